"""Kernels that store a block of tokens in its slots, choose the evictions, and move the kept tokens below the budget.

Buffers of a state are contiguous, [B * Hkv, slots, ...]; `batch_head` is the index of a (row of the batch, KV head).
Below `budget`, a head's occupied slots come first: a cache fills without gaps, and an evicted token's slot is reused at
once. `token_index` is a token's index among the valid tokens of its row. It identifies the newest and the oldest
without a sort.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import SMALL_TILES
from ..numerics import previous_done, sortable
from ..scratch import is_last
from .score_kernels import random_score

NEVER = tl.constexpr(2**31 - 1)
_LOWEST = tl.constexpr(-(2**31))
_WIDE_NEVER = tl.constexpr(2**63 - 1)
_WIDE_LOWEST = tl.constexpr(-(2**63))
#: Tokens of a block that are counted at a time. In the interpreter few, so that tests cover several rounds.
COUNTED = tl.constexpr(16 if SMALL_TILES else 128)


@triton.jit
def _valid_before(valid, valid_q, end, CHUNK: tl.constexpr):
    """The number of valid tokens (no padding) among the first `end` of a block."""
    total = tl.full([CHUNK], 0, tl.int32)
    for start in range(0, end, CHUNK):
        i = start + tl.arange(0, CHUNK)
        there = tl.load(valid + i.to(tl.int64) * valid_q, mask=i < end, other=0) != 0
        total += tl.where(there, 1, 0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=[
    "count", "heads", "slots", "budget", "offset", "key_b", "key_h", "key_t", "value_b", "value_h", "value_t",
    "valid_b",
])
def arrive_kernel(
    new_key, new_value, valid, key, value, occupied, positions, score, token_index, magnitude, valid_seen, seen,
    counts, completion_counters,
    count, heads, slots, budget, offset,
    key_b, key_h, key_t, key_d, value_b, value_h, value_t, value_d, valid_b, valid_q,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr, MAGNITUDE: tl.constexpr, COUNTS: tl.constexpr,
    RANDOM: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Program (TOKENS of the block, batch_head): stores these tokens with a score of 0, or with RANDOM that of
    `random_score`. Padding leaves its slot free.

    valid_seen [B * Hkv] int32: the row's valid tokens, to which a head's last program adds those of this block, as to
    `counts` if COUNTS. magnitude, if MAGNITUDE: ||v||_1.
    """
    previous_done(DEPENDENT)
    blocks = tl.cdiv(count, TOKENS)
    first = (tl.program_id(0) % blocks) * TOKENS
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    b, head = batch_head // heads, batch_head % heads
    i = first + tl.arange(0, TOKENS)
    i64 = i.to(tl.int64)
    in_block = i < count
    here = tl.load(valid + b * valid_b + i64 * valid_q, mask=in_block, other=0) != 0
    d = tl.arange(0, D_PAD).to(tl.int64)
    tile = here[:, None] & (d < HEAD_DIM)[None, :]
    k = tl.load(
        new_key + b * key_b + head * key_h + i64[:, None] * key_t + d[None, :] * key_d, mask=tile, other=0.0
    )
    v = tl.load(
        new_value + b * value_b + head * value_h + i64[:, None] * value_t + d[None, :] * value_d, mask=tile, other=0.0
    )
    at = batch_head * slots + budget + i64
    tl.store(key + at[:, None] * HEAD_DIM + d[None, :], k, mask=tile)
    tl.store(value + at[:, None] * HEAD_DIM + d[None, :], v, mask=tile)
    tl.store(occupied + at, here, mask=in_block)
    position = tl.load(seen) + i64
    tl.store(positions + at, tl.where(here, position, -1), mask=in_block)
    first_score = tl.zeros([TOKENS], tl.float32)
    if RANDOM:
        first_score = random_score(position, offset)
    tl.store(score + at, tl.where(here, first_score, float("-inf")), mask=in_block)
    before = tl.load(valid_seen + batch_head)
    number = before + _valid_before(valid + b * valid_b, valid_q, first, COUNTED)
    number += tl.cumsum(tl.where(here, 1, 0), 0) - 1
    tl.store(token_index + at, number, mask=in_block)
    if MAGNITUDE:
        tl.store(magnitude + at, tl.sum(tl.abs(v.to(tl.float32)), 1), mask=in_block)
    if is_last(completion_counters + batch_head, blocks):
        came = _valid_before(valid + b * valid_b, valid_q, count, COUNTED)
        tl.store(valid_seen + batch_head, before + came)
        if COUNTS:
            tl.store(counts + batch_head, tl.load(counts + batch_head) + came)


