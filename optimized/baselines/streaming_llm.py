"""StreamingLLM on the GPU: attention, and a choice by positions alone."""

from __future__ import annotations

from torch import Tensor

from ...reference.baselines.streaming_llm import StreamingLLMConfig
from .._common.block_cache.state import Block, BlockState, check_positions, newest, oldest

__all__ = ["StreamingLLMConfig", "StreamingLLMState", "keep"]


def keep(positions: Tensor, budget: int, *, sinks: int = 4) -> Tensor:
    """Which of the tokens at hand stay: the `sinks` oldest and the budget - sinks newest; all if there are no more.

    positions [..., S] int64, distinct in each row, -1 where there is no token. Returns [..., S] bool.
    """
    check_positions(positions)
    StreamingLLMConfig(budget, sinks=sinks)  # which checks both
    return oldest(positions, sinks) | newest(positions, budget - sinks)


class StreamingLLMState(BlockState):
    """A StreamingLLM cache. `score` is 0 for every token: positions alone decide."""

    Config = StreamingLLMConfig
    _rule = "age"

    def _allocate(self) -> None:
        self._sinks = self.config.sinks

    def _update(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        return None, None
