"""VATP (Guo et al. 2024): H2O's accumulated attention times the norm of the value, ||v_j||_1; the first token is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .._validate import check_integer
from ..attention import zero_unoccupied
from ..blocks import AttendResult, BlockConfig, BlockState, Piece, group_mean
from .h2o import attend

__all__ = ["AttendResult", "VATPConfig", "VATPState", "attend"]


@dataclass(frozen=True)
class VATPConfig(BlockConfig):
    """Configuration of a VATP cache.

    budget, block_size: see `BlockConfig`. recent: the number of newest tokens that are protected besides the first one,
    less than budget, by default budget // 2. Raises TypeError or ValueError for invalid arguments.
    """

    recent: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent is not None and check_integer("recent", self.recent, minimum=0) >= self.budget:
            raise ValueError(f"recent must be less than budget = {self.budget}, got {self.recent}")

    @property
    def protected(self) -> int:
        """The number of newest tokens that are protected."""
        return self.budget // 2 if self.recent is None else self.recent


class VATPState(BlockState):
    """A VATP cache, see `BlockState`. `score` is as in H2O; tokens are ranked by score * ||v||_1."""

    Config = VATPConfig

    def _observe(self, piece: Piece) -> None:
        self.score += group_mean(piece.weight, self.sizes.key_value_heads).sum(2)

    def _rank(self) -> tuple[Tensor, Tensor]:
        magnitude = zero_unoccupied(self.value, self.occupied).to(self.score.dtype).abs().sum(-1)
        rank = self.score.masked_fill(~self.occupied, 0) * magnitude
        return rank, self._newest(self.config.protected) | self._oldest(1)
