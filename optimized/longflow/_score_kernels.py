"""Scores of a LongFlow decode step and the choice of the slot to overwrite: device functions, and the two kernels that
can end a step, `score_kernel` and, for many KV heads, `choose_kernel`.

Logits, maxima and log scores are in base 2. A rank is the log2 of a score. `batch_head` is the index of a (row of the
batch, KV head). `decision` is the index of the heads that decide together: a row or, with PER_HEAD, a batch_head.
Scratch is contiguous and indexed by batch_head or by query head. Its rows of slots are padded (`row_of`): logits
[batch_heads, padded, GROUP_PAD], ranks [batch_heads, padded]. The padding is never used, but its logits are written up
to `written_of`. Logits in this file include log2 ||v||_1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.launch import SMALL_TILES
from .._common.numerics import finite_or_zero, log2_or_minus_inf, round_output, sortable
from .._common.scratch import discard, is_last, row_of, written_of
from .._common.softmax import divide, merge_sums, raise_maximum, weigh_tile

_FREE = tl.constexpr(-(2**31))
_PROTECTED = tl.constexpr(2**31 - 1)
_NO_SLOT = tl.constexpr(2**63 - 1)
_INDEX = tl.constexpr(2**32 - 1)
#: Candidates of blocks that are compared at a time. In the interpreter few, so that tests cover several rounds.
_COMPARED = tl.constexpr(2 if SMALL_TILES else 64)


@triton.jit
def _denominators(
    row_maxima, weight_sums, first, count, splits, split_stride, HEADS: tl.constexpr, SPLITS: tl.constexpr
):
    """Maximum and sum of the softmax denominators of query heads first to first + count, merged from their splits,
    [HEADS] each. split_stride: splits per head in scratch."""
    h = tl.arange(0, HEADS)
    i = tl.arange(0, SPLITS)
    part = (first + h)[:, None] * split_stride + i[None, :]
    there = (h < count)[:, None] & (i < splits)[None, :]
    return merge_sums(row_maxima, weight_sums, part, there, SAME_LAUNCH=False)


@triton.jit
def _combine(
    partial, row_maxima, weight_sums, output, batch_head, splits, split_stride,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr,
):
    """Merge the outputs of a KV head's query heads. Returns their denominators as `_denominators` does."""
    row_max, total = _denominators(
        row_maxima, weight_sums, batch_head * GROUP, GROUP, splits, split_stride, GROUP_PAD, SPLITS
    )
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D_PAD).to(tl.int64)
    mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    partial += (batch_head * GROUP + g)[:, None] * split_stride * HEAD_DIM + d[None, :]
    row_maxima += (batch_head * GROUP + g) * split_stride
    acc = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    part = tl.load(partial, mask=mask, other=0.0)                      # the loop loads one split ahead
    for split in range(splits):
        ahead = tl.load(partial + tl.minimum(split + 1, splits - 1) * HEAD_DIM, mask=mask, other=0.0)
        share = tl.exp2(tl.load(row_maxima + split, mask=g < GROUP, other=float("-inf")) - row_max)
        acc += part * share[:, None]
        part = ahead
    out = divide(acc, total)
    at = (batch_head * GROUP + g)[:, None] * HEAD_DIM + d[None, :]
    tl.store(output + at, round_output(out, output.dtype.element_ty), mask=mask)
    return row_max, total


@triton.jit
def _rank(logit, row_max, log_total, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr):
    """log2 of the scores summed over a KV head's query heads, [slots]: logit [slots, GROUP_PAD] with log2 ||v||_1.

    row_max and log_total [GROUP_PAD] are subtracted one after the other: their sum would lose digits if row_max is
    large.
    """
    x = (logit - row_max[None, :]) - log_total[None, :]
    x = tl.where((tl.arange(0, GROUP_PAD) < GROUP)[None, :], x, float("-inf"))
    highest = finite_or_zero(tl.max(x, 1))
    return highest + log2_or_minus_inf(tl.sum(tl.exp2(x - highest[:, None]), 1))


