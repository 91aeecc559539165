"""The kernels of an anticipation, no-ops after other steps. Semantics: `_score_kernels`, `_select`.

They are launched at every step of a graph, and the device decides whether an anticipation is due.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.numerics import sortable
from .._common.radix_selection import (
    _FREE,
    count_kernel,
    counted_before,
    first_digit,
    histogram_kernel,
    kept_in_chunk,
)
from .._common.softmax import denominators


@triton.jit(do_not_specialize=["slots", "splits", "chunks", "representative_heads"])
def codes_kernel(
    due, logits, row_maxima, weight_sums, occupied, fixed, codes, histograms, slots, splits, chunks,
    representative_heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, EXCLUDE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Program (chunk, batch_head): codes in the order of the pooled log-weights, last slot first. COUNT: adds their
    first 8 bits to the histograms. EXCLUDE: tokens of the static set (`fixed`) get the highest codes, so that the
    selected union contains them."""
    if tl.load(due) != 0:
        chunk = tl.program_id(0) % chunks
        batch_head = (tl.program_id(0) // chunks).to(tl.int64)
        row_max, log_total = denominators(row_maxima, weight_sums, batch_head, splits, GROUP, ROWS, SPLITS)
        row = tl.arange(0, ROWS)
        s = chunk * CHUNK + tl.arange(0, CHUNK)
        s64 = s.to(tl.int64)
        holds = tl.load(occupied + batch_head // representative_heads * slots + s64, mask=s < slots, other=0) != 0
        logit = tl.load(
            logits + (batch_head * GROUP + row)[:, None] * slots + s64[None, :],
            mask=(row < GROUP)[:, None] & holds[None, :], other=float("-inf"),
        )
        free = logit == float("-inf")
        weight = (tl.where(free, 0.0, logit) - row_max[:, None]) - log_total[:, None]
        score = tl.max(tl.where(free, logit, weight), 0)
        if EXCLUDE:
            taken = tl.load(fixed + batch_head * slots + s64, mask=s < slots, other=0) != 0
            score = tl.where(taken, float("inf"), score)
        code = tl.where(holds, sortable(score), _FREE)
        tl.store(codes + batch_head * slots + (slots - 1 - s64), code, mask=s < slots)
        if COUNT:
            count = tl.histogram(first_digit(code), 256, mask=s < slots)
            tl.atomic_add(histograms + batch_head * 1024 + tl.arange(0, 256), count, mask=count > 0, sem="relaxed")


@triton.jit(do_not_specialize=["slots", "chunks"])
def include_kernel(due, fixed, codes, slots, chunks, CHUNK: tl.constexpr):
    """Program (chunk, batch_head): the tokens of the static set get the highest codes, as in `codes_kernel`."""
    if tl.load(due) != 0:
        batch_head = (tl.program_id(0) // chunks).to(tl.int64)
        s = (tl.program_id(0) % chunks * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
        taken = tl.load(fixed + batch_head * slots + s, mask=s < slots, other=0) != 0
        highest = sortable(tl.full([CHUNK], float("inf"), tl.float32))
        tl.store(codes + batch_head * slots + (slots - 1 - s), highest, mask=taken)


@triton.jit(do_not_specialize=["slots", "wanted", "chunks"])
def histogram_if(
    due, codes, histograms, found, slots, wanted, chunks, PASS: tl.constexpr, CHUNK: tl.constexpr, FEW: tl.constexpr
):
    if tl.load(due) != 0:
        histogram_kernel(codes, histograms, found, slots, wanted, chunks, PASS, CHUNK, FEW)


@triton.jit(do_not_specialize=["slots", "wanted", "chunks"])
def count_if(due, codes, histograms, found, counts, slots, wanted, chunks, CHUNK: tl.constexpr):
    if tl.load(due) != 0:
        count_kernel(codes, histograms, found, counts, slots, wanted, chunks, CHUNK)


@triton.jit(do_not_specialize=["slots", "wanted", "chunks", "capacity"])
def choose_kernel(
    due, codes, histograms, found, counts, fixed, chosen, slots, wanted, chunks, capacity, CHUNK: tl.constexpr,
    EXCLUDE: tl.constexpr,
):
    """Program (chunk, batch_head): writes the chunk's kept tokens to the last `wanted` entries of `chosen`, ascending,
    which with EXCLUDE are all entries. Without EXCLUDE, `fixed` tokens become -1. The program of a row's first chunk
    fills the rest with -1, and clears the histograms for the next anticipation: no program of this launch reads them.
    """
    if tl.load(due) != 0:
        chunk = tl.program_id(0) % chunks
        batch_head = (tl.program_id(0) // chunks).to(tl.int64)
        counts += batch_head * chunks * 2
        above, equal = counted_before(counts, chunk)
        place, to, kept, drop = kept_in_chunk(codes, found, batch_head, chunk, above, equal, slots, CHUNK)
        above, equal = counted_before(counts, chunks)
        count = above + tl.maximum(equal - drop, 0)
        slot = (slots - 1 - place).to(tl.int64)                        # places are read from the end
        token = slot
        if not EXCLUDE:
            holds = tl.load(fixed + batch_head * slots + slot, mask=kept, other=0) == 0
            token = tl.where(holds, slot, -1)
        into = chosen + batch_head * capacity + (capacity - wanted)
        tl.store(into + (count - 1 - to), token, mask=kept)
        if chunk == 0:
            for start in range(0, wanted, CHUNK):
                number = start + tl.arange(0, CHUNK)
                tl.store(into + number, tl.full([CHUNK], -1, tl.int64), mask=(number >= count) & (number < wanted))
            tl.store(histograms + batch_head * 1024 + tl.arange(0, 1024), tl.zeros([1024], tl.int32))


@triton.jit(do_not_specialize=["slots", "lists", "capacity", "width"])
def unite_kernel(due, chosen, united, marks, slots, lists, capacity, width, CHUNK: tl.constexpr):
    """Program (row): the tokens of all lists of `chosen`, in the order of the lists, each once, then -1. The tokens of
    one list are distinct. `marks` [.., slots]: 1 for a token that is in `united` already; all 0 between launches."""
    if tl.load(due) != 0:
        row = tl.program_id(0).to(tl.int64)
        first, mine, into = row * lists * capacity, marks + row * slots, united + row * width
        count = 0
        for number in range(0, lists):
            for start in range(0, capacity, CHUNK):
                entry = start + tl.arange(0, CHUNK)
                token = tl.load(chosen + first + number * capacity + entry, mask=entry < capacity, other=-1)
                fresh = (token >= 0) & (tl.load(mine + token, mask=token >= 0, other=1) == 0)
                at = count + tl.cumsum(fresh.to(tl.int32), 0) - 1
                tl.store(into + at, token, mask=fresh)
                tl.store(mine + token, 1, mask=fresh)
                count += tl.sum(fresh.to(tl.int32), 0)
            # The next list reads the marks of this one.
            tl.debug_barrier()
        for start in range(0, width, CHUNK):
            entry = start + tl.arange(0, CHUNK)
            tl.store(into + entry, -1, mask=(entry >= count) & (entry < width))
        for start in range(0, lists * capacity, CHUNK):
            entry = start + tl.arange(0, CHUNK)
            token = tl.load(chosen + first + entry, mask=entry < lists * capacity, other=-1)
            tl.store(mine + token, 0, mask=token >= 0)
