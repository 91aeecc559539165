"""The operations of a paged cache on its buffers. `_paging_layout.py` describes the memory layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .._common.launch import INTERPRETED, SMALL_TILES, cdiv, next_power_of_2, on_device_of, padded_head_dim
from .._common.operation import operation
from ._paging_kernels import PLAN_SLOTS, append_kernel, assign_kernel, evict_kernel
from ._paging_read_kernels import CODES, read_kernel
from ._paging_store_kernels import store_kernel

#: Codes per byte; 0 for elements that are not quantized, whose format is the name of their dtype here.
LANES = {"fp8": 1, "nvfp4": 2, "int4": 2, "ternary": 4, "int2": 4, "float32": 0, "float16": 0, "bfloat16": 0}
#: Factors that bring the elements of each format into float16's range; see `_paging_decode.py`.
UNITS = {"fp8": 2.0**8, "nvfp4": 2.0**7, "ternary": 2.0**7, "int2": 2.0**7, "int4": 2.0**10}
LINE, WORD = 128, 4  # bytes
LARGEST_SCALE = 0xF6  # 448
TYPES = "TER"  # in the order of the numbers of thought types


class Tables(NamedTuple):
    """By slot [B, S]: positions, segments int64, evicted bool, slot_groups int32. By entry [B, NB]: block_thoughts,
    physical int64, order int32; used uint8, by physical block. group_tokens [B, scale groups] int32; starts [B,
    segments] int64. By row: counts [B, 6] int32, buffered [B] int64, overflow [B] bool. -1 means none."""

    positions: Tensor
    segments: Tensor
    evicted: Tensor
    slot_groups: Tensor
    block_thoughts: Tensor
    physical: Tensor
    order: Tensor
    used: Tensor
    group_tokens: Tensor
    starts: Tensor
    counts: Tensor
    buffered: Tensor
    overflow: Tensor


class Storage(NamedTuple):
    """pool [B, words] int32; key_scales [B, scale groups, Hkv, D / 4] int32; chunk_scales [B, scale groups, Hkv, 2]
    float32, for keys and values, fp8 only; buffer_key, buffer_value [B, Hkv, group, D]."""

    pool: Tensor
    key_scales: Tensor
    chunk_scales: Tensor
    buffer_key: Tensor
    buffer_value: Tensor


@dataclass(frozen=True)
class Layout:
    """The layout of a row. formats: the distinct ones; number: the format of each thought type; first, capacity: for
    each thought type, its first physical block in `used` and their number; base: each format's first word in the row.
    """

    formats: tuple[str, ...]
    number: tuple[int, ...]
    first: tuple[int, ...]
    capacity: tuple[int, ...]
    base: tuple[int, ...]
    row_words: int

    @property
    def types(self) -> dict[str, int]:
        return {f"OF_{letter}": number for letter, number in zip(TYPES, self.number, strict=True)}

    @property
    def constants(self) -> dict[str, object]:
        """The formats, as constants of kernels."""
        return _constants(self)

    @property
    def units(self) -> dict[str, float]:
        return {f"UNIT_{number}": UNITS.get(fmt, 1.0) for number, fmt in enumerate((*self.formats, "", "")[:3])}


@lru_cache
def _constants(plan_of: Layout) -> dict[str, object]:
    padded = (*plan_of.formats, "", "")[:3]
    return {
        **plan_of.types,
        **{f"FORMAT_{number}": fmt for number, fmt in enumerate(padded)},
        **{f"LANES_{number}": LANES.get(fmt, 1) for number, fmt in enumerate(padded)},
    }


@lru_cache
def layout(formats: str, block: int, group: int, heads: int, head_dim: int, entries: int) -> Layout:
    """formats: of the types T, E and R, separated by spaces; entries: NB, of which each type can have a third."""
    of_type = formats.split()
    distinct = tuple(dict.fromkeys(of_type))
    number = tuple(distinct.index(fmt) for fmt in of_type)
    capacities = [entries // 3 * number.count(n) for n in range(len(distinct))]
    firsts = [sum(capacities[:n]) for n in range(len(distinct))]
    sizes = [
        cdiv(capacity * heads * record_bytes(fmt, block, group, head_dim), LINE) * LINE // WORD
        for capacity, fmt in zip(capacities, distinct, strict=True)
    ]
    base = tuple(sum(sizes[:n]) for n in range(len(distinct)))
    return Layout(
        distinct, number, tuple(firsts[n] for n in number), tuple(capacities[n] for n in number),
        (*base, 0, 0)[:3], sum(sizes),
    )


def stored_as(fmt: str, dtype: torch.dtype) -> str:
    """The name of a format in a cache whose tokens have `dtype`."""
    return str(dtype).removeprefix("torch.") if fmt == "unquantized" else fmt


def has_groups(fmt: str) -> bool:
    """Whether a format has scales of groups."""
    return LANES[fmt] > 1


def token_words(fmt: str, head_dim: int) -> int:
    """Words of the codes of a key or a value."""
    if LANES[fmt] == 0:
        return head_dim if fmt == "float32" else cdiv(head_dim, 2)
    return cdiv(head_dim, WORD * LANES[fmt])


def record_bytes(fmt: str, block: int, group: int, head_dim: int) -> int:
    """Bytes of a record, one KV head of one block: for each slot the codes of key and value, each in whole words, and
    one byte per scale of the value, if it has scales of groups; rounded up to words."""
    codes = WORD * token_words(fmt, head_dim)
    scales = cdiv(head_dim, group) if has_groups(fmt) else 0
    return 2 * block * codes + cdiv(block * scales, WORD) * WORD


class Places(NamedTuple):
    """The bytes of a record by slot, [block, ...]: those with codes of the key, codes of the value, and scales of the
    value."""

    keys: Tensor
    values: Tensor
    scales: Tensor


def record_places(fmt: str, block: int, group: int, head_dim: int) -> Places:
    """The byte offsets in a record: `_paging_layout.py` in numbers, for code that inspects a pool."""
    lanes, slot, words = LANES[fmt], torch.arange(block)[:, None], token_words(fmt, head_dim)
    if lanes == 0:
        keys = slot * words * WORD + torch.arange(words * WORD)
        return Places(keys, block * words * WORD + keys, torch.empty(block, 0, dtype=torch.int64))
    units = cdiv(head_dim, 2 * lanes)
    run = head_dim // (16 * lanes) if head_dim % (16 * lanes) == 0 else 1
    step, unit = 2 - block % 2, torch.arange(units)
    half = slot // step * (run * step) + slot % step + unit // run * (run * block) + unit % run * step
    values = block * words * WORD + (2 * half[:, :, None] + torch.arange(2)).flatten(1)
    scales = 0 if fmt == "fp8" else cdiv(head_dim, group)
    return Places(
        slot * words * WORD + torch.arange(words * WORD), values,
        2 * block * words * WORD + slot + torch.arange(scales) * block,
    )


def scale_bytes(head_dim: int) -> int:
    """Bytes of the scales of one KV head's keys, in whole words."""
    return cdiv(head_dim, WORD) * WORD


