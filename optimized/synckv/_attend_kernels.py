"""The kernels of SyncKV's decode step: attention of every head over shares of its tokens, then the merge of the shares.

Logits are in base 2; G query heads share a KV head. `members` [3, Hkv] int32 lists the R-heads (representatives, which
attend to all tokens) first, then the other heads: the head, the index of its keys and values, and its list in `chosen`.
`counters` [6] int64, see SEEN and the constants after it. `due`: whether the step was an anticipation. All of these are
on the device, so a captured step can be replayed as any step.

Scratch is contiguous. The partial results of the R-heads come first, [B, N_r, G, dense_splits, ...], then those of
the other heads, [B, Hkv - N_r, G, list_splits, ...].
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.numerics import dot, multiply, of_any_width, round_output, round_to
from .._common.scratch import all_occupied
from .._common.softmax import raise_maximum, weigh_tile

#: The counters: the tokens seen; the decode steps plus the config's phase; the first token since the last anticipation,
#: and its slot for heads that are not R-heads; the same two for the anticipation before.
SEEN, STEPS, SINCE, FIRST_NEW, EARLIER_SINCE, EARLIER_FIRST_NEW = (tl.constexpr(place) for place in range(6))
#: The rows of `members` after that of the heads.
_STORED_AT, _LIST_INDEX = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _attend_tiles(
    acc, row_max, weight_sum, q, key, value, occupied, chosen, logits, newest, first_new, capacity, slots, kept_end,
    scale, begin, end, token_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    LISTED: tl.constexpr, MASKED: tl.constexpr,
):
    """Update the online softmax of ROWS queries (accumulator, maximum, sum) with places begin to end.

    LISTED: place i < capacity is slot chosen[i], -1 for none; the places after it are slots first_new, first_new + 1
    and so on. Otherwise places are slots, and logits of slots before kept_end are stored. With MASKED, unoccupied slots
    except `newest` are not read.
    """
    d = tl.arange(0, D_PAD).to(tl.int64)
    row = tl.arange(0, ROWS)
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < end
        slot = place.to(tl.int64)
        if LISTED:
            listed = tl.load(chosen + slot, mask=inside & (place < capacity), other=-1)
            slot = tl.where(place < capacity, listed, first_new + (slot - capacity))
            holds = inside & (slot >= 0)
        elif MASKED:
            there = of_any_width(tl.load(occupied + slot, mask=inside, other=0) != 0)
            holds = (there | (place == newest)) & inside
        if HEAD_DIM != D_PAD:
            tile = (d < HEAD_DIM)[None, :]
        if LISTED or MASKED:
            tile = tile & holds[:, None] if HEAD_DIM != D_PAD else holds[:, None]
        at = slot[:, None] * token_stride + d[None, :]
        k = tl.load(key + at, mask=tile, other=0.0) if LISTED or MASKED or HEAD_DIM != D_PAD else tl.load(key + at)
        logit = multiply(dot(q, tl.trans(k)), scale)                   # [ROWS, BLOCK]
        if LISTED or MASKED:
            logit = tl.where(holds[None, :], logit, float("-inf"))
        if not LISTED:
            tl.store(
                logits + row[:, None].to(tl.int64) * slots + slot[None, :], logit,
                mask=(row < GROUP)[:, None] & (place < tl.minimum(end, kept_end))[None, :],
            )
        p, row_max, weight_sum, rescale = weigh_tile(logit, row_max, weight_sum)
        v = tl.load(value + at, mask=tile, other=0.0) if LISTED or MASKED or HEAD_DIM != D_PAD else tl.load(value + at)
        acc = acc * rescale[:, None] + dot(round_to(p, v.dtype), v)
    return acc, row_max, weight_sum


@triton.jit(do_not_specialize=[
    "slots", "lists", "capacity", "stride", "dense_splits", "dense_size", "list_splits", "list_size", "batch",
    "representative_heads", "query_b", "query_h", "new_key_b", "new_key_h", "new_value_b", "new_value_h",
])
def attend_kernel(
    query, new_key, new_value, key, value, pool_key, pool_value, occupied, chosen, members, counters,
    logits, partial, row_maxima, weight_sums,
    scale, slots, lists, capacity, stride, dense_splits, dense_size, list_splits, list_size, batch,
    representative_heads, query_b, query_h, query_d, new_key_b, new_key_h, new_key_d, new_value_b, new_value_h,
    new_value_d, key_b, key_h, pool_b, pool_h,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program: a share of what one KV head attends to. R-heads come first and attend to all tokens; the other heads
    attend to the selected and the newest tokens. The new token is written into its slots."""
    # One grid axis, since the other axes are limited to 65,535 programs.
    program = tl.program_id(0)
    representative_programs = batch * representative_heads * dense_splits
    is_representative = program < representative_programs
    program = tl.where(is_representative, program, program - representative_programs)
    splits = tl.where(is_representative, dense_splits, list_splits)
    heads = tl.where(is_representative, representative_heads, tl.maximum(HEADS - representative_heads, 1))
    split = program % splits
    batch_member = (program // splits).to(tl.int64)
    b, member = batch_member // heads, batch_member % heads
    entry = tl.where(is_representative, member, representative_heads + member)
    head = tl.load(members + entry).to(tl.int64)
    stored_at = tl.load(members + _STORED_AT * HEADS + entry).to(tl.int64)
    list_index = tl.load(members + _LIST_INDEX * HEADS + entry).to(tl.int64)
    seen, steps = tl.load(counters + SEEN), tl.load(counters + STEPS)
    since, first_new = tl.load(counters + SINCE), tl.load(counters + FIRST_NEW)
    d = tl.arange(0, D_PAD).to(tl.int64)
    in_head = d < HEAD_DIM
    row = tl.arange(0, ROWS)
    mask = (row < GROUP)[:, None] & in_head[None, :]
    q = tl.load(
        query + b * query_b + (head * GROUP + row)[:, None] * query_h + d[None, :] * query_d, mask=mask, other=0.0
    )
    # A token beyond the last slot is dropped.
    total = tl.minimum(seen + 1, slots)
    arrives = seen < slots
    newest = tl.where(is_representative, seen, capacity + seen - since)  # the new token's place
    places = tl.where(is_representative, total, capacity + total - since).to(tl.int32)
    begin = split * tl.where(is_representative, dense_size, list_size)
    end = tl.minimum(begin + tl.where(is_representative, dense_size, list_size), places)
    keys, values = key + b * key_b + stored_at * key_h, value + b * key_b + stored_at * key_h
    pool_keys, pool_values = pool_key + b * pool_b + stored_at * pool_h, pool_value + b * pool_b + stored_at * pool_h
    mine = occupied + b * slots
    whole = begin
    dense_end = tl.where(is_representative, end, begin)
    if all_occupied(mine, 1, seen.to(tl.int32), begin, dense_end, 1):
        whole = begin + tl.maximum(dense_end - begin, 0) // BLOCK * BLOCK
    if arrives & (newest >= begin) & (newest < end):
        k_new = tl.load(new_key + b * new_key_b + head * new_key_h + d * new_key_d, mask=in_head)
        v_new = tl.load(new_value + b * new_value_b + head * new_value_h + d * new_value_d, mask=in_head)
        if is_representative:
            tl.store(keys + seen * HEAD_DIM + d, k_new, mask=in_head)
            tl.store(values + seen * HEAD_DIM + d, v_new, mask=in_head)
            if member == 0:
                tl.store(mine + seen, 1)
        else:
            slot = first_new + seen - since
            tl.store(pool_keys + slot * HEAD_DIM + d, k_new, mask=in_head)
            tl.store(pool_values + slot * HEAD_DIM + d, v_new, mask=in_head)
    # This program also reads what it has just written.
    tl.debug_barrier()
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    kept = logits + tl.where(is_representative, batch_member, 0) * GROUP * slots
    kept_end = tl.where((steps + 1) % stride == 0, places, 0)
    list_ = chosen + (b * lists + list_index) * capacity
    # Three loops, at least one of them empty, share their buffers; branches would not.
    acc, row_max, weight_sum = _attend_tiles(
        acc, row_max, weight_sum, q, keys, values, mine, list_, kept, seen, first_new, capacity, slots, kept_end, scale,
        begin, whole, HEAD_DIM, GROUP, HEAD_DIM, D_PAD, ROWS, BLOCK, False, False,
    )
    acc, row_max, weight_sum = _attend_tiles(
        acc, row_max, weight_sum, q, keys, values, mine, list_, kept, seen, first_new, capacity, slots, kept_end, scale,
        whole, dense_end, HEAD_DIM, GROUP, HEAD_DIM, D_PAD, ROWS, BLOCK, False, True,
    )
    acc, row_max, weight_sum = _attend_tiles(
        acc, row_max, weight_sum, q, pool_keys, pool_values, mine, list_, kept, seen, first_new, capacity, slots,
        kept_end, scale, begin, tl.where(is_representative, begin, end), HEAD_DIM, GROUP, HEAD_DIM, D_PAD, ROWS, BLOCK,
        True, False,
    )
    area = tl.where(is_representative, 0, (batch * representative_heads).to(tl.int64) * GROUP * dense_splits)
    part = area + (batch_member * GROUP + row) * splits + split
    tl.store(row_maxima + part, row_max, mask=row < GROUP)
    tl.store(weight_sums + part, weight_sum, mask=row < GROUP)
    if begin < end:
        tl.store(partial + part[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["slots", "stride", "dense_splits", "list_splits", "batch", "representative_heads"])
def combine_kernel(
    partial, row_maxima, weight_sums, entries, counters, due, output, slots, stride, dense_splits, list_splits, batch,
    representative_heads,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr,
    WIDTHS: tl.constexpr, SPLITS: tl.constexpr, POOL: tl.constexpr,
):
    """Program (row, KV head, QUERIES of its query heads, one of WIDTHS parts of the output, WIDTH channels each):
    merges the shares. The first program counts the step. POOL > 0: new tokens alternate between two runs of `stride`
    slots that begin at slot POOL; otherwise a token's slot is its position."""
    blocks: tl.constexpr = (GROUP + QUERIES - 1) // QUERIES
    program = tl.program_id(0).to(tl.int64)
    width, which = program % WIDTHS, program // WIDTHS
    batch_head, row = which // blocks, which % blocks * QUERIES + tl.arange(0, QUERIES)
    b, head = batch_head // HEADS, batch_head % HEADS
    entry = tl.load(entries + head)                                     # the head's index in `members`
    is_representative = entry < representative_heads
    splits = tl.where(is_representative, dense_splits, list_splits)
    batch_member = tl.where(
        is_representative, b * representative_heads + entry,
        b * (HEADS - representative_heads) + entry - representative_heads,
    )
    area = tl.where(is_representative, 0, (batch * representative_heads).to(tl.int64) * GROUP * dense_splits)
    first = (area + (batch_member * GROUP + row) * splits)[:, None]     # [QUERIES, 1]
    d = width * WIDTH + tl.arange(0, WIDTH)
    valid, in_head = (row < GROUP)[:, None], d < HEAD_DIM
    acc = tl.zeros([QUERIES, WIDTH], tl.float32)
    row_max = tl.full([QUERIES], float("-inf"), tl.float32)
    weight_sum = tl.zeros([QUERIES], tl.float32)
    for start in range(0, splits, SPLITS):
        i = start + tl.arange(0, SPLITS)[None, :]
        there = valid & (i < splits)
        part_max = tl.load(row_maxima + first + i, mask=there, other=float("-inf"))
        part_sum = tl.load(weight_sums + first + i, mask=there, other=0.0)
        row_max, shift, rescale = raise_maximum(row_max, tl.max(part_max, 1))
        share = tl.exp2(part_max - shift[:, None])                      # [QUERIES, SPLITS]
        # Empty shares stored no accumulator.
        part = tl.load(
            partial + (first + i)[:, :, None] * HEAD_DIM + d[None, None, :],
            mask=(part_max != float("-inf"))[:, :, None] & in_head[None, None, :], other=0.0,
        )
        acc = acc * rescale[:, None] + tl.sum(part * share[:, :, None], 1)
        weight_sum = weight_sum * rescale + tl.sum(part_sum * share, 1)
    result = acc / tl.where(weight_sum == 0.0, 1.0, weight_sum)[:, None]
    tl.store(
        output + (batch_head * GROUP + row)[:, None] * HEAD_DIM + d[None, :],
        round_output(result, output.dtype.element_ty), mask=valid & in_head[None, :],
    )
    if program == 0:
        seen, steps = tl.load(counters + SEEN), tl.load(counters + STEPS) + 1
        seen = tl.minimum(seen + 1, slots)
        anticipates = steps % stride == 0
        tl.store(counters + SEEN, seen)
        tl.store(counters + STEPS, steps)
        tl.store(due, anticipates.to(tl.int32))
        if anticipates:
            since, first_new = tl.load(counters + SINCE), tl.load(counters + FIRST_NEW)
            tl.store(counters + EARLIER_SINCE, since)
            tl.store(counters + EARLIER_FIRST_NEW, first_new)
            tl.store(counters + SINCE, seen)
            if POOL > 0:
                tl.store(counters + FIRST_NEW, 2 * POOL + stride - first_new)
            else:
                tl.store(counters + FIRST_NEW, seen)
