"""The choice of a block's evictions by one program per head that keeps the codes of all slots in registers.

Buffers are as in `evict_kernels.py`, whose kernel passes over the slots in chunks, of any number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..numerics import previous_done
from .evict_kernels import NEVER, code_of, count_all, ends_of


@triton.jit
def threshold_of(code, wanted):
    """A threshold for codes [SLOTS], and how many candidates' codes are below it: at most `wanted`, and together with
    those equal to it at least `wanted`. int64 codes are at most 2^61. SLOTS: at most 2^15, since a count has 16 bits of
    a sum.

    Finds two bits at a time, by three pivots: one sum counts the codes below each. It ends when `wanted` codes are
    below a pivot. A histogram of more bits takes longer.
    """
    least, never = ends_of(code.dtype)
    base = tl.min(code, 0).to(tl.int64)
    reach = tl.max(tl.where(code != never, code, least), 0).to(tl.int64) - base
    wide = code.to(tl.int64)
    below, shift = wanted * 0, wanted * 0
    while (reach >> shift) > 3:
        shift += 2
    while shift >= 0:
        step = base * 0 + 1 << shift
        count = tl.where(wide < base + step, 1, 0).to(tl.int64)
        count += tl.where(wide < base + 2 * step, 1 << 16, 0).to(tl.int64)
        count += tl.where(wide < base + 3 * step, 1 << 32, 0).to(tl.int64)
        total = tl.sum(count, 0)
        met = wanted < 0
        for number in tl.static_range(3):
            lower = ((total >> (16 * number)) & 0xFFFF).to(tl.int32)
            if lower < wanted:
                below = lower
                base += step
            met = met | (lower == wanted)
        shift -= 2
        if met:
            below = wanted
            base += step                               # a code's type holds it: a pivot above `never` counts all slots
            shift = wanted * 0 - 1
    return base.to(code.dtype), below


@triton.jit(do_not_specialize=["count", "came", "slots", "rank_h", "protected_h", "budget", "sinks", "recent"])
def choose_kernel(
    rank, protected, occupied, token_index, valid_seen, seen, free_slots, destination, count, came, slots, rank_h,
    protected_h, budget, sinks, recent,
    SLOTS: tl.constexpr, BY_AGE: tl.constexpr, PROTECTED: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Program batch_head: the destination of each token of the block, as `evict_kernel` stores it. SLOTS: at least
    budget + count."""
    previous_done(DEPENDENT)
    batch_head = tl.program_id(0).to(tl.int64)
    end = budget + count
    at = batch_head * slots
    free_slots += batch_head * count
    destination += batch_head * count
    count_all(seen, came)
    recent_from = tl.where(recent > 0, tl.load(valid_seen + batch_head) - recent, NEVER)
    s = tl.arange(0, SLOTS)
    _, never = ends_of(tl.int64 if rank.dtype.element_ty == tl.int64 else tl.int32)
    code, holds = code_of(
        s, end, rank + batch_head * rank_h, protected + batch_head * protected_h, occupied + at, token_index + at,
        sinks, recent_from, never, BY_AGE, PROTECTED,
    )
    leave = tl.sum(tl.where(holds, 1, 0), 0) - budget
    leaves = s < 0
    if leave > 0:
        threshold, below = threshold_of(code, leave)
        leaves = code < threshold
        if below < leave:
            # Ties are evicted from the lowest slot up.
            tied = tl.where(code == threshold, 1, 0)
            leaves = leaves | ((tied != 0) & (tl.cumsum(tied, 0) <= leave - below))
    stays = holds & (leaves == 0)
    # Free slots of the cache, and kept tokens of the block, in one sum: the j-th token takes the j-th slot.
    one = tl.where(s < budget, tl.where(stays, 0, 1), tl.where(stays, 1 << 16, 0))
    number = tl.cumsum(one, 0) - one
    free, kept = number & 0xFFFF, number >> 16
    tl.store(free_slots + free, s, mask=(one == 1) & (free < count))
    tl.debug_barrier()
    to = tl.load(free_slots + kept, mask=(one > 1) & (kept < tl.sum(one & 0xFFFF, 0)), other=-1)
    tl.store(destination + (s - budget), to, mask=(s >= budget) & (s < end))
