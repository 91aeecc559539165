"""H2O on the GPU: a block's attention, then the weights that each key received, without a [Q, S] matrix in memory."""

from __future__ import annotations

from torch import Tensor

from ...reference.baselines.h2o import H2OConfig
from ...reference.contract.arguments import resolve_scale
from ...reference.contract.results import AttendResult
from .._common.block_cache import kernels as kernels
from .._common.block_cache.state import Block, BlockState, Policy, check_block

__all__ = ["AttendResult", "H2OConfig", "H2OState", "attend"]


def attend(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None = None,
    key_scale: Tensor | None = None, value_scale: Tensor | None = None,
) -> AttendResult:
    """Attention of the tokens in the last Q slots; received = the sum of each key's weights over the block's queries.

    query [B, Hq, Q, D], causal within the block; key, value [B, Hkv, S, D], any strides; occupied [B, S] or
    [B, Hkv, S] bool. float32, float16 or bfloat16; key and value also torch.float8_e4m3fn or torch.float8_e5m2, times
    key_scale and value_scale, float32 [] or [Hkv]. D from 16 to 256; up to 16 query heads per KV head. Semantics:
    `kvtwin.reference.baselines.h2o.attend`. TypeError or ValueError for invalid arguments, for inputs that require
    grad, and for CPU tensors outside Triton's interpreter.
    """
    scale = resolve_scale(scale, check_block(query, key, value, occupied, key_scale, value_scale).head_dim)
    key, value, stored = kernels.codes(key, value, key_scale, value_scale)
    output, softmax_parts = kernels.attend(query, key, value, occupied, scale, stored=stored)
    received = kernels.received(query, key, occupied, softmax_parts, scale, mean=False, stored=stored)
    return AttendResult(output, received)


class H2OState(BlockState):
    """An H2O cache. `score` is the sum of each token's weights over all queries since its own, which is included. It
    moves with the token and is removed with it."""

    Config = H2OConfig
    _rule = "sum"

    def _make_policy(self) -> Policy:
        return Policy(self.config.sinks, self.config.protected)

    def _update(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        return accumulate(self, block), None


def accumulate(state: BlockState, block: Block, magnitude: Tensor | None = None) -> Tensor:
    """Add the weights that the block's queries gave each key to `score`. Returns the new scores, or their products with
    `magnitude`, [B, Hkv, end]."""
    end = block.end
    assert block.softmax_parts is not None
    return kernels.accumulate(
        block.query, state.key[:, :, :end], state.occupied[..., :end], block.softmax_parts, state.score, magnitude,
        state.scale, state.config.softcap,
    )
