"""Attention over a paged cache, quantized blocks of up to three formats and the buffer, and its sparsity.

A (row, KV head) is divided into splits, each with a share of the blocks of every format. A second launch merges them.
Logits are in base 2 and are stored for that launch, since small weights are defined relative to the row's largest.

Elements of blocks are float16 times 1 / UNIT, exactly (see `_paging_decode.py`). bfloat16 queries are scaled to near
2^14 by a power of two per head and cast to float16. P is cast to float16 times UNIT. Both products use tensor cores.
fp8's scales, here one per token, are applied to the logits and to P, which is then cast to two bfloat16 numbers, the
second of which is the rounding error of the first. With float32 queries, all of this is in float32.

Blocks that are not quantized have the queries' dtype and are read with the arithmetic of the buffer, without scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.numerics import divided, dot, float32, log2_or_minus_inf, round_to
from .._common.scratch import is_last, row_of
from .._common.softmax import merge_head, merge_sums, weigh_tile
from ._mean_kernels import FREE, below_mean, pooled_weight
from ._paging_decode import codes, values
from ._paging_decode import key_scales as scales_of_keys
from ._paging_kernels import COUNTS, LIVE
from ._paging_layout import record_of_whole, value_slot


@triton.jit
def _keep(logits, at, logit, live, inside, kept, GROUP_HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Store the logits of a tile, [ROWS, TILE], at places `at` of their (row, KV head), for the first `kept` query
    heads (all or none); +inf for unoccupied slots."""
    row = tl.arange(0, ROWS)[:, None]
    tl.store(
        logits + at[None, :] * GROUP_HEADS + row, tl.where(live[None, :], logit, float("inf")),
        mask=(row < kept) & inside[None, :], eviction_policy="evict_last",
    )