@triton.jit
def ends_of(dtype: tl.constexpr):
    """The lowest and the highest number of a dtype, int32 or int64. The highest is no token's code."""
    if dtype == tl.int64:
        return tl.full([], _WIDE_LOWEST, tl.int64), tl.full([], _WIDE_NEVER, tl.int64)
    else:
        return tl.full([], _LOWEST, tl.int32), tl.full([], NEVER, tl.int32)


@triton.jit
def code_of(
    s, end, rank, protected, occupied, token_index, sinks, recent_from, never, BY_AGE: tl.constexpr,
    PROTECTED: tl.constexpr,
):
    """The ranks of slots s, float32 or int64, as integers in the order of eviction, `never` for slots that are not
    candidates. Also whether there is a token. Pointers are at the head."""
    holds, index = tokens_of(s, end, occupied, token_index)
    return code_among(s, end, holds, index, rank, protected, sinks, recent_from, never, BY_AGE, PROTECTED), holds


@triton.jit
def tokens_of(s, end, occupied, token_index):
    """Whether slots s hold tokens, and their indices, arbitrary for free slots: no load waits for another."""
    holds = tl.load(occupied + s, mask=s < end, other=0) != 0
    return holds, tl.load(token_index + s, mask=s < end, other=0)


@triton.jit
def code_among(
    s, end, holds, index, rank, protected, sinks, recent_from, never, BY_AGE: tl.constexpr, PROTECTED: tl.constexpr
):
    """The codes of `code_of`, after `tokens_of`."""
    candidate = holds & (index >= sinks) & (index < recent_from)
    if PROTECTED:
        candidate = candidate & (tl.load(protected + s, mask=s < end, other=1) == 0)
    code = index
    if not BY_AGE:
        code = tl.load(rank + s, mask=s < end, other=0)
        if rank.dtype.element_ty == tl.float32:
            code = sortable(code)
    return tl.where(candidate, code, never)


@triton.jit
def _write_codes(
    codes, rank, protected, occupied, token_index, end, sinks, recent_from,
    CHUNK: tl.constexpr, BY_AGE: tl.constexpr, PROTECTED: tl.constexpr,
):
    """Store the slots' codes. Returns the candidates' lowest and highest code."""
    least, never = ends_of(codes.dtype.element_ty)
    lowest = tl.zeros([CHUNK], codes.dtype.element_ty) + never
    highest = tl.zeros([CHUNK], codes.dtype.element_ty) + least
    for start in range(0, end, CHUNK):
        s = start + tl.arange(0, CHUNK)
        code, _ = code_of(
            s, end, rank, protected, occupied, token_index, sinks, recent_from, never, BY_AGE, PROTECTED
        )
        tl.store(codes + s, code, mask=s < end)
        lowest = tl.minimum(lowest, code)
        highest = tl.maximum(highest, tl.where(code != never, code, least))
    tl.debug_barrier()
    return tl.min(lowest, 0), tl.max(highest, 0)


