"""Kernels that put a whole prompt into a paged cache, as if its segments arrived one after the other.

How many tokens a segment keeps depends on the sizes of segments alone, and which ones on its own keys. So all sizes are
planned first (`prepare_kernel`), then each segment shrinks by itself (`cluster_kernel`), one program per segment. Only
the slots depend on what happened to the segments before: `place_kernel` gives and frees them in order, one program per
row. What is left at the end is quantized and stored (`_paging_store_kernels.store_prompt_kernel`).

The tokens of a row are numbered without padding: `order` [B, T] int64 has their indices in the prompt, then -1, and
`counts` [B] int64 their number. Token i is in segment i // tau. Segment m has its turn, `turn` m, when it arrives and
the segments before it shrink. All tokens have the thought type R.

keeps, turns [B, M, LEVELS] int32: how many tokens each selection of a segment keeps, -1 for none, and when it happens.
evictions [B, M] int32: the number of tokens that are evicted at each turn. gone [B, T] int32: the turn at which a token
is evicted, by its index in the prompt.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...reference.contract.thinkv.types import Thought
from .._common.numerics import float32
from ._eviction_kernels import add_gram, centred, representatives, whole_gram
from ._formats_kernels import decode, decode_scale, encode, fp8_scale, magnitude, scale_code
from ._paging_kernels import COUNTS, LIVE, free_places, holes, put_in_order, remove

#: The number of the thought type R.
REASONING = tl.constexpr(int(Thought.REASONING))


@triton.jit
def group_of_prompt(order, b, number, order_b, total, tau, groups, GROUP: tl.constexpr, TOKENS: tl.constexpr):
    """The indices in the prompt of the tokens of a row's group `number`, of which each segment has `groups`; -1 for
    none: [TOKENS] int64."""
    i = tl.arange(0, TOKENS)
    within = number % groups * GROUP + i
    token = number // groups * tau + within
    there = (i < GROUP) & (within < tau) & (token < total)
    return tl.load(order + b * order_b + token, mask=there, other=-1)


@triton.jit
def _scale_group(
    program, key, order, scales, heads, all_groups, total, tau, groups, order_b, key_b, key_h, key_n, key_d,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr,
):
    """The scales of the keys of a row, group and KV head, which `program` numbers, as codes [B, groups, Hkv, D] uint8,
    or for fp8 as numbers [B, groups, Hkv] float32."""
    h, number, b = program % heads, program // heads % all_groups, program // heads // all_groups
    at = group_of_prompt(order, b, number, order_b, total, tau, groups, GROUP, TOKENS)
    d = tl.arange(0, D_PAD)
    rows = key + b * key_b + h * key_h + at[:, None] * key_n
    x = tl.load(rows + d.to(tl.int64)[None, :] * key_d, mask=(at >= 0)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    size = magnitude(float32(x))
    if FORMAT == "fp8":
        tl.store(scales + program, fp8_scale(tl.max(tl.max(size, 1), 0)))
    else:
        code = scale_code(tl.max(size, 0), FORMAT)
        tl.store(scales + program * HEAD_DIM + d, code.to(tl.uint8), mask=d < HEAD_DIM)


@triton.jit
def shrunk(size, level, left, budget, RETENTION: tl.constexpr, LEVELS: tl.constexpr):
    """Size and level of a segment after it shrinks, step by step, to its minimum or until no more than the budget of
    the `left` tokens remain; and how many remain. All int32, like the sizes in RETENTION."""
    floor: tl.constexpr = RETENTION >> (64 * (LEVELS - 1))
    for number in tl.static_range(LEVELS):
        goes = (level == number) & (size > floor) & (left > budget)
        smaller = tl.where(goes, tl.minimum(size, (RETENTION >> (64 * number)) & 0x7FFFFFFF), size)
        level += goes.to(tl.int32)
        left -= size - smaller
        size = smaller
    return size, level, left


@triton.jit
def _plan_row(
    b, counts, keeps, turns, evictions, sizes, levels, live, over_budget, segment, tau, segments, all_segments, budget,
    RETENTION: tl.constexpr, LEVELS: tl.constexpr, SEGMENTS: tl.constexpr,
):
    """The plan of row b's prompt, of up to `segments` segments, and the state of its segments afterwards, of which the
    state's tables have all_segments.

    All segments have the same thought type, and no thought ends in a prompt. So `_eviction_kernels.plan` shrinks one
    after the other, the oldest first, each to its minimum before the next.
    """
    count = tl.load(counts + b).to(tl.int32)
    keeps += b * segments * LEVELS
    turns += b * segments * LEVELS
    sizes += b * all_segments
    levels += b * all_segments
    m = tl.arange(0, SEGMENTS)
    arrived = tl.maximum(tl.minimum(count - m * tau, tau), 0)
    tl.store(sizes + m, arrived.to(tl.int64), mask=m < segments)
    tl.store(levels + m, tl.zeros([SEGMENTS], tl.int64), mask=m < segments)
    for number in tl.static_range(LEVELS):
        tl.store(keeps + m * LEVELS + number, tl.full([SEGMENTS], -1, tl.int32), mask=m < segments)
    tl.debug_barrier()                                                 # stores of the same addresses follow
    last = (count + tau - 1) // tau
    left = tl.zeros([], tl.int32)
    # The oldest segment that is not at its minimum yet. All later ones are as they arrived: full, except for the last
    # one, which does not shrink in a prompt.
    oldest, size, level, selections = 0, tau, 0, 0
    for turn in range(0, last):
        left += tl.minimum(count - turn * tau, tau)
        before = left
        goes_on = left > budget
        while goes_on & (oldest < turn):
            planned, reached, left = shrunk(size, level, left, budget, RETENTION, LEVELS)
            if planned < size:
                tl.store(keeps + oldest * LEVELS + selections, planned)
                tl.store(turns + oldest * LEVELS + selections, turn)
                selections += 1
            size, level = planned, reached
            tl.store(sizes + oldest, size.to(tl.int64))
            tl.store(levels + oldest, level.to(tl.int64))
            goes_on = left > budget
            if goes_on:
                oldest += 1
                size, level, selections = tau, 0, 0
        tl.store(evictions + b * segments + turn, before - left)
    tl.store(live + b, left.to(tl.int64))
    tl.store(over_budget + b, left > budget)
    tl.store(segment + b, (last - 1).to(tl.int64))


@triton.jit(do_not_specialize=[
    "tau", "segments", "all_segments", "budget", "batch", "heads", "all_groups", "total", "groups", "order_b", "key_b",
    "key_h", "key_n",
])
def prepare_kernel(
    counts, keeps, turns, evictions, sizes, levels, live, over_budget, segment, tau, segments, all_segments, budget,
    batch, key, order, scales, heads, all_groups, total, groups, order_b, key_b, key_h, key_n, key_d,
    RETENTION: tl.constexpr, LEVELS: tl.constexpr, SEGMENTS: tl.constexpr, FORMAT: tl.constexpr, LANES: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr,
):
    """The first `batch` programs plan a row each. With LANES, program batch + (row, group, KV head) computes scales."""
    program = tl.program_id(0).to(tl.int64)
    if program < batch:
        _plan_row(
            program, counts, keeps, turns, evictions, sizes, levels, live, over_budget, segment, tau, segments,
            all_segments, budget, RETENTION, LEVELS, SEGMENTS,
        )
    elif LANES > 0:
        _scale_group(
            program - batch, key, order, scales, heads, all_groups, total, tau, groups, order_b, key_b, key_h, key_n,
            key_d, FORMAT, GROUP, HEAD_DIM, D_PAD, TOKENS,
        )


@triton.jit
def _gram(
    key, scales, at, within, b, m, heads, all_groups, groups, key_b, key_h, key_n, key_d,
    FORMAT: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The Gram matrix [TOKENS, TOKENS] of the quantized keys of tokens `at` of the prompt, -1 for none, which are the
    tokens `within` of segment m."""
    holds = at >= 0
    size = tl.sum(holds.to(tl.int32), 0)
    leading = tl.zeros([TOKENS, TOKENS], tl.float32)
    rest = tl.zeros([TOKENS, TOKENS], tl.float32)
    group = b * all_groups + m * groups + within // GROUP
    rows = key + b * key_b + at[:, None] * key_n
    PARTS: tl.constexpr = (HEAD_DIM + CHANNELS - 1) // CHANNELS
    for part in range(heads * PARTS):
        h, d = part // PARTS, part % PARTS * CHANNELS + tl.arange(0, CHANNELS)
        mask = holds[:, None] & (d < HEAD_DIM)[None, :]
        at_d = (tl.cast(h, tl.int64) * key_h + d.to(tl.int64) * key_d)[None, :]
        x = float32(tl.load(rows + at_d, mask=mask, other=0.0))
        if FORMAT == "fp8":
            scale = tl.load(scales + group * heads + h, mask=holds, other=0.0)[:, None]
            x = decode(encode(x, scale, FORMAT), FORMAT) * scale
        elif LANES > 0:
            codes = scales + ((group * heads + h) * HEAD_DIM)[:, None] + d[None, :]
            scale = decode_scale(tl.load(codes, mask=mask, other=0))
            x = decode(encode(x, scale, FORMAT), FORMAT) * scale
        x = tl.where(mask, x, 0.0)
        leading, rest = add_gram(leading, rest, centred(x, holds, size))
    return whole_gram(leading, rest)


