"""Segments that shrink: their tokens are looked up, their keys read out of the pages, and those that k-means leaves out
marked to go. A step in which nothing shrinks costs a look at the plan.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._eviction_kernels import add_gram, centred, representatives
from ._formats_kernels import decode
from ._paging_kernels import pick
from ._paging_layout import keys_at


@triton.jit
def _gram(
    leading, rest, words, key_scales, chunk_scales, physical, group, place, holds, size, b, heads, groups, row_words,
    base, FORMAT: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr,
):
    """Gram matrix of a segment's keys, all of one format: tokens at `place` of their blocks, with scales `group`."""
    for h in range(heads):
        for start in range(0, HEAD_DIM, CHANNELS):
            d = start + tl.arange(0, CHANNELS)
            code, scale = keys_at(
                words, key_scales, chunk_scales, physical, group, place, holds, d, b, h, heads, groups, row_words, base,
                FORMAT, LANES, GROUP, BLOCK, HEAD_DIM,
            )
            x = tl.where(holds[:, None] & (d < HEAD_DIM)[None, :], decode(code, FORMAT) * scale, 0.0)
            leading, rest = add_gram(leading, rest, centred(x, holds, size))
    return leading, rest


@triton.jit
def _slots_of(
    token_segments, positions, scratch, b, m, slots, entries_slots, tau, BLOCK: tl.constexpr, TOKENS: tl.constexpr
):
    """The slots of segment m's tokens, oldest first, then -1: [TOKENS] int64. scratch: room for tau of them."""
    place = tl.arange(0, TOKENS)
    tl.store(scratch + place, tl.full([TOKENS], -1, tl.int64), mask=place < tau)
    tl.debug_barrier()
    found = 0
    for start in range(0, entries_slots, BLOCK):
        s = start + tl.arange(0, BLOCK)
        mine = tl.load(token_segments + b * slots + s, mask=s < entries_slots, other=-1) == m
        to = found + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(scratch + to, s.to(tl.int64), mask=mine & (to < tau))
        found += tl.sum(mine.to(tl.int32), 0)
    tl.debug_barrier()
    held = tl.load(scratch + place, mask=place < tau, other=-1)
    position = tl.load(positions + b * slots + held, mask=held >= 0, other=0)
    older = (position[None, :] < position[:, None]) & (held[None, :] >= 0)
    rank = tl.sum(older.to(tl.int32), 1)
    tl.debug_barrier()
    tl.store(scratch + rank, held, mask=held >= 0)
    tl.debug_barrier()
    return tl.load(scratch + place, mask=place < tau, other=-1)


@triton.jit(do_not_specialize=[
    "heads", "slots", "entries", "groups", "segments", "tau",
])
def shrink_kernel(
    gone, sizes, planned, thoughts, token_segments, positions, slot_groups, physical, words, key_scales, chunk_scales,
    scratch, heads, slots, entries, groups, segments, tau, row_words, base_0, base_1, base_2,
    OF_T: tl.constexpr, OF_E: tl.constexpr, OF_R: tl.constexpr,
    FORMAT_0: tl.constexpr, FORMAT_1: tl.constexpr, FORMAT_2: tl.constexpr,
    LANES_0: tl.constexpr, LANES_1: tl.constexpr, LANES_2: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr, CLUSTERS: tl.constexpr, ITERATIONS: tl.constexpr, SLOTS: tl.constexpr,
):
    """gone [B, S] bool, all False: True where a token of a segment leaves whose planned size [B, M] is below its size.

    Programs of a row take turns with its segments. scratch [B, programs, tau] int64.
    """
    b = tl.program_id(0).to(tl.int64)
    mine = scratch + (b * tl.num_programs(1) + tl.program_id(1)) * tau
    for m in range(tl.program_id(1), segments, tl.num_programs(1)):
        keep = tl.load(planned + b * segments + m)
        if keep < tl.load(sizes + b * segments + m):
            slot = _slots_of(
                token_segments, positions, mine, b, m, slots, entries * BLOCK, tau, SLOTS, TOKENS
            )
            holds = slot >= 0
            size = tl.sum(holds.to(tl.int32), 0)
            entry = tl.where(holds, slot, 0) // BLOCK
            place = tl.where(holds, slot, 0) % BLOCK
            page = tl.load(physical + b * entries + entry, mask=holds, other=0)
            group = tl.load(slot_groups + b * slots + slot, mask=holds, other=0)
            number = pick(tl.load(thoughts + b * segments + m), OF_T, OF_E, OF_R)
            leading = tl.zeros([TOKENS, TOKENS], tl.float32)
            rest = tl.zeros([TOKENS, TOKENS], tl.float32)
            if number == 0:
                leading, rest = _gram(
                    leading, rest, words, key_scales, chunk_scales, page, group, place, holds, size, b, heads, groups,
                    row_words, base_0, FORMAT_0, LANES_0, GROUP, BLOCK, HEAD_DIM, CHANNELS,
                )
            if FORMAT_1 != "":  # noqa: SIM102 - one is known at compile time
                if number == 1:
                    leading, rest = _gram(
                        leading, rest, words, key_scales, chunk_scales, page, group, place, holds, size, b, heads,
                        groups, row_words, base_1, FORMAT_1, LANES_1, GROUP, BLOCK, HEAD_DIM, CHANNELS,
                    )
            if FORMAT_2 != "":  # noqa: SIM102
                if number == 2:
                    leading, rest = _gram(
                        leading, rest, words, key_scales, chunk_scales, page, group, place, holds, size, b, heads,
                        groups, row_words, base_2, FORMAT_2, LANES_2, GROUP, BLOCK, HEAD_DIM, CHANNELS,
                    )
            stay = representatives(
                leading + rest, holds, size, keep.to(tl.int32), mine, TOKENS, CLUSTERS, ITERATIONS, False
            )
            tl.store(gone + b * slots + slot, holds & (stay == 0), mask=holds)