@triton.jit
def _threshold(codes, lowest, highest, end, wanted, CHUNK: tl.constexpr):
    """The `wanted`-th lowest code, and the number of codes below it. Finds its base-256 digits, from histograms; the
    first one is `lowest`, so that the eviction of one token needs none."""
    _, never = ends_of(codes.dtype.element_ty)
    base = lowest.to(tl.int64)
    below = wanted * 0
    if wanted > 1:
        reach = highest.to(tl.int64) - base
        shift = wanted * 0
        while (reach >> shift) > 255:
            shift += 8
        while shift >= 0:
            count = tl.full([256], 0, tl.int32)
            for start in range(0, end, CHUNK):
                s = start + tl.arange(0, CHUNK)
                code = tl.load(codes + s, mask=s < end, other=never)
                digit = (code.to(tl.int64) - base) >> shift
                valid = (digit >= 0) & (digit < 256) & (code != never)
                count += tl.histogram(digit.to(tl.int32) & 255, 256, mask=valid)
            # The first digit with at least `wanted` codes up to it. Digits before it and their codes, in one sum.
            upto = below + tl.cumsum(count, 0)
            earlier = tl.sum(tl.where(upto < wanted, (1 << 32) + count.to(tl.int64), 0), 0)
            below += (earlier & 0x7FFFFFFF).to(tl.int32)
            base += (earlier >> 32) << shift
            shift -= 8
    return base.to(codes.dtype.element_ty), below


@triton.jit
def _leaving(code, threshold, tied, ties):
    """Which of these tokens are evicted. Of codes at the threshold the first `ties` are; `tied` are in lower slots."""
    equal = tl.where(code == threshold, 1, 0)
    before = tied + tl.cumsum(equal, 0) - equal
    return (code < threshold) | ((equal != 0) & (before < ties)), tied + tl.sum(equal, 0)


@triton.jit
def _free_among(codes, s, before, threshold, tied, ties, budget):
    """Which of the slots s below `budget` are free after the evictions, as 0 or 1: those whose token is evicted, and
    those from `before` on, which had none. Also returns `tied` after these slots."""
    _, never = ends_of(codes.dtype.element_ty)
    code = tl.load(codes + s, mask=s < budget, other=never)
    leaves, tied = _leaving(code, threshold, tied, ties)
    return tl.where((leaves | (s >= before)) & (s < budget), 1, 0), tied


@triton.jit
def move(
    dest_slot, key, value, occupied, positions, score, token_index, carried, begin, end,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr, CARRIED: tl.constexpr,
):
    """Move the tokens in slots begin to end to the slots in `dest_slot`, all before `begin`, and free their old slots.
    Pointers are at the head."""
    d = tl.arange(0, D_PAD).to(tl.int64)
    for start in range(begin, end, TOKENS):
        s = start + tl.arange(0, TOKENS)
        to = tl.load(dest_slot + s, mask=s < end, other=-1).to(tl.int64)
        moves = to >= 0
        source = s.to(tl.int64)
        tile = moves[:, None] & (d < HEAD_DIM)[None, :]
        for tensor in tl.static_range(2):
            cache = key if tensor == 0 else value
            rows = tl.load(cache + source[:, None] * HEAD_DIM + d[None, :], mask=tile)
            tl.store(cache + to[:, None] * HEAD_DIM + d[None, :], rows, mask=tile)
        tl.store(occupied + to, moves, mask=moves)
        tl.store(positions + to, tl.load(positions + source, mask=moves), mask=moves)
        tl.store(score + to, tl.load(score + source, mask=moves), mask=moves)
        tl.store(token_index + to, tl.load(token_index + source, mask=moves), mask=moves)
        if CARRIED:
            tl.store(carried + to, tl.load(carried + source, mask=moves), mask=moves)
        tl.debug_barrier()
        tl.store(occupied + source, moves & (s < 0), mask=s < end)
        tl.store(positions + source, tl.full([TOKENS], -1, tl.int64), mask=s < end)
        tl.store(score + source, tl.full([TOKENS], float("-inf"), tl.float32), mask=s < end)


@triton.jit
def count_all(seen, count):
    """Add a block's tokens to those of the state, once per launch."""
    if tl.program_id(0) == 0:
        tl.store(seen, tl.load(seen) + count)


