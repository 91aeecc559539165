"""Attention kernels for a block of queries, launched by `kernels.py`: two passes over the keys.

`attention_kernel` runs an online softmax: it returns the output, and each query's softmax shift and inverse sum.
`received_kernel` recomputes the logits, tile by tile of keys, and sums each key's weights over queries and heads.
`newest_kernel` computes the weights that the newest query alone gives to each key.

With POSITIONS, the queries are those of a window instead of the last slots: see `kernels.Window`. With DUE, heads that
hold at most `capacity` tokens are skipped. With FP8, keys and values are codes of this format (see `from_fp8`), uint8,
with scales of KV heads: that of keys is part of `scale`, and that of values multiplies the outputs. In attention_kernel
and received_kernel, a query's row is query * GROUP + head of the group, so that all heads of a KV head share the loaded
keys. Logits are in base 2; scale and softcap, a number or None: see `scaled_logit`. Strides of queries and caches are
divided by UNIT (see _common.launch.stride_unit).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import SMALL_TILES
from ..numerics import (
    dot,
    finite_or_zero,
    from_fp8,
    log2_or_minus_inf,
    previous_done,
    round_output,
    round_to,
    scaled_logit,
)
from ..scratch import is_last
from ..softmax import begin as begin_softmax
from ..softmax import divide, merge_outputs, merge_sums, weigh

_SIZES = [
    "slots", "count", "heads", "query_b", "query_h", "query_q", "key_b", "key_h", "key_s", "value_b", "value_h",
    "value_s", "occupied_b", "occupied_h",
]
#: Slots, and queries, that are loaded at a time. In the interpreter few, so that tests cover several rounds.
_SLOTS = tl.constexpr(16 if SMALL_TILES else 1024)
_QUERIES = tl.constexpr(8 if SMALL_TILES else 128)
_POSITIONS = ["capacity", "asks_b", "asks_q", "position_b", "position_h", "position_s"]
_SCALES = ["key_scale_h", "value_scale_h"]


@triton.jit
def _extent(occupied, occupied_s, end):
    """The number of slots before `end` occupied without a gap from slot 0 on, and the end of the last occupied slot."""
    gap = tl.full([_SLOTS], 2**31 - 1, tl.int32)
    used = tl.full([_SLOTS], 0, tl.int32)
    for start in range(0, end, _SLOTS):
        s = start + tl.arange(0, _SLOTS)
        holds = tl.load(occupied + s.to(tl.int64) * occupied_s, mask=s < end, other=0) != 0
        gap = tl.minimum(gap, tl.where(holds, 2**31 - 1, s))
        used = tl.maximum(used, tl.where(holds, s + 1, 0))
    return tl.minimum(tl.min(gap, 0), end), tl.max(used, 0)


@triton.jit
def _attend_tiles(
    q, sees, acc, row_max, weight_sum, key, value, occupied, positions, scale, softcap, begin, first, second, slots,
    key_s, key_d, value_s, value_d, occupied_s, position_s,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, POSITIONS: tl.constexpr, OUTPUT: tl.constexpr, STAGES: tl.constexpr,
    NEGATIVE: tl.constexpr, FP8: tl.constexpr,
):
    """Online softmax of all rows over `first` tiles from slot `begin` on, then over the tiles from slot `second` to
    `slots`.

    With CAUSAL, row r attends to slots (with POSITIONS: positions) up to sees[r]. With MASKED, unoccupied slots are not
    read, so that NaN in them has no effect.
    """
    d = tl.arange(0, D_PAD).to(tl.int64)
    in_head = (d < HEAD_DIM)[None, :]
    tiles = first + tl.cdiv(tl.maximum(slots - second, 0), BLOCK)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        start = tl.where(tile < first, begin + tile * BLOCK, second + (tile - first) * BLOCK)
        s = start + tl.arange(0, BLOCK)
        s64 = s.to(tl.int64)
        keys = key + s64[:, None] * key_s + d[None, :] * key_d
        values = value + s64[:, None] * value_s + d[None, :] * value_d
        if MASKED:
            holds = tl.load(occupied + s64 * occupied_s, mask=s < slots, other=0) != 0
            k = tl.load(keys, mask=holds[:, None] & in_head, other=0.0)
        elif HEAD_DIM != D_PAD:
            k = tl.load(keys, mask=in_head, other=0.0)
        else:
            k = tl.load(keys)
        if FP8 is not None:
            k = from_fp8(k, q.dtype, FP8)
        product = dot(q, tl.trans(k))                                  # [ROWS, BLOCK]
        logit = scaled_logit(product, scale, softcap)
        if MASKED:
            logit = tl.where(holds[None, :], logit, float("-inf"))
        if CAUSAL:
            if POSITIONS:
                at = tl.load(positions + s64 * position_s, mask=s < slots, other=0)
            else:
                at = s64
            logit = tl.where(at[None, :] <= sees[:, None], logit, float("-inf"))
        if MASKED or CAUSAL or softcap is not None:
            highest = tl.max(logit, 1)
        elif NEGATIVE:
            highest = tl.min(product, 1) * scale
        else:
            highest = tl.max(product, 1) * scale
        p, row_max, rescale = weigh(logit, row_max, highest)
        weight_sum = weight_sum * rescale + tl.sum(p, 1)
        if OUTPUT:
            if MASKED:
                v = tl.load(values, mask=holds[:, None] & in_head, other=0.0)
            elif HEAD_DIM != D_PAD:
                v = tl.load(values, mask=in_head, other=0.0)
            else:
                v = tl.load(values)
            if FP8 is not None:
                v = from_fp8(v, q.dtype, FP8)
            acc = acc * rescale[:, None] + dot(round_to(p, v.dtype), v)
    return acc, row_max, weight_sum


@triton.jit
def _merge_splits(
    acc, row_max, weight_sum, at, splits, split, counter, partial, row_maxima, weight_sums, valid,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr, OUTPUT: tl.constexpr,
):
    """Store what a split of the slots contributes to the rows `at`. The last program of these rows to arrive merges:
    whether this is the last, and if so the rows' outputs [ROWS, D_PAD], maxima and sums."""
    part = at * splits
    tl.store(row_maxima + part + split, row_max, mask=valid)
    tl.store(weight_sums + part + split, weight_sum, mask=valid)
    if OUTPUT:
        d = tl.arange(0, D_PAD)
        mask = valid[:, None] & (d < HEAD_DIM)[None, :]
        tl.store(partial + (part + split)[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)
    last = is_last(counter, splits)
    if last:
        i = tl.arange(0, SPLITS)
        there = valid[:, None] & (i < splits)[None, :]
        row_max, weight_sum = merge_sums(row_maxima, weight_sums, part[:, None] + i[None, :], there)
        if OUTPUT:
            acc = merge_outputs(partial, row_maxima, part, splits, row_max, weight_sum, valid, HEAD_DIM, D_PAD)
    return last, acc, row_max, weight_sum


@triton.jit(do_not_specialize=[*_SIZES, *_POSITIONS, *_SCALES, "splits", "split_tiles"])
def attention_kernel(
    query, key, value, key_scale, value_scale, occupied, query_positions, positions, counts, output, softmax_parts,
    partial, row_maxima, weight_sums, completion_counters, sink_logits, scale, softcap,
    slots, count, heads, query_b, query_h, query_q, query_d,
    key_b, key_h, key_s, key_d, value_b, value_h, value_s, value_d, occupied_b, occupied_h, occupied_s,
    capacity, asks_b, asks_q, position_b, position_h, position_s, key_scale_h, value_scale_h, splits, split_tiles,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr, POSITIONS: tl.constexpr, DUE: tl.constexpr, OUTPUT: tl.constexpr, STAGES: tl.constexpr,
    NEGATIVE: tl.constexpr, SPLITS: tl.constexpr, FP8: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Program (split, block of rows, KV head, row of the batch). Without OUTPUT, values are not read.

    With SPLITS = 1, a program attends to all slots. Otherwise to `split_tiles` tiles of them, and the last of `splits`
    programs merges; SPLITS is at least `splits`.
    """
    previous_done(DEPENDENT)
    blocks = tl.cdiv(count * GROUP, ROWS)
    program, split = tl.program_id(0), 0
    if SPLITS > 1:
        program, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    first = (program % blocks) * ROWS
    batch_head = (program // blocks).to(tl.int64)
    if DUE:
        tokens = tl.load(counts + batch_head)
        if tokens <= capacity:
            return
    b, k_head = batch_head // heads, batch_head % heads
    key += (b * key_b + k_head * key_h) * UNIT
    value += (b * value_b + k_head * value_h) * UNIT
    if key_scale is not None:
        scale = scale * tl.load(key_scale + k_head * key_scale_h)
    occupied += b * occupied_b + k_head * occupied_h
    d = tl.arange(0, D_PAD).to(tl.int64)
    row = first + tl.arange(0, ROWS)
    valid = row < count * GROUP
    i = (row // GROUP).to(tl.int64)
    head = k_head * GROUP + row % GROUP
    past = slots - count                                               # slots that every query attends to
    if POSITIONS:
        positions += b * position_b + k_head * position_h
        sees = tl.load(query_positions + b * asks_b + i * asks_q, mask=valid, other=-1)
        attends = sees >= 0
        past = slots
        end = slots
    else:
        sees = past + i
        attends = tl.load(occupied + sees * occupied_s, mask=valid, other=0) != 0
        end = tl.minimum(past + (first + ROWS - 1) // GROUP + 1, slots)
    query += (b * query_b + k_head * GROUP * query_h) * UNIT
    q = tl.load(
        query + ((row % GROUP).to(tl.int64)[:, None] * query_h + i[:, None] * query_q) * UNIT + d[None, :] * query_d,
        mask=attends[:, None] & (d < HEAD_DIM)[None, :], other=0.0,
    )
    row_max, weight_sum = begin_softmax(sink_logits, head, valid & (split == 0), ROWS)
    acc = tl.zeros([ROWS, D_PAD if OUTPUT else 16], tl.float32)
    begin = 0
    if SPLITS > 1:
        begin = split * split_tiles * BLOCK
        end = tl.minimum(end, begin + split_tiles * BLOCK)
    # First the full tiles that all queries attend to; then tiles with gaps, up to the last token, and the block's own.
    full, used = _extent(occupied + begin * occupied_s, occupied_s, tl.maximum(tl.minimum(past, end) - begin, 0))
    full = full // BLOCK
    gap = begin + full * BLOCK
    gap_tiles = tl.cdiv(tl.maximum(begin + used - gap, 0), BLOCK)
    own = tl.maximum(past // BLOCK * BLOCK, gap + gap_tiles * BLOCK)
    acc, row_max, weight_sum = _attend_tiles(
        q, sees, acc, row_max, weight_sum, key, value, occupied, positions, scale, softcap, begin, full, end, end,
        key_s * UNIT, key_d, value_s * UNIT, value_d, occupied_s, position_s,
        HEAD_DIM, D_PAD, BLOCK, False, POSITIONS, POSITIONS, OUTPUT, STAGES, NEGATIVE, FP8,
    )
    acc, row_max, weight_sum = _attend_tiles(
        q, sees, acc, row_max, weight_sum, key, value, occupied, positions, scale, softcap, gap, gap_tiles, own, end,
        key_s * UNIT, key_d, value_s * UNIT, value_d, occupied_s, position_s,
        HEAD_DIM, D_PAD, BLOCK, True, True, POSITIONS, OUTPUT, 2, NEGATIVE, FP8,
    )
    at = (b * heads * GROUP + head) * count + i
    if SPLITS > 1:
        last, acc, row_max, weight_sum = _merge_splits(
            acc, row_max, weight_sum, at, splits, split, completion_counters + program, partial, row_maxima,
            weight_sums, valid, HEAD_DIM, D_PAD, SPLITS, OUTPUT,
        )
        if last == 0:
            return
    elif OUTPUT:
        acc = divide(acc, weight_sum)
    if OUTPUT and value_scale is not None:
        acc = acc * tl.load(value_scale + k_head * value_scale_h)
    # The output is 0 for queries that attend to nothing and for padding. NaN stays NaN.
    empty = (weight_sum == 0.0) | ~attends
    inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, weight_sum))
    tl.store(softmax_parts + at, tl.where(empty, 0.0, finite_or_zero(row_max)), mask=valid)
    all_queries = tl.num_programs(0).to(tl.int64) // (blocks * splits) * GROUP * count
    tl.store(softmax_parts + all_queries + at, inverse, mask=valid)
    if OUTPUT:
        tl.store(
            output + at[:, None] * HEAD_DIM + d[None, :],
            round_output(tl.where(empty[:, None], 0.0, acc), output.dtype.element_ty),
            mask=valid[:, None] & (d < HEAD_DIM)[None, :],
        )


@triton.jit
def _receive_tiles(
    k, at, last, total, query, softmax_parts, query_positions, scale, softcap, first, count, past, parts_all, parts_h,
    query_h, query_q, query_d, asks_q,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    POSITIONS: tl.constexpr, STAGES: tl.constexpr,
):
    """Add to total [ROWS, BLOCK] the weights that the queries from tile `first` on give to the keys k [BLOCK, D_PAD].

    A tile has QUERIES queries of all heads of the group: row = query * GROUP + head of the group. `at` [BLOCK]: the
    keys' slots (positions), up to `last`. Each row of total sums one row of every tile, so that rows are added once, at
    the end. Pointers are at the KV head."""
    d = tl.arange(0, D_PAD)
    row = tl.arange(0, ROWS)
    head = row % GROUP
    nth = row // GROUP                                                 # of the tile's queries
    queries = query + head.to(tl.int64)[:, None] * query_h + nth.to(tl.int64)[:, None] * query_q + d[None, :] * query_d
    parts = softmax_parts + head * parts_h + nth
    for tile in tl.range(first, tl.cdiv(count, QUERIES), num_stages=STAGES):
        begin = tile * QUERIES
        valid = (nth < QUERIES) & (begin + nth < count)
        shift = tl.load(parts + begin, mask=valid, other=0.0)
        inverse = tl.load(parts + parts_all + begin, mask=valid, other=0.0)
        q = tl.load(
            queries + begin.to(tl.int64) * query_q, mask=valid[:, None] & (d < HEAD_DIM)[None, :], other=0.0,
        )
        # The arithmetic of `_attend_tiles`, but masked afterwards, so that the mask does not change the rounding.
        weight = tl.exp2(scaled_logit(dot(q, tl.trans(k)), scale, softcap) - shift[:, None])  # [ROWS, BLOCK]
        if POSITIONS:
            sees = tl.load(query_positions + (begin + nth).to(tl.int64) * asks_q, mask=valid, other=-1)
            weight = tl.where(at[None, :] <= sees[:, None], weight, 0.0)
        elif last > past + begin:                                      # otherwise, all queries attend to all keys
            weight = tl.where(at[None, :] <= (past + begin + nth)[:, None], weight, 0.0)
        # Padding queries may be NaN. (Loading a mask first would delay the queries.)
        total += tl.where((inverse != 0.0)[:, None], weight, 0.0) * inverse[:, None]
    return total


@triton.jit
def _receive_block(
    first, batch_head, query, key, occupied, query_positions, positions, softmax_parts, result, magnitude, rank, scale,
    softcap, slots, count, parts_all, parts_h, result_h, query_h, query_q, query_d, key_s, key_d, occupied_s, asks_q,
    position_s,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr, MEAN: tl.constexpr, ADD: tl.constexpr, MAGNITUDE: tl.constexpr, STAGES: tl.constexpr,
    FP8: tl.constexpr, WAITS: tl.constexpr,
):
    """The weights that all queries of the group give to the keys from slot `first` on. Pointers are at the KV head,
    except result, magnitude and rank. parts_all, parts_h: from a query's shift to its inverse sum, and to that of the
    next head. With WAITS, the previous launch, the attention, is still to end: of what is read, it writes
    softmax_parts."""
    d = tl.arange(0, D_PAD).to(tl.int64)
    s = first + tl.arange(0, BLOCK)
    s64 = s.to(tl.int64)
    holds = tl.load(occupied + s64 * occupied_s, mask=s < slots, other=0) != 0
    # Keys of free slots, too, whose weights are replaced in the end: these loads need not wait for `holds`.
    k = tl.load(
        key + s64[:, None] * key_s + d[None, :] * key_d, mask=(s < slots)[:, None] & (d < HEAD_DIM)[None, :], other=0.0
    )
    if FP8 is not None:
        k = from_fp8(k, query.dtype.element_ty, FP8)
    past = slots - count
    divisor = GROUP + 0.0                                              # before the tiles, while keys are loaded
    if MEAN:
        observers = tl.full([_QUERIES], 0, tl.int32)
        for start in range(0, count, _QUERIES):
            i = start + tl.arange(0, _QUERIES)
            if POSITIONS:
                counted = tl.load(query_positions + i.to(tl.int64) * asks_q, mask=i < count, other=-1) >= 0
            else:
                counted = tl.load(occupied + (past + i).to(tl.int64) * occupied_s, mask=i < count, other=0) != 0
            observers += tl.where(counted, 1, 0)
        divisor = divisor * tl.maximum(tl.sum(observers, 0), 1)
    QUERIES: tl.constexpr = ROWS // GROUP                              # of a tile; rows behind those stay empty
    total = tl.full([ROWS, BLOCK], 0.0, tl.float32)
    at = s
    if POSITIONS:
        at = tl.load(positions + s64 * position_s, mask=holds, other=0)
    previous_done(WAITS)
    nearest = tl.maximum(first - past, 0) // QUERIES                   # earlier tiles attend to none of these keys
    if POSITIONS:
        nearest = first * 0
    # One loop, also for keys to which all queries attend: two would wait for each other's loads.
    total = _receive_tiles(
        k, at, first + BLOCK - 1, total, query, softmax_parts, query_positions, scale, softcap, nearest, count, past,
        parts_all, parts_h, query_h, query_q, query_d, asks_q, GROUP, HEAD_DIM, D_PAD, ROWS, QUERIES, POSITIONS, STAGES,
    )
    received = tl.where(holds, tl.sum(total, 0) / divisor, 0.0)
    into = batch_head * result_h + s
    if ADD:
        received += tl.load(result + into, mask=s < slots, other=0.0)
        if MAGNITUDE:
            size = tl.load(magnitude + into, mask=s < slots, other=0.0)
            tl.store(rank + batch_head * slots + s, received * size, mask=s < slots)
    tl.store(result + into, received, mask=s < slots)


@triton.jit(
    do_not_specialize=[*_SIZES, *_POSITIONS, "key_scale_h", "each", "result_h", "parts_all", "parts_h"],
    do_not_specialize_on_alignment=["softmax_parts"],                  # those of a block's last queries
)
def received_kernel(
    query, key, value, key_scale, occupied, query_positions, positions, counts, softmax_parts, result, magnitude, rank,
    scale, softcap, slots, count, heads, query_b, query_h, query_q, query_d,
    key_b, key_h, key_s, key_d, value_b, value_h, value_s, value_d, occupied_b, occupied_h, occupied_s,
    capacity, asks_b, asks_q, position_b, position_h, position_s, key_scale_h, each, result_h, parts_all, parts_h,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr, POSITIONS: tl.constexpr, DUE: tl.constexpr, MEAN: tl.constexpr, ADD: tl.constexpr,
    MAGNITUDE: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Program (block of keys, KV head, row of the batch): the weights that all queries of the group give to these keys.
    With DUE, a program takes `each` blocks of keys, else one. With ADD, they are added to `result`; with MAGNITUDE, the
    sums times `magnitude` are stored in `rank`."""
    if DUE:                                                            # before a program may return
        previous_done(DEPENDENT)
    blocks = tl.cdiv(slots, BLOCK)
    if DUE:
        blocks = tl.cdiv(blocks, each)
    number = tl.program_id(0) % blocks
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    if DUE:
        tokens = tl.load(counts + batch_head)
        if tokens <= capacity:
            return
    b, k_head = batch_head // heads, batch_head % heads
    key += (b * key_b + k_head * key_h) * UNIT
    if key_scale is not None:
        scale = scale * tl.load(key_scale + k_head * key_scale_h)
    occupied += b * occupied_b + k_head * occupied_h
    query += (b * query_b + k_head * GROUP * query_h) * UNIT
    if POSITIONS:
        query_positions += b * asks_b
        positions += b * position_b + k_head * position_h
    softmax_parts += batch_head * GROUP * parts_h
    if DUE:
        for first in range(number * each * BLOCK, tl.minimum((number + 1) * each * BLOCK, slots), BLOCK):
            _receive_block(
                first, batch_head, query, key, occupied, query_positions, positions, softmax_parts, result, magnitude,
                rank, scale, softcap, slots, count, parts_all, parts_h, result_h, query_h * UNIT, query_q * UNIT,
                query_d, key_s * UNIT, key_d, occupied_s, asks_q, position_s, GROUP, HEAD_DIM, D_PAD, ROWS, BLOCK,
                POSITIONS, MEAN, ADD, MAGNITUDE, STAGES, FP8, False,
            )
    else:
        _receive_block(
            number * BLOCK, batch_head, query, key, occupied, query_positions, positions, softmax_parts, result,
            magnitude, rank, scale, softcap, slots, count, parts_all, parts_h, result_h, query_h * UNIT, query_q * UNIT,
            query_d, key_s * UNIT, key_d, occupied_s, asks_q, position_s, GROUP, HEAD_DIM, D_PAD, ROWS, BLOCK,
            POSITIONS, MEAN, ADD, MAGNITUDE, STAGES, FP8, DEPENDENT,
        )


@triton.jit(do_not_specialize=[*_SIZES, "result_h", "key_scale_h"])
def newest_kernel(
    query, key, value, key_scale, occupied, softmax_parts, result, log_result, scale, softcap, result_h, key_scale_h,
    slots, count, heads, query_b, query_h, query_q, query_d,
    key_b, key_h, key_s, key_d, value_b, value_h, value_s, value_d, occupied_b, occupied_h, occupied_s,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr, UPDATE: tl.constexpr, FP8: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Program (block of keys, KV head, row of the batch): the weights that the newest valid query gives these keys.
    With UPDATE, `result` keeps its numbers for unoccupied slots, and for all if no query is valid."""
    previous_done(DEPENDENT)
    blocks = tl.cdiv(slots, BLOCK)
    first = (tl.program_id(0) % blocks) * BLOCK
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    b, k_head = batch_head // heads, batch_head % heads
    key += (b * key_b + k_head * key_h) * UNIT
    if key_scale is not None:
        scale = scale * tl.load(key_scale + k_head * key_scale_h)
    occupied += b * occupied_b + k_head * occupied_h
    query += (b * query_b + k_head * GROUP * query_h) * UNIT
    past = slots - count
    last = tl.full([_QUERIES], -1, tl.int32)
    for start in range(0, count, _QUERIES):
        i = start + tl.arange(0, _QUERIES)
        there = tl.load(occupied + (past + i).to(tl.int64) * occupied_s, mask=i < count, other=0) != 0
        last = tl.maximum(last, tl.where(there, i, -1))
    newest = tl.max(last, 0)
    d = tl.arange(0, D_PAD).to(tl.int64)
    row = tl.arange(0, ROWS)
    s = first + tl.arange(0, BLOCK)
    s64 = s.to(tl.int64)
    holds = tl.load(occupied + s64 * occupied_s, mask=s < slots, other=0) != 0
    in_head = (d < HEAD_DIM)[None, :]
    k = tl.load(key + s64[:, None] * (key_s * UNIT) + d[None, :] * key_d, mask=holds[:, None] & in_head, other=0.0)
    if FP8 is not None:
        k = from_fp8(k, query.dtype.element_ty, FP8)
    asks = (tl.where(newest >= 0, row, GROUP) < GROUP)
    i = tl.maximum(newest, 0).to(tl.int64)
    q = tl.load(
        query + (row.to(tl.int64)[:, None] * query_h + i * query_q) * UNIT + d[None, :] * query_d,
        mask=asks[:, None] & in_head, other=0.0,
    )
    part = (batch_head * GROUP + row) * count + i
    shift = tl.load(softmax_parts + part, mask=asks, other=0.0)
    inverse = tl.load(
        softmax_parts + tl.num_programs(0).to(tl.int64) // blocks * GROUP * count + part, mask=asks, other=0.0
    )
    sees = holds & (s <= past + newest)
    logit = scaled_logit(dot(k, tl.trans(q)), scale, softcap) - shift[None, :]  # [BLOCK, ROWS]
    logit = tl.where(sees[:, None] & asks[None, :], logit, float("-inf"))
    weight = tl.sum(tl.exp2(logit) * inverse[None, :], 1) / GROUP
    stored = s < slots
    if UPDATE:
        stored = holds & (newest >= 0)
    tl.store(result + batch_head * result_h + s, tl.where(sees, weight, 0.0), mask=stored)
    # Subtract the largest logarithm, so that the sum does not underflow.
    logit += log2_or_minus_inf(inverse)[None, :]
    row_max = tl.max(logit, 1)
    total = tl.sum(tl.exp2(logit - finite_or_zero(row_max)[:, None]), 1)
    tl.store(
        log_result + batch_head * slots + s,
        tl.where(sees, finite_or_zero(row_max) + log2_or_minus_inf(total), float("-inf")), mask=s < slots,
    )
