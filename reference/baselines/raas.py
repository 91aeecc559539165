"""RaaS: each token has a timestamp, renewed when a query attends to it enough; the oldest timestamp is evicted.

Paper: Hu et al., "RaaS: Reasoning-Aware Attention Sparsity for Efficient LLM Reasoning" (2025). Here single tokens have
timestamps, as in ThinKV's and EpiKV's tables. The authors' code has pages of 16 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._validate import check_integer, check_ratio
from ..attention import INF
from ..blocks import BlockState, Chunk, IntervalConfig, group_mean
from .h2o import check_protected

__all__ = ["RaaSConfig", "RaaSState"]


@dataclass(frozen=True)
class RaaSConfig(IntervalConfig):
    """Configuration of a RaaS cache.

    budget, block_size: see `BlockConfig`. alpha: the least weight of a query that renews a token's timestamp, from 0
    to 1; there is no default, because it depends on the number of tokens. sinks: the number of first tokens that are
    never evicted, padding not counted; the paper protects the prompt. recent: the number of newest tokens that are
    protected. recent + sinks is at most budget. interval: see `IntervalConfig`. Raises TypeError or ValueError for
    invalid arguments.
    """

    alpha: float = field(kw_only=True)
    recent: int = 0
    sinks: int = 0
    interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio("alpha", self.alpha)
        check_protected(check_integer("recent", self.recent, minimum=0), self.sinks, self.budget)


class RaaSState(BlockState):
    """A RaaS cache, see `BlockState`. Of equal timestamps, the oldest token is evicted. `score` is each token's
    timestamp: the position of the last query whose weight for the token, averaged over the group, was at least alpha,
    or the token's own position."""

    Config = RaaSConfig

    def _observe(self, chunk: Chunk) -> None:
        weight = group_mean(chunk.weight, self.sizes.key_value_heads)                   # [B, Hkv, Q, S]
        asks = chunk.positions.where(chunk.valid, -1)[:, None, :, None]                 # [B, 1, Q, 1]
        attends = self.occupied[:, :, None] & (self.positions[:, :, None] <= asks)
        renewed = asks.where(attends & (weight >= self.config.alpha), -1).amax(2)       # [B, Hkv, S]
        time = torch.maximum(renewed, self.positions).to(self.score.dtype)
        self.score.copy_(torch.maximum(self.score, time).masked_fill(~self.occupied, -INF))

    def _rank(self) -> tuple[Tensor, Tensor]:
        rank = self.score.masked_fill(~self.occupied, 0).long() * 2**31 + self.positions
        return rank, self._oldest(self.config.sinks) | self._newest(self.config.recent)