@triton.jit
def _slots(slot_groups, physical, order, first, tile, count, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Of the slots of a tile: which there are, their scale groups, -1 for unoccupied ones, and their blocks."""
    BLOCKS: tl.constexpr = TILE // BLOCK
    i = tl.arange(0, TILE)
    rank = tile * BLOCKS + i // BLOCK
    inside = (i < BLOCKS * BLOCK) & (rank < count)
    entry = tl.load(order + first + rank, mask=inside, other=0)
    group = tl.load(slot_groups + entry * BLOCK + i % BLOCK, mask=inside, other=-1)
    return inside, group, tl.load(physical + entry, mask=inside, other=0)


@triton.jit
def _whole(words, halves, at, live, dtype: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr):
    """Keys or values [TILE, D_PAD] that are not quantized, whose words begin at `at` [TILE]."""
    d = tl.arange(0, D_PAD)
    mask = live[:, None] & (d < HEAD_DIM)[None, :]
    if dtype == tl.float32:
        return tl.load(words + at[:, None] + d[None, :], mask=mask, other=0).to(tl.float32, bitcast=True)
    else:
        return tl.load(halves + (at * 2)[:, None] + d[None, :], mask=mask, other=0).to(dtype, bitcast=True)


@triton.jit
def _attend_whole(
    acc, row_max, weight_sum, q, scale, words, halves, physical, slot_groups, order, logits, kept, first, count, split,
    splits, b, h, heads, row_words, base, FORMAT: tl.constexpr, GROUP_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):
    """`_attend_blocks` for blocks that are not quantized, with the arithmetic of the buffer. q: the queries."""
    BLOCKS: tl.constexpr = TILE // BLOCK
    WIDTH: tl.constexpr = HEAD_DIM if FORMAT == "float32" else (HEAD_DIM + 1) // 2
    i = tl.arange(0, TILE)
    tiles = (count + BLOCKS - 1) // BLOCKS
    each = (tiles + splits - 1) // splits
    begin = split * each
    for tile in range(begin, tl.minimum(begin + each, tiles)):
        inside, group, block = _slots(slot_groups, physical, order, first, tile, count, BLOCK, TILE)
        live = group >= 0
        at = record_of_whole(b, block, h, row_words, base, heads, FORMAT, BLOCK, HEAD_DIM) + i % BLOCK * WIDTH
        k = _whole(words, halves, at, live, q.dtype, HEAD_DIM, D_PAD)
        logit = tl.where(live[None, :], dot(q, tl.trans(k)) * scale, float("-inf"))
        _keep(logits, (first + tile * BLOCKS) * BLOCK + i, logit, live, inside, kept, GROUP_HEADS, ROWS)
        p, row_max, weight_sum, rescale = weigh_tile(logit, row_max, weight_sum)
        v = _whole(words, halves, at + BLOCK * WIDTH, live, q.dtype, HEAD_DIM, D_PAD)
        acc = acc * rescale[:, None] + dot(round_to(p, v.dtype), v)
    return acc, row_max, weight_sum


@triton.jit
def _attend_format(
    acc, row_max, weight_sum, native, scale, q, factor, words, halves, pool, key_scales, chunk_scales, physical,
    slot_groups, order, logits, kept, first, count, split, splits, b, h, heads, groups, row_words, base,
    FORMAT: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, GROUP_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):
    """Online softmax over a split's share of the `count` blocks of one format. native times scale, and q [ROWS, D_PAD]
    times `factor` [ROWS], are the scaled queries."""
    if LANES == 0:
        return _attend_whole(
            acc, row_max, weight_sum, native, scale, words, halves, physical, slot_groups, order, logits, kept, first,
            count, split, splits, b, h, heads, row_words, base,
            FORMAT, GROUP_HEADS, BLOCK, HEAD_DIM, D_PAD, ROWS, TILE,
        )
    else:
        return _attend_blocks(
            acc, row_max, weight_sum, q, factor * UNIT, words, halves, pool, key_scales, chunk_scales, physical,
            slot_groups, order, logits, kept, first, count, split, splits, b, h, heads, groups, row_words, base,
            FORMAT, LANES, UNIT, GROUP_HEADS, GROUP, BLOCK, HEAD_DIM, D_PAD, ROWS, TILE,
        )


@triton.jit
def _attend_blocks(
    acc, row_max, weight_sum, q, factor, words, halves, pool, key_scales, chunk_scales, physical, slot_groups, order,
    logits, kept, first, count, split, splits, b, h, heads, groups, row_words, base,
    FORMAT: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, GROUP_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):
    """Online softmax over a split's share of the `count` blocks of one format, listed in `order` from `first` on.

    q [ROWS, D_PAD] times `factor` [ROWS] are the scaled queries times UNIT. Unoccupied slots are not read, so NaN in
    them has no effect.
    """
    BLOCKS: tl.constexpr = TILE // BLOCK
    WIDTH: tl.constexpr = (HEAD_DIM + 4 * LANES - 1) // (4 * LANES)
    PER_TOKEN: tl.constexpr = 0 if FORMAT == "fp8" else (HEAD_DIM + GROUP - 1) // GROUP
    RECORD: tl.constexpr = BLOCK * 2 * WIDTH + (BLOCK * PER_TOKEN + 3) // 4
    SCALES: tl.constexpr = (HEAD_DIM + 3) // 4
    i = tl.arange(0, TILE)
    place = i % BLOCK
    tiles = (count + BLOCKS - 1) // BLOCKS
    each = (tiles + splits - 1) // splits
    for tile in range(split * each, tl.minimum(split * each + each, tiles)):
        inside, group, block = _slots(slot_groups, physical, order, first, tile, count, BLOCK, TILE)
        live = group >= 0
        record = b * row_words + base + (block * heads + h) * RECORD
        scales_at = (b * groups + group) * heads + h
        k = codes(words + record + place * WIDTH, live, WIDTH, D_PAD // (4 * LANES), FORMAT, LANES)
        if FORMAT != "fp8":
            k *= scales_of_keys(key_scales + scales_at * SCALES, live, LANES, HEAD_DIM, D_PAD)
        logit = dot(q, tl.trans(k.to(q.dtype))) * factor[:, None]              # [ROWS, TILE]
        if FORMAT == "fp8":
            logit *= tl.load(chunk_scales + scales_at * 2, mask=live, other=0.0)[None, :]
        logit = tl.where(live[None, :], logit, float("-inf"))
        _keep(logits, (first + tile * BLOCKS) * BLOCK + i, logit, live, inside, kept, GROUP_HEADS, ROWS)
        p, row_max, weight_sum, rescale = weigh_tile(logit, row_max, weight_sum)
        v = values(
            halves + (record + BLOCK * WIDTH) * 2 + value_slot(place, LANES, BLOCK, HEAD_DIM),
            pool + (record + 2 * BLOCK * WIDTH) * 4 + place, live, FORMAT, LANES, GROUP, BLOCK, HEAD_DIM, D_PAD,
        )
        p *= UNIT
        if FORMAT == "fp8":
            p *= tl.load(chunk_scales + scales_at * 2 + 1, mask=live, other=0.0)[None, :]
        acc = acc * rescale[:, None]
        if FORMAT == "fp8" and q.dtype == tl.float16:
            v = round_to(v.to(tl.float32), tl.bfloat16)
            high = round_to(p, tl.bfloat16)
            acc += dot(high, v)
            acc += dot(round_to(p - float32(high), tl.bfloat16), v)
        else:
            acc += dot(round_to(p, q.dtype), v.to(q.dtype))
    return acc, row_max, weight_sum


@triton.jit
def _attend_buffer(
    acc, row_max, weight_sum, q, scale, buffer_key, buffer_value, logits, kept, at, count,
    GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):
    """Online softmax over the buffer's `count` tokens. All pointers are at the (row, KV head)."""
    i, d = tl.arange(0, TOKENS), tl.arange(0, D_PAD)
    live = i < count
    mask = live[:, None] & (d < HEAD_DIM)[None, :]
    k = tl.load(buffer_key + i[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
    logit = tl.where(live[None, :], dot(q, tl.trans(k)) * scale, float("-inf"))
    _keep(logits, at + i, logit, live, live, kept, GROUP_HEADS, ROWS)
    p, row_max, weight_sum, rescale = weigh_tile(logit, row_max, weight_sum)
    v = tl.load(buffer_value + i[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
    return acc * rescale[:, None] + dot(round_to(p, v.dtype), v), row_max, weight_sum


@triton.jit
def halved(q, AXIS: tl.constexpr, ROWS: tl.constexpr):
    """Queries, with channels along AXIS, as float16 and factors [ROWS] float32, whose product they are. bfloat16 is
    scaled to a maximum below 2^15; elements below 2^-29 of it lose bits. float32 and float16 are unchanged."""
    if q.dtype == tl.bfloat16:
        wide = float32(q)
        exponent = tl.max((wide.to(tl.int32, bitcast=True) >> 23) & 255, AXIS)
        exponent = tl.maximum(exponent, 32)                            # below 2^-95 logits vanish
        factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
        back = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
        return (wide * tl.expand_dims(factor, AXIS)).to(tl.float16), back
    else:
        return q, tl.full([ROWS], 1.0, tl.float32)


@triton.jit
def heads_with_sparsity(sparsity_mask, b, GROUP_HEADS: tl.constexpr, HAS_SPARSITY_MASK: tl.constexpr):
    """GROUP_HEADS if row b's sparsity is requested, else 0. Without HAS_SPARSITY_MASK, every row's is, and
    `sparsity_mask` is not read."""
    if HAS_SPARSITY_MASK:
        return tl.where(tl.load(sparsity_mask + b) != 0, GROUP_HEADS, 0)
    else:
        return GROUP_HEADS


@triton.jit
def blocks_by_format(counts, OF_T: tl.constexpr, OF_E: tl.constexpr, OF_R: tl.constexpr):
    """The numbers of blocks that a row has in each format."""
    t, e, r = tl.load(counts), tl.load(counts + 1), tl.load(counts + 2)
    zero = (t if OF_T == 0 else 0) + (e if OF_E == 0 else 0) + (r if OF_R == 0 else 0)
    one = (t if OF_T == 1 else 0) + (e if OF_E == 1 else 0) + (r if OF_R == 1 else 0)
    return zero, one, t + e + r - zero - one


@triton.jit(do_not_specialize=["heads", "slots", "entries", "groups", "splits", "query_b", "query_h"])
def attend_kernel(
    query, words, halves, pool, key_scales, chunk_scales, buffer_key, buffer_value, slot_groups, physical, order,
    counts, buffered, sparsity_mask, logits, partial, row_maxima, weight_sums,
    scale, heads, slots, entries, groups, splits, row_words, base_0, base_1, base_2, query_b, query_h, query_d,
    OF_T: tl.constexpr, OF_E: tl.constexpr, OF_R: tl.constexpr,
    FORMAT_0: tl.constexpr, FORMAT_1: tl.constexpr, FORMAT_2: tl.constexpr,
    LANES_0: tl.constexpr, LANES_1: tl.constexpr, LANES_2: tl.constexpr,
    UNIT_0: tl.constexpr, UNIT_1: tl.constexpr, UNIT_2: tl.constexpr,
    GROUP_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr, HAS_SPARSITY_MASK: tl.constexpr,
):
    """Program (split, batch_head): attends to a share of the blocks of a (row, KV head), for all its query heads. The
    last split also attends to the buffer. Stores the share's maximum, sum and accumulator, and logits in reading order.
    """
    split = tl.program_id(0) % splits
    batch_head = (tl.program_id(0) // splits).to(tl.int64)
    b, h = batch_head // heads, batch_head % heads
    row, d = tl.arange(0, ROWS), tl.arange(0, D_PAD)
    mask = (row < GROUP_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    head = (h * GROUP_HEADS + row)[:, None]
    native = tl.load(
        query + b * query_b + head * query_h + d.to(tl.int64)[None, :] * query_d, mask=mask, other=0.0
    )
    q, factor = halved(native, 1, ROWS)
    factor *= scale
    physical += b * entries
    order += b * entries
    slot_groups += b * slots
    logits += batch_head * row_of(slots) * GROUP_HEADS
    kept = heads_with_sparsity(sparsity_mask, b, GROUP_HEADS, HAS_SPARSITY_MASK)
    zero, one, two = blocks_by_format(counts + b * COUNTS, OF_T, OF_E, OF_R)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    acc, row_max, weight_sum = _attend_format(
        acc, row_max, weight_sum, native, scale, q, factor, words, halves, pool, key_scales, chunk_scales, physical,
        slot_groups, order, logits, kept, 0, zero, split, splits, b, h, heads, groups, row_words, base_0,
        FORMAT_0, LANES_0, UNIT_0, GROUP_HEADS, GROUP, BLOCK, HEAD_DIM, D_PAD, ROWS, TILE,
    )
    if FORMAT_1 != "":
        acc, row_max, weight_sum = _attend_format(
            acc, row_max, weight_sum, native, scale, q, factor, words, halves, pool, key_scales, chunk_scales, physical,
            slot_groups, order, logits, kept, zero, one, split, splits, b, h, heads, groups, row_words, base_1,
            FORMAT_1, LANES_1, UNIT_1, GROUP_HEADS, GROUP, BLOCK, HEAD_DIM, D_PAD, ROWS, TILE,
        )
    if FORMAT_2 != "":
        acc, row_max, weight_sum = _attend_format(
            acc, row_max, weight_sum, native, scale, q, factor, words, halves, pool, key_scales, chunk_scales, physical,
            slot_groups, order, logits, kept, zero + one, two, split, splits, b, h, heads, groups, row_words, base_2,
            FORMAT_2, LANES_2, UNIT_2, GROUP_HEADS, GROUP, BLOCK, HEAD_DIM, D_PAD, ROWS, TILE,
        )
    if split == splits - 1:
        acc, row_max, weight_sum = _attend_buffer(
            acc, row_max, weight_sum, native, scale, buffer_key + batch_head * GROUP * HEAD_DIM,
            buffer_value + batch_head * GROUP * HEAD_DIM, logits, kept, (zero + one + two) * BLOCK,
            tl.load(buffered + b), GROUP_HEADS, HEAD_DIM, D_PAD, ROWS, TOKENS,
        )
    part = (batch_head * GROUP_HEADS + row) * splits + split
    tl.store(row_maxima + part, row_max, mask=row < GROUP_HEADS)
    tl.store(weight_sums + part, weight_sum, mask=row < GROUP_HEADS)
    tl.store(partial + part[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)


@triton.jit
def _measure(
    batch_head, logits, row_maxima, weight_sums, counts, buffered, sparsity_mask, below, sparsity, completion_counters,
    pooled, sums, log_threshold, threshold, heads, slots, splits,
    GROUP_HEADS: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    HAS_SPARSITY_MASK: tl.constexpr, OF_MEAN: tl.constexpr, OF_RANKS: tl.constexpr,
):
    """For rows whose sparsity is requested, counts a KV head's tokens with small weights; the last head of a row adds
    up the counts. log_threshold is in base 2. With OF_MEAN, the heads store weights instead, and the last one averages
    them over the heads and counts. With OF_RANKS, they only store them: without OF_MEAN as logarithms in base 2, +inf
    in free places."""
    b = batch_head // heads
    g, i = tl.arange(0, GROUP_PAD), tl.arange(0, SPLITS)
    valid = g < GROUP_HEADS
    if heads_with_sparsity(sparsity_mask, b, GROUP_HEADS, HAS_SPARSITY_MASK) > 0:
        part = (batch_head * GROUP_HEADS + g)[:, None] * splits + i[None, :]
        there = valid[:, None] & (i < splits)[None, :]
        row_max, total = merge_sums(row_maxima, weight_sums, part, there, SAME_LAUNCH=False)
        # The largest weight of head g is 1 / total. A token counts by its largest. Subtracting row_max first is exact.
        log_total = log2_or_minus_inf(total)
        limit = tl.max(tl.where(valid, -log_total, float("-inf")), 0) + log_threshold
        counts += b * COUNTS
        blocks = tl.load(counts) + tl.load(counts + 1) + tl.load(counts + 2)
        waiting = tl.load(buffered + b).to(tl.int32)
        live = tl.load(counts + LIVE) + tl.load(counts + LIVE + 1) + tl.load(counts + LIVE + 2) + waiting
        places = blocks * BLOCK + waiting
        logits += batch_head * row_of(slots) * GROUP_HEADS
        passed = tl.zeros([CHUNK], tl.int32)
        weight_sum = tl.zeros([CHUNK], tl.float32)
        for start in range(0, places, CHUNK):
            s = start + tl.arange(0, CHUNK)
            x = tl.load(
                logits + s[:, None] * GROUP_HEADS + g[None, :], mask=(s < places)[:, None] & valid[None, :],
                other=float("inf"),
            )
            x = tl.where(valid[None, :], (x - row_max[None, :]) - log_total[None, :], float("-inf"))
            if OF_RANKS and not OF_MEAN:
                tl.store(pooled + batch_head * row_of(slots) + s, tl.max(x, 1), mask=s < places)
            elif OF_MEAN:
                weight = pooled_weight(tl.max(x, 1))
                tl.store(pooled + batch_head * row_of(slots) + s, weight, mask=s < places)
                weight_sum += tl.where(weight == FREE, 0.0, weight)
            else:
                passed += (tl.max(x, 1) < limit).to(tl.int32)
        if not OF_RANKS:
            if OF_MEAN:
                tl.store(sums + batch_head, tl.sum(weight_sum, 0))
            else:
                tl.store(below + batch_head, tl.sum(passed, 0))
            if is_last(completion_counters + b, heads):
                if OF_MEAN:
                    first, length = b * heads, row_of(slots)
                    count = below_mean(pooled + first * length, sums + first, length, heads, places, threshold, CHUNK)
                    share = divided(count.to(tl.float32), tl.maximum(live, 1).to(tl.float32))
                else:
                    count = tl.load(below + b * heads)
                    for other in range(1, heads):
                        count += tl.load(below + b * heads + other)
                    share = divided(count.to(tl.float32), tl.maximum(live * heads, 1).to(tl.float32))
                tl.store(sparsity + b, share)
    elif not OF_RANKS:
        tl.store(sparsity + b, float("nan"), mask=batch_head % heads == 0)


@triton.jit(do_not_specialize=["heads", "slots", "splits"])
def finish_kernel(
    logits, partial, row_maxima, weight_sums, counts, buffered, sparsity_mask, output, below, sparsity,
    completion_counters, pooled, sums, log_threshold, threshold, heads, slots, splits,
    GROUP_HEADS: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    HAS_SPARSITY_MASK: tl.constexpr, OF_MEAN: tl.constexpr, OF_RANKS: tl.constexpr,
):
    """The first programs, one for each query head, merge its output. The others, one for each KV head, `_measure`."""
    outputs = tl.num_programs(0) // (GROUP_HEADS + 1) * GROUP_HEADS
    if tl.program_id(0) < outputs:
        merge_head(partial, row_maxima, weight_sums, output, splits, HEAD_DIM, D_PAD, SPLITS)
    else:
        _measure(
            (tl.program_id(0) - outputs).to(tl.int64), logits, row_maxima, weight_sums, counts, buffered, sparsity_mask,
            below, sparsity, completion_counters, pooled, sums, log_threshold, threshold, heads, slots, splits,
            GROUP_HEADS, GROUP_PAD, BLOCK, SPLITS, CHUNK, HAS_SPARSITY_MASK, OF_MEAN, OF_RANKS,
        )
