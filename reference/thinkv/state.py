"""The ThinKV cache of one layer: tokens are quantized by thought type, and segments of past thoughts shrink.

A step (sections 3 and 4, D.6): the token joins the full-precision buffer, and the query attends to all live tokens.
Every tau steps, the sparsity of the step's attention determines the thought type of the next tau tokens, this one
included. A full buffer, and the rest of it at the end of a segment, is quantized in the format of the thought type. At
the end of a transition thought, every earlier segment shrinks by one level (case 1). While more than `budget` tokens
are live, the least important and then oldest earlier segment shrinks (case 2). The sizes of all segments are computed
first, in integers; then each segment that shrinks is reduced once, to the representatives of its keys.

The prompt is a reasoning thought, cut into segments of tau tokens. Each segment is quantized, and the tokens over the
budget are evicted, before the next one enters. So at most config.peak tokens are live at any time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._ranks import Heads
from ..attention import accumulate_dtype, causal_attention
from ..contract.arguments import check_config, check_room
from ..contract.ranks import ProcessGroup, check_heads, check_process_group, digest
from ..contract.thinkv.config import ThinKVConfig
from ..contract.thinkv.paging import check_thought
from ..contract.thinkv.types import Thought
from ..state import State
from .eviction import anneal, segment_representatives
from .paging import PagedCache, decode_with
from .thoughts import classify

__all__ = ["ThinKVConfig", "ThinKVState"]


class ThinKVState(State):
    """The ThinKV cache of `batch` sequences in one layer (sections 3 and 4).

    dtype: the dtype of queries, keys and values; float64 makes it the oracle.
    Readable by slot [B, S]: occupied (bool); positions and segments (int64, -1 = free); key and value [B, Hkv, S, D]
    float32, dequantized, zeros in free slots. `cache` is the `PagedCache`, with its block table and byte counts.
    Readable by row [B]: sparsity, as last measured; thought (int64), of the current segment; over_budget (bool). levels
    [B, M] int64: how often each segment was selected for eviction.
    thought is writable: code that averages the sparsity over several layers (section 3.1.3) assigns it between the
    first step of a segment and the next flush. Without config.edges only the prefill changes it, to reasoning.

    process_group: the ranks that share the heads of these sequences. Each has a state of its query heads and of their
    KV heads. The sparsity and the representatives of a segment are those of the KV heads of all ranks, and all ranks
    quantize and evict the same tokens. replicas: the number of ranks in a row that hold the same KV heads, each with a
    part of their query heads: more than 1 if there are more ranks than KV heads. The ranks' calls must match, as for
    `kvtwin.reference.longflow.LongFlowState`, and so must what is assigned to `thought`.
    """

    config: ThinKVConfig
    _per_row = ("sparsity", "over_budget", "levels", "_thought", "_thoughts", "_segment")
    _nested = ("cache",)
    _of_all_rows = (*State._of_all_rows, "_decoded")

    def __init__(
        self, config: ThinKVConfig, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str, process_group: ProcessGroup | None = None, replicas: int = 1,
    ) -> None:
        super().__init__(
            check_config(config, ThinKVConfig), slots=config.slots, batch=batch, query_heads=query_heads,
            key_value_heads=key_value_heads, head_dim=head_dim, dtype=dtype, device=device,
        )
        self.cache = PagedCache(
            config, batch=batch, key_value_heads=key_value_heads, head_dim=head_dim, dtype=dtype, device=self.device
        )
        check_heads(
            process_group, replicas, key_value_heads, config=config, batch=batch,
            query_heads_per_key_value_head=self.sizes.group, head_dim=head_dim, dtype=dtype,
        )
        self._heads = Heads(process_group, replicas)
        # The judge replaces these two, to observe attention and to make this state follow another valid choice.
        self._attended: Callable[[Tensor], None] = _ignore          # a function with a name can be pickled
        self._representatives = segment_representatives
        self.reset()

    def _allocate(self) -> None:
        batch, segments, reasoning = self.sizes.batch, self.config.segments, int(Thought.REASONING)
        self.cache.reset()
        dtype = accumulate_dtype(torch.empty(0, dtype=self.dtype))
        self.sparsity = torch.zeros(batch, dtype=dtype, device=self.device)
        self.over_budget = self._rows(False)
        self.levels = torch.zeros(batch, segments, dtype=torch.int64, device=self.device)
        self._thought = torch.full((batch,), reasoning, device=self.device)
        self._thoughts = torch.full((batch, segments), reasoning, device=self.device)
        self._segment = torch.full((batch,), -1, device=self.device)  # the current segment
        self._decoded = 0

    def _rows(self, value: bool) -> Tensor:
        return torch.full((self.sizes.batch,), value, device=self.device)

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
        """The `Thought` of the current segment, [B] int64. Assigning checks and copies the values."""
        return self._thought

    @thought.setter
    def thought(self, value: Tensor) -> None:
        self._thought = check_thought(value, self._thought).clone()

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Full causal attention of the prompt in full precision; then its tokens are quantized and evicted by segments.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, by default all True.
        Returns [B, Hq, T, D], zeros for padding. RuntimeError if the state holds tokens; ValueError for more than
        config.max_tokens tokens; TypeError or ValueError for other invalid arguments.
        """
        occupied = self._check_prompt(query, key, value, occupied)
        self._check_empty()
        total = occupied.shape[1]
        check_room(0, total, self.config.max_tokens)
        if self._heads.process_group is not None:
            check_process_group(self._heads.process_group, tokens=total, occupied=digest(occupied))
        self._start_change("prefill")
        output = causal_attention(query, key, value, occupied, scale=self.scale)
        self._thought = torch.full_like(self._thought, int(Thought.REASONING))
        token = (~occupied).long().argsort(dim=1, stable=True)                          # [B, T], tokens before padding
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
        self._end_change()
        return output

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Buffer a token, attend to it and to all live tokens, then quantize and evict if due.

        query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D]. ValueError beyond
        config.max_tokens tokens; TypeError or ValueError for other invalid arguments.
        """
        self._check_step(query, key, value)
        check_room(self._seen, 1, self.config.max_tokens)
        self._start_change("step")
        begins = self._decoded % self.config.tau == 0
        if begins:
            self._segment = self._segment + 1
        self.cache.append(key, value, torch.full_like(self._segment, self._seen))
        output, sparsity = decode_with(self._heads, query, self.cache, self.scale, self._rows(begins))
        if begins:
            self.sparsity = sparsity
        self._attended(query)
        if begins and self.config.edges is not None:
            self._thought = classify(self.sparsity, self.config.edges)
        self._seen, self._decoded = self._seen + 1, self._decoded + 1
        ended = self._decoded % self.config.tau == 0
        self._flush((self.cache.buffered == self.config.group) | ended)
        self._evict(ended & (self._thought == Thought.TRANSITION))
        self._end_change()
        return output

    def _flush(self, rows: Tensor) -> None:
        """Quantize the buffers of `rows` [B] bool."""
        self._thoughts.scatter_(1, self._segment[:, None].clamp_min(0), self._thought[:, None])
        self.cache.flush(rows, self._thought, self._segment)

    def _evict(self, trajectory_change: Tensor) -> None:
        """Reduce every segment before the current one to its size by definition 3: trajectory_change [B] bool."""
        live = self.cache.occupied.sum(-1)
        if not bool((trajectory_change | (live > self.config.budget)).any()):
            self.over_budget = self._rows(False)
            return
        segments = self.cache.segments
        number = torch.arange(self.config.segments, device=self.device)
        size = (segments[:, None] == number[:, None]).sum(-1)                           # [B, M]
        plan = anneal(
            size, self.levels, self._thoughts, self._segment, trajectory_change,
            live=live, budget=self.config.budget, retention=self.config.retention,
        )
        self.levels, self.over_budget = plan.level, plan.over_budget
        shrinks = plan.size < size
        if not bool(shrinks.any()):
            return
        slots = self._slots_of_segments(segments, shrinks)                              # [B, M, L]
        key = self._heads.once(self.cache.dequantized()[0])
        keep = self._representatives(key.double() if self.dtype == torch.float64 else key, slots, plan.size)
        evicted = torch.zeros_like(self.cache.occupied)
        evict = (slots >= 0) & ~keep                                                    # [B, M, L]
        evicted[evict.nonzero()[:, 0], slots[evict]] = True
        self.cache.evict(evicted)

    def _slots_of_segments(self, segments: Tensor, wanted: Tensor) -> Tensor:
        """The slots of the tokens of the wanted segments [B, M] bool, oldest first, then -1: [B, M, tau]."""
        slots = torch.full((*wanted.shape, self.config.tau), -1, device=self.device)
        positions = self.cache.positions
        for b, segment in wanted.nonzero().tolist():
            found = (segments[b] == segment).nonzero()[:, 0]
            slots[b, segment, :len(found)] = found[positions[b, found].argsort()]
        return slots


def _ignore(query: Tensor) -> None:
    """Observe nothing."""