@triton.jit(do_not_specialize=[
    "heads", "all_groups", "total", "tau", "groups", "segments", "order_b", "key_b", "key_h", "key_n",
])
def cluster_kernel(
    key, scales, order, counts, keeps, turns, gone, scratch, heads, all_groups, total, tau, groups, segments,
    order_b, key_b, key_h, key_n, key_d,
    FORMAT: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, LEVELS: tl.constexpr,
    CHANNELS: tl.constexpr, TOKENS: tl.constexpr, CLUSTERS: tl.constexpr, ITERATIONS: tl.constexpr,
):
    """Program (segment, row): which tokens the segment's selections evict. scratch [B, M, tau] int32.

    Only old segments have selections, so those of all rows come first and find a multiprocessor each.
    """
    batch = tl.num_programs(0) // segments
    b, m = (tl.program_id(0) % batch).to(tl.int64), (tl.program_id(0) // batch).to(tl.int64)
    keeps += (b * segments + m) * LEVELS
    turns += (b * segments + m) * LEVELS
    scratch += (b * segments + m) * tau
    i = tl.arange(0, TOKENS)
    size = tl.minimum(tl.load(counts + b) - m * tau, tau).to(tl.int32)  # 0 or less in segments without tokens
    within = i
    for number in range(LEVELS):
        keep = tl.load(keeps + number)
        if keep >= 0:
            at = tl.load(order + b * order_b + m * tau + within, mask=i < size, other=-1)
            holds = at >= 0
            kept = holds & (keep > 0)
            if keep > 0:
                gram = _gram(
                    key, scales, at, within, b, m, heads, all_groups, groups, key_b, key_h, key_n, key_d, FORMAT, LANES,
                    GROUP, HEAD_DIM, CHANNELS, TOKENS,
                )
                chosen = representatives(
                    gram, holds, size, keep, scratch, TOKENS, CLUSTERS, ITERATIONS, False
                )
                kept = holds & (chosen != 0)
            turn = tl.load(turns + number)
            tl.store(gone + b * total + at, tl.zeros([TOKENS], tl.int32) + turn, mask=holds & (kept == 0))
            # The tokens that stay come first in the next selection.
            tl.debug_barrier()
            tl.store(scratch + tl.cumsum(kept.to(tl.int32), 0) - 1, within, mask=kept)
            tl.debug_barrier()
            size = keep
            within = tl.load(scratch + i, mask=i < size, other=0)


@triton.jit(do_not_specialize=[
    "total", "tau", "segments", "all_segments", "slots", "entries", "groups", "order_b", "capacity",
])
def place_kernel(
    order, counts, evictions, gone, place, positions, token_segments, evicted, slot_groups, block_thoughts, physical,
    entry_order, used, group_tokens, starts, block_counts, overflow, scratch,
    total, tau, segments, all_segments, slots, entries, groups, order_b, first, capacity,
    OF_T: tl.constexpr, OF_E: tl.constexpr, OF_R: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_PAD: tl.constexpr, NEW: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
    ENTRIES: tl.constexpr, CHUNK: tl.constexpr,
):
    """Program b: gives the tokens of each turn the lowest free slots, then frees those of the tokens that go.

    place [B, T] int32: the slot of each token that stays, by its index in the prompt, -1 for the others. first,
    capacity: R's first physical block in `used`, and their number. scratch [B, tau + 2 NEW + GROUPS] int32. The cache
    must be empty. If a row has no room for the tokens of a turn, its program sets `overflow` and stops there.
    """
    b = tl.program_id(0).to(tl.int64)
    positions += b * slots
    token_segments += b * slots
    evicted += b * slots
    slot_groups += b * slots
    block_thoughts += b * entries
    physical += b * entries
    used += b * entries
    group_tokens += b * groups
    block_counts += b * COUNTS
    gone += b * total
    place += b * total
    slot = scratch + b * (tau + 2 * NEW + GROUPS)
    entry = slot + tau
    group = entry + 2 * NEW
    count = tl.load(counts + b).to(tl.int32)
    i, j, g = tl.arange(0, TOKENS), tl.arange(0, BLOCKS), tl.arange(0, GROUPS)
    most = 0                                                           # entries in use are below
    turn = 0
    room = True
    while room & (turn * tau < count):
        size = tl.minimum(count - turn * tau, tau)
        num_blocks, live = tl.load(block_counts + REASONING), tl.load(block_counts + LIVE + REASONING)
        found = holes(
            block_thoughts, slot_groups, slot, REASONING, size, num_blocks * BLOCK - live, most * BLOCK, BLOCK, CHUNK
        )
        needed = (size - found + BLOCK - 1) // BLOCK
        parts = (size + GROUP - 1) // GROUP
        room = (
            (free_places(block_thoughts, -1, entry, needed, entries, CHUNK) == needed)
            & (free_places(used + first, 0, entry + NEW, needed, capacity, CHUNK) == needed)
            & (free_places(group_tokens, 0, group, parts, groups, CHUNK) == parts)
        )
        tl.debug_barrier()                                             # all reads come before the writes
        if room:
            new = tl.load(entry + j, mask=j < needed, other=0)
            taken = tl.load(entry + NEW + j, mask=j < needed, other=0)
            tl.store(block_thoughts + new, tl.full([BLOCKS], REASONING, tl.int64), mask=j < needed)
            tl.store(physical + new, taken.to(tl.int64), mask=j < needed)
            tl.store(used + first + taken, tl.full([BLOCKS], 1, tl.uint8), mask=j < needed)
            there = i < size
            late = i - found
            into = tl.load(entry + late // BLOCK, mask=there & (late >= 0), other=0) * BLOCK + late % BLOCK
            s = tl.where(late >= 0, into, tl.load(slot + i, mask=there & (late < 0), other=0))
            at = tl.load(order + b * order_b + turn * tau + i, mask=there, other=0)
            tl.store(place + at, s, mask=there)
            tl.store(positions + s, at, mask=there)
            tl.store(token_segments + s, tl.zeros([TOKENS], tl.int64) + turn, mask=there)
            tl.store(evicted + s, tl.zeros([TOKENS], tl.int32), mask=there)
            tl.store(slot_groups + s, tl.load(group + i // GROUP, mask=there, other=0), mask=there)
            mine = tl.load(group + g, mask=g < parts, other=0)
            tl.store(group_tokens + mine, tl.minimum(size - g * GROUP, GROUP), mask=g < parts)
            tl.store(starts + b * all_segments + turn, tl.load(order + b * order_b + turn * tau))
            tl.store(block_counts + REASONING, num_blocks + needed)
            tl.store(block_counts + LIVE + REASONING, live + size)
            most = tl.maximum(most, num_blocks + needed)
            tl.debug_barrier()
            if tl.load(evictions + b * segments + turn) > 0:
                _free_gone(
                    gone, place, turn, most, positions, token_segments, evicted, slot_groups, block_thoughts, physical,
                    used, group_tokens, block_counts, total, first, BLOCK, BLOCK_PAD, ENTRIES,
                )
                tl.debug_barrier()
        else:
            tl.store(overflow + b, 1)
        turn += 1
    put_in_order(entry_order + b * entries, block_thoughts, block_counts, entries, OF_T, OF_E, OF_R, CHUNK)


@triton.jit
def _free_gone(
    gone, place, turn, end, positions, token_segments, evicted, slot_groups, block_thoughts, physical, used,
    group_tokens, block_counts, total, first, BLOCK: tl.constexpr, BLOCK_PAD: tl.constexpr, ENTRIES: tl.constexpr,
):
    """Free the slots of the tokens that go at this turn, in the entries before `end`. All pointers are at the row."""
    o = tl.arange(0, BLOCK_PAD)[None, :]
    for start in range(0, end, ENTRIES):
        e = start + tl.arange(0, ENTRIES)
        s = e[:, None] * BLOCK + o
        inside = (e < end)[:, None] & (o < BLOCK)
        group = tl.load(slot_groups + s, mask=inside, other=-1)
        at = tl.load(positions + s, mask=group >= 0, other=0)
        # A replay of a graph may find older tokens, since a capture does not check that the cache is empty.
        of_prompt = (group >= 0) & (at < total)
        goes = of_prompt & (tl.load(gone + at, mask=of_prompt, other=-1) == turn)
        if tl.max(tl.max(goes.to(tl.int32), 1), 0) > 0:
            tl.store(place + at, tl.full([ENTRIES, BLOCK_PAD], -1, tl.int32), mask=goes)
            remove(
                goes, group, e, s, inside, end, positions, token_segments, evicted, slot_groups, block_thoughts,
                physical, used, group_tokens, block_counts, first, first, first,
            )
