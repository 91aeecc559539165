"""Kernels that choose the evictions of a block with many programs per head, for few heads and short caches.

The programs of `stay_kernel` count, for each of their slots, the tokens of the head that are evicted earlier. Those of
the other kernels assign free slots to tokens of the block, and move them. Buffers are as in `evict_kernels.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .evict_kernels import NEVER, code_of, count_all, ends_of, move


@triton.jit(do_not_specialize=["end", "came", "slots", "rank_h", "protected_h", "budget", "sinks", "recent", "blocks"])
def stay_kernel(
    rank, protected, occupied, token_index, valid_seen, seen, stays, end, came, slots, rank_h, protected_h, budget,
    sinks, recent, blocks,
    SLOTS: tl.constexpr, CHUNK: tl.constexpr, BY_AGE: tl.constexpr, PROTECTED: tl.constexpr, WIDE: tl.constexpr,
):
    """Program (SLOTS slots, batch_head): 1 in stays [B * Hkv, end] int8 for slots whose tokens are not evicted, 0 for
    others and for free slots. CHUNK is a multiple of SLOTS. WIDE: ranks are int64. Otherwise as `evict_kernel`."""
    first = (tl.program_id(0) % blocks) * SLOTS
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    at = batch_head * slots
    occupied += at
    token_index += at
    rank += batch_head * rank_h
    protected += batch_head * protected_h
    count_all(seen, came)
    recent_from = tl.where(recent > 0, tl.load(valid_seen + batch_head) - recent, NEVER)
    _, never = ends_of(tl.int64 if WIDE else tl.int32)
    s = first + tl.arange(0, SLOTS)
    code, holds = code_of(
        s, end, rank, protected, occupied, token_index, sinks, recent_from, never, BY_AGE, PROTECTED
    )
    own_chunk = first // CHUNK * CHUNK                                 # where the chunk of these slots begins
    earlier = tl.zeros([SLOTS, CHUNK], tl.int32)                       # tokens that are evicted earlier
    held = tl.zeros([CHUNK], tl.int32)
    for start in range(0, end, CHUNK):
        other, others_hold = code_of(
            start + tl.arange(0, CHUNK), end, rank, protected, occupied, token_index, sinks, recent_from, never,
            BY_AGE, PROTECTED,
        )
        # Ties are evicted from the lowest slot up.
        earlier += tl.where(other[None, :] < tl.where(start < own_chunk, code + 1, code)[:, None], 1, 0)
        held += tl.where(others_hold, 1, 0)
    in_chunk = own_chunk + tl.arange(0, CHUNK)
    other, _ = code_of(
        in_chunk, end, rank, protected, occupied, token_index, sinks, recent_from, never, BY_AGE, PROTECTED
    )
    earlier += tl.where((other[None, :] == code[:, None]) & (in_chunk[None, :] < s[:, None]), 1, 0)
    leave = tl.sum(held, 0) - budget
    leaves = (code != never) & (tl.sum(earlier, 1) < leave)
    tl.store(stays + batch_head * end + s, (holds & ~leaves).to(tl.int8), mask=s < end)


@triton.jit
def _place(
    stays, free_slots, destination, begin, end, budget, CHUNK: tl.constexpr, TOKENS: tl.constexpr,
):
    """Write the destinations of the block's tokens begin to end, at most TOKENS of them: -1, or for the j-th token of
    the block that stays the j-th free slot. Pointers are at the head."""
    before = begin * 0
    for start in range(0, begin, TOKENS):
        i = start + tl.arange(0, TOKENS)
        before += tl.sum(tl.load(stays + budget + i, mask=i < begin, other=0).to(tl.int32), 0)
    i = begin + tl.arange(0, TOKENS)
    kept = tl.load(stays + budget + i, mask=i < end, other=0).to(tl.int32)
    last = before + tl.sum(kept, 0)
    free = begin * 0
    for start in range(0, budget, CHUNK):
        s = start + tl.arange(0, CHUNK)
        is_free = 1 - tl.load(stays + s, mask=s < budget, other=1).to(tl.int32)
        number = free + tl.cumsum(is_free, 0) - is_free
        tl.store(free_slots + number, s, mask=(is_free != 0) & (number >= before) & (number < last))
        free += tl.sum(is_free, 0)
    tl.debug_barrier()
    number = before + tl.cumsum(kept, 0) - kept
    to = tl.load(free_slots + number, mask=(kept != 0) & (number < free), other=-1)
    tl.store(destination + i, to, mask=i < end)


@triton.jit(do_not_specialize=["count", "budget"])
def place_kernel(
    stays, free_slots, destination, count, budget, CHUNK: tl.constexpr, TOKENS: tl.constexpr,
):
    """Program (TOKENS of the block, batch_head): the destinations of these tokens, [B * Hkv, count]: a slot below
    budget, -1 if evicted. free_slots: scratch like destination."""
    blocks = tl.cdiv(count, TOKENS)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks) * TOKENS
    _place(
        stays + batch_head * (budget + count), free_slots + batch_head * count, destination + batch_head * count,
        first, tl.minimum(first + TOKENS, count), budget, CHUNK, TOKENS,
    )


@triton.jit(do_not_specialize=["count", "slots", "budget"])
def place_and_settle_kernel(
    stays, free_slots, destination, key, value, occupied, positions, score, token_index, carried, count, slots, budget,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, CARRIED: tl.constexpr,
):
    """`place_kernel`, whose programs then move their tokens. No program reads what another one writes: tokens that stay
    keep their slots."""
    blocks = tl.cdiv(count, TOKENS)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks) * TOKENS
    last = tl.minimum(first + TOKENS, count)
    at = batch_head * slots
    destination += batch_head * count
    _place(
        stays + batch_head * (budget + count), free_slots + batch_head * count, destination, first, last, budget, CHUNK,
        TOKENS,
    )
    tl.debug_barrier()
    move(
        destination - budget, key + at * HEAD_DIM, value + at * HEAD_DIM, occupied + at, positions + at, score + at,
        token_index + at, (carried + at) if CARRIED else carried, budget + first, budget + last,
        HEAD_DIM, D_PAD, TOKENS, CARRIED,
    )
