"""KeyDiff's state: a block cache whose decode steps update the anchor incrementally."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.keydiff import KeyDiffConfig
from .._common.block_cache.state import Block, BlockState
from . import _ops
from ._anchors import DEFAULT, any_rank, any_score, cosine
from ._step import lengths, scratch, step


class KeyDiffState(BlockState):
    """A KeyDiff cache. `score` is the function `score` of the tokens before the last eviction, and moves with its
    token. It is computed on access, from the anchor of that time: storing it would make a step 4 % slower.

    A block recomputes the anchor. A step adds the new normalized key to the anchor, ranks, and subtracts the evicted
    key. Every config.refresh steps, a step recomputes the sum for the next one, since it reads the keys anyway. Steps
    are counted on the device, per head, so that replays of a CUDA graph count too. Other anchors and similarities than
    the defaults are recomputed at every step, in PyTorch operations.
    """

    Config = KeyDiffConfig
    _library_attends = True
    _chooses_early = True

    def _allocate(self) -> None:
        batch, _, heads, slots, head_dim = self.sizes
        self._recent = self.config.recent
        # For the default anchor: the sum of the normalized keys held, the sum used for the last ranks, steps since the
        # last recomputation, and inverse lengths.
        self._anchor, self._ranked = (self._buffer(batch, heads, head_dim, dtype=torch.float32) for _ in range(2))
        self._age = self._buffer(batch, heads, dtype=torch.int32)
        self._carried = self._buffer(batch, heads, slots, dtype=torch.float32)
        with torch.inference_mode(False):
            self._between = scratch(self.key, self.config.budget)

    def _buffers(self) -> tuple[Tensor, ...]:
        return self._anchor, self._age, self._ranked

    def _clear(self) -> None:
        self._anchor.zero_()
        self._age.zero_()
        self._ranked.zero_()
        self._between[2].zero_()                                                # in case a launch was interrupted

    @property
    def _follows(self) -> bool:
        """Whether the anchor is updated incrementally."""
        return (self.config.anchor, self.config.similarity) == DEFAULT

    @property
    def score(self) -> Tensor:
        if not self._follows:
            return self._score
        assert self._carried is not None
        rank = _ops.rank(self.key, None, self.occupied, self._ranked, self._carried)
        return cosine(rank, self._ranked, self.occupied)

    def _append_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, padded: bool | None = None
    ) -> Tensor:
        output = super()._append_blocks(query, key, value, occupied, padded=padded)
        if self._follows:
            self._start_change("append_block")
            budget = self.config.budget
            _ops.update_anchor(self.key[:, :, :budget], self.occupied[..., :budget], self._anchor, self._scratch[2])
            self._age.zero_()
            self._end_change()
        return output

    def _evict(self, block: Block, count: int) -> None:
        if block.softmax_parts is None and self._follows:
            self._replace()
        else:
            super()._evict(block, count)

    def _replace(self) -> None:
        """Evict at a decode step, whose token is in slot `budget`."""
        step(
            self.key, self.value, self.occupied, self.positions, self._token_index, self._carried, self._valid_seen,
            self._anchor, self._ranked, self._age, *self._between, self.config.budget, self.config.refresh,
            self.config.recent,
        )

    def _update(self, block: Block) -> tuple[Tensor, None]:
        end = block.end
        key, occupied = self.key[:, :, :end], self.occupied[..., :end]
        if self._follows:
            assert self._carried is not None
            lengths(self.key, self._carried, self.config.budget, end)
            _ops.update_anchor(key, occupied, self._ranked, self._scratch[2])
            return _ops.rank(key, None, occupied, self._ranked, self._carried[..., :end]), None
        options = self.config.anchor, self.config.similarity
        self._score[..., :end] = any_score(key, occupied, *options)
        return any_rank(key, occupied, *options), None
