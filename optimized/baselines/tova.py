"""TOVA on the GPU: a block's attention, then each key's weight from its newest query, linear and as a logarithm."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.baselines.tova import TOVAConfig
from ...reference.contract.arguments import resolve_scale
from ...reference.contract.results import AttendResult
from .._common.block_cache import kernels as kernels
from .._common.block_cache.newest_query import received_of_newest, update_by_newest
from .._common.block_cache.over_heads import over_heads
from .._common.block_cache.state import Block, BlockState, Policy, check_block

__all__ = ["AttendResult", "TOVAConfig", "TOVAState", "attend"]


def attend(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None = None,
    key_scale: Tensor | None = None, value_scale: Tensor | None = None,
) -> AttendResult:
    """Attention of the tokens in the last Q slots; received = each key's weight from the newest query.

    Arguments and errors as in `h2o.attend`. Semantics: `kvtwin.reference.baselines.tova.attend`.
    """
    scale = resolve_scale(scale, check_block(query, key, value, occupied, key_scale, value_scale).head_dim)
    key, value, stored = kernels.codes(key, value, key_scale, value_scale)
    output, softmax_parts = kernels.attend(query, key, value, occupied, scale, stored=stored)
    return AttendResult(output, received_of_newest(query, key, occupied, softmax_parts, scale, stored)[0])


class TOVAState(BlockState):
    """A TOVA cache. `score` is each token's weight from the newest query. Tokens are ranked by its logarithm, which
    does not underflow. With per_head False, both are averages over all heads, and a step takes more kernels."""

    Config = TOVAConfig
    _rule = "newest"

    def _make_policy(self) -> Policy:
        return Policy(by_blocks=not self.config.per_head)

    def _update(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        end = block.end
        assert block.softmax_parts is not None
        occupied = self.occupied[..., :end]
        given = block.query, self.key[:, :, :end], occupied, block.softmax_parts
        if self.config.per_head:
            return update_by_newest(*given, self.score, self.scale, self.config.softcap), None
        weight, log_weight = received_of_newest(*given, self.scale, softcap=self.config.softcap)
        over_heads(weight, log_weight)
        score = self.score[..., :end]
        came = block.valid.any(-1)[:, None, None]
        score.copy_(torch.where(came & occupied, weight, score))
        return log_weight, None
