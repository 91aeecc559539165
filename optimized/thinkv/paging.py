"""Continuous Thinking on the GPU: a cache of quantized tokens in blocks that each hold one type of thought.

Twin of the reference's paged cache, with the same table to the letter; `kvtwin.reference.thinkv.paging` says what its
slots are and what a state does with it. All of it is allocated beforehand, updated in place, and fits in CUDA graphs:
`append`, `flush`, `evict` and `decode_attention` ask the host nothing. Every row has pools of its own for each format,
for the worst case that its config allows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference._validate import check_dtype, check_reorder, resolve_device
from ...reference.contract import Sizes
from ...reference.thinkv._validate_paging import check_append, check_decode, check_flush, check_paged_cache, check_rows
from ...reference.thinkv.contract import ThinKVConfig
from ...reference.thinkv.types import BlockEntry, PagedAttentionResult, PagedCodes, Thought
from .._common.launch import DTYPES, check_kernel_device, check_kernel_sizes, check_launchable
from .._common.state import Buffers
from . import _paging_ops as ops
from ._paged_attention_ops import attend
from ._paging_read_kernels import CODES, NUMBERS, SCALES

__all__ = ["PagedAttentionResult", "PagedCache", "decode_attention"]

#: Tokens that a kernel takes at once: of a group, of a block.
LARGEST = 256


class PagedCache(Buffers):
    """The paged cache of `batch` sequences in one layer (ThinKV section 4.2).

    Attributes as in the reference: by slot [B, S] positions, occupied, segments, thoughts, groups, evicted; by entry of
    the block table block_thoughts, physical; by row buffered, and overflow (bool): an append to a full buffer, or a
    flush that found no block or was given numbers out of range, was refused, and nothing else happened. It stays set
    until the row is released.
    float32, float16 or bfloat16; D from 16 to 256; up to 16 query heads per KV head; groups and blocks of up to 256
    tokens. TypeError, ValueError for anything else, and for CPU tensors outside Triton's interpreter.
    """

    def __init__(
        self, config: ThinKVConfig, *, batch: int, key_value_heads: int, head_dim: int, dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.config = check_paged_cache(config, batch, key_value_heads, head_dim)
        for name, value in (("group", config.group), ("block", config.block)):
            if value > LARGEST:
                raise ValueError(f"config.{name} must be at most {LARGEST}, got {value}")
        self.shape = (batch, key_value_heads, head_dim)
        check_kernel_sizes(Sizes(batch, key_value_heads, key_value_heads, config.slots, head_dim))
        self.dtype = check_dtype("dtype", dtype, DTYPES)
        self.device = resolve_device(device)
        check_kernel_device("device", self.device)
        self._formats = " ".join(config.format_of(thought) for thought in Thought)
        self._layout = ops.layout(
            self._formats, config.block, config.group, key_value_heads, head_dim, config.blocks
        )
        self._tables = self._allocate_tables()
        self._storage = self._allocate_storage()
        self._arrivals = self._buffer(batch, dtype=torch.int32)
        self.release(torch.ones(batch, dtype=torch.bool, device=self.device))

    def _allocate_tables(self) -> ops.Tables:
        config, batch = self.config, self.shape[0]
        long, short = torch.int64, torch.int32
        slots, entries = (batch, config.slots), (batch, config.blocks)
        return ops.Tables(
            positions=self._buffer(*slots, dtype=long), segments=self._buffer(*slots, dtype=long),
            evicted=self._buffer(*slots, dtype=torch.bool), slot_groups=self._buffer(*slots, dtype=short),
            block_thoughts=self._buffer(*entries, dtype=long), physical=self._buffer(*entries, dtype=long),
            order=self._buffer(*entries, dtype=short), used=self._buffer(*entries, dtype=torch.uint8),
            group_tokens=self._buffer(batch, config.peak, dtype=short),
            starts=self._buffer(batch, config.segments, dtype=long),
            counts=self._buffer(batch, 2 * len(Thought), dtype=short),
            buffered=self._buffer(batch, dtype=long), overflow=self._buffer(batch, dtype=torch.bool),
        )

    def _allocate_storage(self) -> ops.Storage:
        config, (batch, heads, head_dim) = self.config, self.shape
        chunks = config.peak if "fp8" in self._layout.formats else 1
        buffer = (batch, heads, config.group, head_dim)
        return ops.Storage(
            pool=self._buffer(batch, self._layout.row_words, dtype=torch.int32),
            key_scales=self._buffer(
                batch, config.peak, heads, ops.scale_bytes(head_dim) // ops.WORD, dtype=torch.int32
            ),
            chunk_scales=self._buffer(batch, chunks, heads, 2, dtype=torch.float32),
            buffer_key=self._buffer(*buffer, dtype=self.dtype), buffer_value=self._buffer(*buffer, dtype=self.dtype),
        )

    # What comes and goes -------------------------------------------------------------------------------------------

    def append(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """One token per row into its buffer: key and value [B, Hkv, D], positions [B] int64, -1: none for this row.

        Positions that are in the row already are the caller's error; a full buffer stays as it is (see overflow).
        """
        check_append(key, value, positions, shape=self.shape, dtype=self.dtype, device=self.device)
        check_launchable(key=key, value=value)
        storage, tables = self._storage, self._tables
        ops.append(
            key, value, positions, storage.buffer_key, storage.buffer_value, tables.positions, tables.buffered,
            tables.overflow,
        )

    def flush(self, rows: Tensor, thought: Tensor, segment: Tensor) -> None:
        """The buffers of `rows` [B] bool are quantized in the format of `thought` [B] int64 (0 T, 1 E, 2 R), and their
        tokens take slots, as tokens of `segment` [B] int64. Where there is no room for them, see overflow."""
        check_flush(rows, thought, segment, batch=self.shape[0], device=self.device)
        ops.flush(rows, thought, segment, *self._storage, *self._tables, self._formats, self.config.block)

    def evict(self, tokens: Tensor) -> None:
        """The tokens in slots `tokens` [B, S] bool leave; slots that hold no quantized token are passed over."""
        check_rows("tokens", tokens, (self.shape[0], self.config.slots), "[B, S]", self.device)
        tables = self._tables
        ops.evict(
            tokens, tables.positions, tables.segments, tables.evicted, tables.slot_groups, tables.block_thoughts,
            tables.physical, tables.order, tables.used, tables.group_tokens, tables.counts, self._formats,
            self.config.block,
        )

    def release(self, rows: Tensor) -> None:
        """The sequences in `rows` [B] bool leave: nothing is left of them."""
        check_rows("rows", rows, self.shape[:1], "[B]", self.device)
        nothing = {"positions", "segments", "slot_groups", "block_thoughts", "physical", "starts"}
        for name, table in self._tables._asdict().items():
            table.masked_fill_(rows.view(-1, *[1] * (table.dim() - 1)), -1 if name in nothing else 0)

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was (beam search). index [B] int64."""
        index = check_reorder(index, self.shape[0], self.device)
        for tensor in (*self._tables, *self._storage):
            tensor.copy_(tensor.index_select(0, index))

    # What is in it -------------------------------------------------------------------------------------------------

    @property
    def positions(self) -> Tensor:
        return self._tables.positions

    @property
    def occupied(self) -> Tensor:
        return self._tables.positions >= 0

    @property
    def segments(self) -> Tensor:
        return self._tables.segments

    @property
    def thoughts(self) -> Tensor:
        kinds = self._tables.block_thoughts.repeat_interleave(self.config.block, 1)
        kinds = torch.nn.functional.pad(kinds, (0, self.config.group), value=-1)
        return kinds.masked_fill(self._tables.slot_groups < 0, -1)

    @property
    def groups(self) -> Tensor:
        return self._tables.slot_groups.long()

    @property
    def evicted(self) -> Tensor:
        return self._tables.evicted

    @property
    def block_thoughts(self) -> Tensor:
        return self._tables.block_thoughts

    @property
    def physical(self) -> Tensor:
        return self._tables.physical

    @property
    def buffered(self) -> Tensor:
        return self._tables.buffered

    @property
    def overflow(self) -> Tensor:
        return self._tables.overflow

    def _read(self, what: int) -> tuple[Tensor, Tensor]:
        tables = self._tables
        both: tuple[Tensor, Tensor] = ops.read(
            *self._storage, tables.positions, tables.slot_groups, tables.block_thoughts, tables.physical,
            self._formats, self.config.block, what,
        )
        return both

    def dequantized(self) -> tuple[Tensor, Tensor]:
        """Keys and values by slot, [B, Hkv, S, D] float32, the buffer's included; zeros where there is no token."""
        return self._read(NUMBERS)

    def codes(self) -> PagedCodes:
        """The quantized tokens' codes and scales by slot."""
        return PagedCodes(*self._read(CODES), *self._read(SCALES))

    def block_table(self, row: int) -> list[BlockEntry]:
        """The block table of a row, as figure 5 shows it, in order of entries. Reads the tables (synchronises)."""
        config = self.config
        table = {name: tensor[row].tolist() for name, tensor in self._tables._asdict().items()}
        entries = []
        for entry, thought in enumerate(table["block_thoughts"]):
            if thought < 0:
                continue
            slots = slice(entry * config.block, (entry + 1) * config.block)
            segments = table["segments"][slots]
            present = sorted((table["starts"][one], one) for one in {*segments} - {-1})
            entries.append(BlockEntry(
                entry, table["physical"][entry], sum(one >= 0 for one in segments), thought,
                tuple(start for start, _ in present),
                tuple(tuple(int(one == number) for one in segments) for _, number in present),
                tuple(map(int, table["evicted"][slots])),
            ))
        return entries

    # What it costs -------------------------------------------------------------------------------------------------

    def bytes_allocated(self) -> int:
        """Bytes that are taken: codes and value scales of held blocks, scales of held groups, all buffers and tables.
        Synchronises. The pools are reserved for the worst case; what is counted is what they have given out."""
        fixed = sum(table.nbytes for table in self._tables)
        return self._quantized_bytes() + fixed + self._storage.buffer_key.nbytes + self._storage.buffer_value.nbytes

    def bits_per_element(self) -> float:
        """Bits of held blocks and scale groups per element of a live quantized token; 0.0 if there is none."""
        _, heads, head_dim = self.shape
        elements = 2 * heads * head_dim * int((self._tables.slot_groups >= 0).sum())
        return 8 * self._quantized_bytes() / elements if elements else 0.0

    def _quantized_bytes(self) -> int:
        config, (_, heads, head_dim) = self.config, self.shape
        blocks = self._tables.counts[:, :len(Thought)].sum(0).tolist()
        total = sum(
            number * heads * ops.record_bytes(config.format_of(thought), config.block, config.group, head_dim)
            for thought, number in zip(Thought, blocks, strict=True)
        )
        # A group's tokens are all of one type.
        for thought in Thought:
            mine = torch.where(self.thoughts == thought, self.groups, config.peak)
            held = torch.zeros(len(mine), config.peak + 1, device=self.device).scatter_(1, mine, 1.0)[:, :-1].sum()
            total += int(held) * heads * (8 if config.format_of(thought) == "fp8" else ops.scale_bytes(head_dim))
        return total


