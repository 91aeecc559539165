"""StreamingLLM on the GPU: attention, with or without rotation by places in the cache, and eviction by position alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.baselines.streaming_llm import StreamingLLMConfig
from ...reference.contract.arguments import check_pairs, check_positions
from .._common.block_cache.rotate import rotate
from .._common.block_cache.state import Block, BlockState, Policy, newest, oldest

__all__ = ["StreamingLLMConfig", "StreamingLLMState", "keep"]


def keep(positions: Tensor, budget: int, *, sinks: int = 4) -> Tensor:
    """The tokens to keep: the `sinks` oldest and the budget - sinks newest, or all if a row has at most `budget`.

    positions [..., S] int64, distinct in each row, -1 = no token. Returns [..., S] bool.
    """
    check_positions(positions)
    StreamingLLMConfig(budget, sinks=sinks)  # checks both
    return oldest(positions, sinks) | newest(positions, budget - sinks)


class StreamingLLMState(BlockState):
    """A StreamingLLM cache. Tokens are ranked by position; `score` is 0 for every token. With config.inv_freq, queries
    and keys come without rotation, and `key` holds such keys; rotated queries and keys are rounded to the state's
    dtype, and a step takes more kernels. ValueError for more frequencies than pairs of channels."""

    Config = StreamingLLMConfig
    _rule = "age"
    _chooses_early = True

    def _make_policy(self) -> Policy:
        return Policy(self.config.sinks, by_blocks=self.config.inv_freq is not None)

    def _allocate(self) -> None:
        inv_freq = self.config.inv_freq
        check_pairs("inv_freq", inv_freq, self.sizes.head_dim)
        self._library_attends = inv_freq is None
        if inv_freq is not None:
            self._frequencies = self._buffer(len(inv_freq), dtype=torch.float32)
            self._frequencies.copy_(torch.tensor(inv_freq))

    def _compared(self, query: Tensor, valid: Tensor, end: int) -> tuple[Tensor, Tensor]:
        if self.config.inv_freq is None:
            return super()._compared(query, valid, end)
        config, token_index = self.config, self._token_index[:, :, :end]
        # Evicted tokens are newer than all sinks and older than all other cached tokens.
        evicted = (self._valid_seen - valid.sum(-1, keepdim=True) - config.budget).clamp_min(0).int()
        own = token_index[:, :, end - query.shape[2]:]
        return (
            rotate(query, own, evicted, self._frequencies, config.sinks),
            rotate(self.key[:, :, :end], token_index, evicted, self._frequencies, config.sinks),
        )

    def _update(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        return None, None
