"""Device functions for the scores and ranks of one (row, KV head) at a decode step, from its logits.

The rule says what tokens are ranked by. SUM: the sum of a token's weights so far (times ||v||_1 with MAGNITUDE).
NEWEST: the logarithm of the newest query's weight. RENEW: the position of the last query that gave it at least `alpha`,
or its own; of equal ones, the oldest token goes first. ACTIVATE: LazyEviction's `importance`. RANDOM: a number that the
token got on arrival. AGE. Two rules leave eviction to the caller: with NOTHING, a new token takes slot `budget`; with
APPEND, it takes the first free slot, and its query enters a window of the last queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..numerics import LOG2_E, finite_or_zero, log2_or_minus_inf, sortable
from ..scratch import discard
from ..softmax import merge_sums

NOTHING = tl.constexpr(0)
SUM = tl.constexpr(1)
NEWEST = tl.constexpr(2)
RENEW = tl.constexpr(3)
ACTIVATE = tl.constexpr(4)
RANDOM = tl.constexpr(5)                                               # from here on, the rules that need no logits
AGE = tl.constexpr(6)
APPEND = tl.constexpr(7)
_NEVER = tl.constexpr(2**63 - 1)
_GAP = tl.constexpr(2**32 - 1)
#: Added to a gap before it divides, as in the authors' code.
_EPSILON = tl.constexpr(1e-5)


@triton.jit
def normalise(
    row_maxima, weight_sums, normalisers, batch_head, splits, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    SPLITS: tl.constexpr
):
    """The shifts of the group's softmaxes and the sums relative to them, [GROUP_PAD] each; also stored to memory."""
    g = tl.arange(0, GROUP_PAD)
    i = tl.arange(0, SPLITS)
    head = batch_head * GROUP + g
    part = head[:, None] * splits + i[None, :]
    there = (g < GROUP)[:, None] & (i < splits)[None, :]
    row_max, total = merge_sums(row_maxima, weight_sums, part, there)
    tl.store(normalisers + head * 2, row_max, mask=g < GROUP)
    tl.store(normalisers + head * 2 + 1, total, mask=g < GROUP)
    return row_max, total


@triton.jit
def _load_slots(
    logits, score, token_index, carried, s, limit, last,
    GROUP_PAD: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, RULE: tl.constexpr, MAGNITUDE: tl.constexpr,
    PROTECTS: tl.constexpr,
):
    """Load what a rule needs of the slots s before `limit`, a multiple of 16, and up to slot `last`."""
    reads = (s < limit) & (s <= last)
    if UNIT == 16:
        reads = s // 16 * 16 < limit                                   # whole vectors: rows are long enough
    logit = tl.full([CHUNK, GROUP_PAD], 0.0, tl.float32)
    old = tl.full([CHUNK], 0.0, tl.float32)
    index = tl.full([CHUNK], 0, tl.int32)
    size = tl.full([CHUNK], 1.0, tl.float32)
    if RULE < RANDOM:
        g = tl.arange(0, GROUP_PAD)
        logit = tl.load(logits + s[:, None] * GROUP_PAD + g[None, :], mask=reads[:, None], other=0.0)
    if (RULE == SUM) | (RULE == RENEW) | (RULE == RANDOM):
        old = tl.load(score + s, mask=reads, other=0.0)
    if PROTECTS or (RULE == AGE) | (RULE == RENEW):
        index = tl.load(token_index + s, mask=reads, other=0)
    if MAGNITUDE:
        size = tl.load(carried + s, mask=reads, other=0.0)
    if RULE == ACTIVATE:
        size = tl.load(carried + s, mask=reads, other=0)
    return reads, logit, old, index, size


@triton.jit
def _weigh(logit, row_max, total, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, LOG: tl.constexpr):
    """The group's mean weight of each slot, and its rank: the same, or the base-2 logarithm of the group's sum."""
    valid = tl.arange(0, GROUP_PAD) < GROUP
    empty = (total == 0.0) | ~valid
    if LOG:
        log_total = tl.where(empty, float("inf"), tl.log2(tl.where(empty, 1.0, total)))
        # Subtract row_max and log_total one after the other: their sum would lose digits if the maximum is large.
        x = (logit - row_max[None, :]) - log_total[None, :]
        highest = finite_or_zero(tl.max(x, 1))
        shifted = tl.sum(tl.exp2(x - highest[:, None]), 1)
        return tl.exp2(highest) * shifted / GROUP, highest + log2_or_minus_inf(shifted)
    else:
        inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
        weight = tl.sum(tl.where(valid[None, :], tl.exp2(logit - row_max[None, :]) * inverse[None, :], 0.0), 1) / GROUP
        return weight, weight


@triton.jit
def importance(age, gap, shift):
    """2 sigmoid(-shift - age / gap) + 2 sigmoid(1 - gap), the second term 0 for a gap of 0: float32 of int32 times."""
    longest = gap.to(tl.float32)
    x = age.to(tl.float32) / (longest + _EPSILON) + shift
    recurring = tl.where(gap > 0, 2.0 / (1.0 + tl.exp2((longest - 1.0) * LOG2_E)), 0.0)
    return 2.0 / (1.0 + tl.exp2(x * LOG2_E)) + recurring


@triton.jit
def new_activation(new_score, now):
    """What `carried` holds of a new token with ACTIVATE: its own query activates it, which is a gap of 1, or not. With
    a gap the importance is at least 1, without one it is 0."""
    return tl.where(new_score > 0.5, (now << 32) + 1, (now - 1) << 32)


