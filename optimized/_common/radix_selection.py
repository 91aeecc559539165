"""Selection by radix search: the tokens with the highest codes, in token order. Four passes over the codes, eight bits
each, find the lowest code to keep. Then the kept tokens are counted, numbered by prefix sums, and gathered.

Each row is divided into chunks, one per program. Only integer counts use atomics, so no result depends on their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import SMALL_TILES, on_device_of, padded_head_dim, stride_unit
from .operation import operation

#: Codes per program of the search, and tokens per program of the gather.
CHUNK = 2048
GATHER = 64

_FREE = tl.constexpr(-(2**31))
#: Counts of chunks that are added at a time. In the interpreter few, so that tests cover several rounds.
_ADDED = tl.constexpr(2 if SMALL_TILES else 256)


@operation("kvtwin::keydiff_select", mutates_args=("histograms",))
def select(
    key: Tensor, value: Tensor, code: Tensor, histograms: Tensor, count: int, counted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The `count` tokens with the highest codes, in order. Of equal codes, the last tokens win; -2^31 is never kept.

    key, value [B, Hkv, S, D]; code [B, Hkv, S] int32, -2^31 for unoccupied slots; histograms [B, Hkv, 4, 256] int32,
    zeros, but with `counted` the first of the four holds the histogram of the codes' first 8 bits. Returns the kept
    keys and values [B, Hkv, count, D], their slots int64 and True, both [B, Hkv, count]; zeros, -1 and False if fewer.
    """
    batch, heads, _, head_dim = key.shape
    place, kept_count = search(code, histograms, count, counted)
    kept_key, kept_value, kept, occupied = _places(key, count)
    unit = stride_unit(key, value)
    block = 16 if SMALL_TILES else GATHER
    with on_device_of(key):
        gather_kernel[(batch * heads * triton.cdiv(count, block),)](
            key, value, place, kept_count, kept_key, kept_value, kept, occupied, count, heads,
            *(stride // unit for stride in key.stride()[:3]), key.stride(3),
            *(stride // unit for stride in value.stride()[:3]), value.stride(3),
            HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), BLOCK=block, UNIT=unit, num_warps=4,
        )
    return kept_key, kept_value, kept, occupied


@select.register_fake
def _(key: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _places(key, count)


@operation("kvtwin::keydiff_select_slots", mutates_args=("histograms",))
def select_slots(code: Tensor, histograms: Tensor, count: int, counted: bool) -> Tensor:
    """The slots that `select` returns: [B, Hkv, count] int64, ascending, -1 if fewer. Arguments as there."""
    place, kept_count = search(code, histograms, count, counted)
    number = torch.arange(count, device=code.device)
    return place.where(number < kept_count[:, None], -1).long().view(*code.shape[:2], count)


@select_slots.register_fake
def _(code: Tensor, count: int) -> Tensor:
    return code.new_empty((*code.shape[:2], count), dtype=torch.int64)


def search(code: Tensor, histograms: Tensor, count: int, counted: bool) -> tuple[Tensor, Tensor]:
    """The slots of the kept tokens of all rows, [B * Hkv, count] int32, ascending, of which the first kept_count
    [B * Hkv] int32 are written."""
    batch, heads, slots = code.shape
    rows, device = batch * heads, code.device
    chunk = (16 if slots <= 48 else 64) if SMALL_TILES else CHUNK
    chunks = triton.cdiv(slots, chunk)
    code = code.contiguous()
    found = torch.empty(rows, 4, 2, dtype=torch.int64, device=device)
    counts = torch.empty(rows, chunks, 2, dtype=torch.int32, device=device)
    place = torch.empty(rows, count, dtype=torch.int32, device=device)
    kept_count = torch.empty(rows, dtype=torch.int32, device=device)
    with on_device_of(code):
        for number in range(1 if counted else 0, 4):
            histogram_kernel[(rows * chunks,)](
                code, histograms, found, slots, count, chunks, PASS=number, CHUNK=chunk, FEW=chunk // 16, num_warps=4
            )
        count_kernel[(rows * chunks,)](code, histograms, found, counts, slots, count, chunks, CHUNK=chunk, num_warps=4)
        compact_kernel[(rows * chunks,)](
            code, found, counts, place, kept_count, slots, count, chunks, CHUNK=chunk, num_warps=4
        )
    return place, kept_count


def _places(key: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors for an EvictResult."""
    rows = (*key.shape[:2], count)
    kept_key = key.new_empty((*rows, key.shape[3]))
    kept = key.new_empty(rows, dtype=torch.int64)
    return kept_key, torch.empty_like(kept_key), kept, key.new_empty(rows, dtype=torch.bool)


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def first_digit(code):
    """The first 8 bits of codes, 0 to 255 in the order of the codes: negative ones come first."""
    return ((code >> 24) & 255) ^ 128


@triton.jit
def _next_digits(histograms, found, batch_head, wanted, PASS: tl.constexpr):
    """After PASS passes: the leading 8 * PASS bits of the lowest kept code (as an unsigned number), the number of kept
    codes with these bits, and the number of all codes with them."""
    digit = tl.arange(0, 256)
    count = tl.load(histograms + (batch_head * 4 + PASS - 1) * 256 + digit)
    prefix = tl.zeros([], tl.int64)
    need = wanted.to(tl.int64)
    if PASS > 1:
        prefix = tl.load(found + (batch_head * 4 + PASS - 2) * 2)
        need = tl.load(found + (batch_head * 4 + PASS - 2) * 2 + 1)
    at_least = tl.sum(count, 0) - tl.cumsum(count, 0) + count
    last = tl.max(tl.where(at_least >= need, digit, 0), 0)
    above = tl.sum(tl.where(digit > last, count, 0), 0)
    equal = tl.sum(tl.where(digit == last, count, 0), 0)
    return prefix * 256 + last, need - above, equal.to(tl.int64)


@triton.jit(do_not_specialize=["slots", "wanted", "chunks"])
def histogram_kernel(
    codes, histograms, found, slots, wanted, chunks, PASS: tl.constexpr, CHUNK: tl.constexpr, FEW: tl.constexpr
):
    """Program (chunk, batch_head): the histogram of the next 8 bits of codes whose earlier bits equal the threshold's.
    """
    chunk = tl.program_id(0) % chunks
    batch_head = (tl.program_id(0) // chunks).to(tl.int64)
    s = chunk * CHUNK + tl.arange(0, CHUNK)
    matches = s < slots
    code = tl.load(codes + batch_head * slots + s, mask=matches, other=0)
    digit = first_digit(code) if PASS == 0 else (code >> (24 - 8 * PASS)) & 255
    if PASS > 0:
        prefix, need, _ = _next_digits(histograms, found, batch_head, wanted, PASS)
        if chunk == 0:
            tl.store(found + (batch_head * 4 + PASS - 1) * 2, prefix)
            tl.store(found + (batch_head * 4 + PASS - 1) * 2 + 1, need)
        matches = matches & ((code >> (32 - 8 * PASS)) == (prefix - (1 << (8 * PASS - 1))).to(tl.int32))
    into = histograms + (batch_head * 4 + PASS) * 256
    # For few matches, single atomics are cheaper than a histogram of the chunk.
    if tl.sum(tl.where(matches, 1, 0), 0) <= FEW:
        tl.atomic_add(into + digit, 1, mask=matches, sem="relaxed")
    else:
        count = tl.histogram(digit, 256, mask=matches)
        tl.atomic_add(into + tl.arange(0, 256), count, mask=count > 0, sem="relaxed")


@triton.jit(do_not_specialize=["slots", "wanted", "chunks"])
def count_kernel(codes, histograms, found, counts, slots, wanted, chunks, CHUNK: tl.constexpr):
    """Program (chunk, batch_head): counts the codes above the threshold and those equal to it."""
    chunk = tl.program_id(0) % chunks
    batch_head = (tl.program_id(0) // chunks).to(tl.int64)
    prefix, need, equal = _next_digits(histograms, found, batch_head, wanted, 4)
    threshold = (prefix - 2147483648).to(tl.int32)
    # The number of codes to drop among those equal to the threshold, from the first on; all for unoccupied slots.
    drop = tl.where(threshold == _FREE, equal, equal - need)
    if chunk == 0:
        tl.store(found + (batch_head * 4 + 3) * 2, threshold.to(tl.int64))
        tl.store(found + (batch_head * 4 + 3) * 2 + 1, drop)
    s = chunk * CHUNK + tl.arange(0, CHUNK)
    code = tl.load(codes + batch_head * slots + s, mask=s < slots, other=_FREE)
    at = counts + (batch_head * chunks + chunk) * 2
    tl.store(at, tl.sum(tl.where(code > threshold, 1, 0), 0))
    tl.store(at + 1, tl.sum(tl.where((code == threshold) & (s < slots), 1, 0), 0))


@triton.jit
def counted_before(counts, end):
    """The numbers of codes above the threshold and equal to it in a row's chunks before `end`."""
    above = tl.zeros([_ADDED], tl.int32)
    equal = tl.zeros([_ADDED], tl.int32)
    for start in range(0, end, _ADDED):
        i = start + tl.arange(0, _ADDED)
        above += tl.load(counts + i * 2, mask=i < end, other=0)
        equal += tl.load(counts + i * 2 + 1, mask=i < end, other=0)
    return tl.sum(above, 0), tl.sum(equal, 0)


@triton.jit
def kept_in_chunk(codes, found, batch_head, chunk, above_sum, equal_sum, slots, CHUNK: tl.constexpr):
    """The chunk's slots [CHUNK], their places among all kept tokens of the row, which of them are kept, and how many
    codes equal to the threshold the row drops. above_sum, equal_sum: those of `counted_before` the chunk."""
    threshold = tl.load(found + (batch_head * 4 + 3) * 2).to(tl.int32)
    drop = tl.load(found + (batch_head * 4 + 3) * 2 + 1).to(tl.int32)
    s = chunk * CHUNK + tl.arange(0, CHUNK)
    code = tl.load(codes + batch_head * slots + s, mask=s < slots, other=_FREE)
    above = code > threshold
    equal = (code == threshold) & (s < slots)
    # Both prefix sums in one integer, since CHUNK is far below 2^16.
    packed = tl.where(above, 1, 0) + tl.where(equal, 65536, 0)
    running = tl.cumsum(packed, 0) - packed
    number = equal_sum + (running >> 16)                                # index among the codes equal to the threshold
    to = above_sum + (running & 65535) + tl.maximum(number - drop, 0)
    return s, to, above | (equal & (number >= drop)), drop


@triton.jit(do_not_specialize=["slots", "wanted", "chunks"])
def compact_kernel(codes, found, counts, place, kept_count, slots, wanted, chunks, CHUNK: tl.constexpr):
    """Program (chunk, batch_head): writes the slots of the chunk's kept tokens to their places in the result."""
    chunk = tl.program_id(0) % chunks
    batch_head = (tl.program_id(0) // chunks).to(tl.int64)
    counts += batch_head * chunks * 2
    above_sum, equal_sum = counted_before(counts, chunk)
    s, to, kept, drop = kept_in_chunk(codes, found, batch_head, chunk, above_sum, equal_sum, slots, CHUNK)
    tl.store(place + batch_head * wanted + to, s, mask=kept)
    if chunk == chunks - 1:
        above_sum += tl.load(counts + chunk * 2)
        equal_sum += tl.load(counts + chunk * 2 + 1)
        tl.store(kept_count + batch_head, above_sum + tl.maximum(equal_sum - drop, 0))


@triton.jit(do_not_specialize=[
    "wanted", "heads", "key_b", "key_h", "key_s", "value_b", "value_h", "value_s",
])
def gather_kernel(
    key, value, place, kept_count, kept_key, kept_value, kept, kept_occupied, wanted, heads,
    key_b, key_h, key_s, key_d, value_b, value_h, value_s, value_d,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
):
    """Program (block, batch_head): gathers keys and values of BLOCK places; zeros, -1 and False beyond the kept tokens.
    """
    blocks = tl.cdiv(wanted, BLOCK)
    block = tl.program_id(0) % blocks
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    b, head = batch_head // heads, batch_head % heads
    number = block * BLOCK + tl.arange(0, BLOCK)
    inside = number < wanted
    holds = number < tl.load(kept_count + batch_head)
    at = batch_head * wanted + number
    slot = tl.load(place + at, mask=holds, other=-1).to(tl.int64)
    key += (b * key_b + head * key_h) * UNIT
    value += (b * value_b + head * value_h) * UNIT
    d = tl.arange(0, D_PAD).to(tl.int64)
    reads, writes = holds[:, None], inside[:, None]
    if HEAD_DIM != D_PAD:
        reads, writes = reads & (d < HEAD_DIM)[None, :], writes & (d < HEAD_DIM)[None, :]
    k = tl.load(key + slot[:, None] * (key_s * UNIT) + d[None, :] * key_d, mask=reads, other=0.0)
    v = tl.load(value + slot[:, None] * (value_s * UNIT) + d[None, :] * value_d, mask=reads, other=0.0)
    into = at[:, None] * HEAD_DIM + d[None, :]
    tl.store(kept_key + into, k, mask=writes)
    tl.store(kept_value + into, v, mask=writes)
    tl.store(kept + at, slot, mask=inside)
    tl.store(kept_occupied + at, holds, mask=inside)
