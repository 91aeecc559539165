"""LazyEviction: keep the tokens that are attended to again and again, for as long as their longest gap suggests.

Paper: Zhang et al., "LazyEviction: Lagged KV Eviction with Attention Pattern Observation for Efficient Long Reasoning"
(2025, arXiv 2506.15969). A query *activates* a token if its weight is at least alpha. The importance of a token is high
soon after its last activation, measured by its longest gap between two activations, and for tokens with short gaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..attention import INF
from ..blocks import BlockState, Chunk, IntervalConfig, group_mean
from ..contract.arguments import check_flag, check_integer, check_ratio
from ..contract.blocks import check_protected

__all__ = ["LazyEvictionConfig", "LazyEvictionState"]

#: Added to a gap before it divides, as in the authors' code.
EPSILON = 1e-5


@dataclass(frozen=True)
class LazyEvictionConfig(IntervalConfig):
    """Configuration of a LazyEviction cache.

    budget, block_size: see `BlockConfig`. alpha: the least weight with which a query activates a token, from 0 to 1;
    there is no default, because it depends on the number of tokens; the authors' code has 1e-4. recent: the number of
    newest tokens that are protected, at most budget. shifted: whether 1 is added to age / gap, as in the authors' code:
    the first term is then 37 to 54 % as large. interval: see `IntervalConfig`; the authors' window is both interval and
    recent. Raises TypeError or ValueError for invalid arguments.
    """

    alpha: float = field(kw_only=True)
    recent: int = 0
    shifted: bool = True
    interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio("alpha", self.alpha)
        check_protected(check_integer("recent", self.recent, minimum=0), 0, self.budget)
        check_flag("shifted", self.shifted)

    @classmethod
    def defaults_for(cls, budget: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Ours: the best of four alphas for 1,024 tokens. The newest tokens are protected, as the authors do."""
        return {} if "alpha" in given else {"alpha": 0.005, "recent": budget // 4}


def importance(age: Tensor, gap: Tensor, *, shifted: bool) -> Tensor:
    """2 sigmoid(-shift - age / (gap + EPSILON)) + 2 sigmoid(1 - gap), float64; the second term is 0 for a gap of 0.

    age: the time since the last activation; gap: the longest time between two activations, 0 for none. Both int64, and
    below 2^31. Equal ages and gaps give equal bits: each pair is computed once, since the last bits of torch's sigmoid
    depend on the place in the tensor.
    """
    pairs, place = torch.unique(age * 2**31 + gap, return_inverse=True)
    age, gap = pairs // 2**31, (pairs % 2**31).double()
    recurring = torch.where(gap > 0, 2 * torch.sigmoid(1 - gap), 0.0)
    return (2 * torch.sigmoid(-float(shifted) - age / (gap + EPSILON)) + recurring)[place]


class LazyEvictionState(BlockState):
    """A LazyEviction cache, see `BlockState`. `score` is each token's importance after the last token. A token
    starts as if activated one step before it came, with a gap of 0. So its own query can give it a gap of 1."""

    Config = LazyEvictionConfig
    _per_slot: ClassVar[tuple[str, ...]] = (*BlockState._per_slot, "_last", "_gap")

    def _allocate(self) -> None:
        super()._allocate()
        self._last = torch.zeros_like(self.positions)                # the position of the query that activated last
        self._gap = torch.zeros_like(self.positions)

    def _observe(self, chunk: Chunk) -> None:
        is_new = torch.arange(self.sizes.slots, device=self.device) >= self.config.capacity
        self._last.copy_(torch.where(is_new, self.positions - 1, self._last))
        self._gap.masked_fill_(is_new, 0)
        weight = group_mean(chunk.weight, self.sizes.key_value_heads)                   # [B, Hkv, Q, S]
        asks = chunk.positions.where(chunk.valid, -1)                                   # [B, Q]
        attends = self.occupied[:, :, None] & (self.positions[:, :, None] <= asks[:, None, :, None])
        active = attends & (weight >= self.config.alpha)
        for number, position in enumerate(chunk.positions):
            now = active[:, :, number]
            self._gap.copy_(torch.where(now, torch.maximum(self._gap, position - self._last), self._gap))
            self._last.copy_(torch.where(now, position, self._last))
        score = importance(self._seen - 1 - self._last, self._gap, shifted=self.config.shifted)
        self.score.copy_(score.masked_fill(~self.occupied, -INF))

    def _rank(self) -> tuple[Tensor, Tensor]:
        return self.score, self._newest(self.config.recent)
