"""Continuous Thinking on the GPU: a cache of quantized tokens in blocks, each with tokens of one thought type.

The tables equal those of the reference's paged cache; `kvtwin.reference.thinkv.paging` describes the slots and the use
by a state. All memory is preallocated and updated in place. `append`, `flush`, `evict` and `decode_attention` do not
synchronize with the host and can be captured in CUDA graphs. Every row has its own pool for each format, sized for the
worst case that the config allows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.contract import Sizes
from ...reference.contract.arguments import check_dtype, resolve_device
from ...reference.contract.interruption import Reorderable
from ...reference.contract.thinkv.config import ThinKVConfig
from ...reference.contract.thinkv.paging import check_append, check_decode, check_flush, check_paged_cache, check_rows
from ...reference.contract.thinkv.types import BlockEntry, PagedAttentionResult, PagedCodes, Thought
from .._common.launch import DTYPES, check_kernel_device, check_kernel_sizes, check_launchable, padded_slots
from .._common.ranks import Ranks
from .._common.state import Buffers, Rows
from . import _paging_ops as ops
from . import _ranks_ops as on_ranks
from ._paged_attention_ops import attend
from ._paging_read_kernels import CODES, NUMBERS, SCALES
from ._prompt_ops import place_prompt, plan_prompt, store_prompt

__all__ = ["PagedAttentionResult", "PagedCache", "decode_attention"]

#: The largest number of tokens of a group or a block that kernels support.
LARGEST = 256
#: Tables whose entries are -1 if there is nothing.
NOTHING = {"positions", "segments", "slot_groups", "block_thoughts", "physical", "starts"}


class PagedCache(Rows, Buffers, Reorderable):
    """The paged cache of `batch` sequences in one layer (ThinKV section 4.2).

    Attributes as in the reference: by slot [B, S] positions, occupied, segments, thoughts, groups, evicted; by entry of
    the block table block_thoughts, physical; by row buffered and overflow. overflow (bool): an append to a full buffer
    was refused, or a flush without a free block or with numbers out of range. Nothing else changed, and the flag stays
    set until the row is released.
    float32, float16 or bfloat16; D from 16 to 256; up to 16 query heads per KV head; groups and blocks of up to 256
    tokens. TypeError or ValueError for other arguments, and for CPU tensors outside Triton's interpreter.
    """

    _rows = ("_tables", "_storage")

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
        self._formats = " ".join(ops.stored_as(config.format_of(thought), dtype) for thought in Thought)
        self._layout = ops.layout(
            self._formats, config.block, config.group, key_value_heads, head_dim, config.blocks
        )
        self._tables = self._allocate_tables()
        self._storage = self._allocate_storage()
        self._completion_counters = self._buffer(batch, dtype=torch.int32)
        self.reset()

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

    # Updates -------------------------------------------------------------------------------------------------------

    def append(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Append one token per row to its buffer: key and value [B, Hkv, D]; positions [B] int64, -1 = no token.

        The caller must not repeat positions. A full buffer stays unchanged (see overflow).
        """
        check_append(key, value, positions, shape=self.shape, dtype=self.dtype, device=self.device)
        check_launchable(key=key, value=value)
        self._append_tokens(key[:, :, None], value[:, :, None], positions[:, None])

    def _append_tokens(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Append N tokens per row, in their order: key, value [B, Hkv, N, D]; positions [B, N]."""
        storage, tables = self._storage, self._tables
        self._start_change("append")
        ops.append(
            key, value, positions, storage.buffer_key, storage.buffer_value, tables.positions, tables.buffered,
            tables.overflow,
        )
        self._end_change()

    def _plan_prompt(
        self, key: Tensor, order: Tensor, counts: Tensor, sizes: Tensor, levels: Tensor, live: Tensor,
        over_budget: Tensor, segment: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """What happens to the tokens of a prompt for an empty cache: see `plan_prompt`. `_place_prompt` and
        `_store_prompt` follow."""
        config = self.config
        self._start_change("append")
        evictions, gone = plan_prompt(
            key, order, counts, sizes, levels, live, over_budget, segment, self._tables.physical.shape[1],
            self._formats, config.block, config.group, config.tau, config.budget, list(config.retention),
        )
        return evictions, gone

    def _place_prompt(
        self, order: Tensor, counts: Tensor, evictions: Tensor, gone: Tensor, place: Tensor
    ) -> None:
        """Append a prompt to the tables, and evict. The arguments: see `place_prompt`."""
        config, tables, (_, heads, head_dim) = self.config, self._tables, self.shape
        place_prompt(
            order, counts, evictions, gone, place, tables.positions, tables.segments, tables.evicted,
            tables.slot_groups, tables.block_thoughts, tables.physical, tables.order, tables.used, tables.group_tokens,
            tables.starts, tables.counts, tables.overflow, heads, head_dim, self._formats, config.block, config.group,
            config.tau,
        )

    def _store_prompt(self, key: Tensor, value: Tensor, order: Tensor, place: Tensor) -> None:
        """Quantize the tokens of a prompt that have a place, and store them."""
        config, storage, tables = self.config, self._storage, self._tables
        store_prompt(
            key, value, order, place, storage.pool, storage.key_scales, storage.chunk_scales, tables.slot_groups,
            tables.physical, self._formats, config.block, config.group, config.tau,
        )
        self._end_change()

    def flush(self, rows: Tensor, thought: Tensor, segment: Tensor) -> None:
        """Quantize the buffers of `rows` [B] bool in the format of `thought` [B] int64 (0 T, 1 E, 2 R), and assign
        slots to their tokens, which become tokens of `segment` [B] int64. If there is no room, see overflow."""
        check_flush(rows, thought, segment, batch=self.shape[0], device=self.device)
        self._flush(rows, thought, segment)

    def _flush(self, rows: Tensor, thought: Tensor, segment: Tensor) -> None:
        self._start_change("flush")
        ops.flush(rows, thought, segment, *self._storage, *self._tables, self._formats, self.config.block)
        self._end_change()

    def evict(self, tokens: Tensor) -> None:
        """Evict the tokens in the slots `tokens` [B, S] bool; slots without a quantized token are ignored."""
        check_rows("tokens", tokens, (self.shape[0], self.config.slots), "[B, S]", self.device)
        self._evict(tokens)

    def _evict(self, tokens: Tensor) -> None:
        tables = self._tables
        self._start_change("evict")
        ops.evict(
            tokens, tables.positions, tables.segments, tables.evicted, tables.slot_groups, tables.block_thoughts,
            tables.physical, tables.order, tables.used, tables.group_tokens, tables.counts, self._formats,
            self.config.block,
        )
        self._end_change()

    def reset(self) -> None:
        """Forget all tokens of all rows."""
        self._interrupted = "reset"
        for name, table in self._tables._asdict().items():
            table.fill_(-1 if name in NOTHING else 0)
        self._end_change()

    def release(self, rows: Tensor) -> None:
        """Forget all tokens of `rows` [B] bool."""
        check_rows("rows", rows, self.shape[:1], "[B]", self.device)
        self._start_change("release")
        for name, table in self._tables._asdict().items():
            table.masked_fill_(rows.view(-1, *[1] * (table.dim() - 1)), -1 if name in NOTHING else 0)
        self._end_change()

    @property
    def _num_rows(self) -> int:
        return self.shape[0]

    # Contents ------------------------------------------------------------------------------------------------------

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
        """Keys and values by slot, [B, Hkv, S, D] float32, including the buffer; zeros in free slots."""
        return self._read(NUMBERS)

    def codes(self) -> PagedCodes:
        """The codes and scales of the quantized tokens by slot."""
        return PagedCodes(*self._read(CODES), *self._read(SCALES))

    def block_table(self, row: int) -> list[BlockEntry]:
        """The block table of a row (figure 5), by ascending entry. Synchronizes with the GPU."""
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

    # Memory --------------------------------------------------------------------------------------------------------

    def bytes_allocated(self) -> int:
        """Bytes in use: codes and value scales of used blocks, key scales of used groups, all buffers and tables.
        Synchronizes with the GPU. The pools are allocated for the worst case; this counts their used parts."""
        fixed = sum(table.nbytes for table in self._tables)
        return self._quantized_bytes() + fixed + self._storage.buffer_key.nbytes + self._storage.buffer_value.nbytes

    def bits_per_element(self) -> float:
        """Bits of used blocks and scale groups per element of a live quantized token; 0.0 without such tokens."""
        _, heads, head_dim = self.shape
        elements = 2 * heads * head_dim * int((self._tables.slot_groups >= 0).sum())
        return 8 * self._quantized_bytes() / elements if elements else 0.0

    def _quantized_bytes(self) -> int:
        config, (_, heads, head_dim) = self.config, self.shape
        blocks = self._tables.counts[:, :len(Thought)].sum(0).tolist()
        total = sum(
            number * heads * ops.record_bytes(fmt, config.block, config.group, head_dim)
            for fmt, number in zip(self._formats.split(), blocks, strict=True)
        )
        # All tokens of a group have one type.
        for thought, fmt in zip(Thought, self._formats.split(), strict=True):
            mine = torch.where(self.thoughts == thought, self.groups, config.peak)
            used = torch.zeros(len(mine), config.peak + 1, device=self.device).scatter_(1, mine, 1.0)
            used_groups = used[:, :-1].sum()
            scales = ops.scale_bytes(head_dim) if ops.has_groups(fmt) else 8 if fmt == "fp8" else 0
            total += int(used_groups) * heads * scales
        return total


def decode_attention(
    query: Tensor, cache: PagedCache, *, scale: float | None = None, sparsity_mask: Tensor | None = None
) -> PagedAttentionResult:
    """Attention of one query to all live tokens, quantized or buffered, and its sparsity.

    query [B, Hq, D] with the cache's dtype and device, any strides; scale defaults to D ** -0.5; sparsity_mask [B]
    bool: the rows whose sparsity is requested, None for all. A step without any is faster. Returns output [B, Hq, D] in
    query's dtype, zeros for a row without tokens, and sparsity [B] float32, the `attention_sparsity` with
    config.sparsity_threshold and config.sparsity_of, NaN for other rows. Does not synchronize with the host. TypeError
    or ValueError for invalid arguments.
    """
    if not isinstance(cache, PagedCache):
        raise TypeError(f"cache must be a PagedCache, got {type(cache).__name__}")
    return decode_with(None, query, cache, scale, sparsity_mask)


def decode_with(
    ranks: Ranks | None, query: Tensor, cache: PagedCache, scale: float | None, sparsity_mask: Tensor | None
) -> PagedAttentionResult:
    """`decode_attention`, with the sparsity over the KV heads of all ranks, which call this at the same time."""
    scale = check_decode(query, scale, sparsity_mask, shape=cache.shape, dtype=cache.dtype, device=cache.device)
    check_launchable(query=query)
    cache._check_whole()
    batch, heads, head_dim = cache.shape
    check_kernel_sizes(Sizes(batch, query.shape[1], heads, cache.config.slots, head_dim))
    storage, tables = cache._storage, cache._tables
    of_mean, pooled = cache.config.sparsity_of == "mean", None
    if ranks is not None:
        pooled = torch.empty(batch, heads, padded_slots(cache.config.slots), dtype=torch.float32, device=cache.device)
    output, sparsity = attend(
        query, *storage, tables.slot_groups, tables.physical, tables.order, tables.counts, tables.buffered,
        cache._completion_counters, sparsity_mask, cache._formats, cache.config.block, scale,
        cache.config.sparsity_threshold, of_mean, pooled,
    )
    if ranks is not None and pooled is not None:
        sparsity = on_ranks.sparsity(
            ranks.largest(pooled), tables.counts, tables.buffered, sparsity_mask, cache.config.block,
            cache.config.slots, cache.config.sparsity_threshold, of_mean,
        )
    return PagedAttentionResult(output, sparsity)