def _new_blocks(group: int, block: int) -> int:
    """The largest number of blocks that a flush may open."""
    return cdiv(group, block)


def chunk_of(total: int) -> int:
    """Entries or slots per iteration. In the interpreter, tables have several chunks, so that tests cover what happens
    between them."""
    return 8 if SMALL_TILES else min(1024, max(128, next_power_of_2(total)))


@operation(
    "kvtwin::thinkv_paged_append", mutates_args=("buffer_key", "buffer_value", "positions", "buffered", "overflow")
)
def append(
    key: Tensor, value: Tensor, new_positions: Tensor, buffer_key: Tensor, buffer_value: Tensor, positions: Tensor,
    buffered: Tensor, overflow: Tensor,
) -> None:
    """See `PagedCache._append_tokens`."""
    batch, heads, group, head_dim = buffer_key.shape
    slots = positions.shape[1]
    d_pad = padded_head_dim(head_dim)
    with on_device_of(key):
        append_kernel[(batch,)](
            key, value, new_positions, buffer_key, buffer_value, positions, buffered, overflow,
            key.shape[2], heads, slots, slots - group, *key.stride(), *value.stride(), *new_positions.stride(),
            GROUP=group, HEAD_DIM=head_dim, D_PAD=d_pad,
            HEADS=1 if SMALL_TILES else min(next_power_of_2(heads), 2048 // d_pad), num_warps=4,
        )


@operation(
    "kvtwin::thinkv_paged_flush",
    mutates_args=(
        "pool", "key_scales", "chunk_scales", "positions", "segments", "evicted", "slot_groups", "block_thoughts",
        "physical", "order", "used", "group_tokens", "starts", "counts", "buffered", "overflow",
    ),
)
def flush(
    rows: Tensor, thought: Tensor, segment: Tensor, pool: Tensor, key_scales: Tensor, chunk_scales: Tensor,
    buffer_key: Tensor, buffer_value: Tensor, positions: Tensor, segments: Tensor, evicted: Tensor,
    slot_groups: Tensor, block_thoughts: Tensor, physical: Tensor, order: Tensor, used: Tensor, group_tokens: Tensor,
    starts: Tensor, counts: Tensor, buffered: Tensor, overflow: Tensor, formats: str, block: int,
) -> None:
    """See `PagedCache.flush`."""
    batch, heads, group, head_dim = buffer_key.shape
    slots, entries, groups = positions.shape[1], block_thoughts.shape[1], group_tokens.shape[1]
    plan_of = layout(formats, block, group, heads, head_dim, entries)
    new = _new_blocks(group, block)
    plan = torch.empty(batch, PLAN_SLOTS.value + group + 2 * new, dtype=torch.int32, device=pool.device)
    tokens = next_power_of_2(group)
    with on_device_of(pool):
        assign_kernel[(batch,)](
            rows, thought, segment, positions, segments, evicted, slot_groups, block_thoughts, physical, order, used,
            group_tokens, starts, counts, buffered, overflow, plan,
            slots, entries, groups, starts.shape[1], rows.stride(0), thought.stride(0), segment.stride(0),
            *plan_of.first, *plan_of.capacity,
            **plan_of.types, GROUP=group, BLOCK=block, NEW=new, TOKENS=tokens, BLOCKS=next_power_of_2(new),
            CHUNK=chunk_of(entries), num_warps=4,
        )
        store_kernel[(batch * heads,)](
            buffer_key, buffer_value, pool, pool.view(torch.int16), pool.view(torch.uint8),
            key_scales.view(torch.uint8), chunk_scales, physical, plan,
            heads, entries, groups, plan_of.row_words, *plan_of.base,
            **{name: value for name, value in plan_of.constants.items() if not name.startswith("OF_")},
            GROUP=group, NEW=new, BLOCK=block, HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), TOKENS=tokens,
            num_warps=4,
        )


