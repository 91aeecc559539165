"""VATP on the GPU: H2O's sums times ||v||_1, which is computed once, when a token arrives."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.baselines.vatp import VATPConfig
from ...reference.contract.results import AttendResult
from .._common.block_cache.state import Block, BlockState, Policy
from .h2o import accumulate, attend

__all__ = ["AttendResult", "VATPConfig", "VATPState", "attend"]


class VATPState(BlockState):
    """A VATP cache. `score` is the sum of each token's weights, as in H2O; tokens are ranked by score * ||v||_1."""

    Config = VATPConfig
    _rule = "sum"
    _carries = torch.float32  # ||v_j||_1

    def _make_policy(self) -> Policy:
        return Policy(self.config.sinks, self.config.protected)

    def _update(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        return accumulate(self, block, self._carried), None
