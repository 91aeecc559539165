"""Kernels that begin and end a step of a ThinKV state, per row. Their counters are on the device, int64, one per row,
so that replays of a graph update them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.thoughts import thought_of


@triton.jit
def begin_kernel(segment, seen, decoded, positions, sparsity_mask, overflow, tau, most):
    """A token arrives in row b: sets its position and, every tau decode steps, begins a segment and requests the
    sparsity (`sparsity_mask`). Beyond `most` tokens, which only replays of a graph reach, it is rejected: position -1.
    """
    b = tl.program_id(0)
    number = tl.load(seen + b)
    taken = number < most
    begins = taken & ((tl.load(decoded + b) % tau) == 0)
    tl.store(segment + b, tl.load(segment + b) + begins.to(tl.int64))
    tl.store(positions + b, tl.where(taken, number, -1))
    tl.store(sparsity_mask + b, begins)
    tl.store(overflow + b, True, mask=number >= most)


@triton.jit
def settle_kernel(
    sparsity, found, thought, thoughts, segment, seen, decoded, positions, sparsity_mask, buffered, sizes, live, flush,
    change, tau, group, segments, low, high, CLASSIFY: tl.constexpr,
):
    """After attention to the token of row b: stores a requested sparsity (`found`) and the segment's thought, decides
    whether to flush, and updates the counters. If the token was rejected (see `begin_kernel`), only `decoded` changes.
    """
    b = tl.program_id(0).to(tl.int64)
    taken = tl.load(positions + b) >= 0
    step = tl.load(decoded + b)
    kind = tl.load(thought + b)
    with_sparsity = tl.load(sparsity_mask + b) != 0
    share = tl.load(found + b)
    tl.store(sparsity + b, share, mask=with_sparsity)
    if CLASSIFY:
        kind = tl.where(with_sparsity, thought_of(share, low, high), kind)
        tl.store(thought + b, kind, mask=taken)
    ended = ((step + 1) % tau) == 0
    waiting = tl.load(buffered + b)
    full = taken & ((waiting == group) | ended)
    here = b * segments + tl.load(segment + b)
    tl.store(thoughts + here, kind, mask=taken)
    tl.store(sizes + here, tl.load(sizes + here, mask=taken, other=0) + waiting, mask=full)
    one = taken.to(tl.int64)
    tl.store(live + b, tl.load(live + b) + one)
    tl.store(flush + b, full)
    tl.store(change + b, taken & ended & (kind == 0))
    tl.store(seen + b, tl.load(seen + b) + one)
    tl.store(decoded + b, step + one)


@triton.jit
def commit_kernel(
    sizes, levels, live, over_budget, new_sizes, new_levels, new_over_budget, segments, SEGMENTS: tl.constexpr
):
    """Program: a row. Its segments, [B, M], and over_budget [B] take the planned values; live loses what they lose."""
    b = tl.program_id(0).to(tl.int64)
    left = tl.zeros([SEGMENTS], tl.int64)
    for start in range(0, segments, SEGMENTS):
        m = start + tl.arange(0, SEGMENTS)
        at, inside = b * segments + m, m < segments
        size = tl.load(new_sizes + at, mask=inside, other=0)
        left += tl.load(sizes + at, mask=inside, other=0) - size
        tl.store(sizes + at, size, mask=inside)
        tl.store(levels + at, tl.load(new_levels + at, mask=inside), mask=inside)
    tl.store(live + b, tl.load(live + b) - tl.sum(left, 0))
    tl.store(over_budget + b, tl.load(new_over_budget + b))
