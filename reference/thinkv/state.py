"""A layer's cache under ThinKV: tokens are quantized as their thought deserves, and thoughts of the past shrink.

A step (sections 3 and 4, D.6): the token joins the full-precision buffer; the query attends to all live tokens; every
tau steps, that step's sparsity says what kind of thought the tau tokens from this one on belong to. A full buffer, and
what is in it when the thought ends, is quantized in the thought's format. At the end of a transition thought every
earlier segment shrinks by one level (case 1); while more than `budget` tokens are live, the least important and then
oldest earlier segment does (case 2). How far all of them shrink is settled first, in integers; each segment that does
is then reduced once, to the representatives of its keys.

The prompt is a reasoning thought, cut into segments of tau tokens, of which each is quantized, and then what is over
the budget evicted, before the next one comes: so no more than config.peak tokens are live at any moment.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..attention import causal_attention
from ..contract import check_prompt, check_reorder, check_step, resolve_device, resolve_scale, state_sizes
from .contract import ThinKVConfig, Thought
from .contract_state import check_room, check_thought
from .eviction import anneal, segment_representatives
from .paging import PagedCache, decode_attention
from .thoughts import classify

__all__ = ["ThinKVConfig", "ThinKVState"]


class ThinKVState:
    """The cache of `batch` sequences in one layer (ThinKV sections 3 and 4).

    dtype: that of queries, keys and values; float64 makes it the oracle. Readable, by slot [B, S]: occupied (bool),
    positions and segments (int64, -1 = free) and the stored numbers, key and value [B, Hkv, S, D] float32, dequantized
    (zeros where free); `cache`: the `PagedCache` itself, with its block table and its accounts of bytes. By row [B]:
    sparsity (of the last look), thought (int64, of the segment that is being written), over_budget (bool). levels
    [B, M] int64: how often each segment was selected for eviction.
    thought is writable: whoever averages the sparsity over several layers (section 3.1.3) sets it between the first
    step of a window and the first flush after it. Without config.edges nothing else sets it, but that a prompt is
    reasoning.
    """

    def __init__(
        self, config: ThinKVConfig, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str,
    ) -> None:
        if not isinstance(config, ThinKVConfig):
            raise TypeError(f"config must be a ThinKVConfig, got {type(config).__name__}")
        self.config = config
        self.sizes = state_sizes(
            batch=batch, query_heads=query_heads, key_value_heads=key_value_heads, slots=config.slots,
            head_dim=head_dim,
        )
        self.dtype, self.device = dtype, resolve_device(device)
        self.scale = resolve_scale(config.scale, head_dim)
        self.cache = PagedCache(
            config, batch=batch, key_value_heads=key_value_heads, head_dim=head_dim, dtype=dtype, device=self.device
        )
        # How the judge looks on and makes this side follow choices that are as right as its own.
        self._attended: Callable[[Tensor], None] = lambda query: None
        self._representatives = segment_representatives
        self.reset()

    @torch.inference_mode(False)  # else a state that was made in inference mode could not be used outside of it
    def reset(self) -> None:
        """Forget every token."""
        batch, segments = self.sizes.batch, self.config.segments
        self.cache.release(self._rows(True))
        self.sparsity = torch.zeros(
            batch, dtype=torch.float64 if self.dtype == torch.float64 else torch.float32, device=self.device
        )
        self.over_budget = self._rows(False)
        self.levels = torch.zeros(batch, segments, dtype=torch.int64, device=self.device)
        self._thought = torch.full((batch,), int(Thought.REASONING), device=self.device)
        self._thoughts = torch.full((batch, segments), int(Thought.REASONING), device=self.device)
        self._segment = torch.full((batch,), -1, device=self.device)  # the one being written
        self._seen = self._decoded = 0

    def _rows(self, value: bool) -> Tensor:
        return torch.full((self.sizes.batch,), value, device=self.device)

    @property
    def tokens_seen(self) -> int:
        """Tokens that came in, padding included."""
        return self._seen

    @property
    def positions(self) -> Tensor:
        return self.cache.positions

    @property
    def occupied(self) -> Tensor:
        return self.cache.occupied

    @property
    def segments(self) -> Tensor:
        return self.cache.segments

    @property
    def key(self) -> Tensor:
        return self.cache.dequantized()[0]

    @property
    def value(self) -> Tensor:
        return self.cache.dequantized()[1]

    @property
    def thought(self) -> Tensor:
        """Of the segment that is being written, [B] int64: see `Thought`. Assigning checks the values, and copies."""
        return self._thought

    @thought.setter
    def thought(self, value: Tensor) -> None:
        self._thought = check_thought(value, self._thought).clone()

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """The prompt: full causal attention in full precision, then its tokens are quantized and evicted by segments.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, default all True.
        Returns [B, Hq, T, D]; padding gives zeros. RuntimeError when the state already holds tokens; ValueError for
        more than config.max_tokens of them.
        """
        total = check_prompt(query, key, value, occupied, sizes=self.sizes, dtype=self.dtype, device=self.device)
        if self._seen:
            raise RuntimeError("prefill needs an empty state: call reset() first")
        check_room(0, total, self.config.max_tokens)
        if occupied is None:
            occupied = torch.ones(self.sizes.batch, total, dtype=torch.bool, device=self.device)
        output = causal_attention(query, key, value, occupied, scale=self.scale)
        self._thought = torch.full_like(self._thought, int(Thought.REASONING))
        token = (~occupied).long().argsort(dim=1, stable=True)                          # [B, T]: the tokens come first
        count = occupied.sum(1)
        row = torch.arange(self.sizes.batch, device=self.device)
        for start in range(0, total, self.config.tau):
            self._segment = self._segment + (count > start)
            end = min(start + self.config.tau, total)
            for number in range(start, end):
                if number > start and (number - start) % self.config.group == 0:
                    self._flush(self.cache.buffered > 0)
                place = token[:, number]
                self.cache.append(key[row, :, place], value[row, :, place], place.where(number < count, -1))
            self._flush(self.cache.buffered > 0)
            self._evict(self._rows(False))
        self._seen = total
        return output

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One token: buffered, attended to together with the rest; then quantization and eviction as they are due.

        query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D]. ValueError where
        config.max_tokens have been seen.
        """
        check_step(query, key, value, sizes=self.sizes, dtype=self.dtype, device=self.device)
        check_room(self._seen, 1, self.config.max_tokens)
        begins = self._decoded % self.config.tau == 0
        if begins:
            self._segment = self._segment + 1
        self.cache.append(key, value, torch.full_like(self._segment, self._seen))
        output, sparsity = decode_attention(query, self.cache, scale=self.scale, look=self._rows(begins))
        if begins:
            self.sparsity = sparsity
        self._attended(query)
        if begins and self.config.edges is not None:
            self._thought = classify(self.sparsity, self.config.edges)
        self._seen, self._decoded = self._seen + 1, self._decoded + 1
        ended = self._decoded % self.config.tau == 0
        self._flush((self.cache.buffered == self.config.group) | ended)
        self._evict(ended & (self._thought == Thought.TRANSITION))
        return output

    def _flush(self, rows: Tensor) -> None:
        self._thoughts.scatter_(1, self._segment[:, None].clamp_min(0), self._thought[:, None])
        self.cache.flush(rows, self._thought, self._segment)

    def _evict(self, trajectory_change: Tensor) -> None:
        """Every segment before the one being written shrinks to what definition 3 leaves it."""
        segments = self.cache.segments
        number = torch.arange(self.config.segments, device=self.device)
        size = (segments[:, None] == number[:, None]).sum(-1)                           # [B, M]
        plan = anneal(
            size, self.levels, self._thoughts, self._segment, trajectory_change,
            live=self.cache.occupied.sum(-1), budget=self.config.budget, retention=self.config.retention,
        )
        self.levels, self.over_budget = plan.level, plan.over_budget
        shrinks = plan.size < size
        if not bool(shrinks.any()):
            return
        slots = self._slots_of_segments(segments, shrinks)                              # [B, M, L]
        key = self.cache.dequantized()[0]
        stays = self._representatives(key.double() if self.dtype == torch.float64 else key, slots, plan.size)
        gone = torch.zeros_like(self.cache.occupied)
        leaves = (slots >= 0) & ~stays                                                  # [B, M, L]
        gone[leaves.nonzero()[:, 0], slots[leaves]] = True
        self.cache.evict(gone)

    def _slots_of_segments(self, segments: Tensor, wanted: Tensor) -> Tensor:
        """Where the tokens of the wanted segments [B, M] lie, oldest first, then -1: [B, M, tau]."""
        slots = torch.full((*wanted.shape, self.config.tau), -1, device=self.device)
        positions = self.cache.positions
        for b, segment in wanted.nonzero().tolist():
            held = (segments[b] == segment).nonzero()[:, 0]
            slots[b, segment, :len(held)] = held[positions[b, held].argsort()]
        return slots

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was (beam search). index [B] int64."""
        index = check_reorder(index, self.sizes.batch, self.device)
        self.cache.reorder(index)
        for name in ("sparsity", "over_budget", "levels", "_thought", "_thoughts", "_segment"):
            setattr(self, name, getattr(self, name).index_select(0, index))
