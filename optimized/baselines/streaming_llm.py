"""StreamingLLM on the GPU: attention, and eviction by position alone."""

from __future__ import annotations

from torch import Tensor

from ...reference._validate import check_positions
from ...reference.baselines.streaming_llm import StreamingLLMConfig
from .._common.block_cache.state import Block, BlockState, newest, oldest

__all__ = ["StreamingLLMConfig", "StreamingLLMState", "keep"]


def keep(positions: Tensor, budget: int, *, sinks: int = 4) -> Tensor:
    """The tokens to keep: the `sinks` oldest and the budget - sinks newest, or all if a row has at most `budget`.

    positions [..., S] int64, distinct in each row, -1 = no token. Returns [..., S] bool.
    """
    check_positions(positions)
    StreamingLLMConfig(budget, sinks=sinks)  # checks both
    return oldest(positions, sinks) | newest(positions, budget - sinks)


class StreamingLLMState(BlockState):
    """A StreamingLLM cache. Tokens are ranked by position; `score` is 0 for every token."""

    Config = StreamingLLMConfig
    _rule = "age"

    def _allocate(self) -> None:
        self._sinks = self.config.sinks

    def _update(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        return None, None
