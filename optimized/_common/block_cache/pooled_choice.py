"""SnapKV's scores and its choice of a block's evictions, by one program per head that keeps all codes in registers.

Buffers are as in `evict_kernels.py` and `compress.py`, whose kernel does the same in chunks of any number of slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import dependent_launch, on_device_of
from ..numerics import previous_done, sortable
from ..operation import operation
from .choose_kernel import settled
from .evict_kernels import COUNTED, NEVER, count_all
from .ops import INDEPENDENT, choosing_warps, codes_at_once

#: Neighbours in a pool that are loaded at a time.
_NEAR = tl.constexpr(8)


@operation(
    "kvtwin::block_choose_pooled", mutates_args=("score", "seen", "counts", "order", "numbers"),
)
def choose_pooled(
    window_positions: Tensor, received: Tensor, occupied: Tensor, score: Tensor, seen: Tensor, counts: Tensor,
    order: Tensor, numbers: Tensor, budget: int, count: int, kernel_size: int, in_block: bool,
) -> Tensor:
    """Update scores after `count` tokens arrived, in the slots from `budget` on, and choose evictions. Returns the
    tokens' destinations, [B, Hkv, count] int32, as `ops.choose` does.

    received [B, Hkv, budget + count] float32: see `compress.weigh_window`. Other arguments as in `compress.compress`.
    in_block: the window's tokens are the last ones of the block, so that window_positions [B, W] is not read, and the
    launch before this one is that of `received`. Otherwise, it may be on another stream.
    """
    batch, heads, slots = occupied.shape
    destination = torch.empty(batch, heads, count, dtype=torch.int32, device=occupied.device)
    start = dependent_launch(occupied.device) if in_block else INDEPENDENT
    with on_device_of(occupied):
        choose_pooled_kernel[(batch * heads,)](
            window_positions, received, occupied, score, seen, counts, order, numbers, destination, budget, count,
            slots, heads, window_positions.shape[1], kernel_size, int(in_block),
            SLOTS=codes_at_once(budget), COUNT=codes_at_once(count),
            num_warps=choosing_warps(batch * heads), **start,
        )
    return destination


@choose_pooled.register_fake
def _(occupied: Tensor, count: int) -> Tensor:
    return occupied.new_empty((*occupied.shape[:2], count), dtype=torch.int32)


@triton.jit
def _pooled(by_age, i, prefix, kernel_size):
    """The scores of tokens i, in order of arrival: the mean of what the neighbours of the first `prefix` received, with
    0 beyond either end. The others are the window and get +inf."""
    total = tl.zeros(i.shape, tl.float32)
    for start in range(0, kernel_size, _NEAR):
        for k in tl.static_range(_NEAR):
            near = i + (start + k - kernel_size // 2)
            inside = (near >= 0) & (near < prefix) & (start + k < kernel_size)
            total += tl.load(by_age + near, mask=inside, other=0).to(tl.float32, bitcast=True)
    return tl.where(i < prefix, total / kernel_size, float("inf"))


@triton.jit(do_not_specialize=["budget", "count", "slots", "heads", "observers", "kernel_size", "in_block"])
def choose_pooled_kernel(
    window_positions, received, occupied, score, seen, counts, order, numbers, destination, budget, count, slots, heads,
    observers, kernel_size, in_block,
    SLOTS: tl.constexpr, COUNT: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Program batch_head. SLOTS, COUNT: at least budget and count. numbers, a head's four rows: what tokens received in
    order of arrival (bits of float32), codes of slots, free slots, and which slots' tokens stay."""
    batch_head = tl.program_id(0).to(tl.int64)
    at = batch_head * slots
    each = tl.num_programs(0).to(tl.int64) * slots
    numbers += at
    by_age, codes, free_slots, kept_slots = numbers, numbers + each, numbers + 2 * each, numbers + 3 * each
    occupied += at
    score += at
    received += batch_head * (budget + count)
    order += batch_head * budget
    c, n = tl.arange(0, SLOTS), tl.arange(0, COUNT)
    slot = tl.load(order + c, mask=c < budget, other=0)                # also the slots without a token
    tokens = tl.load(counts + batch_head)
    came = tl.load(occupied + budget + n, mask=n < count, other=0) != 0
    observing = tl.full([COUNTED], 0, tl.int32)
    for start in range(0, observers, COUNTED):
        w = start + tl.arange(0, COUNTED)
        last = tl.load(occupied + budget + count - observers + w, mask=(w < observers) & (in_block != 0), other=0) != 0
        place = batch_head // heads * observers + w
        asks = tl.load(window_positions + place, mask=(w < observers) & (in_block == 0), other=-1) >= 0
        observing += tl.where(last | asks, 1, 0)
    # The window's valid tokens are the newest of the row and are always kept: the budget has room for them.
    prefix = tokens - tl.sum(observing, 0)
    one = tl.where(came, 1, 0)
    before = tokens - tl.sum(one, 0)
    held = c < before                                                  # of the c-th token, and of slot c
    nth = before + tl.cumsum(one, 0) - one                             # of the block's tokens, in order of arrival
    # The previous launch, `received_kernel`, wrote nothing of what was read so far.
    previous_done(DEPENDENT)
    count_all(seen, count)
    weight = tl.load(received + slot, mask=c < budget, other=0.0)
    new_weight = tl.load(received + budget + n, mask=n < count, other=0.0)
    tl.store(by_age + c, weight.to(tl.int32, bitcast=True), mask=held)
    tl.store(by_age + nth, new_weight.to(tl.int32, bitcast=True), mask=came)
    tl.debug_barrier()
    pooled = _pooled(by_age, c, prefix, kernel_size)
    new_pooled = _pooled(by_age, nth, prefix, kernel_size)
    tl.store(score + slot, pooled, mask=held)
    tl.store(score + budget + n, new_pooled, mask=came)
    code = tl.where(held & (c < prefix), sortable(pooled), NEVER)
    tl.store(codes + slot, code, mask=held)
    tl.debug_barrier()
    leave = tokens - budget
    stays, to, threshold, below = settled(
        tl.load(codes + c, mask=held, other=NEVER), tl.where(came & (nth < prefix), sortable(new_pooled), NEVER), held,
        came, leave, free_slots, c, n, budget, count,
    )
    tl.store(destination + batch_head * count + n, to, mask=n < count)
    # The slots of the kept tokens, in order of arrival. Which of equal codes stay was decided in order of slots.
    goes_on = held & (code >= threshold)
    if below < leave:
        tl.store(kept_slots + c, tl.where(stays, 1, 0), mask=held)
        tl.debug_barrier()
        goes_on = tl.load(kept_slots + slot, mask=held, other=0) != 0
    kept, new_kept = tl.where(goes_on, 1, 0), tl.where(to >= 0, 1, 0)
    tl.store(order + tl.cumsum(kept, 0) - kept, slot, mask=kept != 0)
    tl.store(order + tl.sum(kept, 0) + tl.cumsum(new_kept, 0) - new_kept, to, mask=new_kept != 0)
    tl.store(counts + batch_head, tokens - tl.maximum(leave, 0))
