"""KeyDiff's kernels over whole caches: the sum of normalized keys, and ranks against it. `_step.py` has the decode
step.

Scratch is indexed by `batch_head`, the index of a (row of the batch, KV head). Strides of keys are divided by UNIT (see
`stride_unit`). With PAGE > 0, keys lie in pages of PAGE slots: `pages` has the page of each PAGE slots of a row, and
key_b is the stride of pages instead of rows. Otherwise `pages` and its strides are None. A rank is computed from a key,
its inverse length and the anchor, by the same operations in every tile, and inverse lengths that are compared come from
one kernel, so equal keys get equal ranks. Sums over programs are added in a fixed order; atomics only count integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.launch import INTERPRETED, SMALL_TILES
from .._common.numerics import float32, from_fp8, sum_of_products
from .._common.paged_rows import offsets

_INTERPRETED = tl.constexpr(INTERPRETED)
_SMALL_TILES = tl.constexpr(SMALL_TILES)
_FREE = tl.constexpr(-(2**31))
_PROTECTED = tl.constexpr(2**31 - 1)
#: Squared lengths outside this range may have lost digits or overflowed. Such keys are *odd* and get a negative inverse
#: length. They are rare: a program that finds one processes its share a second time, so that the main loop stays short.
_SMALL = tl.constexpr(2.0**-80)
_LARGE = tl.constexpr(2.0**100)


@triton.jit
def bounded(x):
    """x, clamped in the interpreter, whose sums would warn about products that overflow."""
    if _INTERPRETED:
        return tl.where(x == x, tl.minimum(tl.maximum(x, -1e35), 1e35), x)
    else:
        return x


@triton.jit
def load_rows(
    pointer, first, holds, stride_s, stride_d,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, MASKED: tl.constexpr, FP8: tl.constexpr = None,
):
    """ROWS rows from `first` on of a [S, D] matrix, in float32, [ROWS, D_PAD]. With MASKED, rows where `holds` is False
    are zeros and not read; otherwise all rows must exist. FP8: the format of codes (see `from_fp8`), or None."""
    row = tl.arange(0, ROWS).to(tl.int64)
    d = tl.arange(0, D_PAD).to(tl.int64)
    at = pointer + row[:, None] * stride_s + d[None, :] * stride_d + (first + tl.zeros([], tl.int64)) * stride_s
    if MASKED:
        if HEAD_DIM != D_PAD:
            x = tl.load(at, mask=holds[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        else:
            x = tl.load(at, mask=holds[:, None], other=0.0)
    elif HEAD_DIM != D_PAD:
        x = tl.load(at, mask=(d < HEAD_DIM)[None, :], other=0.0)
    else:
        x = tl.load(at)
    if FP8 is not None:
        x = from_fp8(x, tl.float32, FP8)
    return float32(x)


@triton.jit
def load_paged_rows(
    pointer, pages, first, holds, stride_p, stride_s, stride_d, pages_s,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr = None,
):
    """As `load_rows` with MASKED, for the slots of a row that lie in pages."""
    d = tl.arange(0, D_PAD).to(tl.int64)
    row = offsets(pages, first + tl.arange(0, ROWS), holds, stride_p, stride_s, pages_s, PAGE)
    at = pointer + row[:, None] + d[None, :] * stride_d
    mask = holds[:, None]
    if HEAD_DIM != D_PAD:
        mask = mask & (d < HEAD_DIM)[None, :]
    x = tl.load(at, mask=mask, other=0.0)
    if FP8 is not None:
        x = from_fp8(x, tl.float32, FP8)
    return float32(x)


@triton.jit
def load(
    pointer, pages, first, holds, stride_p, stride_s, stride_d, pages_s,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, MASKED: tl.constexpr, PAGE: tl.constexpr,
    FP8: tl.constexpr = None,
):
    """`load_paged_rows` if there are pages, else `load_rows`."""
    if PAGE:
        tl.static_assert(MASKED)
        return load_paged_rows(
            pointer, pages, first, holds, stride_p, stride_s, stride_d, pages_s, ROWS, HEAD_DIM, D_PAD, PAGE, FP8
        )
    else:
        return load_rows(pointer, first, holds, stride_s, stride_d, ROWS, HEAD_DIM, D_PAD, MASKED, FP8)


@triton.jit
def _tile(
    occupied, start, end, slots, occupied_s, ROWS: tl.constexpr, OCCUPIED: tl.constexpr, MASKED: tl.constexpr
):
    """A tile's first slot, its slots, which of them belong to the share, and which of those are occupied.

    Without MASKED, the row's last tile overlaps the one before, so that all its slots exist.
    """
    first = start
    if not MASKED:
        first = tl.minimum(start, slots - ROWS)
    s = first + tl.arange(0, ROWS)
    inside = (s >= start) & (s < end)
    holds = inside
    if OCCUPIED:
        holds = tl.load(occupied + s.to(tl.int64) * occupied_s, mask=inside, other=0) != 0
    return first, s, inside, holds


@triton.jit
def inverse_lengths(k):
    """1 / ||k|| of the rows of k; NaN for odd keys and zero keys."""
    squares = tl.sum(bounded(k * k), 1)
    plain = (squares > _SMALL) & (squares < _LARGE)
    return tl.where(plain, tl.rsqrt(tl.where(plain, squares, 1.0)), float("nan"))


@triton.jit
def any_units(k):
    """The rows of k divided by their lengths, for any lengths; a zero row stays zero.

    Scales by a power of two that brings the largest element near 1, so that squares neither overflow nor underflow.
    """
    exponent = tl.max(tl.abs(k), 1).to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.maximum((254 << 23) - exponent, 1 << 23).to(tl.float32, bitcast=True)
    scaled = k * power[:, None]
    squares = tl.sum(scaled * scaled, 1)
    zero = squares == 0.0
    return scaled * tl.where(zero, 0.0, tl.rsqrt(tl.where(zero, 1.0, squares)))[:, None]


@triton.jit
def ranks(k, inverse, anchor):
    """-k_hat . anchor for the rows of k, which are not odd."""
    return -tl.sum(bounded(k * anchor[None, :]), 1) * inverse


@triton.jit
def odd_ranks(k, anchor):
    """-k_hat . anchor for rows of k of any length."""
    return -tl.sum(any_units(k) * anchor[None, :], 1)


@triton.jit
def sum_partials(partial, splits, D_PAD: tl.constexpr):
    """The sum of `splits` vectors written by other programs, always in the same order."""
    ROWS: tl.constexpr = 1 if _SMALL_TILES else 4096 // D_PAD
    d = tl.arange(0, D_PAD)
    i = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, D_PAD], tl.float32)
    for start in range(0, splits, ROWS):
        rows = start + i
        total += tl.load(
            partial + rows.to(tl.int64)[:, None] * D_PAD + d[None, :], mask=(rows < splits)[:, None], other=0.0,
            cache_modifier=".cg",
        )
    return tl.sum(total, 0)


_SIZES = [
    "slots", "split_size", "splits", "heads", "key_b", "key_h", "key_s", "occupied_b", "occupied_h", "occupied_s",
    "pages_b", "pages_s",
]


@triton.jit(do_not_specialize=_SIZES)
def anchor_kernel(
    key, pages, occupied, inverse, partial, anchor, completion_counters, slots, split_size, splits, heads,
    key_b, key_h, key_s, key_d, occupied_b, occupied_h, occupied_s, pages_b, pages_s,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, OCCUPIED: tl.constexpr,
    MASKED: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, STAGES: tl.constexpr,
):
    """Program (split, batch_head): stores the inverse lengths of its keys and the sum of these keys, normalized. The
    last program of a (row, KV head) adds up the sums."""
    split = tl.program_id(0) % splits
    batch_head = (tl.program_id(0) // splits).to(tl.int64)
    b, head = batch_head // heads, batch_head % heads
    key_p = 0
    if PAGE:
        pages += b * pages_b
        key += head * key_h * UNIT
        key_p = key_b.to(tl.int64) * UNIT
    else:
        key += (b * key_b + head * key_h) * UNIT
    key_s = key_s.to(tl.int64) * UNIT
    inverse += batch_head * slots
    begin = split * split_size
    end = tl.minimum(begin + split_size, slots)
    if OCCUPIED:
        occupied += b * occupied_b + head * occupied_h
    total = tl.zeros([BLOCK, D_PAD], tl.float32)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        first, s, inside, holds = _tile(occupied, start, end, slots, occupied_s, BLOCK, OCCUPIED, MASKED)
        k = load(key, pages, first, holds, key_p, key_s, key_d, pages_s, BLOCK, HEAD_DIM, D_PAD, MASKED, PAGE, FP8)
        factor = tl.where(holds, inverse_lengths(k), 0.0)
        tl.store(inverse + s, tl.where(factor == factor, factor, -1.0), mask=inside)
        total += k * factor[:, None]
    share = tl.sum(total, 0)
    # NaN means an odd or a zero key.
    if tl.sum(tl.where(share != share, 1, 0), 0) > 0:
        tl.debug_barrier()                                              # order these stores after the ones above
        rest = tl.zeros([16, D_PAD], tl.float32)
        for start in range(begin, end, 16):
            s = start + tl.arange(0, 16)
            holds = s < end
            if OCCUPIED:
                holds = tl.load(occupied + s.to(tl.int64) * occupied_s, mask=holds, other=0) != 0
            k = load(key, pages, start, holds, key_p, key_s, key_d, pages_s, 16, HEAD_DIM, D_PAD, True, PAGE, FP8)
            tl.store(inverse + s, 0.0, mask=holds & (tl.max(tl.abs(k), 1) == 0.0))
            rest += any_units(k)
        share = tl.sum(rest, 0)
    d = tl.arange(0, D_PAD)
    partial += batch_head * splits * D_PAD
    tl.store(partial + split.to(tl.int64) * D_PAD + d, share)
    tl.debug_barrier()
    if tl.atomic_add(completion_counters + batch_head, 1, sem="acq_rel", scope="gpu") == splits - 1:
        tl.store(anchor + batch_head * HEAD_DIM + d, sum_partials(partial, splits, D_PAD), mask=d < HEAD_DIM)
        tl.store(completion_counters + batch_head, 0)                   # reset for the next launch


@triton.jit
def _store_ranks(
    result, protected, rank, unit, s, holds, mask, protected_s, PROTECTED: tl.constexpr, CODES: tl.constexpr
):
    """Store ranks, -inf where `holds` is False; or CODES (see `rank_kernel`), where unit is 1 / the largest rank."""
    if CODES:
        # Cosines in steps of 2^-31, far below their error, so that 8 bits separate many keys. NaN is the lowest.
        cosine = rank * unit
        cosine = tl.where(cosine == cosine, tl.minimum(tl.maximum(cosine, -1.0), 1.0), -1.005)
        code = (cosine * 2130000000.0).to(tl.int32)
        if PROTECTED:
            is_protected = tl.load(protected + s.to(tl.int64) * protected_s, mask=mask, other=0) != 0
            code = tl.where(is_protected, _PROTECTED, code)
        tl.store(result + s, tl.where(holds, code, _FREE), mask=mask)
    else:
        tl.store(result + s, tl.where(holds, rank, float("-inf")), mask=mask)


@triton.jit(do_not_specialize=[
    *_SIZES, "inverse_b", "inverse_h", "protected_b", "protected_h", "protected_s",
])
def rank_kernel(
    key, pages, occupied, protected, inverse, anchor, result, histograms, slots, split_size, splits, heads,
    key_b, key_h, key_s, key_d, occupied_b, occupied_h, occupied_s, pages_b, pages_s, inverse_b, inverse_h,
    protected_b, protected_h, protected_s,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, OCCUPIED: tl.constexpr,
    MASKED: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, PROTECTED: tl.constexpr, CODES: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr,
):
    """Program (split, batch_head): ranks, float32, -inf where unoccupied. With CODES: the ranks as integers in the same
    order, with unoccupied slots below and protected ones above, and the histogram of their first 8 bits for the
    selection. Codes are equal for keys whose order is below the arithmetic's precision."""
    # Backwards, since what the previous pass read last is still in L2.
    turn = tl.num_programs(0) - 1 - tl.program_id(0)
    split = turn % splits
    batch_head = (turn // splits).to(tl.int64)
    b, head = batch_head // heads, batch_head % heads
    key_p = 0
    if PAGE:
        pages += b * pages_b
        key += head * key_h * UNIT
        key_p = key_b.to(tl.int64) * UNIT
    else:
        key += (b * key_b + head * key_h) * UNIT
    key_s = key_s.to(tl.int64) * UNIT
    inverse += b * inverse_b + head * inverse_h
    result += batch_head * slots
    begin = split * split_size
    end = tl.minimum(begin + split_size, slots)
    if OCCUPIED:
        occupied += b * occupied_b + head * occupied_h
    if PROTECTED:
        protected += b * protected_b + head * protected_h
    d = tl.arange(0, D_PAD)
    direction = tl.load(anchor + batch_head * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
    squares = sum_of_products(direction, direction, 0)
    unit = tl.where(squares == 0.0, 0.0, tl.rsqrt(tl.where(squares == 0.0, 1.0, squares)))
    odd = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        first, s, inside, holds = _tile(occupied, start, end, slots, occupied_s, BLOCK, OCCUPIED, MASKED)
        k = load(key, pages, first, holds, key_p, key_s, key_d, pages_s, BLOCK, HEAD_DIM, D_PAD, MASKED, PAGE, FP8)
        factor = tl.load(inverse + s, mask=holds, other=0.0)
        _store_ranks(
            result, protected, ranks(k, factor, direction), unit, s, holds, inside, protected_s, PROTECTED, CODES
        )
        odd = tl.where(factor < 0.0, 1, odd)
    if tl.max(odd, 0) > 0:
        tl.debug_barrier()                                              # order these stores after the ones above
        for start in range(begin, end, 16):
            s = start + tl.arange(0, 16)
            factor = tl.load(inverse + s, mask=s < end, other=0.0)
            holds = factor < 0.0
            if OCCUPIED:
                holds = holds & (tl.load(occupied + s.to(tl.int64) * occupied_s, mask=s < end, other=0) != 0)
            k = load(key, pages, start, holds, key_p, key_s, key_d, pages_s, 16, HEAD_DIM, D_PAD, True, PAGE, FP8)
            _store_ranks(
                result, protected, odd_ranks(k, direction), unit, s, holds, holds, protected_s, PROTECTED, CODES
            )
    if CODES:
        tl.debug_barrier()
        count = tl.zeros([256], tl.int32)
        for start in range(begin, end, CHUNK):
            s = start + tl.arange(0, CHUNK)
            code = tl.load(result + s, mask=s < end, other=0)
            count += tl.histogram(((code >> 24) & 255) ^ 128, 256, mask=s < end)
        tl.atomic_add(histograms + batch_head * 1024 + tl.arange(0, 256), count, mask=count > 0, sem="relaxed")
