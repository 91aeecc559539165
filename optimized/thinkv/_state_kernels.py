"""The clockwork of a ThinKV state: what begins and ends with a token, per row, so that a graph's replays keep time.

Counters are int64, one per row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._thoughts_kernels import thought_of


@triton.jit
def begin_kernel(segment, seen, decoded, positions, tau):
    """A token comes to row b: its position, and after every tau of them a new segment."""
    b = tl.program_id(0)
    begins = (tl.load(decoded + b) % tau) == 0
    tl.store(segment + b, tl.load(segment + b) + begins.to(tl.int64))
    tl.store(positions + b, tl.load(seen + b))


@triton.jit
def settle_kernel(
    sparsity, thought, thoughts, segment, seen, decoded, buffered, sizes, live, flush, change,
    tau, group, segments, low, high, CLASSIFY: tl.constexpr,
):
    """The token of row b has been attended to: its window's thought, whether the buffer is flushed, what has ended."""
    b = tl.program_id(0).to(tl.int64)
    step = tl.load(decoded + b)
    kind = tl.load(thought + b)
    if CLASSIFY:
        kind = tl.where((step % tau) == 0, thought_of(tl.load(sparsity + b), low, high), kind)
        tl.store(thought + b, kind)
    ended = ((step + 1) % tau) == 0
    waiting = tl.load(buffered + b)
    full = (waiting == group) | ended
    here = b * segments + tl.load(segment + b)
    tl.store(thoughts + here, kind)
    tl.store(sizes + here, tl.load(sizes + here) + tl.where(full, waiting, 0))
    tl.store(live + b, tl.load(live + b) + 1)
    tl.store(flush + b, full)
    tl.store(change + b, ended & (kind == 0))
    tl.store(seen + b, tl.load(seen + b) + 1)
    tl.store(decoded + b, step + 1)
