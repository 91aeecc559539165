"""Shrinking of segments: finds their tokens, reads their keys from the pages, and marks the tokens that k-means does
not keep. If no segment shrinks, a step only reads the plan.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.launch import SMALL_TILES
from ._eviction_kernels import add_gram, centred, representatives, whole_gram
from ._formats_kernels import decode
from ._paging_kernels import pick
from ._paging_layout import keys_at, whole_at

#: The segments whose plan a program reads at once.
PLANS = tl.constexpr(4 if SMALL_TILES else 1024)


@triton.jit
def shrinking(sizes, planned, b, segments, start):
    """Of the segments `start` to start + PLANS - 1 of row b: their numbers, what each keeps, and its place among those
    that shrink, -1 for the others, each [PLANS]; and how many shrink."""
    m = start + tl.arange(0, PLANS)
    keep = tl.load(planned + b * segments + m, mask=m < segments, other=0)
    size = tl.load(sizes + b * segments + m, mask=m < segments, other=0)
    shrinks = (keep < size).to(tl.int32)
    return m, keep, tl.where(shrinks > 0, tl.cumsum(shrinks, 0) - 1, -1), tl.sum(shrinks, 0)


@triton.jit
def one_of(x, chosen):
    """The element of x that is chosen."""
    return tl.sum(tl.where(chosen, x, 0), 0)


@triton.jit
def _fill(
    x, words, key_scales, chunk_scales, physical, group, place, mine, d, b, h, heads, groups, row_words, base,
    FORMAT: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
):
    """Fill x [TOKENS, CHANNELS] with the keys of the tokens `mine`, which are in blocks of this format."""
    if LANES == 0:
        key = whole_at(words, physical, place, mine, d, b, h, heads, row_words, base, FORMAT, BLOCK, HEAD_DIM)
    else:
        code, scale = keys_at(
            words, key_scales, chunk_scales, physical, group, place, mine, d, b, h, heads, groups, row_words, base,
            FORMAT, LANES, GROUP, BLOCK, HEAD_DIM,
        )
        key = decode(code, FORMAT) * scale
    return tl.where(mine[:, None] & (d < HEAD_DIM)[None, :], key, x)


@triton.jit
def slots_of(
    token_segments, positions, scratch, b, m, slots, entries_slots, tau, BLOCK: tl.constexpr, TOKENS: tl.constexpr
):
    """The slots of segment m's tokens, oldest first, then -1: [TOKENS] int64. scratch: memory for tau slots."""
    place = tl.arange(0, TOKENS)
    tl.debug_barrier()
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
    slot = tl.load(scratch + place, mask=place < tau, other=-1)
    position = tl.load(positions + b * slots + slot, mask=slot >= 0, other=0)
    older = (position[None, :] < position[:, None]) & (slot[None, :] >= 0)
    rank = tl.sum(older.to(tl.int32), 1)
    tl.debug_barrier()
    tl.store(scratch + rank, slot, mask=slot >= 0)
    tl.debug_barrier()
    return tl.load(scratch + place, mask=place < tau, other=-1)


