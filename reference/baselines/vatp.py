"""VATP: H2O's accumulated attention times the norm of the value, ||v_j||_1. The first tokens stay.

Paper: Guo et al., "Attention Score is not All You Need for Token Importance Indicator in KV Cache Reduction" (2024,
arXiv 2406.12335).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..attention import sum_in_order, zero_unoccupied
from ..blocks import AttendResult, BlockState, Chunk, IntervalConfig, group_mean
from ..contract.blocks import check_protected
from .h2o import attend

__all__ = ["AttendResult", "VATPConfig", "VATPState", "attend"]


@dataclass(frozen=True)
class VATPConfig(IntervalConfig):
    """Configuration of a VATP cache.

    budget, block_size, recent: see `H2OConfig`. sinks: the number of first tokens that are never evicted, padding not
    counted; the authors' code has 20. recent + sinks is at most budget. interval: see `IntervalConfig`. Raises
    TypeError or ValueError for invalid arguments.
    """

    recent: int | None = None
    sinks: int = 1
    interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_protected(self.recent, self.sinks, self.budget)

    @property
    def protected(self) -> int:
        """The number of newest tokens that are protected."""
        return self.budget // 2 if self.recent is None else self.recent


class VATPState(BlockState):
    """A VATP cache, see `BlockState`. `score` is as in H2O; tokens are ranked by score * ||v||_1."""

    Config = VATPConfig

    def _observe(self, chunk: Chunk) -> None:
        self.score += sum_in_order(group_mean(chunk.weight, self.sizes.key_value_heads), 2)

    def _rank(self) -> tuple[Tensor, Tensor]:
        magnitude = zero_unoccupied(self.value, self.occupied).to(self.score.dtype).abs().sum(-1)
        rank = self.score.masked_fill(~self.occupied, 0) * magnitude
        return rank, self._newest(self.config.protected) | self._oldest(self.config.sinks)