@triton.jit
def finish_group(
    logits, ranks, partial, row_maxima, weight_sums, output, batch_head, splits, split_stride, slots,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr,
    CHUNK: tl.constexpr, DISCARD: tl.constexpr,
):
    """The outputs of a KV head's query heads and the ranks of its slots. DISCARD: no other program reads logits and
    partial results, and their cache lines are dropped."""
    padded, written = row_of(slots), written_of(slots)
    logits += batch_head * padded * GROUP_PAD
    ranks += batch_head * padded
    s = tl.arange(0, CHUNK)
    g = tl.arange(0, GROUP_PAD)
    # Prefetch: the first chunk is loaded while splits are merged, later ones while the chunk before is ranked.
    logit = tl.load(logits + s[:, None] * GROUP_PAD + g[None, :], mask=(s < written)[:, None], other=0.0)
    row_max, total = _combine(
        partial, row_maxima, weight_sums, output, batch_head, splits, split_stride, GROUP, GROUP_PAD, HEAD_DIM, D_PAD,
        SPLITS
    )
    log_total = log2_or_minus_inf(total)
    if DISCARD and GROUP * HEAD_DIM % 32 == 0:                         # else lines are shared with other KV heads
        tl.debug_barrier()
        lines = GROUP * split_stride * HEAD_DIM // 32
        for start in range(0, lines, 128):
            line = tl.minimum(start + tl.arange(0, 128), lines - 1)
            discard(partial + batch_head * GROUP * split_stride * HEAD_DIM + line * 32)
    for start in range(0, padded, CHUNK):
        ahead = s + CHUNK
        next_logit = tl.load(
            logits + ahead[:, None] * GROUP_PAD + g[None, :], mask=(ahead < written)[:, None], other=0.0
        )
        rank = _rank(logit, row_max, log_total, GROUP, GROUP_PAD)
        tl.store(ranks + s, rank, mask=s < padded, eviction_policy="evict_last")
        if DISCARD:
            tl.debug_barrier()
            line = start * GROUP_PAD + tl.arange(0, CHUNK * GROUP_PAD // 32) * 32
            discard(logits + tl.minimum(line, padded * GROUP_PAD - 32))
        s, logit = ahead, next_logit


@triton.jit
def _sum_ranks(ranks, first, count, s, padded, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """log2 of the scores summed over KV heads first to first + count, from the ranks of slots s [BLOCK]."""
    row_max = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, HEADS):
        k = start + tl.arange(0, HEADS)
        there = (s < padded)[:, None] & (k < count)[None, :]
        x = tl.load(ranks + (first + k)[None, :] * padded + s[:, None], mask=there, other=float("-inf"))
        _, row_max, total, _ = weigh_tile(x, row_max, total)
    return finite_or_zero(row_max) + log2_or_minus_inf(total)


@triton.jit
def _protected(
    protected, mask_s, positions, sinks, newest, s, slots,
    ARRIVAL: tl.constexpr, PROTECTED: tl.constexpr, PROTECT_NEWEST: tl.constexpr,
):
    """Which of the slots s are protected. Pointers are at the decision's row."""
    is_protected = s < 0
    if ARRIVAL:
        asked = tl.where(sinks > 0, slots, 0)                          # without sinks, skip the loads
        is_protected = tl.load(positions + s, mask=s < asked, other=0) < sinks
        if PROTECT_NEWEST:
            is_protected = is_protected | (s == newest)
    if PROTECTED:
        is_protected = tl.load(protected + s.to(tl.int64) * mask_s, mask=s < slots, other=0) != 0
    return is_protected


@triton.jit
def _candidates(rank, holds, is_protected, score, s, slots, count):
    """Store the scores of slots s, the mean over `count`, and return each slot's candidate.

    A candidate has the rank in its upper half and the slot in its lower half, so that one integer minimum decides, ties
    included. Free slots come first and protected slots last, each in the order of their indices.
    """
    in_row = s < slots
    linear = tl.exp2(rank) / count
    tl.store(score + s, tl.where(holds, tl.where(is_protected, float("inf"), linear), float("-inf")), mask=in_row)
    code = tl.where(holds, tl.where(is_protected, _PROTECTED, sortable(rank)), _FREE)
    return tl.where(in_row, (code.to(tl.int64) << 32) | s.to(tl.int64), _NO_SLOT)


@triton.jit
def _slot_of(candidates):
    """The slot of the lowest of candidates [N]."""
    return tl.min(candidates, 0) & _INDEX


@triton.jit
def _finish_normalisers(
    row_maxima, weight_sums, normalisers, first, count, splits, HEADS: tl.constexpr, SPLITS: tl.constexpr
):
    """Store log2 of the softmax denominators of query heads first to first + count in two parts: the maximum and log2
    of the sum.

    Every program of a decision writes the same numbers to the same place and reads back its own.
    """
    for start in range(0, count, HEADS):
        row_max, total = _denominators(
            row_maxima, weight_sums, first + start, count - start, splits, splits, HEADS, SPLITS
        )
        h = start + tl.arange(0, HEADS)
        tl.store(normalisers + (first + h) * 2, row_max, mask=h < count)
        tl.store(normalisers + (first + h) * 2 + 1, log2_or_minus_inf(total), mask=h < count)
    tl.debug_barrier()


@triton.jit
def _rank_block(
    logits, normalisers, first, count, s, slots,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK: tl.constexpr,
):
    """log2 of the scores summed over KV heads first to first + count, from their logits, [BLOCK]."""
    g = tl.arange(0, GROUP_PAD)
    padded, there = row_of(slots), s < written_of(slots)
    row_max = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.range(0, count, num_stages=3):
        batch_head = first + k
        at = (batch_head * padded + s)[:, None] * GROUP_PAD + g[None, :]
        logit = tl.load(logits + at, mask=there[:, None], other=0.0)
        head = normalisers + (batch_head * GROUP + g) * 2
        x = _rank(
            logit, tl.load(head, mask=g < GROUP, other=0.0), tl.load(head + 1, mask=g < GROUP, other=0.0),
            GROUP, GROUP_PAD,
        )
        row_max, shift, rescale = raise_maximum(row_max, x)
        total = total * rescale + tl.exp2(x - shift)
    return finite_or_zero(row_max) + log2_or_minus_inf(total)


@triton.jit(do_not_specialize=[
    "slots", "splits", "heads", "blocks", "occupied_b", "occupied_h", "mask_b", "mask_h",
])
def score_kernel(
    logits, partial, row_maxima, weight_sums, normalisers, occupied, protected, positions, sink_end, seen,
    output, score, slot, candidates, completion_counters,
    slots, splits, heads, blocks,
    occupied_b, occupied_h, occupied_s, mask_b, mask_h, mask_s,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, PER_HEAD: tl.constexpr, ARRIVAL: tl.constexpr,
    PROTECTED: tl.constexpr, PROTECT_NEWEST: tl.constexpr,
):
    """Programs (block of slots, decision): turn logits into scores, summed over the heads that decide together, and
    find the block's candidate. The last program of a decision picks the slot. Other programs merge a KV head's
    outputs."""
    kv_heads = 1 if PER_HEAD else heads                                # heads that decide together
    query_heads = GROUP * kv_heads
    each = blocks + kv_heads                                           # programs per decision
    block = tl.program_id(0) % each
    decision = (tl.program_id(0) // each).to(tl.int64)
    b = decision // heads if PER_HEAD else decision
    k_head = decision % heads if PER_HEAD else 0
    if block >= blocks:
        _combine(
            partial, row_maxima, weight_sums, output, decision * kv_heads + block - blocks, splits, splits,
            GROUP, GROUP_PAD, HEAD_DIM, D_PAD, SPLITS,
        )
    else:
        s = block * BLOCK + tl.arange(0, BLOCK)
        mine = occupied + b * occupied_b + k_head * occupied_h
        holds = tl.load(mine + s.to(tl.int64) * occupied_s, mask=s < slots, other=0) != 0
        is_protected = _protected(
            protected + b * mask_b + k_head * mask_h, mask_s, positions + decision * slots,
            tl.load(sink_end + b) if ARRIVAL else 0, tl.load(slot + decision) if ARRIVAL else -1, s, slots,
            ARRIVAL, PROTECTED, PROTECT_NEWEST,
        )
        _finish_normalisers(
            row_maxima, weight_sums, normalisers, decision * query_heads, query_heads, splits, HEADS, SPLITS
        )
        rank = _rank_block(
            logits, normalisers, decision * kv_heads, kv_heads, s, slots, GROUP, GROUP_PAD, BLOCK
        )
        candidate = _candidates(rank, holds, is_protected, score + decision * slots, s, slots, query_heads * HEAD_DIM)
        tl.store(candidates + decision * blocks + block, tl.min(candidate, 0))
        if is_last(completion_counters + decision, blocks):
            best = tl.full([_COMPARED], _NO_SLOT, tl.int64)
            for start in range(0, blocks, _COMPARED):
                i = start + tl.arange(0, _COMPARED)
                found = tl.load(candidates + decision * blocks + i, mask=i < blocks, other=_NO_SLOT)
                best = tl.minimum(best, found)
            tl.store(slot + decision, _slot_of(best))
        if ARRIVAL and (block == 0) & (decision == 0):
            tl.store(seen, tl.load(seen) + 1)


@triton.jit(do_not_specialize=["slots", "heads", "occupied_b", "occupied_h", "mask_b", "mask_h"])
def choose_kernel(
    ranks, occupied, protected, positions, sink_end, seen, score, slot,
    slots, heads,
    occupied_b, occupied_h, occupied_s, mask_b, mask_h, mask_s,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PER_HEAD: tl.constexpr,
    ARRIVAL: tl.constexpr, PROTECTED: tl.constexpr, PROTECT_NEWEST: tl.constexpr, DISCARD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (decision), if the attention kernel ranked all slots: sums scores over the heads that decide together and
    picks the slot. Nothing else runs meanwhile, so no program waits for another, and all loads are issued at once."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    kv_heads = 1 if PER_HEAD else heads                                # heads that decide together
    decision = tl.program_id(0).to(tl.int64)
    b = decision // heads if PER_HEAD else decision
    k_head = decision % heads if PER_HEAD else 0
    padded = row_of(slots)
    first = decision * kv_heads
    sinks = tl.load(sink_end + b) if ARRIVAL else 0
    newest = tl.load(slot + decision) if ARRIVAL else -1
    mine = occupied + b * occupied_b + k_head * occupied_h
    best = tl.full([BLOCK], _NO_SLOT, tl.int64)
    for start in range(0, slots, BLOCK):
        s = start + tl.arange(0, BLOCK)
        holds = tl.load(mine + s.to(tl.int64) * occupied_s, mask=s < slots, other=0) != 0
        rank = _sum_ranks(ranks, first, kv_heads, s, padded, HEADS, BLOCK)
        is_protected = _protected(
            protected + b * mask_b + k_head * mask_h, mask_s, positions + decision * slots, sinks, newest, s, slots,
            ARRIVAL, PROTECTED, PROTECT_NEWEST,
        )
        count = GROUP * kv_heads * HEAD_DIM
        best = tl.minimum(best, _candidates(rank, holds, is_protected, score + decision * slots, s, slots, count))
    tl.store(slot + decision, _slot_of(best))
    if ARRIVAL and decision == 0:
        tl.store(seen, tl.load(seen) + 1)
    if DISCARD:
        tl.debug_barrier()
        lines = kv_heads * padded // 32
        for start in range(0, lines, 512):
            line = tl.minimum(start + tl.arange(0, 512), lines - 1)
            discard(ranks + first * padded + line * 32)