def decode_attention(
    query: Tensor, cache: PagedCache, *, scale: float | None = None, look: Tensor | None = None
) -> PagedAttentionResult:
    """Attention of one query per head to all live tokens, quantized or in the buffer, and how sparse it is.

    query [B, Hq, D] in the cache's dtype and on its device, any strides; scale: the factor on query . key, default
    D ** -0.5; look [B] bool: the rows whose sparsity is asked for, None for all; where none is, a step is faster.
    Returns the output [B, Hq, D] in that dtype, zeros for a row without tokens, and the sparsity [B] float32 with
    config.sparsity_threshold, NaN for a row that is not looked at. No host synchronisation. TypeError, ValueError for
    arguments that do not fit.
    """
    if not isinstance(cache, PagedCache):
        raise TypeError(f"cache must be a PagedCache, got {type(cache).__name__}")
    scale = check_decode(query, scale, look, shape=cache.shape, dtype=cache.dtype, device=cache.device)
    check_launchable(query=query)
    batch, heads, head_dim = cache.shape
    check_kernel_sizes(Sizes(batch, query.shape[1], heads, cache.config.slots, head_dim))
    storage, tables = cache._storage, cache._tables
    return PagedAttentionResult(*attend(
        query, *storage, tables.slot_groups, tables.physical, tables.order, tables.counts, tables.buffered,
        cache._arrivals, look, cache._formats, cache.config.block, scale, cache.config.sparsity_threshold,
    ))
