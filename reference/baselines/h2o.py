"""H2O (Zhang et al. 2023): keep the heavy hitters, whose attention weights summed over all queries so far are largest.

LongFlow section 4.1 splits the budget evenly between them and the most recent tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..blocks import AttendResult, BlockConfig, BlockState, Piece, attention_of_block, group_mean
from ..contract import check_integer

__all__ = ["AttendResult", "H2OConfig", "H2OState", "attend"]


@dataclass(frozen=True)
class H2OConfig(BlockConfig):
    """budget, block_size: see `BlockConfig`. recent: that many newest tokens are protected, default budget // 2.

    Raises TypeError or ValueError for anything else; recent may be at most budget.
    """

    recent: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent is not None and check_integer("recent", self.recent, minimum=0) > self.budget:
            raise ValueError(f"recent must be at most budget = {self.budget}, got {self.recent}")

    @property
    def protected(self) -> int:
        """How many newest tokens are protected."""
        return self.budget // 2 if self.recent is None else self.recent


def attend(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None = None
) -> AttendResult:
    """Attention of a block of the newest tokens; received = the sum of each key's weights over the block's queries.

    query [B, Hq, Q, D], the queries of the tokens in the last Q slots, causal among themselves; key, value
    [B, Hkv, S, D]; occupied [B, S] or [B, Hkv, S] bool; scale defaults to D ** -0.5. A query at an unoccupied slot
    gives zeros. received [B, Hkv, S]: the mean over the G query heads of a KV head. TypeError,
    ValueError for bad arguments.
    """
    output, weight = attention_of_block(query, key, value, occupied, scale=scale)       # weight [B, Hkv, Q, S]
    return AttendResult(output, weight.sum(2))


class H2OState(BlockState):
    """An H2O cache. `score` is each token's sum of weights since it came in, its own query's included; it moves with
    the token, and is dropped with it."""

    Config = H2OConfig

    def _observe(self, piece: Piece) -> None:
        self.score += group_mean(piece.weight, self.sizes.key_value_heads).sum(2)

    def _rank(self) -> tuple[Tensor, Tensor]:
        return self.score, self._newest(self.config.protected)
