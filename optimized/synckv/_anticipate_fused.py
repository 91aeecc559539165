"""An anticipation in one launch, for caches that one program can search. Semantics: `_anticipate_kernels`.

A graph launches an anticipation at every step, and most steps have none: at batch 1, eight launches of nothing take
longer than one program that searches alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.launch import SMALL_TILES
from .._common.radix_selection import _FREE
from .._common.scratch import is_last
from ._anticipate_kernels import pooled_codes

_FIRST_BITS = 4 if SMALL_TILES else 11
#: Bins of a histogram of the codes' first bits, by which all but the candidates are left out; and the other bits.
BINS, _REST = tl.constexpr(2**_FIRST_BITS), tl.constexpr(32 - _FIRST_BITS)


@triton.jit
def _bin(code):
    """The first bits of codes, in the order of the codes."""
    return (code >> _REST) + BINS // 2


@triton.jit
def _candidates(codes, listed, histogram, slots, wanted, WIDE: tl.constexpr):
    """List the codes from the lowest bin on that holds a kept code, with their slots, ascending: listed [2, slots].
    Clears the histogram. Returns the lowest code of that bin, the number of codes to keep, and that of the list."""
    digit = tl.arange(0, BINS)
    count = tl.load(histogram + digit)
    tl.debug_barrier()                                                 # all threads have read it
    tl.store(histogram + digit, tl.zeros([BINS], tl.int32))
    keep = tl.minimum(tl.sum(count, 0), wanted)
    at_least = tl.sum(count, 0) - tl.cumsum(count, 0) + count
    last = tl.max(tl.where(at_least >= keep, digit, 0), 0)
    found = 0
    for start in range(0, slots, WIDE):
        s = start + tl.arange(0, WIDE)
        code = tl.load(codes + s, mask=s < slots, other=_FREE)
        may = (_bin(code) >= last) & (code != _FREE) & (s < slots)
        at = found + tl.cumsum(may.to(tl.int32), 0) - 1
        tl.store(listed + at, code, mask=may)
        tl.store(listed + slots + at, s, mask=may)
        found += tl.sum(may.to(tl.int32), 0)
    tl.debug_barrier()
    return (last - BINS // 2) << _REST, keep, found


@triton.jit
def _threshold(listed, lowest, keep, found, WIDE: tl.constexpr):
    """The lowest code to keep, or one that as many codes are not below: it is found bit by bit. `lowest`: its first
    bits."""
    i = tl.arange(0, WIDE)
    first = tl.load(listed + i, mask=i < found, other=_FREE)
    number = tl.where(found == keep, -1, _REST - 1)
    while number >= 0:
        tried = lowest + (tl.full([], 1, tl.int32) << number)
        enough = tl.sum((first >= tried).to(tl.int32), 0)
        for start in range(WIDE, found, WIDE):
            code = tl.load(listed + start + i, mask=start + i < found, other=_FREE)
            enough += tl.sum((code >= tried).to(tl.int32), 0)
        lowest = tl.where(enough >= keep, tried, lowest)
        number = tl.where(enough == keep, -1, number - 1)
    return lowest


@triton.jit(do_not_specialize=["slots", "splits", "chunks", "representative_heads", "wanted", "capacity"])
def anticipate_kernel(
    due, logits, row_maxima, weight_sums, occupied, fixed, codes, listed, histograms, arrived, chosen, slots, splits,
    chunks, representative_heads, wanted, capacity,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
    LIST: tl.constexpr, EXCLUDE: tl.constexpr,
):
    """Program (chunk, batch_head): codes and their histogram. The last program of an R-head writes the `wanted` best
    tokens to the end of `chosen`, ascending, then -1. Of equal codes, the first tokens are kept.

    codes [rows, slots], listed [rows, 2, slots] int32: scratch. histograms [rows, BINS], arrived [rows] int32: all 0
    between launches.
    """
    if tl.load(due) != 0:
        chunk = tl.program_id(0) % chunks
        batch_head = (tl.program_id(0) // chunks).to(tl.int64)
        s = chunk * CHUNK + tl.arange(0, CHUNK)
        code = pooled_codes(
            logits, row_maxima, weight_sums, occupied, fixed, batch_head, s, slots, splits, representative_heads,
            GROUP, ROWS, SPLITS, EXCLUDE,
        )
        codes += batch_head * slots
        histograms += batch_head * BINS
        tl.store(codes + s, code, mask=s < slots)
        count = tl.histogram(_bin(code), BINS, mask=(code != _FREE) & (s < slots))
        tl.atomic_add(histograms + tl.arange(0, BINS), count, mask=count > 0, sem="relaxed")
        if is_last(arrived + batch_head, chunks):
            listed += batch_head * 2 * slots
            lowest, keep, found = _candidates(codes, listed, histograms, slots, wanted, WIDE)
            lowest = _threshold(listed, lowest, keep, found, LIST)
            above = 0
            i = tl.arange(0, LIST)
            for start in range(0, found, LIST):
                code = tl.load(listed + start + i, mask=start + i < found, other=_FREE)
                above += tl.sum((code > lowest).to(tl.int32), 0)
            need = keep - above                                        # of those equal to the lowest, the first ones
            into = chosen + batch_head * capacity + (capacity - wanted)
            equal_before = 0
            kept_before = 0
            for start in range(0, found, LIST):
                there = start + i < found
                code = tl.load(listed + start + i, mask=there, other=_FREE)
                slot = tl.load(listed + slots + start + i, mask=there, other=0)
                equal = there & (code == lowest)
                order = equal_before + tl.cumsum(equal.to(tl.int32), 0) - 1
                kept = (there & (code > lowest)) | (equal & (order < need))
                to = kept_before + tl.cumsum(kept.to(tl.int32), 0) - 1
                if EXCLUDE:
                    token = slot
                else:
                    is_fixed = tl.load(fixed + batch_head * slots + slot, mask=kept, other=0) != 0
                    token = tl.where(is_fixed, -1, slot)
                tl.store(into + to, token.to(tl.int64), mask=kept)
                equal_before += tl.sum(equal.to(tl.int32), 0)
                kept_before += tl.sum(kept.to(tl.int32), 0)
            for start in range(0, wanted, LIST):
                rest = start + i
                tl.store(into + rest, tl.full([LIST], -1, tl.int64), mask=(rest >= keep) & (rest < wanted))
