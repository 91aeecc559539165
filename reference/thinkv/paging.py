"""Continuous Thinking: a cache of quantized tokens in blocks, each with tokens of one thought type (section 4.2, D.6).

New tokens wait in a full-precision buffer. A flush quantizes the buffer as one group and assigns slots to its tokens.
An evicted token is marked and no longer attended to; the next token of the same type reuses its slot. Attention does
not depend on the order of tokens (theorem 1), so no token is ever moved.

The block table is a Python object per row: blocks with their slots, and the live tokens in a dictionary. Attention
reads the tokens in the order of their positions. Of the S slots that attributes refer to, slot n is slot n % block of
entry n // block of the block table; the last `group` slots are the buffer, filled from the first on.

At each step a state calls `append` and `decode_attention`. If a row's `buffered` reaches config.group, and at the end
of a segment, it calls `flush` with the thought type and the number of the segment. To evict, it finds the slots of a
segment by `segments` and `positions` and their keys by `dequantized`, and calls `evict`. Only quantized tokens can be
evicted, so the last tokens of a segment are flushed first. The pools have room for config.peak live tokens per row in
any order of these calls. `reorder` serves beam search; `release` frees rows for new sequences.
"""

from __future__ import annotations

import copy
from collections import Counter
from itertools import count, islice
from math import ceil
from typing import Any

import torch
from torch import Tensor

from .._ranks import Heads
from ..attention import accumulate_dtype, attention_weights, weighted_values
from ..contract.arguments import check_dtype, check_no_grad, resolve_device
from ..contract.interruption import Reorderable
from ..contract.thinkv.config import ThinKVConfig, pool_blocks
from ..contract.thinkv.paging import check_append, check_decode, check_flush, check_paged_cache, check_rows
from ..contract.thinkv.types import BlockEntry, PagedAttentionResult, PagedCodes, Thought, bits_in_cache, has_groups
from .formats import dequantize, in_words, quantize, scale_of_elements
from .table import Block, Flush, Row, Token
from .thoughts import ONE_RANK, sparsity_of_heads

__all__ = ["PagedAttentionResult", "PagedCache", "decode_attention"]

#: Bytes of the tables, allocated in full. Per slot: position and segment (int64), scale group (int32), eviction mask.
#: Per entry: thought type and physical block (int64), place in the order in which attention reads the table (int32) and
#: a flag for one physical block. Per scale group: its live tokens (int32). Per segment: its start (int64). Per row:
#: tokens in the buffer (int64), blocks and tokens of each thought type (6 int32), overflow.
SLOT_BYTES, ENTRY_BYTES, GROUP_BYTES, SEGMENT_BYTES, ROW_BYTES = 21, 21, 4, 8, 33