@triton.jit
def score_slots(
    logits, score, token_index, carried, ranks, row_max, total, begin, limit, tokens, number, budget, new_score,
    new_size, now, sinks, recent, alpha, shift, padded,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, RULE: tl.constexpr,
    MAGNITUDE: tl.constexpr, PROTECTS: tl.constexpr, RANKS: tl.constexpr, DISCARD: tl.constexpr,
):
    """Store the scores of slots begin to limit, with RANKS also the ranks. Returns the lowest candidate, an int64 with
    the rank in its upper and the slot, or with RENEW the token's index, in its lower half, and the new token's score.
    All pointers are at the row.

    The first `tokens` slots are occupied. Slot `budget` stands for the new token, valid token `number` of the row.
    Other slots are free. new_score: the new token's score before this step's weights. new_size: its ||v||_1. now, with
    ACTIVATE: its position. carried: ||v||_1 with MAGNITUDE; with ACTIVATE int64, the position of the query that
    activated a token last in the upper half, and its longest gap in the lower. limit is a multiple of 16, at most
    `budget` + 16. Rows of logits have `padded` slots, arbitrary behind `budget`.
    """
    s = begin + tl.arange(0, CHUNK)
    # Prefetch: the next chunk's loads overlap the ranking of this one.
    reads, logit, old, index, size = _load_slots(
        logits, score, token_index, carried, s, limit, budget, GROUP_PAD, UNIT, CHUNK, RULE, MAGNITUDE, PROTECTS
    )
    best = tl.full([CHUNK], _NEVER, tl.int64)
    newest = tl.full([CHUNK], 0.0, tl.float32)
    for start in range(begin, limit, CHUNK):
        ahead = s + CHUNK
        next_reads, next_logit, next_old, next_index, next_size = _load_slots(
            logits, score, token_index, carried, ahead, limit, budget,
            GROUP_PAD, UNIT, CHUNK, RULE, MAGNITUDE, PROTECTS,
        )
        cached = (s < tokens) & reads
        arrives = (s == budget) & reads
        candidate = cached | arrives
        index = tl.where(arrives, number, index)
        if PROTECTS:
            candidate = candidate & (index >= sinks) & (index <= number - recent)
        updated = tl.where(arrives, new_score, old)
        if RULE < RANDOM:
            weight, rank = _weigh(logit, row_max, total, GROUP, GROUP_PAD, RULE == NEWEST)
            if RULE == SUM:
                updated += weight
                rank = updated
            elif RULE == RENEW:
                updated = tl.where(cached & (weight >= alpha), new_score, updated)
            elif RULE == ACTIVATE:
                last = tl.where(arrives, now - 1, size >> 32)
                gap = tl.where(arrives, 0, size & _GAP)
                gap = tl.where(weight >= alpha, tl.maximum(gap, now - last), gap)
                last = tl.where(weight >= alpha, now, last)
                tl.store(carried + s, (last << 32) + gap, mask=cached)
                updated = importance((now - last).to(tl.int32), gap.to(tl.int32), shift)
                rank = updated
            else:
                updated = weight
            tl.store(score + s, tl.where(cached, updated, float("-inf")), mask=reads)
        else:
            rank = updated
        if MAGNITUDE:
            rank = updated * tl.where(arrives, new_size, size)
        # Rank in the upper half, slot in the lower: one integer minimum decides, ties included.
        code = index if RULE == AGE else updated.to(tl.int32) if RULE == RENEW else sortable(rank)
        lower = index if RULE == RENEW else s
        wide = (code.to(tl.int64) << 32) | lower.to(tl.int64)
        if RANKS:
            tl.store(ranks + s, wide if RULE == RENEW else rank, mask=reads)
        best = tl.minimum(best, tl.where(candidate, wide, _NEVER))
        newest += tl.where(arrives, updated, 0.0)
        if DISCARD and RULE < RANDOM:
            tl.debug_barrier()
            line = start * GROUP_PAD + tl.arange(0, CHUNK * GROUP_PAD // 32) * 32
            discard(logits + tl.minimum(line, padded * GROUP_PAD - 32))
        s, reads, logit, old, index, size = ahead, next_reads, next_logit, next_old, next_index, next_size
    return tl.min(best, 0), tl.sum(newest, 0)


@triton.jit
def slot_of(token_index, index, tokens, budget, CHUNK: tl.constexpr):
    """The slot below `tokens` of the token with this index; `budget` if there is none. token_index is at the row."""
    found = tl.full([CHUNK], 0, tl.int32) + budget
    for start in range(0, tokens, CHUNK):
        s = start + tl.arange(0, CHUNK)
        here = tl.load(token_index + s, mask=s < tokens, other=-1) == index
        found = tl.minimum(found, tl.where(here, s, budget))
    return tl.min(found, 0)


@triton.jit
def random_score(position, offset):
    """The top 24 bits of splitmix64; `offset` is its state without the position's part; int64 [N] -> float32 [N]."""
    z = (position + offset).to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 40).to(tl.int64).to(tl.float32)


@triton.jit
def new_score_of(seen, offset, RULE: tl.constexpr):
    """The score of a token on arrival."""
    score = 0.0
    if RULE == RANDOM:
        score = tl.sum(random_score(tl.load(seen + tl.arange(0, 1)), offset), 0)
    if RULE == RENEW:
        score = tl.load(seen).to(tl.float32)
    if RULE == APPEND:
        score = float("inf")                                           # not ranked yet
    return score
