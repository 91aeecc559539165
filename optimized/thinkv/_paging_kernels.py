"""Kernels that update the tables of a paged cache: tokens are appended, flushed into slots, and evicted.

A row of the batch is one program, or one per KV head for keys and values. Rows are independent. Thought types (0 T, 1
E, 2 R) are stored in up to three formats, numbered in the order of the types: OF_T, OF_E, OF_R are the types' numbers.
`used` flags a row's physical blocks, those of each format from its first one on.

counts [B, COUNTS]: the entries of the block table for each thought type, then, from LIVE on, the live tokens of each.
plan [B, PLAN_SLOTS + group + 2 new]: the decisions of a flush, namely the number of tokens, the number of the format,
and the scale group; the slot of each token; the new entries; the new physical blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: The size of a row of `counts`, and where its live tokens begin.
COUNTS, LIVE = tl.constexpr(6), tl.constexpr(3)
#: The first parts of a row of `plan`.
PLAN_COUNT, PLAN_FORMAT, PLAN_GROUP, PLAN_SLOTS = (tl.constexpr(place) for place in range(4))


@triton.jit
def pick(number, OF_T, OF_E, OF_R):
    """The argument for a thought type."""
    return tl.where(number == 0, OF_T, tl.where(number == 1, OF_E, OF_R))


@triton.jit(do_not_specialize=[
    "tokens", "heads", "slots", "table_slots", "key_b", "key_h", "key_n", "value_b", "value_h", "value_n", "new_b",
    "new_n",
])
def append_kernel(
    key, value, new_positions, buffer_key, buffer_value, positions, buffered, overflow,
    tokens, heads, slots, table_slots, key_b, key_h, key_n, key_d, value_b, value_h, value_n, value_d, new_b, new_n,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr,
):
    """Append a row's tokens, those with a position, to the buffer. A full buffer stays unchanged and sets `overflow`.
    """
    b = tl.program_id(0).to(tl.int64)
    count = tl.load(buffered + b)
    d = tl.arange(0, D_PAD).to(tl.int64)[None, :]
    for number in range(0, tokens):
        n = tl.cast(number, tl.int64)
        position = tl.load(new_positions + b * new_b + n * new_n)
        if position >= 0:
            if count < GROUP:
                for first in range(0, heads, HEADS):
                    h = (first + tl.arange(0, HEADS)).to(tl.int64)[:, None]
                    mask = (h < heads) & (d < HEAD_DIM)
                    at = ((b * heads + h) * GROUP + count) * HEAD_DIM + d
                    k = tl.load(key + b * key_b + h * key_h + n * key_n + d * key_d, mask=mask)
                    v = tl.load(value + b * value_b + h * value_h + n * value_n + d * value_d, mask=mask)
                    tl.store(buffer_key + at, k, mask=mask)
                    tl.store(buffer_value + at, v, mask=mask)
                tl.store(positions + b * slots + table_slots + count, position)
                count += 1
            else:
                tl.store(overflow + b, 1)
    tl.debug_barrier()                                                 # all threads have read `buffered`
    tl.store(buffered + b, count)


# Flush ---------------------------------------------------------------------------------------------------------------


@triton.jit
def holes(
    block_thoughts, slot_groups, slot, kind, count, there, table_slots, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """List the lowest free slots, at most `count`, in the blocks of a thought type, which have `there` free slots.
    Returns how many were found."""
    found = 0
    start = 0
    wanted = tl.minimum(count, there)
    while (found < wanted) & (start < table_slots):
        s = start + tl.arange(0, CHUNK)
        mine = tl.load(block_thoughts + s // BLOCK, mask=s < table_slots, other=-1) == kind
        free = mine & (tl.load(slot_groups + s, mask=mine, other=0) < 0)
        rank = found + tl.cumsum(free.to(tl.int32), 0) - 1
        tl.store(slot + rank, s, mask=free & (rank < count))
        found += tl.sum(free.to(tl.int32), 0)
        start += CHUNK
    return tl.minimum(found, count)


@triton.jit
def free_places(flags, FREE: tl.constexpr, result, count, total, CHUNK: tl.constexpr):
    """List the lowest `count` of `total` places whose flag is FREE. Returns how many were found, at most `count`."""
    found = 0
    start = 0
    while (found < count) & (start < total):
        i = start + tl.arange(0, CHUNK)
        free = tl.load(flags + i, mask=i < total, other=FREE + 1).to(tl.int32) == FREE
        free = free & (i < total)
        rank = found + tl.cumsum(free.to(tl.int32), 0) - 1
        tl.store(result + rank, i, mask=free & (rank < count))
        found += tl.sum(free.to(tl.int32), 0)
        start += CHUNK
    return tl.minimum(found, count)


@triton.jit
def _free_group(tokens, total, CHUNK: tl.constexpr):
    """The lowest scale group without tokens, or `total` if there is none."""
    best = total
    start = 0
    while (best == total) & (start < total):
        i = start + tl.arange(0, CHUNK)
        free = (i < total) & (tl.load(tokens + i, mask=i < total, other=1) == 0)
        best = tl.minimum(best, tl.min(tl.where(free, i, total), 0))
        start += CHUNK
    return best


@triton.jit
def put_in_order(
    order, block_thoughts, counts, entries, OF_T: tl.constexpr, OF_E: tl.constexpr, OF_R: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """List the entries in use, format by format, ascending in each. All pointers are at the row."""
    tl.debug_barrier()
    t, e, r = tl.load(counts), tl.load(counts + 1), tl.load(counts + 2)
    second = tl.where(OF_T == 0, t, 0) + tl.where(OF_E == 0, e, 0) + tl.where(OF_R == 0, r, 0)
    third = second + tl.where(OF_T == 1, t, 0) + tl.where(OF_E == 1, e, 0) + tl.where(OF_R == 1, r, 0)
    first = 0
    for start in range(0, entries, CHUNK):
        i = start + tl.arange(0, CHUNK)
        kind = tl.load(block_thoughts + i, mask=i < entries, other=-1)
        number = tl.where(kind < 0, -1, pick(kind, OF_T, OF_E, OF_R))
        zero, one, two = (number == 0).to(tl.int32), (number == 1).to(tl.int32), (number == 2).to(tl.int32)
        place = tl.where(
            number == 0, first + tl.cumsum(zero, 0),
            tl.where(number == 1, second + tl.cumsum(one, 0), third + tl.cumsum(two, 0)),
        )
        tl.store(order + place - 1, i, mask=number >= 0)
        first += tl.sum(zero, 0)
        second += tl.sum(one, 0)
        third += tl.sum(two, 0)


@triton.jit(do_not_specialize=["slots", "entries", "groups", "segment_count", "capacity_t", "capacity_e", "capacity_r"])
def assign_kernel(
    rows, thought, segment, positions, segments, evicted, slot_groups, block_thoughts, physical, order, used,
    group_tokens, starts, counts, buffered, overflow, plan,
    slots, entries, groups, segment_count, rows_b, thought_b, segment_b, first_t, first_e, first_r,
    capacity_t, capacity_e, capacity_r,
    OF_T: tl.constexpr, OF_E: tl.constexpr, OF_R: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    NEW: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr,
):
    """A row's flush, if requested: assigns slots, blocks and a scale group to the tokens of its buffer and empties it.
    If there is no room, only sets `overflow`. first, capacity: a type's first physical block in `used`, and their
    number."""
    b = tl.program_id(0).to(tl.int64)
    plan += b * (PLAN_SLOTS + GROUP + 2 * NEW)
    tl.store(plan + PLAN_COUNT, 0)
    count = tl.load(buffered + b).to(tl.int32)
    if (tl.load(rows + b * rows_b) != 0) & (count > 0):
        kind = tl.load(thought + b * thought_b)
        number = tl.load(segment + b * segment_b)
        block_thoughts += b * entries
        physical += b * entries
        used += b * entries
        group_tokens += b * groups
        slot_groups += b * slots
        counts += b * COUNTS
        table_slots = entries * BLOCK
        valid = (kind >= 0) & (kind < 3) & (number >= 0) & (number < segment_count)
        known = tl.where(valid, kind, 0)
        num_blocks = tl.load(counts + known)
        live = tl.load(counts + LIVE + known)
        slot, entry = plan + PLAN_SLOTS, plan + PLAN_SLOTS + GROUP
        found = holes(
            block_thoughts, slot_groups, slot, known, count, num_blocks * BLOCK - live, table_slots, BLOCK, CHUNK
        )
        needed = (count - found + BLOCK - 1) // BLOCK
        first = pick(known, first_t, first_e, first_r)
        opened = free_places(block_thoughts, -1, entry, needed, entries, CHUNK)
        capacity = pick(known, capacity_t, capacity_e, capacity_r)
        given = free_places(used + first, 0, entry + NEW, needed, capacity, CHUNK)
        group = _free_group(group_tokens, groups, CHUNK)
        i = tl.arange(0, TOKENS)
        there = i < count
        waiting = positions + b * slots + table_slots + i
        position = tl.load(waiting, mask=there, other=-1)
        start_at = starts + b * segment_count + tl.where(valid, number, 0)
        begun = tl.load(start_at) >= 0
        if valid & (opened == needed) & (given == needed) & (group < groups):
            tl.debug_barrier()                                         # all reads come before the writes
            j = tl.arange(0, BLOCKS)
            new = tl.load(entry + j, mask=j < needed, other=0)
            taken = tl.load(entry + NEW + j, mask=j < needed, other=0)
            tl.store(block_thoughts + new, kind, mask=j < needed)
            tl.store(physical + new, taken.to(tl.int64), mask=j < needed)
            tl.store(used + first + taken, 1, mask=j < needed)
            late = i - found
            into = tl.load(entry + late // BLOCK, mask=there & (late >= 0), other=0) * BLOCK + late % BLOCK
            s = tl.where(late >= 0, into, tl.load(slot + i, mask=there & (late < 0), other=0))
            tl.store(slot + i, s, mask=there)
            tl.store(positions + b * slots + s, position, mask=there)
            tl.store(segments + b * slots + s, tl.zeros([TOKENS], tl.int64) + number, mask=there)
            tl.store(evicted + b * slots + s, tl.zeros([TOKENS], tl.int32), mask=there)
            tl.store(slot_groups + s, tl.zeros([TOKENS], tl.int32) + group, mask=there)
            tl.store(waiting, tl.full([TOKENS], -1, tl.int64), mask=there)
            tl.store(group_tokens + group, count)
            tl.store(start_at, tl.sum(tl.where(i == 0, position, 0), 0), mask=~begun)
            tl.store(counts + kind, num_blocks + needed)
            tl.store(counts + LIVE + kind, live + count)
            tl.store(buffered + b, 0)
            tl.store(plan + PLAN_COUNT, count)
            tl.store(plan + PLAN_FORMAT, pick(kind, OF_T, OF_E, OF_R))
            tl.store(plan + PLAN_GROUP, group)
            if needed > 0:
                put_in_order(order + b * entries, block_thoughts, counts, entries, OF_T, OF_E, OF_R, CHUNK)
        else:
            tl.store(overflow + b, 1)


# Eviction ------------------------------------------------------------------------------------------------------------


@triton.jit
def remove(
    gone, group, e, s, inside, entries, positions, segments, evicted, slot_groups, block_thoughts, physical, used,
    group_tokens, counts, first_t, first_e, first_r,
):
    """Remove the tokens `gone`, and free the blocks that become empty. Returns how many did.

    gone, group, s, inside [E, BLOCK_PAD]: whether a token goes, its scale group, its slot, and whether there is one; e
    [E]: the entries of the block table. All pointers are at the row.
    """
    kept = inside & ~gone & (tl.load(slot_groups + s, mask=inside, other=-1) >= 0)
    kind = tl.load(block_thoughts + e, mask=e < entries, other=-1)
    empty = (kind >= 0) & (tl.max(kept.to(tl.int32), 1) == 0)
    block = tl.load(physical + e, mask=empty, other=0)
    tl.debug_barrier()                                                 # all reads come before the writes
    tl.store(positions + s, tl.full(s.shape, -1, tl.int64), mask=gone)
    tl.store(segments + s, tl.full(s.shape, -1, tl.int64), mask=gone)
    tl.store(slot_groups + s, tl.full(s.shape, -1, tl.int32), mask=gone)
    tl.store(evicted + s, (~empty[:, None] & gone).to(tl.int32), mask=gone | (empty[:, None] & inside))
    tl.atomic_add(group_tokens + group, tl.full(s.shape, -1, tl.int32), mask=gone)
    tl.store(used + pick(kind, first_t, first_e, first_r) + block, tl.zeros(e.shape, tl.int32), mask=empty)
    tl.store(block_thoughts + e, tl.full(e.shape, -1, tl.int64), mask=empty)
    tl.store(physical + e, tl.full(e.shape, -1, tl.int64), mask=empty)
    left = tl.sum(gone.to(tl.int32), 1)
    freed = 0
    for one in tl.static_range(3):
        emptied = tl.sum((empty & (kind == one)).to(tl.int32), 0)
        tl.store(counts + one, tl.load(counts + one) - emptied)
        tl.store(counts + LIVE + one, tl.load(counts + LIVE + one) - tl.sum(tl.where(kind == one, left, 0), 0))
        freed += emptied
    return freed


@triton.jit(do_not_specialize=["slots", "entries", "groups"])
def evict_kernel(
    tokens, positions, segments, evicted, slot_groups, block_thoughts, physical, order, used, group_tokens, counts,
    slots, entries, groups, tokens_b, tokens_s, first_t, first_e, first_r,
    OF_T: tl.constexpr, OF_E: tl.constexpr, OF_R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PAD: tl.constexpr,
    ENTRIES: tl.constexpr, CHUNK: tl.constexpr, MARKS: tl.constexpr,
):
    """A row's evictions: removes marked tokens and frees the blocks that become empty."""
    b = tl.program_id(0).to(tl.int64)
    block_thoughts += b * entries
    physical += b * entries
    positions += b * slots
    segments += b * slots
    evicted += b * slots
    slot_groups += b * slots
    counts += b * COUNTS
    # Nearly all steps evict nothing. They only read the marks, many at a time.
    marked = tl.zeros([MARKS], tl.int32)
    for start in range(0, slots, MARKS):
        s = start + tl.arange(0, MARKS)
        marked |= tl.load(tokens + b * tokens_b + s.to(tl.int64) * tokens_s, mask=s < slots, other=0).to(tl.int32)
    o = tl.arange(0, BLOCK_PAD)[None, :]
    freed = 0
    for start in range(0, tl.where(tl.max(marked, 0) != 0, entries, 0), ENTRIES):
        e = start + tl.arange(0, ENTRIES)
        s = e[:, None] * BLOCK + o
        inside = (e < entries)[:, None] & (o < BLOCK)
        asked = tl.load(tokens + b * tokens_b + s.to(tl.int64) * tokens_s, mask=inside, other=0) != 0
        group = tl.load(slot_groups + s, mask=asked, other=-1)
        gone = asked & (group >= 0)
        if tl.max(tl.max(gone.to(tl.int32), 1), 0) > 0:
            freed += remove(
                gone, group, e, s, inside, entries, positions, segments, evicted, slot_groups, block_thoughts, physical,
                used + b * entries, group_tokens + b * groups, counts, first_t, first_e, first_r,
            )
    if freed > 0:
        put_in_order(order + b * entries, block_thoughts, counts, entries, OF_T, OF_E, OF_R, CHUNK)
