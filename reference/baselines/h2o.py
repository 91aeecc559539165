"""H2O (Zhang et al. 2023): keep the tokens with the largest attention weights, summed over all queries so far.

LongFlow section 4.1 splits the budget evenly between these heavy hitters and the most recent tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .._validate import check_integer
from ..blocks import AttendResult, BlockConfig, BlockState, Piece, attention_of_block, group_mean

__all__ = ["AttendResult", "H2OConfig", "H2OState", "attend"]


@dataclass(frozen=True)
class H2OConfig(BlockConfig):
    """Configuration of an H2O cache.

    budget, block_size: see `BlockConfig`. recent: the number of newest tokens that are protected, at most budget, by
    default budget // 2. Raises TypeError or ValueError for invalid arguments.
    """

    recent: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent is not None and check_integer("recent", self.recent, minimum=0) > self.budget:
            raise ValueError(f"recent must be at most budget = {self.budget}, got {self.recent}")

    @property
    def protected(self) -> int:
        """The number of newest tokens that are protected."""
        return self.budget // 2 if self.recent is None else self.recent


def attend(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None = None
) -> AttendResult:
    """Attention of the tokens in the last Q slots; received = the sum of each key's weights over the block's queries.

    query [B, Hq, Q, D], causal within the block; key, value [B, Hkv, S, D]; occupied [B, S] or [B, Hkv, S] bool; scale
    defaults to D ** -0.5. Returns output [B, Hq, Q, D], zeros at unoccupied slots, and received [B, Hkv, S], the mean
    over the G query heads of a KV head. TypeError or ValueError for invalid arguments.
    """
    output, weight = attention_of_block(query, key, value, occupied, scale=scale)       # weight [B, Hkv, Q, S]
    return AttendResult(output, weight.sum(2))


class H2OState(BlockState):
    """An H2O cache, see `BlockState`. `score` is the sum of each token's weights over all queries since its own, which
    is included."""

    Config = H2OConfig

    def _observe(self, piece: Piece) -> None:
        self.score += group_mean(piece.weight, self.sizes.key_value_heads).sum(2)

    def _rank(self) -> tuple[Tensor, Tensor]:
        return self.score, self._newest(self.config.protected)
