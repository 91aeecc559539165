"""VATP (Guo et al. 2024): H2O's accumulated attention times the size of the value, ||v_j||_1; the first token stays."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..attention import zero_unoccupied
from ..blocks import AttendResult, BlockConfig, BlockState, Piece, attention_of_block, group_mean
from ..contract import check_integer

__all__ = ["AttendResult", "VATPConfig", "VATPState", "attend"]


@dataclass(frozen=True)
class VATPConfig(BlockConfig):
    """budget, block_size: see `BlockConfig`. recent: that many newest tokens are protected besides the first one,
    default budget // 2.

    Raises TypeError or ValueError for anything else; recent must be less than budget.
    """

    recent: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent is not None and check_integer("recent", self.recent, minimum=0) >= self.budget:
            raise ValueError(f"recent must be less than budget = {self.budget}, got {self.recent}")

    @property
    def protected(self) -> int:
        """How many newest tokens are protected."""
        return self.budget // 2 if self.recent is None else self.recent


def attend(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None = None
) -> AttendResult:
    """Attention of a block of the newest tokens; received = the sum of each key's weights over the block's queries.

    Arguments and results as in `h2o.attend`; the values' sizes enter when the state ranks its tokens.
    """
    output, weight = attention_of_block(query, key, value, occupied, scale=scale)       # weight [B, Hkv, Q, S]
    return AttendResult(output, weight.sum(2))


class VATPState(BlockState):
    """A VATP cache. `score` is each token's sum of weights, as in H2O; tokens are ranked by score * ||v||_1."""

    Config = VATPConfig

    def _observe(self, piece: Piece) -> None:
        self.score += group_mean(piece.weight, self.sizes.key_value_heads).sum(2)

    def _rank(self) -> tuple[Tensor, Tensor]:
        magnitude = zero_unoccupied(self.value, self.occupied).to(self.score.dtype).abs().sum(-1)
        rank = self.score.masked_fill(~self.occupied, 0) * magnitude
        return rank, self._newest(self.config.protected) | self._oldest(1)