@triton.jit
def gram_of_segment(
    slot, block_thoughts, slot_groups, physical, words, key_scales, chunk_scales, b, heads, slots, entries, groups,
    row_words, base_0, base_1, base_2,
    OF_T: tl.constexpr, OF_E: tl.constexpr, OF_R: tl.constexpr,
    FORMAT_0: tl.constexpr, FORMAT_1: tl.constexpr, FORMAT_2: tl.constexpr,
    LANES_0: tl.constexpr, LANES_1: tl.constexpr, LANES_2: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr,
):
    """The Gram matrix [TOKENS, TOKENS] of the keys in the slots of a segment's tokens, -1 for none."""
    holds = slot >= 0
    size = tl.sum(holds.to(tl.int32), 0)
    entry = tl.where(holds, slot, 0) // BLOCK
    place = tl.where(holds, slot, 0) % BLOCK
    page = tl.load(physical + b * entries + entry, mask=holds, other=0)
    group = tl.load(slot_groups + b * slots + slot, mask=holds, other=0)
    kind = tl.load(block_thoughts + b * entries + entry, mask=holds, other=0)
    number = pick(kind, OF_T, OF_E, OF_R)
    leading = tl.zeros([TOKENS, TOKENS], tl.float32)
    rest = tl.zeros([TOKENS, TOKENS], tl.float32)
    for h in range(heads):
        for start in range(0, HEAD_DIM, CHANNELS):
            d = start + tl.arange(0, CHANNELS)
            x = tl.zeros([TOKENS, CHANNELS], tl.float32)
            x = _fill(
                x, words, key_scales, chunk_scales, page, group, place, holds & (number == 0), d, b, h, heads,
                groups, row_words, base_0, FORMAT_0, LANES_0, GROUP, BLOCK, HEAD_DIM,
            )
            if FORMAT_1 != "":
                x = _fill(
                    x, words, key_scales, chunk_scales, page, group, place, holds & (number == 1), d, b, h,
                    heads, groups, row_words, base_1, FORMAT_1, LANES_1, GROUP, BLOCK, HEAD_DIM,
                )
            if FORMAT_2 != "":
                x = _fill(
                    x, words, key_scales, chunk_scales, page, group, place, holds & (number == 2), d, b, h,
                    heads, groups, row_words, base_2, FORMAT_2, LANES_2, GROUP, BLOCK, HEAD_DIM,
                )
            leading, rest = add_gram(leading, rest, centred(x, holds, size))
    return whole_gram(leading, rest)


@triton.jit(do_not_specialize=[
    "heads", "slots", "entries", "groups", "segments", "tau",
])
def shrink_kernel(
    gone, sizes, planned, block_thoughts, token_segments, positions, slot_groups, physical, words, key_scales,
    chunk_scales, scratch, heads, slots, entries, groups, segments, tau, row_words, base_0, base_1, base_2,
    OF_T: tl.constexpr, OF_E: tl.constexpr, OF_R: tl.constexpr,
    FORMAT_0: tl.constexpr, FORMAT_1: tl.constexpr, FORMAT_2: tl.constexpr,
    LANES_0: tl.constexpr, LANES_1: tl.constexpr, LANES_2: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr, CLUSTERS: tl.constexpr, ITERATIONS: tl.constexpr, SLOTS: tl.constexpr,
):
    """gone [B, S] bool, all False before: becomes True for tokens to evict, in segments whose planned size [B, M] is
    below their size.

    The programs of a row take the segments that shrink in turn. scratch [B, programs, tau] int64.
    """
    b = tl.program_id(0).to(tl.int64)
    mine = scratch + (b * tl.num_programs(1) + tl.program_id(1)) * tau
    for start in range(0, segments, PLANS):
        numbers, keeps, places, count = shrinking(sizes, planned, b, segments, start)
        for i in range(tl.program_id(1), count, tl.num_programs(1)):
            m, keep = one_of(numbers, places == i), one_of(keeps, places == i)
            slot = slots_of(
                token_segments, positions, mine, b, m, slots, entries * BLOCK, tau, SLOTS, TOKENS
            )
            holds = slot >= 0
            size = tl.sum(holds.to(tl.int32), 0)
            gram = gram_of_segment(
                slot, block_thoughts, slot_groups, physical, words, key_scales, chunk_scales, b, heads, slots, entries,
                groups, row_words, base_0, base_1, base_2, OF_T, OF_E, OF_R, FORMAT_0, FORMAT_1, FORMAT_2, LANES_0,
                LANES_1, LANES_2, GROUP, BLOCK, HEAD_DIM, CHANNELS, TOKENS,
            )
            most = tl.maximum(keep, 1).to(tl.int32)                    # k-means needs a cluster
            kept = representatives(gram, holds, size, most, mine, TOKENS, CLUSTERS, ITERATIONS, False)
            tl.store(gone + b * slots + slot, holds & ((kept == 0) | (keep == 0)), mask=holds)
