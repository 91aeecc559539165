"""Device functions for scratch memory that several programs of a launch share."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import ROW_UNIT

_ROW_UNIT = tl.constexpr(ROW_UNIT)


@triton.jit
def row_of(slots):
    """Slots of a row of scratch, so that every row is aligned and a tile never leaves its row."""
    return (slots + _ROW_UNIT - 1) // _ROW_UNIT * _ROW_UNIT


@triton.jit
def is_last(counter, count):
    """Whether `count` programs have come here, with this one: then all that they wrote can be read."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(counter, 0)                                           # ready for the next step
    return last


@triton.jit
def discard(line):
    """Drop lines of 128 bytes from the cache: nobody reads them again, so they need not go to memory."""
    tl.inline_asm_elementwise(
        "discard.global.L2 [$1], 128; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def all_occupied(occupied, occupied_s, newest, begin, end, MASK_UNIT: tl.constexpr):
    """Whether every slot of a range holds a token: then tiles need no mask but at the range's end."""
    if MASK_UNIT == 16:
        end = end // 16 * 16                                           # it is, and now the compiler knows
    missing = tl.zeros([2048], tl.int32)
    for start in range(begin, end, 2048):
        s = start + tl.arange(0, 2048)
        holds = tl.load(occupied + s.to(tl.int64) * occupied_s, mask=s < end, other=1) != 0
        missing += tl.where(holds | (s == newest), 0, 1)
    return tl.sum(missing, 0) == 0
