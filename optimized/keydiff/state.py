"""KeyDiff's state: a block cache whose decode steps update the anchor incrementally."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...reference.contract import Pages
from ...reference.contract.pages import check_own_pages
from ...reference.keydiff import KeyDiffConfig
from .._common.block_cache.state import Block, BlockState, Policy
from .._common.pages import by_head, read_slots, write_slots
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

    pages: see `kvtwin.reference.keydiff.KeyDiffState`. A step reads and writes the pages. Prompts, blocks, `reorder`
    and the steps of other anchors and similarities work on a copy of the tokens, in tensors that are freed afterwards.
    """

    Config = KeyDiffConfig
    _rows = (*BlockState._rows, "_anchor", "_age", "_ranked")
    _carries = torch.float32  # for the default anchor: inverse lengths
    _library_attends = True
    _chooses_early = True
    #: Keys and values [B, Hkv, S, D] in one tensor each. Of a state with pages, None but within `_in_one_tensor`.
    _key: Tensor | None = None
    _value: Tensor | None = None

    def __init__(
        self, config: KeyDiffConfig, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str, sink_logits: Tensor | None = None, pages: Pages | None = None,
    ) -> None:
        self._pages = pages
        super().__init__(
            config, batch=batch, query_heads=query_heads, key_value_heads=key_value_heads, head_dim=head_dim,
            dtype=dtype, device=device, sink_logits=sink_logits,
        )

    @property
    def pages(self) -> Pages | None:
        return self._pages

    @property
    def key(self) -> Tensor:
        """[B, Hkv, S, D], a copy if the state has pages."""
        return self._copy(0) if self._key is None else self._key

    @key.setter
    def key(self, value: Tensor) -> None:
        self._key = value

    @property
    def value(self) -> Tensor:
        """Like `key`."""
        return self._copy(1) if self._value is None else self._value

    @value.setter
    def value(self, value: Tensor) -> None:
        self._value = value

    def _copy(self, which: int) -> Tensor:
        """The keys (0) or values (1) in pages: [B, Hkv, S, D], zeros from slot `budget` on."""
        assert self._pages is not None
        batch, _, heads, slots, head_dim = self.sizes
        tokens = torch.zeros(batch, heads, slots, head_dim, dtype=self.dtype, device=self.device)
        tokens[:, :, :self.config.budget] = read_slots(
            self._pages[which], self._pages.block_table, self.config.budget
        )
        return tokens

    @contextmanager
    def _in_one_tensor(self) -> Iterator[None]:
        """A context in which `key` and `value` may be written to. Tokens in pages are copied, and copied back unless
        there is an exception."""
        if self._pages is None:
            yield
            return
        tokens = self._copy(0), self._copy(1)
        self._key, self._value = tokens
        try:
            yield
            for cache, held in zip(self._pages[:2], tokens, strict=True):
                write_slots(cache, self._pages.block_table, held[:, :, :self.config.budget])
        finally:
            self._key = self._value = None

    def _allocate_tokens(self) -> None:
        if self._pages is None:
            super()._allocate_tokens()
        else:
            sizes = self.sizes._replace(slots=self.config.budget + 1)
            check_own_pages(self._pages, sizes=sizes, dtype=self.dtype, device=self.device)

    def _make_policy(self) -> Policy:
        return Policy(recent=self.config.recent)

    def _allocate(self) -> None:
        batch, _, heads, _, head_dim = self.sizes
        # For the default anchor: the sum of the normalized keys held, the sum used for the last ranks, and steps since
        # the last recomputation.
        self._anchor, self._ranked = (self._buffer(batch, heads, head_dim, dtype=torch.float32) for _ in range(2))
        self._age = self._buffer(batch, heads, dtype=torch.int32)
        with torch.inference_mode(False):
            self._between = scratch((batch, heads, head_dim), self.dtype, self.device, self.config.budget)

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
        key, _, table = self._tokens()
        rank = _ops.rank(key, table, self.occupied, self._ranked, self._carried)
        return cosine(rank, self._ranked, self.occupied)

    def _append_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, padded: bool | None = None
    ) -> Tensor:
        with self._in_one_tensor():
            output = super()._append_blocks(query, key, value, occupied, padded=padded)
            if self._follows:
                self._start_change("append_block")
                budget = self.config.budget
                _ops.update_anchor(self.key[:, :, :budget], self.occupied[..., :budget], self._anchor, self._scratch[2])
                self._age.zero_()
                self._end_change()
        return output

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Add one token: query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D]. Does not
        synchronize with the host."""
        if self._follows:
            return super().step(query, key, value)
        with self._in_one_tensor():
            return super().step(query, key, value)

    def _take(self, source: Any, index: Tensor) -> None:
        with self._in_one_tensor(), nullcontext() if source is self else source._in_one_tensor():
            super()._take(source, index)

    def _tokens(self) -> tuple[Tensor, Tensor, Tensor | None]:
        if self._pages is None or self._key is not None:
            return super()._tokens()
        return by_head(self._pages.key_cache), by_head(self._pages.value_cache), self._pages.block_table

    def _evict(self, block: Block, count: int) -> None:
        if block.softmax_parts is None and self._follows:
            self._replace()
        else:
            super()._evict(block, count)

    def _replace(self) -> None:
        """Evict at a decode step, whose token is in slot `budget`."""
        step(
            *self._tokens(), self.occupied, self.positions, self._token_index, self._carried, self._valid_seen,
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
