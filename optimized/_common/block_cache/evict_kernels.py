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
from ..numerics import sortable

_NEVER = tl.constexpr(2**31 - 1)
_LOWEST = tl.constexpr(-(2**31))
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
    "count", "heads", "slots", "budget", "key_b", "key_h", "key_t", "value_b", "value_h", "value_t", "valid_b",
])
def arrive_kernel(
    new_key, new_value, valid, key, value, occupied, positions, score, token_index, magnitude, valid_seen, seen,
    count, heads, slots, budget, key_b, key_h, key_t, key_d, value_b, value_h, value_t, value_d, valid_b, valid_q,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr, MAGNITUDE: tl.constexpr,
):
    """Program (TOKENS of the block, batch_head): stores these tokens with a score of 0. Padding leaves its slot free.

    valid_seen [B * Hkv] int32: the row's valid tokens before this block. magnitude, if MAGNITUDE: ||v||_1.
    """
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
    tl.store(positions + at, tl.where(here, tl.load(seen) + i64, -1), mask=in_block)
    tl.store(score + at, tl.where(here, 0.0, float("-inf")), mask=in_block)
    number = tl.load(valid_seen + batch_head) + _valid_before(valid + b * valid_b, valid_q, first, COUNTED)
    number += tl.cumsum(tl.where(here, 1, 0), 0) - 1
    tl.store(token_index + at, number, mask=in_block)
    if MAGNITUDE:
        tl.store(magnitude + at, tl.sum(tl.abs(v.to(tl.float32)), 1), mask=in_block)


@triton.jit
def _write_codes(
    codes, rank, protected, occupied, token_index, end, sinks, recent_from,
    CHUNK: tl.constexpr, BY_AGE: tl.constexpr, PROTECTED: tl.constexpr,
):
    """Store the slots' ranks as integers in the order of eviction, _NEVER for slots that are not candidates. Returns
    the candidates' lowest and highest code."""
    lowest = tl.full([CHUNK], _NEVER, tl.int32)
    highest = tl.full([CHUNK], _LOWEST, tl.int32)
    for start in range(0, end, CHUNK):
        s = start + tl.arange(0, CHUNK)
        holds = tl.load(occupied + s, mask=s < end, other=0) != 0
        index = tl.load(token_index + s, mask=holds, other=0)
        candidate = holds & (index >= sinks) & (index < recent_from)
        if PROTECTED:
            candidate = candidate & (tl.load(protected + s, mask=holds, other=1) == 0)
        code = index
        if not BY_AGE:
            code = sortable(tl.load(rank + s, mask=holds, other=0.0))
        code = tl.where(candidate, code, _NEVER)
        tl.store(codes + s, code, mask=s < end)
        lowest = tl.minimum(lowest, code)
        highest = tl.maximum(highest, tl.where(candidate, code, _LOWEST))
    tl.debug_barrier()
    return tl.min(lowest, 0), tl.max(highest, 0)


@triton.jit
def _threshold(codes, lowest, highest, end, wanted, CHUNK: tl.constexpr):
    """The `wanted`-th lowest code, and the number of codes below it. Searches its base-16 digits by counting."""
    base = lowest.to(tl.int64)
    reach = tl.where(wanted > 1, highest.to(tl.int64) - base, 0)
    unit = base * 0 + 1
    while unit * 15 < reach:
        unit *= 16
    digit = tl.arange(0, 16).to(tl.int64)
    while (unit > 0) & (reach > 0):
        cut = base + digit * unit
        counted = tl.full([CHUNK, 16], 0, tl.int32)
        for start in range(0, end, CHUNK):
            s = start + tl.arange(0, CHUNK)
            code = tl.load(codes + s, mask=s < end, other=_NEVER).to(tl.int64)
            counted += tl.where(code[:, None] < cut[None, :], 1, 0)
        # The largest digit with fewer than `wanted` codes below base + digit * unit.
        base = tl.max(tl.where(tl.sum(counted, 0) < wanted, cut, base), 0)
        unit //= 16
    below = tl.full([CHUNK], 0, tl.int32)
    for start in range(0, end, CHUNK):
        s = start + tl.arange(0, CHUNK)
        below += tl.where(tl.load(codes + s, mask=s < end, other=_NEVER) < base, 1, 0)
    return base.to(tl.int32), tl.sum(below, 0)


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
    code = tl.load(codes + s, mask=s < budget, other=_NEVER)
    leaves, tied = _leaving(code, threshold, tied, ties)
    return tl.where((leaves | (s >= before)) & (s < budget), 1, 0), tied


