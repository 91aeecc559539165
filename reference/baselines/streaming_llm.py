"""StreamingLLM (Xiao et al. 2024): keep the first tokens (attention sinks) and the newest ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .._validate import check_integer, check_positions
from ..blocks import BlockConfig, BlockState
from ..selection import order

__all__ = ["StreamingLLMConfig", "StreamingLLMState", "keep"]


@dataclass(frozen=True)
class StreamingLLMConfig(BlockConfig):
    """Configuration of a StreamingLLM cache.

    budget, block_size: see `BlockConfig`. sinks: the number of first tokens that are kept, an int from 0 to budget - 1.
    Raises TypeError or ValueError for invalid arguments.
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sinks(self.sinks, self.budget)


def check_sinks(sinks: object, budget: int) -> None:
    """An int from 0 to budget - 1."""
    if check_integer("sinks", sinks, minimum=0) >= budget:
        raise ValueError(f"sinks must be less than budget = {budget}, got {sinks}")


def keep(positions: Tensor, budget: int, *, sinks: int = 4) -> Tensor:
    """The tokens to keep: the `sinks` oldest and the budget - sinks newest, or all if a row has at most `budget`.

    positions [..., S] int64, distinct in each row, -1 = no token. Returns [..., S] bool. TypeError or ValueError for
    invalid arguments.
    """
    check_positions(positions)
    check_integer("budget", budget, minimum=1)
    check_sinks(sinks, budget)
    place, slots = order(positions), positions.shape[-1]
    free = (positions < 0).sum(-1, keepdim=True)
    # free + sinks could exceed int64.
    first, newest = place < free + min(sinks, slots), place >= slots - (budget - sinks)
    return (first | newest) & (positions >= 0)


class StreamingLLMState(BlockState):
    """A StreamingLLM cache, see `BlockState`. Tokens are ranked by position; `score` is 0 for every token."""

    Config = StreamingLLMConfig

    def _rank(self) -> tuple[Tensor, Tensor]:
        return self.positions, self._oldest(self.config.sinks)
