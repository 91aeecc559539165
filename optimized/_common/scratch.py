"""Device functions for scratch memory shared by the programs of a launch."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import ROW_UNIT, SMALL_TILES

_ROW_UNIT = tl.constexpr(ROW_UNIT)
#: Slots that are loaded at a time. In the interpreter few, so that tests cover several rounds.
_SLOTS_AT_ONCE = tl.constexpr(16 if SMALL_TILES else 2048)


@triton.jit
def row_of(slots):
    """`slots` rounded up to ROW_UNIT, the length of a scratch row: rows are aligned and a tile stays in its row."""
    return (slots + _ROW_UNIT - 1) // _ROW_UNIT * _ROW_UNIT


@triton.jit
def written_of(slots):
    """`slots` rounded up to a multiple of 4: what is written and read of a scratch row. The multiple lets accesses that
    are masked by it be as wide as those without a mask."""
    return (slots + 3) // 4 * 4


@triton.jit
def is_last(counter, count):
    """Whether this program is the last of `count` to arrive. If so, it can read all that they wrote."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(counter, 0)                                           # reset for the next launch
    return last


@triton.jit
def discard(line):
    """Drop lines of 128 bytes from L2 without writing them to memory: they are not read again."""
    tl.inline_asm_elementwise(
        "discard.global.L2 [$1], 128; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def all_occupied(occupied, occupied_s, newest, begin, end, MASK_UNIT: tl.constexpr):
    """Whether all slots of a range are occupied (`newest` counts). Then only the range's last tile needs a mask."""
    if MASK_UNIT == 16:
        end = end // 16 * 16                                           # no change; tells the compiler the alignment
    missing = tl.zeros([_SLOTS_AT_ONCE], tl.int32)
    for start in range(begin, end, _SLOTS_AT_ONCE):
        s = start + tl.arange(0, _SLOTS_AT_ONCE)
        holds = tl.load(occupied + s.to(tl.int64) * occupied_s, mask=s < end, other=1) != 0
        missing += tl.where(holds | (s == newest), 0, 1)
    return tl.sum(missing, 0) == 0