@triton.jit(do_not_specialize=["count", "slots", "rank_h", "protected_h", "budget", "sinks", "recent"])
def choose_kernel(
    rank, protected, occupied, token_index, valid_seen, codes, free_slots, destination,
    count, slots, rank_h, protected_h, budget, sinks, recent,
    CHUNK: tl.constexpr, SEARCH: tl.constexpr, TOKENS: tl.constexpr, BY_AGE: tl.constexpr, PROTECTED: tl.constexpr,
):
    """Program batch_head: the destination of each token of the block, [B * Hkv, count]: a slot below budget, -1 if
    evicted.

    The j-th kept token of the block takes the j-th free slot (`free_slots`). rank and protected have one row per
    batch_head. valid_seen: the row's valid tokens, the block included. The oldest `sinks`, the newest `recent` and the
    `protected` tokens are not evicted; the caller ensures that enough others exist.
    """
    batch_head = tl.program_id(0).to(tl.int64)
    end = budget + count
    occupied += batch_head * slots
    codes += batch_head * end
    free_slots += batch_head * count
    total = tl.load(valid_seen + batch_head)
    before = _valid_before(occupied, 1, budget, CHUNK)                 # the cache's tokens are in its first slots
    leave = tl.maximum(before + _valid_before(occupied + budget, 1, count, COUNTED) - budget, 0)
    lowest, highest = _write_codes(
        codes, rank + batch_head * rank_h, protected + batch_head * protected_h, occupied,
        token_index + batch_head * slots, end, sinks, tl.where(recent > 0, total - recent, _NEVER), CHUNK, BY_AGE,
        PROTECTED,
    )
    threshold = leave * 0 + _LOWEST
    ties = leave * 0                                        # evictions among the codes equal to the threshold
    if leave > 0:
        threshold, below = _threshold(codes, lowest, highest, end, leave, SEARCH)
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
        code = tl.load(codes + budget + i, mask=i < count, other=_NEVER)
        leaves, tied = _leaving(code, threshold, tied, ties)
        here = tl.load(occupied + budget + i, mask=i < count, other=0) != 0
        kept = tl.where(here & (leaves == 0), 1, 0)
        number = num_kept + tl.cumsum(kept, 0) - kept
        to = tl.load(free_slots + number, mask=(kept != 0) & (number < free), other=-1)
        tl.store(destination + batch_head * count + i, to, mask=i < count)
        num_kept += tl.sum(kept, 0)


@triton.jit(do_not_specialize=["count", "slots", "budget"])
def settle_kernel(
    destination, key, value, occupied, positions, score, token_index, carried,
    count, slots, budget,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr, CARRIED: tl.constexpr,
):
    """Program (TOKENS of the block, batch_head): moves kept tokens to their destinations and frees the block's slots.
    """
    blocks = tl.cdiv(count, TOKENS)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    i = (tl.program_id(0) % blocks) * TOKENS + tl.arange(0, TOKENS)
    in_block = i < count
    to = tl.load(destination + batch_head * count + i, mask=in_block, other=-1).to(tl.int64)
    kept = to >= 0
    source = batch_head * slots + budget + i
    target = batch_head * slots + to
    d = tl.arange(0, D_PAD).to(tl.int64)
    tile = kept[:, None] & (d < HEAD_DIM)[None, :]
    for tensor in tl.static_range(2):
        cache = key if tensor == 0 else value
        rows = tl.load(cache + source[:, None] * HEAD_DIM + d[None, :], mask=tile)
        tl.store(cache + target[:, None] * HEAD_DIM + d[None, :], rows, mask=tile)
    tl.store(occupied + target, kept, mask=kept)
    tl.store(positions + target, tl.load(positions + source, mask=kept), mask=kept)
    tl.store(score + target, tl.load(score + source, mask=kept), mask=kept)
    tl.store(token_index + target, tl.load(token_index + source, mask=kept), mask=kept)
    if CARRIED:
        tl.store(carried + target, tl.load(carried + source, mask=kept), mask=kept)
    tl.debug_barrier()
    tl.store(occupied + source, kept & (i < 0), mask=in_block)
    tl.store(positions + source, tl.full([TOKENS], -1, tl.int64), mask=in_block)
    tl.store(score + source, tl.full([TOKENS], float("-inf"), tl.float32), mask=in_block)