class PagedCache(Reorderable):
    """The paged cache of `batch` sequences in one layer (section 4.2). The module docstring describes its use.

    config: formats, group, block and sizes. dtype: the dtype of keys, values and queries; float64 makes it the oracle.
    Attributes by slot [B, S]: positions (int64, -1 = free); occupied (bool); segments and thoughts (int64, -1 in free
    slots; thoughts also -1 in the buffer); groups (int64, the id of the key's scales, -1 in the buffer and in free
    slots); evicted (bool: the token was evicted, and the slot can be reused). By entry of the block table [B,
    config.blocks]: block_thoughts, physical (int64, -1 = free). By row [B]: buffered (int64, tokens in the buffer);
    overflow (bool: the optimized side ran out of blocks, which it cannot report as an error; always False here).
    """

    def __init__(
        self, config: ThinKVConfig, *, batch: int, key_value_heads: int, head_dim: int, dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.config = check_paged_cache(config, batch, key_value_heads, head_dim)
        self.shape = (batch, key_value_heads, head_dim)
        self.dtype = check_dtype("dtype", dtype)
        self.device = resolve_device(device)
        # The memory of `dequantized`. Without it, a list of as many rows would take forever.
        torch.empty(2, batch, key_value_heads, self.config.slots, head_dim, device=self.device)
        self._rows = [Row() for _ in range(batch)]

    # Updates ---------------------------------------------------------------------------------------------------------

    def append(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Append one token per row to its buffer: key and value [B, Hkv, D]; positions [B] int64, -1 = no token.

        ValueError for a position that the row already holds, and for a full buffer; TypeError or ValueError for other
        invalid arguments.
        """
        check_append(key, value, positions, shape=self.shape, dtype=self.dtype, device=self.device)
        check_no_grad(key=key, value=value)
        self._check_whole()
        numbers = positions.tolist()
        for b, (row, position) in enumerate(zip(self._rows, numbers, strict=True)):
            if position < -1 or position in row.tokens:
                raise ValueError(f"positions must be new ones, or -1, got {position} in row {b}")
            if position >= 0 and len(row.buffer) == self.config.group:
                raise ValueError(f"row {b} has {self.config.group} tokens in its buffer: flush() it before append()")
        self._start_change("append")
        for b, (row, position) in enumerate(zip(self._rows, numbers, strict=True)):
            if position >= 0:
                token = Token(position, key[b].clone(), value[b].clone())
                row.buffer.append(token)
                row.tokens[position] = token
        self._end_change()

    def flush(self, rows: Tensor, thought: Tensor, segment: Tensor) -> None:
        """Quantize the buffers of `rows` [B] bool in the format of `thought` [B] int64 (0 T, 1 E, 2 R).

        The tokens become tokens of `segment` [B] int64, from 0 to config.segments - 1. Keys share a scale per channel,
        values one per config.group channels. Tokens take free slots of blocks of their type first, the lowest first,
        then slots of new blocks: the lowest free entry and the lowest free physical block of the format. ValueError if
        there is no free block, and for thoughts and segments out of range; no row changes then.
        """
        check_flush(rows, thought, segment, batch=self.shape[0], device=self.device)
        self._check_whole()
        plans = []
        for b, (asked, kind, number) in enumerate(zip(*(x.tolist() for x in (rows, thought, segment)), strict=True)):
            row = self._rows[b]
            if not asked or not row.buffer:
                continue
            if kind not in tuple(Thought):
                raise ValueError(f"thought must be 0, 1 or 2, got {kind} in row {b}")
            if not 0 <= number < self.config.segments:
                raise ValueError(f"segment must be from 0 to {self.config.segments - 1}, got {number} in row {b}")
            slots, blocks = self._free(row, kind)
            if len(slots) + len(blocks) * self.config.block < len(row.buffer):
                raise ValueError(f"row {b} has no block left for {len(row.buffer)} tokens of type {kind}")
            group = next(group for group in count() if group not in row.flushes())
            if group >= self.config.peak:
                raise ValueError(f"row {b} has no scale group left")
            plans.append((row, kind, number, slots, blocks, group))
        self._start_change("flush")
        for plan in plans:
            self._flush(*plan)
        self._end_change()

    def _free(self, row: Row, kind: int) -> tuple[list[int], list[tuple[int, int]]]:
        """The free slots in blocks of a thought type, and (entry, physical block) of each possible new block."""
        size, fmt = self.config.block, self.config.format_of(kind)
        slots = [
            entry * size + place for entry in sorted(row.table) if row.table[entry].thought == kind
            for place, token in enumerate(row.table[entry].tokens) if token is None
        ]
        used = {block.physical for block in row.table.values() if self.config.format_of(block.thought) == fmt}
        physical = [number for number in range(pool_blocks(self.config, fmt)) if number not in used]
        entries = islice((entry for entry in count() if entry not in row.table), len(physical))
        return slots, list(zip(entries, physical, strict=True))

    def _flush(
        self, row: Row, kind: int, segment: int, slots: list[int], blocks: list[tuple[int, int]], group: int
    ) -> None:
        """Quantize a row's buffer as scale group `group`, into free `slots` and as many new `blocks` as it needs."""
        size, fmt, buffer = self.config.block, self.config.format_of(kind), row.buffer
        for entry, physical in blocks[:max(0, ceil((len(buffer) - len(slots)) / size))]:
            row.table[entry] = Block(physical, kind, [None] * size, [False] * size)
            slots.extend(range(entry * size, (entry + 1) * size))
        flushed = Flush(
            group,
            quantize(torch.stack([token.key for token in buffer], 1), fmt, axis=-2, group=self.config.group),
            quantize(torch.stack([token.value for token in buffer], 1), fmt, axis=-1, group=self.config.group),
        )
        keys, values = (dequantize(codes, torch.float32) for codes in (flushed.keys, flushed.values))  # [Hkv, n, D]
        for place, (token, slot) in enumerate(zip(buffer, slots, strict=False)):
            token.key, token.value = keys[:, place], values[:, place]
            token.slot, token.segment, token.thought = slot, segment, kind
            token.flushed, token.place = flushed, place
            block = row.table[slot // size]
            block.tokens[slot % size], block.evicted[slot % size] = token, False
        row.starts.setdefault(segment, buffer[0].position)
        row.buffer, row.quantized = [], None

    def evict(self, tokens: Tensor) -> None:
        """Evict the tokens in the slots `tokens` [B, S] bool; slots without a quantized token are ignored.

        A slot is marked for reuse by a later token of the same type. A block without tokens is freed, and so are the
        scales of a group without tokens.
        """
        check_rows("tokens", tokens, (self.shape[0], self.config.slots), "[B, S]", self.device)
        size, marks = self.config.block, tokens.tolist()
        self._start_change("evict")
        for row, marked in zip(self._rows, marks, strict=True):
            for entry, block in list(row.table.items()):
                for place, token in enumerate(block.tokens):
                    if token is not None and marked[entry * size + place]:
                        block.tokens[place], block.evicted[place] = None, True
                        del row.tokens[token.position]
                        row.quantized = None
                if not any(block.tokens):
                    del row.table[entry]
        self._end_change()

    def reset(self) -> None:
        """Forget all tokens of all rows."""
        self._rows = [Row() for _ in range(self.shape[0])]
        self._end_change()

    def release(self, rows: Tensor) -> None:
        """Forget all tokens of `rows` [B] bool."""
        check_rows("rows", rows, self.shape[:1], "[B]", self.device)
        self._check_whole()
        self._rows = [Row() if released else self._rows[b] for b, released in enumerate(rows.tolist())]

    @property
    def _num_rows(self) -> int:
        return self.shape[0]

    def _take(self, source: Any, index: Tensor) -> None:
        self._rows = [copy.deepcopy(source._rows[row]) for row in index.tolist()]

    # Contents --------------------------------------------------------------------------------------------------------

    def _slot(self, row: Row, token: Token) -> int:
        """The slot of a token. Tokens in the buffer are in order of arrival."""
        if token.flushed:
            return token.slot
        return self.config.blocks * self.config.block + next(n for n, one in enumerate(row.buffer) if one is token)

    def _by_slot(self, attribute: str) -> Tensor:
        """An attribute of the live tokens, [B, S] int64, -1 in free slots."""
        numbers = torch.full((self.shape[0], self.config.slots), -1, dtype=torch.int64)
        for b, row in enumerate(self._rows):
            tokens = row.tokens.values()
            slots = [self._slot(row, token) for token in tokens]
            numbers[b, slots] = torch.tensor([getattr(token, attribute) for token in tokens], dtype=torch.int64)
        return numbers.to(self.device)

    @property
    def positions(self) -> Tensor:
        return self._by_slot("position")

    @property
    def occupied(self) -> Tensor:
        return self.positions >= 0

    @property
    def segments(self) -> Tensor:
        return self._by_slot("segment")

    @property
    def thoughts(self) -> Tensor:
        return self._by_slot("thought")

    @property
    def groups(self) -> Tensor:
        numbers = torch.full((self.shape[0], self.config.slots), -1, dtype=torch.int64)
        for b, row in enumerate(self._rows):
            for token in row.tokens.values():
                if token.flushed:
                    numbers[b, token.slot] = token.flushed.group
        return numbers.to(self.device)

    @property
    def evicted(self) -> Tensor:
        marks = torch.zeros(self.shape[0], self.config.slots, dtype=torch.bool)
        for b, row in enumerate(self._rows):
            for entry, block in row.table.items():
                marks[b, entry * self.config.block:][:self.config.block] = torch.tensor(block.evicted)
        return marks.to(self.device)

    def _by_entry(self, attribute: str) -> Tensor:
        """An attribute of the blocks, [B, config.blocks] int64, -1 for free entries."""
        numbers = torch.full((self.shape[0], self.config.blocks), -1, dtype=torch.int64)
        for b, row in enumerate(self._rows):
            for entry, block in row.table.items():
                numbers[b, entry] = getattr(block, attribute)
        return numbers.to(self.device)

    @property
    def block_thoughts(self) -> Tensor:
        return self._by_entry("thought")

    @property
    def physical(self) -> Tensor:
        return self._by_entry("physical")

    @property
    def buffered(self) -> Tensor:
        return torch.tensor([len(row.buffer) for row in self._rows], device=self.device)

    @property
    def overflow(self) -> Tensor:
        return torch.zeros(self.shape[0], dtype=torch.bool, device=self.device)

    def dequantized(self) -> tuple[Tensor, Tensor]:
        """Keys and values by slot, [B, Hkv, S, D] float32, including the buffer; zeros in free slots."""
        batch, heads, head_dim = self.shape
        both = torch.zeros(2, batch, heads, self.config.slots, head_dim, device=self.device)
        for b, row in enumerate(self._rows):
            if row.tokens:
                tokens, vectors = row.in_order(both.dtype)
                both[:, b, :, [self._slot(row, token) for token in tokens]] = vectors
        return both[0], both[1]

    def codes(self) -> PagedCodes:
        """The codes and scales of the quantized tokens by slot."""
        batch, heads, head_dim = self.shape
        shape = (batch, heads, self.config.slots, head_dim)
        codes = torch.zeros(2, *shape, dtype=torch.uint8, device=self.device)
        scales = torch.zeros(2, *shape, dtype=torch.float32, device=self.device)
        for b, row in enumerate(self._rows):
            for token in row.tokens.values():
                if token.flushed and token.flushed.keys.fmt != "unquantized":
                    for side, quantized in enumerate((token.flushed.keys, token.flushed.values)):
                        codes[side, b, :, token.slot] = quantized.codes[:, token.place]
                        scales[side, b, :, token.slot] = scale_of_elements(quantized)[:, token.place]
        return PagedCodes(*codes, *scales)

    def block_table(self, row: int) -> list[BlockEntry]:
        """The block table of a row (figure 5), by ascending entry."""
        entries = []
        for entry, block in sorted(self._rows[row].table.items()):
            segments = sorted({token.segment for token in block.tokens if token})
            masks = [tuple(int(token is not None and token.segment == n) for token in block.tokens) for n in segments]
            starts = [self._rows[row].starts[one] for one in segments]
            ordered = sorted(zip(starts, masks, strict=True))
            entries.append(BlockEntry(
                entry, block.physical, sum(token is not None for token in block.tokens), block.thought,
                tuple(start for start, _ in ordered), tuple(mask for _, mask in ordered),
                tuple(map(int, block.evicted)),
            ))
        return entries

    # Memory ----------------------------------------------------------------------------------------------------------

    def bytes_allocated(self) -> int:
        """Bytes in use: codes and value scales of used blocks, key scales of used groups, all buffers and tables.

        The optimized side allocates the pools of each row for the worst case; this counts what a pool shared by all
        rows would allocate.
        """
        config, (batch, heads, head_dim) = self.config, self.shape
        buffer = 2 * config.group * heads * head_dim * self.dtype.itemsize
        tables = SLOT_BYTES * config.slots + ENTRY_BYTES * config.blocks + GROUP_BYTES * config.peak + ROW_BYTES
        tables += SEGMENT_BYTES * config.segments
        return self._quantized_bytes() + batch * (buffer + tables)

    def bits_per_element(self) -> float:
        """Bits of used blocks and scale groups per element of a live quantized token; 0.0 without such tokens."""
        _, heads, head_dim = self.shape
        elements = 2 * heads * head_dim * sum(len(row.tokens) - len(row.buffer) for row in self._rows)
        return 8 * self._quantized_bytes() / elements if elements else 0.0

    def _quantized_bytes(self) -> int:
        """Bytes of all used blocks and scale groups, in words of 4 bytes.

        A block has per head the codes of each slot's key and value and the scales of the values. A scale group has per
        head one scale for each channel of the keys; for fp8, one float32 scale for the keys and one for the values; and
        none for "unquantized", whose codes are the elements, in 16 bits (32 for float32).
        """
        _, heads, head_dim = self.shape
        total = 0
        for row in self._rows:
            for fmt, number in Counter(self.config.format_of(block.thought) for block in row.table.values()).items():
                size = self.config.block
                value_scales = size * ceil(head_dim / self.config.group) if has_groups(fmt) else 0
                codes = in_words(head_dim * bits_in_cache(fmt, self.dtype) / 8)
                total += number * heads * (2 * size * codes + in_words(value_scales))
            for flushed in row.flushes().values():
                fmt = flushed.keys.fmt
                total += heads * (in_words(head_dim) if has_groups(fmt) else 8 if fmt == "fp8" else 0)
        return total


def decode_attention(
    query: Tensor, cache: PagedCache, *, scale: float | None = None, sparsity_mask: Tensor | None = None
) -> PagedAttentionResult:
    """Attention of one query to all live tokens, quantized or buffered, and its sparsity.

    query [B, Hq, D] with the cache's dtype and device; scale defaults to D ** -0.5; sparsity_mask [B] bool: the rows
    whose sparsity is requested (section 3.1.3 requests it every tau steps), None for all. Returns output [B, Hq, D] in
    query's dtype, zeros for a row without tokens, and sparsity [B], the `attention_sparsity` with
    config.sparsity_threshold and config.sparsity_of, NaN for other rows. TypeError or ValueError for invalid arguments.
    """
    if not isinstance(cache, PagedCache):
        raise TypeError(f"cache must be a PagedCache, got {type(cache).__name__}")
    return decode_with(ONE_RANK, query, cache, scale, sparsity_mask)


def decode_with(
    heads: Heads, query: Tensor, cache: PagedCache, scale: float | None, sparsity_mask: Tensor | None
) -> PagedAttentionResult:
    """`decode_attention`, with the sparsity over the KV heads of all ranks."""
    scale = check_decode(query, scale, sparsity_mask, shape=cache.shape, dtype=cache.dtype, device=cache.device)
    cache._check_whole()
    key, value, occupied = in_order(cache, accumulate_dtype(query))
    exact = query.to(key.dtype)
    weight = attention_weights(exact, key, occupied, scale=scale)                  # eq. 1
    output = weighted_values(weight, value, occupied).to(query.dtype)
    if sparsity_mask is not None and not bool(sparsity_mask.any()):
        return PagedAttentionResult(output, weight.new_full(weight.shape[:1], torch.nan))
    sparsity = sparsity_of_heads(
        exact, key, occupied, cache.config.sparsity_threshold, scale, cache.config.sparsity_of, heads
    )
    if sparsity_mask is not None:
        sparsity = sparsity.masked_fill(~sparsity_mask, torch.nan)
    return PagedAttentionResult(output, sparsity)


def in_order(cache: PagedCache, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The live tokens of each row in order of position: key and value [B, Hkv, n, D], occupied [B, n] bool."""
    batch, heads, head_dim = cache.shape
    most = max(1, *(len(row.tokens) for row in cache._rows))
    both = torch.zeros(2, batch, heads, most, head_dim, dtype=dtype, device=cache.device)
    occupied = torch.zeros(batch, most, dtype=torch.bool, device=cache.device)
    for b, row in enumerate(cache._rows):
        if row.tokens:
            both[:, b, :, :len(row.tokens)], occupied[b, :len(row.tokens)] = row.in_order(dtype)[1], True
    return both[0], both[1], occupied
