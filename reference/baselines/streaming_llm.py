"""StreamingLLM (Xiao et al. 2024): the first tokens, which attract attention whatever they say, and the newest ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..blocks import BlockConfig, BlockState, check_positions, order
from ..contract import check_integer

__all__ = ["StreamingLLMConfig", "StreamingLLMState", "keep"]


@dataclass(frozen=True)
class StreamingLLMConfig(BlockConfig):
    """budget, block_size: see `BlockConfig`. sinks: that many first tokens stay, an int from 0 to budget - 1."""

    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sinks(self.sinks, self.budget)


def check_sinks(sinks: object, budget: int) -> None:
    if check_integer("sinks", sinks, minimum=0) >= budget:
        raise ValueError(f"sinks must be less than budget = {budget}, got {sinks}")


def keep(positions: Tensor, budget: int, *, sinks: int = 4) -> Tensor:
    """Which of the tokens at hand stay: the `sinks` oldest and the budget - sinks newest; all if there are no more.

    positions [..., S] int64, distinct in each row, -1 where there is no token. Returns [..., S] bool.
    """
    check_positions(positions)
    check_integer("budget", budget, minimum=1)
    check_sinks(sinks, budget)
    place, slots = order(positions), positions.shape[-1]
    free = (positions < 0).sum(-1, keepdim=True)
    first, newest = place < free + sinks, place >= slots - (budget - sinks)
    return (first | newest) & (positions >= 0)


class StreamingLLMState(BlockState):
    """A StreamingLLM cache. `score` is 0 for every token: positions alone decide."""

    Config = StreamingLLMConfig

    def _rank(self) -> tuple[Tensor, Tensor]:
        return self.positions, self._oldest(self.config.sinks)
