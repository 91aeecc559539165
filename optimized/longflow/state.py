"""LongFlow's state: a cache of `budget` slots in preallocated buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...reference.contract import Pages
from ...reference.contract.arguments import check_all_finite, check_config, check_next_slot
from ...reference.contract.attention import check_sink_logits
from ...reference.contract.pages import check_own_pages
from ...reference.contract.ranks import ProcessGroup, Shared, check_process_group, digest
from ...reference.longflow import LongFlowConfig
from .._common.pages import by_head, read_slots, write_slots
from .._common.prompts import prompt_selection
from .._common.prompts.compression import gather_tokens
from .._common.ranks import Ranks, ranks_of
from .._common.state import State
from . import _ops


class LongFlowState(State):
    """A LongFlow cache: preallocated buffers of `budget` slots, updated in place. Steps can be captured in CUDA graphs.

    key, value [B, Hkv, S, D] with S = budget; occupied [B, S] bool; positions [B, S] int64: the position of the token
    in each slot, counted from 0 with padding included, -1 = free; score [B, S] float32, of the last step; next_slot [B]
    int64, writable. With config.per_head the last four are [B, Hkv, S] and [B, Hkv]. The contents of unoccupied slots
    are unspecified. process_group, sink_logits, pages: see `kvtwin.reference.longflow.LongFlowState`.
    """

    config: LongFlowConfig
    _rows = ("occupied", "positions", "_next_slot", "score", "_sink_end")
    _of_all_rows = (*State._of_all_rows, "_seen")

    def __init__(
        self, config: LongFlowConfig, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str, process_group: ProcessGroup | None = None,
        sink_logits: Tensor | None = None, pages: Pages | None = None,
    ) -> None:
        super().__init__(
            check_config(config, LongFlowConfig), slots=config.budget, batch=batch, query_heads=query_heads,
            key_value_heads=key_value_heads, head_dim=head_dim, dtype=dtype, device=device,
        )
        if pages is not None:
            check_own_pages(pages, sizes=self.sizes, dtype=self.dtype, device=self.device)
        self._pages = pages
        check_process_group(
            process_group, config=config, batch=batch, query_heads_per_key_value_head=self.sizes.group,
            head_dim=head_dim, dtype=dtype,
        )
        self._shared = Shared(process_group)
        self.sink_logits = check_sink_logits(sink_logits, self.sizes, self.device)
        self._ranks = None if config.per_head else ranks_of(process_group, key_value_heads, self.device)
        heads, slots = key_value_heads, config.budget
        rows = (batch, heads) if config.per_head else (batch,)
        self._own: tuple[Tensor, ...] = ()
        if pages is None:
            self._own = tuple(self._buffer(batch, heads, slots, head_dim, dtype=dtype) for _ in range(2))
        self.occupied = self._buffer(*rows, slots, dtype=torch.bool)
        self.positions = self._buffer(*rows, slots, dtype=torch.int64)
        self._next_slot = self._buffer(*rows, dtype=torch.int64)
        self.score = self._buffer(*rows, slots, dtype=torch.float32)
        self._sink_end = self._buffer(batch, dtype=torch.int64)          # positions below this are sinks
        self._seen = self._buffer(1, dtype=torch.int64)                  # on the device: graphs update it
        with torch.inference_mode(False):
            self._scratch = _ops.scratch(self.sizes, self._caches[0], config.per_head)
        workspace, candidates, completion_counters = self._scratch
        #: Of every step, between the caches with their block table and the sinks.
        self._arguments = _ops.step.arguments_after("block_table", {
            "occupied": self.occupied, "positions": self.positions, "next_slot": self._next_slot, "score": self.score,
            "sink_end": self._sink_end, "seen": self._seen, "workspace": workspace, "candidates": candidates,
            "completion_counters": completion_counters, "scale": self.scale, "softcap": config.softcap,
            "per_head": config.per_head, "protect_newest": config.protect_newest,
        })
        self.reset()

    @classmethod
    def _compiles(cls, config: LongFlowConfig) -> bool:
        return not config.check_finite

    @property
    def tokens_seen(self) -> int:
        """Tokens received since the last reset, padding included. Reading it synchronizes with the GPU."""
        return int(self._seen.item())

    @property
    def pages(self) -> Pages | None:
        return self._pages

    @property
    def _caches(self) -> tuple[Tensor, ...]:
        """Keys and values as kernels take them. Not stored: a copy of the state must not hold its pages twice."""
        if self._pages is None:
            return self._own
        return by_head(self._pages.key_cache), by_head(self._pages.value_cache)

    @property
    def key(self) -> Tensor:
        """[B, Hkv, S, D], a copy if the state has pages."""
        return self._held(0)

    @property
    def value(self) -> Tensor:
        """Like `key`."""
        return self._held(1)

    def _held(self, which: int) -> Tensor:
        if self.pages is None:
            return self._own[which]
        return read_slots(self.pages[which], self.pages.block_table, self.config.budget)

    @property
    def next_slot(self) -> Tensor:
        """The slot that the next token is written into. Assigning checks and copies the values. In-place writes are not
        checked, and a token for a slot out of range is lost."""
        return self._next_slot

    @next_slot.setter
    def next_slot(self, value: Tensor) -> None:
        self._next_slot.copy_(check_next_slot(value, self._next_slot, self.config.budget))

    def reset(self) -> None:
        """Forget every token."""
        self._start_reset()
        self.occupied.zero_()
        self.positions.fill_(-1)
        self._next_slot.zero_()
        self.score.fill_(-torch.inf)
        self._sink_end.fill_(self.config.sinks)
        self._seen.zero_()
        completion_counters = self._scratch[2]
        completion_counters.zero_()                                             # in case a launch was interrupted
        self._end_change()

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Full causal attention of the prompt; then at most budget - 1 of its tokens are kept, so that a slot is free.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, by default all True.
        Returns [B, Hq, T, D], zeros for padding. RuntimeError if the state holds tokens.
        """
        padded = occupied is not None
        occupied = self._check_prompt(query, key, value, occupied)
        total = occupied.shape[1]
        self._check_empty()
        if self.config.check_finite:
            hidden = ~occupied[:, None, :, None]
            check_all_finite(
                query=query.masked_fill(hidden, 0), key=key.masked_fill(hidden, 0), value=value.masked_fill(hidden, 0)
            )
        if self._shared.process_group is not None:
            check_process_group(self._shared.process_group, tokens=total, occupied=digest(occupied))
            self._start_change("prefill")                                       # another rank may fail
        output = self._attend_prompt(
            query, key, value, occupied, padded=padded, softcap=self.config.softcap, sink_logits=self.sink_logits
        )
        if self._shared.process_group is None:
            self._start_change("prefill")
        if padded:
            self._set_sinks(occupied)
        if total < self.config.budget:
            self._keep_all(key, value, occupied)
        else:
            self._keep_best(query, key, value, occupied, padded=padded)
        self._seen.fill_(total)
        self._end_change()
        return output

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write a token into `next_slot`, attend to it and to the cached tokens, and select the next slot.

        query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D]. Does not synchronize with
        the host.
        """
        self._check_step(query, key, value)
        if self.config.check_finite:
            check_all_finite(query=query, key=key, value=value)
        if self._ranks is not None:
            return self._step_with(self._ranks, query, key, value)
        self._note_change()
        output: Tensor = _ops.step(
            query, key, value, *self._caches, self._block_table, *self._arguments, self.sink_logits
        )
        return output

    def _step_with(self, ranks: Ranks, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`step`, in which the heads of all ranks decide."""
        self._start_change("step")                                              # another rank may fail
        workspace, _, completion_counters = self._scratch
        output: Tensor
        output, rank = _ops.rank(
            query, key, value, *self._caches, self._block_table, self.occupied, self.positions, self._next_slot,
            self._seen, workspace, completion_counters, self.scale, self.config.softcap, self.sink_logits,
        )
        _ops.choose(
            ranks.gather(rank), self.occupied, self.positions, self._next_slot, self.score, self._sink_end, self._seen,
            self.sizes.group, self.sizes.head_dim, self.config.protect_newest,
        )
        self._end_change()
        return output

    def _take(self, source: Any, index: Tensor) -> None:
        for which in (0, 1):
            self._write(which, source._held(which).index_select(0, index))
        super()._take(source, index)

    @property
    def _block_table(self) -> Tensor | None:
        return None if self.pages is None else self.pages.block_table

    def _write(self, which: int, tokens: Tensor) -> None:
        """Write keys (0) or values (1) [B, Hkv, N, D] into the first N slots."""
        if self.pages is None:
            self._own[which][:, :, :tokens.shape[2]] = tokens
        else:
            write_slots(self.pages[which], self.pages.block_table, tokens)

    def _keep_all(self, key: Tensor, value: Tensor, occupied: Tensor) -> None:
        """Put each token of a short prompt into the slot with its index."""
        total = occupied.shape[1]
        here = occupied[:, None, :, None]
        self._write(0, key.where(here, key.new_zeros(())))
        self._write(1, value.where(here, value.new_zeros(())))
        kept = torch.arange(total, device=self.device).where(occupied, -1)
        kept = kept[:, None] if self.config.per_head else kept
        self.positions[..., :total] = kept
        self.occupied[..., :total] = kept >= 0
        index = torch.arange(self.config.budget, device=self.device)
        self._next_slot.copy_(index.where(~self.occupied, self.config.budget).amin(-1))

    def _keep_best(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, padded: bool) -> None:
        """Put the budget - 1 best tokens of a long prompt into the first slots, the same for all heads."""
        if self.config.budget == 1:
            return
        config = self.config
        window = query[:, :, -config.window:]
        received = prompt_selection.received(
            window, key, occupied, self.scale, config.prefix_alone, config.softcap,
            None if config.prefix_alone else self.sink_logits,
        )
        ranks = self._ranks if not self.config.per_head else ranks_of(
            self._shared.process_group, self.sizes.key_value_heads, self.device
        )
        if ranks is not None:
            received = ranks.gather(received)
        held_key, held_value = self._own if self.pages is None else (None, None)
        best = prompt_selection.choose(
            received, occupied if padded else None, self._sink_end, self.config.budget - 1, window.shape[2],
            self.config.kernel_size, 1,
        )
        prompt_selection.fill(
            key, value, *best, held_key, held_value, self.occupied, self.positions, self._next_slot, None, None
        )
        if self.pages is not None:
            kept = prompt_selection.indices(*best[:2])
            self._write(0, gather_tokens(key, kept))
            self._write(1, gather_tokens(value, kept))

    def _set_sinks(self, occupied: Tensor) -> None:
        """Set each row's end of sinks, after its n-th token. If the prompt has fewer tokens, the next ones are
        sinks."""
        sinks, total = self.config.sinks, occupied.shape[1]
        rank = occupied.cumsum(1)                                               # tokens up to and including each
        before = (rank < sinks).sum(1)                                          # positions before the n-th token
        missing = (sinks - rank[:, -1]).clamp_min(0)
        end = torch.where(missing > 0, total + missing, before + 1)
        self._sink_end.copy_(end if sinks else torch.zeros_like(end))