@triton.jit(do_not_specialize=["count", "came", "slots", "rank_h", "protected_h", "budget", "sinks", "recent"])
def evict_kernel(
    rank, protected, key, value, occupied, positions, score, token_index, carried, valid_seen, seen, codes, free_slots,
    destination, count, came, slots, rank_h, protected_h, budget, sinks, recent,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr,
    BY_AGE: tl.constexpr, PROTECTED: tl.constexpr, CARRIED: tl.constexpr, MOVED: tl.constexpr,
):
    """Program batch_head: the destination of each token of the block, [B * Hkv, count]: a slot below budget, -1 if
    evicted. Moves them there, MOVED at a time; if MOVED is 0, `settle_kernel` does.

    The j-th kept token of the block takes the j-th free slot (`free_slots`). rank and protected have one row per
    batch_head. valid_seen: the row's valid tokens, the block included. The oldest `sinks`, the newest `recent` and the
    `protected` tokens are not evicted; the caller ensures that enough others exist. `seen` grows by `came`.
    """
    batch_head = tl.program_id(0).to(tl.int64)
    end = budget + count
    at = batch_head * slots
    occupied += at
    codes += batch_head * end
    free_slots += batch_head * count
    destination += batch_head * count
    count_all(seen, came)
    total = tl.load(valid_seen + batch_head)
    before = _valid_before(occupied, 1, budget, CHUNK)                 # the cache's tokens are in its first slots
    leave = tl.maximum(before + _valid_before(occupied + budget, 1, count, COUNTED) - budget, 0)
    lowest, highest = _write_codes(
        codes, rank + batch_head * rank_h, protected + batch_head * protected_h, occupied, token_index + at, end, sinks,
        tl.where(recent > 0, total - recent, NEVER), CHUNK, BY_AGE, PROTECTED,
    )
    threshold, never = ends_of(codes.dtype.element_ty)
    ties = leave * 0                                        # evictions among the codes equal to the threshold
    if leave > 0:
        threshold, below = _threshold(codes, lowest, highest, end, leave, CHUNK)
        ties = leave - below
    # The first free slots of the cache, as many as the block may need. Ties are evicted from the lowest slot up.
    tied = leave * 0
    free = leave * 0
    for start in range(0, budget, CHUNK):
        s = start + tl.arange(0, CHUNK)
        is_free, tied = _free_among(codes, s, before, threshold, tied, ties, budget)
        number = free + tl.cumsum(is_free, 0) - is_free
        tl.store(free_slots + number, s, mask=(is_free != 0) & (number < count))
        free += tl.sum(is_free, 0)
    tl.debug_barrier()
    num_kept = leave * 0
    for start in range(0, count, TOKENS):
        i = start + tl.arange(0, TOKENS)
        code = tl.load(codes + budget + i, mask=i < count, other=never)
        leaves, tied = _leaving(code, threshold, tied, ties)
        here = tl.load(occupied + budget + i, mask=i < count, other=0) != 0
        kept = tl.where(here & (leaves == 0), 1, 0)
        number = num_kept + tl.cumsum(kept, 0) - kept
        to = tl.load(free_slots + number, mask=(kept != 0) & (number < free), other=-1)
        tl.store(destination + i, to, mask=i < count)
        num_kept += tl.sum(kept, 0)
    if MOVED > 0:
        tl.debug_barrier()
        move(
            destination - budget, key + at * HEAD_DIM, value + at * HEAD_DIM, occupied, positions + at, score + at,
            token_index + at, (carried + at) if CARRIED else carried, budget, end, HEAD_DIM, D_PAD, MOVED, CARRIED,
        )


@triton.jit(do_not_specialize=["count", "slots", "budget", "destination_h"])
def settle_kernel(
    destination, key, value, occupied, positions, score, token_index, carried, count, slots, budget, destination_h,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr, CARRIED: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Program (TOKENS of the block, batch_head): moves these tokens to the destinations of `evict_kernel`."""
    previous_done(DEPENDENT)
    blocks = tl.cdiv(count, TOKENS)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks) * TOKENS
    at = batch_head * slots
    move(
        destination + batch_head * destination_h - budget, key + at * HEAD_DIM, value + at * HEAD_DIM, occupied + at,
        positions + at, score + at, token_index + at, (carried + at) if CARRIED else carried, budget + first,
        budget + tl.minimum(first + TOKENS, count), HEAD_DIM, D_PAD, TOKENS, CARRIED,
    )
