"""The observation window of SnapKV and R-KV: the last tokens, whose queries score the others."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import INF
from .blocks import BlockState, Chunk


class WindowedState(BlockState):
    """A block cache whose scores depend on the queries of the last W = `config.observers` tokens.

    A subclass calls `_observe_window` in each `_observe`. The logits of a query are computed with its block, and those
    of tokens that are kept stay: `_window_logit` [B, Hkv, S, G, W], in the window's order.
    """

    _per_slot = (*BlockState._per_slot, "_window_logit")
    _per_row = ("_window_query", "_window_positions")

    def _allocate(self) -> None:
        super()._allocate()
        (batch, query_heads, heads, slots, head_dim), observers = self.sizes, self.config.observers
        shape = (batch, heads, query_heads // heads, observers, slots)
        self._window_logit = torch.full(shape, -INF, dtype=self.score.dtype, device=self.device).movedim(-1, 2)
        self._window_positions = torch.full((batch, observers), -1, dtype=torch.int64, device=self.device)
        # The conformance suite reads the queries.
        self._window_query = torch.zeros(batch, query_heads, observers, head_dim, dtype=self.dtype, device=self.device)

    def _observe_window(self, chunk: Chunk) -> Tensor:
        """Move the window to the end of a block. Returns the logits of its queries, [B, Hkv, G, W, S]: -inf for later
        tokens, free slots and padding."""
        heads, observers = self.sizes.key_value_heads, self.config.observers
        query = chunk.query.masked_fill(~chunk.valid[:, None, :, None], 0)
        self._window_query.copy_(torch.cat((self._window_query, query), 2)[:, :, -observers:])
        positions = chunk.positions.where(chunk.valid, -1)                               # [B, Q]
        self._window_positions.copy_(torch.cat((self._window_positions, positions), 1)[:, -observers:])
        new = chunk.logit.unflatten(1, (heads, -1))                                      # [B, Hkv, G, Q, S]
        logit = torch.cat((self._window_logit.movedim(2, -1), new), 3)[..., -observers:, :]
        later = self.positions[:, :, None] > self._window_positions[:, None, :, None]    # [B, Hkv, W, S]
        hidden = later | ~self.occupied[:, :, None]
        self._window_logit.copy_(logit.masked_fill(hidden[:, :, None], -INF).movedim(-1, 2))
        return self._window_logit.movedim(2, -1)
