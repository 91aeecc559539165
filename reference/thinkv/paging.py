"""Continuous Thinking: a cache of quantized tokens in blocks that each hold one type of thought (section 4.2, D.6).

New tokens wait in a buffer in full precision; a flush quantizes all of them as one group and gives them slots. An
evicted token is marked, and attended to no more; its slot waits for the next token of the same type. Since attention
does not depend on the order of tokens (theorem 1), nothing is ever moved.

Here the table is plain Python, per row: blocks with their slots, and the live tokens in a dictionary. Attention runs
over the dictionary in order of position. Slot n of the S slots that attributes show is slot n % block of the entry
n // block of the block table; the last `group` slots are the buffer's, filled from the first on.

What a state does with it, per step: `append` the token, `decode_attention`; where a row's `buffered` has reached
config.group, and at the end of a segment, `flush` these rows with the segment's thought type and number; to evict,
find a segment's slots by `segments` and `positions` and its keys by `dequantized`, and `evict` what goes. Only flushed
tokens are evicted: a segment's last tokens are flushed before it is. Room for config.peak live tokens per row is room
for any order of these calls. `reorder` and `release` serve beams and sequences that come and go.
"""

from __future__ import annotations

import copy
from collections import Counter
from itertools import count, islice
from math import ceil

import torch
from torch import Tensor

from ..attention import accumulate_dtype, attention_weights, weighted_values
from ..contract import check_dtype, check_reorder, resolve_device
from .contract import BITS, PagedAttentionResult, Quantized, ThinKVConfig, Thought
from .contract_paging import (
    BlockEntry, PagedCodes, check_append, check_decode, check_flush, check_paged_cache, check_rows, pool_blocks,
)
from .formats import dequantize, per_element, quantize
from .table import Block, Flush, Row, Token
from .thoughts import attention_sparsity

__all__ = ["PagedAttentionResult", "PagedCache", "decode_attention"]

#: Bytes of the tables, which are there whether they are in use or not. A slot: position and segment (int64), scale
#: group (int32), eviction mask. An entry: thought type and physical block (int64), its place in the order in which
#: attention goes through the table (int32); and a flag per physical block, of which there are as many. A scale group:
#: its live tokens (int32). A segment: its start (int64). A row: tokens in the buffer (int64), of each thought type
#: the blocks and the tokens (6 int32), overflow.
SLOT_BYTES, ENTRY_BYTES, GROUP_BYTES, SEGMENT_BYTES, ROW_BYTES = 21, 21, 4, 8, 33