@operation(
    "kvtwin::thinkv_paged_evict",
    mutates_args=(
        "positions", "segments", "evicted", "slot_groups", "block_thoughts", "physical", "order", "used",
        "group_tokens", "counts",
    ),
)
def evict(
    tokens: Tensor, positions: Tensor, segments: Tensor, evicted: Tensor, slot_groups: Tensor, block_thoughts: Tensor,
    physical: Tensor, order: Tensor, used: Tensor, group_tokens: Tensor, counts: Tensor, formats: str, block: int,
) -> None:
    """See `PagedCache.evict`. Only the number of each type's format matters here."""
    batch, slots = positions.shape
    entries = block_thoughts.shape[1]
    plan_of = layout(formats, block, 1, 1, 1, entries)
    block_pad = next_power_of_2(block)
    with on_device_of(positions):
        evict_kernel[(batch,)](
            tokens, positions, segments, evicted, slot_groups, block_thoughts, physical, order, used, group_tokens,
            counts, slots, entries, group_tokens.shape[1], *tokens.stride(), *plan_of.first,
            **plan_of.types, BLOCK=block, BLOCK_PAD=block_pad,
            ENTRIES=max(1, (32 if SMALL_TILES else 2048) // block_pad), CHUNK=chunk_of(entries),
            MARKS=32 if SMALL_TILES else 8192, num_warps=4,
        )


@operation("kvtwin::thinkv_paged_read", mutates_args=())
def read(
    pool: Tensor, key_scales: Tensor, chunk_scales: Tensor, buffer_key: Tensor, buffer_value: Tensor,
    positions: Tensor, slot_groups: Tensor, block_thoughts: Tensor, physical: Tensor, formats: str, block: int,
    what: int,
) -> tuple[Tensor, Tensor]:
    """Keys and values by slot [B, Hkv, S, D], 0 in unoccupied slots: NUMBERS, or, of quantized tokens, CODES (uint8) or
    SCALES."""
    batch, heads, group, head_dim = buffer_key.shape
    slots, entries = positions.shape[1], block_thoughts.shape[1]
    plan_of = layout(formats, block, group, heads, head_dim, entries)
    keys, values = _shown(positions, buffer_key, what), _shown(positions, buffer_key, what)
    tile = 64 if INTERPRETED else 32
    tiles = cdiv(slots, tile)
    with on_device_of(pool):
        read_kernel[(batch * heads * tiles,)](
            keys, values, pool, pool.view(torch.uint8), key_scales.view(torch.uint8), chunk_scales, buffer_key,
            buffer_value, positions, slot_groups, block_thoughts, physical,
            heads, slots, entries, key_scales.shape[1], tiles,
            plan_of.row_words, *plan_of.base, WHAT=what, **plan_of.constants,
            GROUP=group, BLOCK=block, HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), SLOTS=tile, num_warps=4,
        )
    return keys, values


@read.register_fake
def _(buffer_key: Tensor, positions: Tensor, what: int) -> tuple[Tensor, Tensor]:
    return _shown(positions, buffer_key, what), _shown(positions, buffer_key, what)


def _shown(positions: Tensor, buffer: Tensor, what: int) -> Tensor:
    batch, heads, _, head_dim = buffer.shape
    dtype = torch.uint8 if what == CODES else torch.float32
    return torch.empty(batch, heads, positions.shape[1], head_dim, dtype=dtype, device=buffer.device)
