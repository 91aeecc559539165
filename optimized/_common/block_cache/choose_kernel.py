"""The choice of a block's evictions by one program per head that keeps the codes of all slots in registers.

The slots of the cache and those of the block are two tensors: one of both would have up to twice as many elements,
since their number is a power of two. Buffers are as in `evict_kernels.py`, whose kernel passes over the slots in
chunks, of any number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..numerics import previous_done
from .evict_kernels import NEVER, code_among, count_all, ends_of, tokens_of


@triton.jit
def _lower(code, first, second):
    """How many codes are below each of two pivots: 16 bits each of one sum."""
    return tl.sum(tl.where(code < first, 1, 0) + tl.where(code < second, 1 << 16, 0), 0)


@triton.jit
def _span(code, least, never):
    """The lowest code, and the highest of a candidate."""
    return tl.min(code, 0).to(tl.int64), tl.max(tl.where(code != never, code, least), 0).to(tl.int64)


@triton.jit
def threshold_of(cached, new, wanted):
    """A threshold for codes [SLOTS] and [COUNT], and how many candidates' codes are below it: at most `wanted`, and
    together with those equal to it at least `wanted`. int64 codes are at most 2^61. Fewer than 2^15 codes, since a
    count has 16 bits of a sum.

    Divides the range of codes by three each time. It ends when `wanted` codes are below a pivot.
    """
    least, never = ends_of(cached.dtype)
    base, top = _span(cached, least, never)
    other_base, other_top = _span(new, least, never)
    base, top = tl.minimum(base, other_base), tl.maximum(top, other_top)
    below = wanted * 0
    step = (top - base) // 3 + 1
    while step > 0:
        # A third is rounded up, so that pivots exceed the highest code, by a few dozen at most: they are below `never`.
        first, second = (base + step).to(cached.dtype), (base + 2 * step).to(cached.dtype)
        lower = _lower(cached, first, second) + _lower(new, first, second)
        lower_first, lower_second = lower & 0xFFFF, lower >> 16
        if lower_first < wanted:
            below = lower_first
            base += step
        if lower_second < wanted:
            below = lower_second
            base += step
        if (lower_first == wanted) | (lower_second == wanted):
            below = wanted
            base += step
            step = step * 0
        else:
            step = tl.where(step == 1, 0, (step + 2) // 3)
    return base.to(cached.dtype), below


@triton.jit
def settled(cached, new, held, came, leave, free_slots, c, n, budget, count):
    """Evict `leave` tokens: the lowest codes first, ties to the lowest slot. cached, held [SLOTS]: the codes of slots c
    below budget, and whether there is a token; new, came [COUNT]: of the block's slots n. free_slots [count]: scratch.

    Returns which tokens of the cache stay, and the destinations of the block's, -1 for none: the j-th that stays takes
    the j-th free slot. Also the threshold and the number of codes below it, all of which leave.
    """
    leaves, new_leaves = c < 0, n < 0
    threshold, _ = ends_of(cached.dtype)
    below = leave * 0
    if leave > 0:
        threshold, below = threshold_of(cached, new, leave)
        leaves, new_leaves = cached < threshold, new < threshold
        if below < leave:
            tied, new_tied = tl.where(cached == threshold, 1, 0), tl.where(new == threshold, 1, 0)
            leaves = leaves | ((tied != 0) & (tl.cumsum(tied, 0) <= leave - below))
            left = leave - below - tl.sum(tied, 0)
            new_leaves = new_leaves | ((new_tied != 0) & (tl.cumsum(new_tied, 0) <= left))
    stays = held & (leaves == 0)
    is_free = tl.where((c < budget) & (stays == 0), 1, 0)
    free = tl.cumsum(is_free, 0) - is_free
    tl.store(free_slots + free, c, mask=(is_free != 0) & (free < count))
    kept = tl.where(came & (new_leaves == 0), 1, 0)
    number = tl.cumsum(kept, 0) - kept
    tl.debug_barrier()
    to = tl.load(free_slots + number, mask=(kept != 0) & (number < tl.sum(is_free, 0)), other=-1)
    return stays, to, threshold, below


@triton.jit(do_not_specialize=["count", "came", "slots", "rank_h", "protected_h", "budget", "sinks", "recent"])
def choose_kernel(
    rank, protected, occupied, token_index, valid_seen, seen, free_slots, destination, count, came, slots, rank_h,
    protected_h, budget, sinks, recent,
    SLOTS: tl.constexpr, COUNT: tl.constexpr, BY_AGE: tl.constexpr, PROTECTED: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Program batch_head: the destination of each token of the block, as `evict_kernel` stores it. SLOTS, COUNT: at
    least budget and count."""
    batch_head = tl.program_id(0).to(tl.int64)
    at = batch_head * slots
    rank += batch_head * rank_h
    protected += batch_head * protected_h
    occupied += at
    token_index += at
    recent_from = tl.where(recent > 0, tl.load(valid_seen + batch_head) - recent, NEVER)
    _, never = ends_of(tl.int64 if rank.dtype.element_ty == tl.int64 else tl.int32)
    c, n = tl.arange(0, SLOTS), tl.arange(0, COUNT)
    held, index = tokens_of(c, budget, occupied, token_index)
    arrived, new_index = tokens_of(n, count, occupied + budget, token_index + budget)
    leave = tl.sum(tl.where(held, 1, 0), 0) + tl.sum(tl.where(arrived, 1, 0), 0) - budget
    # The previous launch may write ranks and masks, but none of what was read so far: see `ops.evict`.
    previous_done(DEPENDENT)
    count_all(seen, came)
    cached = code_among(
        c, budget, held, index, rank, protected, sinks, recent_from, never, BY_AGE, PROTECTED
    )
    new = code_among(
        n, count, arrived, new_index, rank + budget, protected + budget, sinks, recent_from, never, BY_AGE, PROTECTED
    )
    _, to, _, _ = settled(
        cached, new, held, arrived, leave, free_slots + batch_head * count, c, n, budget, count
    )
    tl.store(destination + batch_head * count + n, to, mask=n < count)