class PagedCache:
    """The paged cache of `batch` sequences in one layer (section 4.2). See the module for what a state does with it.

    config: formats, group, block and sizes. dtype: that of keys, values and queries; float64 makes it the oracle.
    Attributes, tensors by slot [B, S]: positions (int64, -1 = free), occupied (bool), segments and thoughts (int64, -1
    where free; thoughts -1 in the buffer too), groups (int64: the id of the scales of the token's key, -1 in the buffer
    and where free), evicted (bool: the token left, its slot waits for another). By entry of the block table [B,
    config.blocks]: block_thoughts, physical (int64, -1 = free). By row [B]: buffered (int64: tokens in the buffer),
    overflow (bool: the optimized twin's, which cannot raise where it has no room; False here).
    """

    def __init__(
        self, config: ThinKVConfig, *, batch: int, key_value_heads: int, head_dim: int, dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.config = check_paged_cache(config, batch, key_value_heads, head_dim)
        self.shape = (batch, key_value_heads, head_dim)
        self.dtype = check_dtype("dtype", dtype)
        self.device = resolve_device(device)
        self._rows = [Row() for _ in range(batch)]

    # What comes and goes -------------------------------------------------------------------------------------------

    def append(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """One token per row into its buffer: key and value [B, Hkv, D], positions [B] int64, -1: none for this row.

        ValueError for a position that is in the row already, and where the buffer is full.
        """
        check_append(key, value, positions, shape=self.shape, dtype=self.dtype, device=self.device)
        numbers = positions.tolist()
        for b, (row, position) in enumerate(zip(self._rows, numbers, strict=True)):
            if position < -1 or position in row.tokens:
                raise ValueError(f"positions must be new ones, or -1, got {position} in row {b}")
            if position >= 0 and len(row.buffer) == self.config.group:
                raise ValueError(f"row {b} has {self.config.group} tokens in its buffer: flush() it before append()")
        for b, (row, position) in enumerate(zip(self._rows, numbers, strict=True)):
            if position >= 0:
                token = Token(position, key[b].clone(), value[b].clone())
                row.buffer.append(token)
                row.tokens[position] = token

    def flush(self, rows: Tensor, thought: Tensor, segment: Tensor) -> None:
        """The buffers of `rows` [B] bool are quantized in the format of `thought` [B] int64 (0 T, 1 E, 2 R), and their
        tokens take slots, as tokens of `segment` [B] int64 (0 to config.segments - 1).

        Keys share a scale per channel, values one per config.group channels. Tokens take slots in order: first those
        that are free in blocks of their type, the lowest slot first, then those of new blocks: the lowest free entry,
        and the lowest free physical block of the format. ValueError where there is none, and for other numbers.
        """
        check_flush(rows, thought, segment, batch=self.shape[0], device=self.device)
        plans = []
        for b, (asked, kind, number) in enumerate(zip(*(x.tolist() for x in (rows, thought, segment)), strict=True)):
            row = self._rows[b]
            if not asked or not row.buffer:
                continue
            if kind not in tuple(Thought):
                raise ValueError(f"thought must be 0, 1 or 2, got {kind} in row {b}")
            if not 0 <= number < self.config.segments:
                raise ValueError(f"segment must be from 0 to {self.config.segments - 1}, got {number} in row {b}")
            holes, blocks = self._room(row, kind)
            if len(holes) + len(blocks) * self.config.block < len(row.buffer):
                raise ValueError(f"row {b} has no block left for {len(row.buffer)} tokens of type {kind}")
            group = next(group for group in count() if group not in row.flushes())
            if group >= self.config.peak:
                raise ValueError(f"row {b} has no scale group left")
            plans.append((row, kind, number, holes, blocks, group))
        for plan in plans:
            self._flush(*plan)

    def _room(self, row: Row, kind: int) -> tuple[list[int], list[tuple[int, int]]]:
        """The free slots of a type's blocks, and (entry, physical block) of those that there is room for, in order."""
        size, fmt = self.config.block, self.config.format_of(kind)
        holes = [
            entry * size + place for entry in sorted(row.table) if row.table[entry].thought == kind
            for place, token in enumerate(row.table[entry].tokens) if token is None
        ]
        held = {block.physical for block in row.table.values() if self.config.format_of(block.thought) == fmt}
        physical = [number for number in range(pool_blocks(self.config, fmt)) if number not in held]
        entries = islice((entry for entry in count() if entry not in row.table), len(physical))
        return holes, list(zip(entries, physical, strict=True))

    def _flush(
        self, row: Row, kind: int, segment: int, holes: list[int], blocks: list[tuple[int, int]], group: int
    ) -> None:
        size, fmt, buffer = self.config.block, self.config.format_of(kind), row.buffer
        for entry, physical in blocks[:max(0, ceil((len(buffer) - len(holes)) / size))]:
            row.table[entry] = Block(physical, kind, [None] * size, [False] * size)
            holes.extend(range(entry * size, (entry + 1) * size))
        flushed = Flush(
            group,
            quantize(torch.stack([token.key for token in buffer], 1), fmt, axis=-2, group=self.config.group),
            quantize(torch.stack([token.value for token in buffer], 1), fmt, axis=-1, group=self.config.group),
        )
        keys, values = (dequantize(codes, torch.float32) for codes in (flushed.keys, flushed.values))  # [Hkv, n, D]
        for place, (token, slot) in enumerate(zip(buffer, holes, strict=False)):
            token.key, token.value = keys[:, place], values[:, place]
            token.slot, token.segment, token.thought = slot, segment, kind
            token.flushed, token.place = flushed, place
            block = row.table[slot // size]
            block.tokens[slot % size], block.evicted[slot % size] = token, False
        row.starts.setdefault(segment, buffer[0].position)
        row.buffer = []

    def evict(self, tokens: Tensor) -> None:
        """The tokens in slots `tokens` [B, S] bool leave; slots that hold no quantized token are passed over.

        The slot is marked, for a later token of its block's type. A block that no token is left in is free, and so are
        the scales of a group of which none is left.
        """
        check_rows("tokens", tokens, (self.shape[0], self.config.slots), "[B, S]", self.device)
        size = self.config.block
        for row, marked in zip(self._rows, tokens.tolist(), strict=True):
            for entry, block in list(row.table.items()):
                for place, token in enumerate(block.tokens):
                    if token is not None and marked[entry * size + place]:
                        block.tokens[place], block.evicted[place] = None, True
                        del row.tokens[token.position]
                if not any(block.tokens):
                    del row.table[entry]

    def release(self, rows: Tensor) -> None:
        """The sequences in `rows` [B] bool leave: nothing is left of them."""
        check_rows("rows", rows, self.shape[:1], "[B]", self.device)
        for b, gone in enumerate(rows.tolist()):
            if gone:
                self._rows[b] = Row()

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was (beam search). index [B] int64."""
        index = check_reorder(index, self.shape[0], self.device)
        self._rows = [copy.deepcopy(self._rows[source]) for source in index.tolist()]

    # What is in it -------------------------------------------------------------------------------------------------

    def _slot(self, row: Row, token: Token) -> int:
        """A token's slot; in the buffer the slots are in order of arrival."""
        if token.flushed:
            return token.slot
        return self.config.blocks * self.config.block + next(n for n, one in enumerate(row.buffer) if one is token)

    def _by_slot(self, attribute: str) -> Tensor:
        numbers = torch.full((self.shape[0], self.config.slots), -1, dtype=torch.int64)
        for b, row in enumerate(self._rows):
            for token in row.tokens.values():
                numbers[b, self._slot(row, token)] = getattr(token, attribute)
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
        """Keys and values by slot, [B, Hkv, S, D] float32, the buffer's included; zeros where there is no token."""
        batch, heads, head_dim = self.shape
        both = torch.zeros(2, batch, heads, self.config.slots, head_dim, device=self.device)
        for b, row in enumerate(self._rows):
            for token in row.tokens.values():
                slot = self._slot(row, token)
                both[0, b, :, slot], both[1, b, :, slot] = token.key, token.value
        return both[0], both[1]

    def codes(self) -> PagedCodes:
        """The quantized tokens' codes and scales by slot."""
        batch, heads, head_dim = self.shape
        shape = (batch, heads, self.config.slots, head_dim)
        codes = torch.zeros(2, *shape, dtype=torch.uint8, device=self.device)
        scales = torch.zeros(2, *shape, dtype=torch.float32, device=self.device)
        for b, row in enumerate(self._rows):
            for token in row.tokens.values():
                if token.flushed:
                    for side, quantized in enumerate((token.flushed.keys, token.flushed.values)):
                        codes[side, b, :, token.slot] = quantized.codes[:, token.place]
                        scales[side, b, :, token.slot] = scale_of_elements(quantized)[:, token.place]
        return PagedCodes(*codes, *scales)

    def block_table(self, row: int) -> list[BlockEntry]:
        """The block table of a row, as figure 5 shows it, in order of entries."""
        entries = []
        for entry, block in sorted(self._rows[row].table.items()):
            segments = sorted({token.segment for token in block.tokens if token})
            masks = [tuple(int(token is not None and token.segment == one) for token in block.tokens)
                     for one in segments]
            starts = [self._rows[row].starts[one] for one in segments]
            ordered = sorted(zip(starts, masks, strict=True))
            entries.append(BlockEntry(
                entry, block.physical, sum(token is not None for token in block.tokens), block.thought,
                tuple(start for start, _ in ordered), tuple(mask for _, mask in ordered),
                tuple(map(int, block.evicted)),
            ))
        return entries

    # What it costs -------------------------------------------------------------------------------------------------

    def bytes_allocated(self) -> int:
        """Bytes that are taken: codes and value scales of held blocks, scales of held groups, all buffers and tables.

        The optimized twin reserves each row's pools beforehand, for the worst case; what is counted here is what a pool
        that rows share would give out.
        """
        config, (batch, heads, head_dim) = self.config, self.shape
        buffer = 2 * config.group * heads * head_dim * self.dtype.itemsize
        tables = (
            SLOT_BYTES * config.slots + ENTRY_BYTES * config.blocks + GROUP_BYTES * config.peak
            + SEGMENT_BYTES * config.segments + ROW_BYTES
        )
        return self._quantized_bytes() + batch * (buffer + tables)

    def bits_per_element(self) -> float:
        """Bits of held blocks and scale groups per element of a live quantized token; 0.0 if there is none."""
        _, heads, head_dim = self.shape
        elements = 2 * heads * head_dim * sum(len(row.tokens) - len(row.buffer) for row in self._rows)
        return 8 * self._quantized_bytes() / elements if elements else 0.0

    def _quantized_bytes(self) -> int:
        """All in whole words of 4 bytes. Blocks: per head the codes of each slot's key and value, and the scales of the
        values. Scale groups: per head a scale for each channel of the keys; for fp8 one of the keys, one of the values,
        both float32."""
        _, heads, head_dim = self.shape
        total = 0
        for row in self._rows:
            for fmt, number in Counter(self.config.format_of(block.thought) for block in row.table.values()).items():
                size = self.config.block
                value_scales = 0 if fmt == "fp8" else size * ceil(head_dim / self.config.group)
                total += number * heads * (2 * size * in_words(head_dim * BITS[fmt] / 8) + in_words(value_scales))
            for flushed in row.flushes().values():
                total += heads * (8 if flushed.keys.fmt == "fp8" else in_words(head_dim))
        return total


def in_words(size: float) -> int:
    """Bytes, as words of 4."""
    return 4 * ceil(size / 4)


def scale_of_elements(quantized: Quantized) -> Tensor:
    """What one unit of each element of [Hkv, n, D] is worth, float32. There is one group of tokens."""
    heads, tokens, head_dim = quantized.shape
    scale = per_element(quantized.scales, None, quantized.fmt, quantized.axis)
    if quantized.fmt != "fp8" and quantized.axis == -1:
        return scale.expand(*scale.shape[:-1], quantized.group).flatten(-2)[..., :head_dim]
    return scale[:, 0].expand(heads, tokens, head_dim)


def decode_attention(
    query: Tensor, cache: PagedCache, *, scale: float | None = None, look: Tensor | None = None
) -> PagedAttentionResult:
    """Attention of one query per head to all live tokens, quantized or in the buffer, and how sparse it is.

    query [B, Hq, D] in the cache's dtype and on its device; scale: the factor on query . key, default D ** -0.5; look
    [B] bool: the rows whose sparsity is asked for (section 3.1.3 looks every tau steps), None for all. Returns the
    output [B, Hq, D] in that dtype, zeros for a row without tokens, and the sparsity [B] by `attention_sparsity` with
    config.sparsity_threshold, NaN for a row that is not looked at. TypeError, ValueError for arguments that do not fit.
    """
    if not isinstance(cache, PagedCache):
        raise TypeError(f"cache must be a PagedCache, got {type(cache).__name__}")
    scale = check_decode(query, scale, look, shape=cache.shape, dtype=cache.dtype, device=cache.device)
    key, value, occupied = in_order(cache, accumulate_dtype(query))
    exact = query.to(key.dtype)
    weight = attention_weights(exact, key, occupied, scale=scale)                  # eq. 1
    output = weighted_values(weight, value, occupied).to(query.dtype)
    threshold = cache.config.sparsity_threshold
    sparsity = attention_sparsity(exact, key, occupied, threshold=threshold, scale=scale)
    if look is not None:
        sparsity = sparsity.masked_fill(~look, torch.nan)
    return PagedAttentionResult(output, sparsity)


def in_order(cache: PagedCache, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The live tokens of each row in order of position: key and value [B, Hkv, n, D], occupied [B, n] bool."""
    batch, heads, head_dim = cache.shape
    most = max(1, *(len(row.tokens) for row in cache._rows))
    key, value = torch.zeros(2, batch, heads, most, head_dim, dtype=dtype, device=cache.device)
    occupied = torch.zeros(batch, most, dtype=torch.bool, device=cache.device)
    for b, row in enumerate(cache._rows):
        for place, token in enumerate(row.in_order()):
            key[b, :, place], value[b, :, place], occupied[b, place] = token.key, token.value, True
    return key, value, occupied
