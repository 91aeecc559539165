"""The kernels of a LongFlow decode step: `split_kernel` or `row_kernel` for attention, then `score_kernel`.

Logits, maxima and log scores are in base 2 throughout. Contiguous scratch is indexed by the flat number of the (row of
the batch, KV head), or of the (row, query head); strides of the caches come divided by UNIT (see _launch.stride_unit).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._numerics import dot, finite_or_zero, log2_or_minus_inf, round_to, sortable

_FREE = tl.constexpr(-(2**31))
_PROTECTED = tl.constexpr(2**31 - 1)
_NO_SLOT = tl.constexpr(2**63 - 1)
_INDEX = tl.constexpr(2**32 - 1)


@triton.jit
def _write_token(
    key, value, occupied, positions, magnitude, new_key, new_value, seen, newest,
    key_s, key_d, value_s, value_d, occupied_s, new_key_d, new_value_d, writes_masks,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
):
    """The new token's key and value, and ||v||_1, into slot `newest` of one KV head; all pointers are at its row.

    A mask that KV heads share is written by one of them; the others take the slot as occupied without reading it.
    """
    d = tl.arange(0, D_PAD)
    in_head = d < HEAD_DIM
    at = newest.to(tl.int64)
    k_new = tl.load(new_key + d * new_key_d, mask=in_head)
    v_new = tl.load(new_value + d * new_value_d, mask=in_head, other=0.0)
    tl.store(key + at * key_s + d * key_d, k_new, mask=in_head)
    tl.store(value + at * value_s + d * value_d, v_new, mask=in_head)
    tl.store(magnitude + at, tl.sum(tl.abs(v_new.to(tl.float32)), 0))
    if writes_masks:
        tl.store(occupied + at * occupied_s, 1)
        tl.store(positions + at, tl.load(seen))


@triton.jit
def _all_occupied(occupied, occupied_s, newest, begin, end):
    """Whether every slot of a range holds a token: then tiles need no mask but at the range's end."""
    missing = tl.zeros([4096], tl.int32)
    for start in range(begin, end, 4096):
        s = start + tl.arange(0, 4096)
        holds = tl.load(occupied + s.to(tl.int64) * occupied_s, mask=s < end, other=1) != 0
        missing += tl.where(holds | (s == newest), 0, 1)
    return tl.sum(missing, 0) == 0


@triton.jit
def _attend_tiles(
    q, key, value, occupied, magnitude, logits, newest, scale, begin, end, slots,
    key_s, key_d, value_s, value_d, occupied_s,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, ARRIVAL: tl.constexpr,
):
    """Online softmax of ROWS queries (of which GROUP are real) over slots begin to end: accumulator, maximum, sum.

    Logits are kept, [GROUP, slots]. Slots without a token are not even read if MASKED, so that NaN in them is harmless.
    """
    d = tl.arange(0, D_PAD)
    in_head = d < HEAD_DIM
    row = tl.arange(0, ROWS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    for start in range(begin, end, BLOCK):
        s = start + tl.arange(0, BLOCK)
        s64 = s.to(tl.int64)
        inside = s < end
        holds = inside
        if MASKED:
            holds = tl.load(occupied + s64 * occupied_s, mask=inside, other=0) != 0
            holds = (holds | (s == newest)) & inside
        tile = holds[:, None]
        if HEAD_DIM != D_PAD:
            tile = tile & in_head[None, :]
        k = tl.load(key + s64[:, None] * key_s + d[None, :] * key_d, mask=tile, other=0.0)
        logit = dot(q, tl.trans(k)) * scale                            # [ROWS, BLOCK]
        logit = tl.where(holds[None, :], logit, float("-inf"))
        tl.store(logits + row[:, None] * slots + s[None, :], logit, mask=(row < GROUP)[:, None] & inside[None, :])
        new_top = tl.maximum(top, tl.max(logit, 1))
        shift = finite_or_zero(new_top)
        p = tl.exp2(logit - shift[:, None])
        rescale = tl.exp2(top - shift)
        weight_sum = weight_sum * rescale + tl.sum(p, 1)
        v = tl.load(value + s64[:, None] * value_s + d[None, :] * value_d, mask=tile, other=0.0)
        if not ARRIVAL:
            tl.store(magnitude + s, tl.sum(tl.abs(v.to(tl.float32)), 1), mask=inside)
        acc = acc * rescale[:, None] + dot(round_to(p, v.dtype), v)
        top = new_top
    return acc, top, weight_sum


@triton.jit
def _attend(
    q, key, value, occupied, magnitude, logits, newest, scale, begin, end, slots,
    key_s, key_d, value_s, value_d, occupied_s,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ARRIVAL: tl.constexpr,
):
    """`_attend_tiles`, without reading the mask tile by tile where the cache is full, as it is in the long run."""
    if _all_occupied(occupied, occupied_s, newest, begin, end):
        acc, top, weight_sum = _attend_tiles(
            q, key, value, occupied, magnitude, logits, newest, scale, begin, end, slots,
            key_s, key_d, value_s, value_d, occupied_s,
            GROUP, HEAD_DIM, D_PAD, ROWS, BLOCK, False, ARRIVAL,
        )
    else:
        acc, top, weight_sum = _attend_tiles(
            q, key, value, occupied, magnitude, logits, newest, scale, begin, end, slots,
            key_s, key_d, value_s, value_d, occupied_s,
            GROUP, HEAD_DIM, D_PAD, ROWS, BLOCK, True, ARRIVAL,
        )
    return acc, top, weight_sum


@triton.jit
def _normalise(acc, weight_sum):
    """The output; zeros for a row without any occupied slot."""
    empty = weight_sum == 0.0
    return tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, weight_sum)[:, None])


@triton.jit
def _log_weight(logit, top, weight_sum):
    """log2 of softmax weights [n, BLOCK] from n finished normalisers. Their two parts leave one by one, so that no
    digits of a large maximum are lost."""
    log_sum = log2_or_minus_inf(weight_sum)
    return (logit - finite_or_zero(top)[:, None]) - log_sum[:, None]


@triton.jit(do_not_specialize=[
    "slots", "split_size", "splits", "heads", "query_b", "query_h", "key_b", "key_h", "key_s", "value_b", "value_h",
    "value_s", "occupied_b", "occupied_h", "new_key_b", "new_key_h", "new_value_b", "new_value_h",
])
def split_kernel(
    query, key, value, occupied, new_key, new_value, slot, positions, seen, magnitude, logits,
    output, partial, tops, weight_sums, scores,
    scale, slots, split_size, splits, heads, rows,
    query_b, query_h, query_d, key_b, key_h, key_s, key_d, value_b, value_h, value_s, value_d,
    occupied_b, occupied_h, occupied_s, new_key_b, new_key_h, new_key_d, new_value_b, new_value_h, new_value_d,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SCORE_BLOCK: tl.constexpr, UNIT: tl.constexpr, PER_HEAD: tl.constexpr,
    ARRIVAL: tl.constexpr,
):
    """For few rows: program (split, flat) takes one share of a row's slots; partial results go to memory."""
    split = tl.program_id(0)
    flat = tl.program_id(1).to(tl.int64)
    b, k_head = flat // heads, flat % heads
    begin = split * split_size
    end = tl.minimum(begin + split_size, slots)
    key += (b * key_b + k_head * key_h) * UNIT
    value += (b * value_b + k_head * value_h) * UNIT
    occupied += b * occupied_b + k_head * occupied_h
    magnitude += flat * slots
    d = tl.arange(0, D_PAD)
    row = tl.arange(0, ROWS)
    mask = (row < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    head = (k_head * GROUP + row)[:, None]
    q = tl.load(query + b * query_b + head * query_h + d[None, :] * query_d, mask=mask, other=0.0)
    newest = -1
    if ARRIVAL:
        decision = flat if PER_HEAD else b
        newest = tl.load(slot + decision).to(tl.int32)
        if (newest >= begin) & (newest < end):
            _write_token(
                key, value, occupied, positions + decision * slots, magnitude,
                new_key + b * new_key_b + k_head * new_key_h, new_value + b * new_value_b + k_head * new_value_h,
                seen, newest, key_s * UNIT, key_d, value_s * UNIT, value_d, occupied_s, new_key_d, new_value_d,
                PER_HEAD or k_head == 0, HEAD_DIM, D_PAD,
            )
        # The tile that holds the slot is read by this very program: it must see what was just written.
        tl.debug_barrier()
    acc, top, weight_sum = _attend(
        q, key, value, occupied, magnitude, logits + flat * GROUP * slots, newest, scale, begin, end, slots,
        key_s * UNIT, key_d, value_s * UNIT, value_d, occupied_s, GROUP, HEAD_DIM, D_PAD, ROWS, BLOCK, ARRIVAL,
    )
    part = (flat * GROUP + row) * splits + split
    tl.store(tops + part, top, mask=row < GROUP)
    tl.store(weight_sums + part, weight_sum, mask=row < GROUP)
    tl.store(partial + part[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=[
    "slots", "split_size", "splits", "heads", "rows", "query_b", "query_h", "key_b", "key_h", "key_s", "value_b",
    "value_h", "value_s", "occupied_b", "occupied_h", "new_key_b", "new_key_h", "new_value_b",
    "new_value_h",
])
def row_kernel(
    query, key, value, occupied, new_key, new_value, slot, positions, seen, magnitude, logits,
    output, partial, tops, weight_sums, scores,
    scale, slots, split_size, splits, heads, rows,
    query_b, query_h, query_d, key_b, key_h, key_s, key_d, value_b, value_h, value_s, value_d,
    occupied_b, occupied_h, occupied_s, new_key_b, new_key_h, new_key_d, new_value_b, new_value_h, new_value_d,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SCORE_BLOCK: tl.constexpr, UNIT: tl.constexpr, PER_HEAD: tl.constexpr,
    ARRIVAL: tl.constexpr,
):
    """For many rows: a resident program takes (row, KV head)s one after the other and finishes each.

    Its logits lie in scratch of its own, used again for the next row: they stay in L2 and cost no memory bandwidth.
    What leaves is the output and one log score per slot, summed over the group.
    """
    program = tl.program_id(0).to(tl.int64)
    logits += program * GROUP * slots
    tops += program * GROUP
    weight_sums += program * GROUP
    d = tl.arange(0, D_PAD)
    row = tl.arange(0, ROWS)
    mask = (row < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        flat = tl.cast(index, tl.int64)
        b, k_head = flat // heads, flat % heads
        row_key = key + (b * key_b + k_head * key_h) * UNIT
        row_value = value + (b * value_b + k_head * value_h) * UNIT
        row_occupied = occupied + b * occupied_b + k_head * occupied_h
        row_magnitude = magnitude + flat * slots
        head = (k_head * GROUP + row)[:, None]
        q = tl.load(query + b * query_b + head * query_h + d[None, :] * query_d, mask=mask, other=0.0)
        newest = -1
        if ARRIVAL:
            decision = flat if PER_HEAD else b
            newest = tl.load(slot + decision).to(tl.int32)
            if (newest >= 0) & (newest < slots):
                _write_token(
                    row_key, row_value, row_occupied, positions + decision * slots, row_magnitude,
                    new_key + b * new_key_b + k_head * new_key_h, new_value + b * new_value_b + k_head * new_value_h,
                    seen, newest, key_s * UNIT, key_d, value_s * UNIT, value_d, occupied_s, new_key_d, new_value_d,
                    PER_HEAD or k_head == 0, HEAD_DIM, D_PAD,
                )
            tl.debug_barrier()
        acc, top, weight_sum = _attend(
            q, row_key, row_value, row_occupied, row_magnitude, logits, newest, scale, 0, slots, slots,
            key_s * UNIT, key_d, value_s * UNIT, value_d, occupied_s, GROUP, HEAD_DIM, D_PAD, ROWS, BLOCK, ARRIVAL,
        )
        out = _normalise(acc, weight_sum)
        tl.store(
            output + (flat * GROUP + row)[:, None] * HEAD_DIM + d[None, :], round_to(out, output.dtype.element_ty),
            mask=mask,
        )
        # Through memory into scalars; the barriers order this program's own stores and loads.
        log_sum = log2_or_minus_inf(weight_sum)
        tl.store(tops + row, finite_or_zero(top), mask=row < GROUP)
        tl.store(weight_sums + row, log_sum, mask=row < GROUP)
        tl.debug_barrier()
        for start in range(0, slots, SCORE_BLOCK):
            s = start + tl.arange(0, SCORE_BLOCK)
            highest = tl.full([SCORE_BLOCK], float("-inf"), tl.float32)
            total = tl.zeros([SCORE_BLOCK], tl.float32)
            # One vector per head, merged in registers: no exchange between threads, and all loads in flight at once.
            for g in tl.static_range(GROUP):
                logit = tl.load(logits + g * slots + s, mask=s < slots, other=float("-inf"))
                x = (logit - tl.load(tops + g)) - tl.load(weight_sums + g)
                x = tl.where(logit == float("-inf"), float("-inf"), x)
                higher = tl.maximum(highest, x)
                shift = finite_or_zero(higher)
                total = total * tl.exp2(highest - shift) + tl.exp2(x - shift)
                highest = higher
            size = tl.load(row_magnitude + s, mask=s < slots, other=0.0)
            score = finite_or_zero(highest) + log2_or_minus_inf(total) + log2_or_minus_inf(size)
            tl.store(scores + flat * slots + s, score, mask=s < slots)
        tl.debug_barrier()


@triton.jit
def _split_rank(
    logits, tops, weight_sums, magnitude, holds, s, first, count, slots, splits,
    GROUP: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):
    """log2 of the scores summed over query heads first to first + count (flat numbers), from logits and splits."""
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    i = tl.arange(0, SPLITS)
    for start in range(0, count, HEADS):
        h = start + tl.arange(0, HEADS)
        real = h < count
        head = first + h
        part = head[:, None] * splits + i[None, :]
        there = real[:, None] & (i < splits)[None, :]
        split_top = tl.load(tops + part, mask=there, other=float("-inf"))
        split_sum = tl.load(weight_sums + part, mask=there, other=0.0)
        head_top = finite_or_zero(tl.max(split_top, 1))
        head_sum = tl.sum(split_sum * tl.exp2(split_top - head_top[:, None]), 1)
        valid = real[:, None] & holds[None, :]
        logit = tl.load(logits + head[:, None] * slots + s[None, :], mask=valid, other=float("-inf"))
        size = tl.load(magnitude + (head // GROUP)[:, None] * slots + s[None, :], mask=valid, other=0.0)
        x = _log_weight(logit, head_top, tl.where(real, head_sum, 1.0)) + log2_or_minus_inf(size)
        x = tl.where(logit == float("-inf"), float("-inf"), x)
        new_top = tl.maximum(top, tl.max(x, 0))
        shift = finite_or_zero(new_top)
        total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(x - shift[None, :]), 0)
        top = new_top
    return finite_or_zero(top) + log2_or_minus_inf(total)


@triton.jit
def _row_rank(scores, s, first, count, slots, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """log2 of the scores summed over KV heads first to first + count (flat numbers), from their log scores."""
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, HEADS):
        h = start + tl.arange(0, HEADS)
        there = (h < count)[:, None] & (s < slots)[None, :]
        x = tl.load(scores + (first + h)[:, None] * slots + s[None, :], mask=there, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(x, 0))
        shift = finite_or_zero(new_top)
        total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(x - shift[None, :]), 0)
        top = new_top
    return finite_or_zero(top) + log2_or_minus_inf(total)


@triton.jit
def _combine(
    partial, tops, weight_sums, output, head, splits,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr,
):
    """One query head's output from its splits."""
    i = tl.arange(0, SPLITS)
    d = tl.arange(0, D_PAD)
    part = head * splits + i
    split_top = tl.load(tops + part, mask=i < splits, other=float("-inf"))
    split_sum = tl.load(weight_sums + part, mask=i < splits, other=0.0)
    share = tl.exp2(split_top - finite_or_zero(tl.max(split_top, 0)))
    total = tl.sum(split_sum * share, 0)
    mask = (i < splits)[:, None] & (d < HEAD_DIM)[None, :]
    pieces = tl.load(partial + part[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
    acc = tl.sum(pieces * share[:, None], 0)
    out = tl.where(total == 0.0, 0.0, acc / tl.where(total == 0.0, 1.0, total))
    tl.store(output + head * HEAD_DIM + d, round_to(out, output.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit(do_not_specialize=[
    "slots", "splits", "heads", "blocks", "occupied_b", "occupied_h", "mask_b", "mask_h",
])
def score_kernel(
    logits, partial, tops, weight_sums, magnitude, scores, occupied, protected, positions, sink_end, seen,
    output, score, slot, candidates, arrivals,
    slots, splits, heads, blocks,
    occupied_b, occupied_h, occupied_s, mask_b, mask_h, mask_s,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, PER_HEAD: tl.constexpr, ARRIVAL: tl.constexpr,
    PROTECTED: tl.constexpr, PROTECT_NEWEST: tl.constexpr,
):
    """Programs (block of slots, decision): scores summed over the heads that decide together, and the block's victim;
    the last block of a decision to finish picks among them. After a split, further programs combine the outputs."""
    block = tl.program_id(0)
    decision = tl.program_id(1).to(tl.int64)
    b = decision // heads if PER_HEAD else decision
    k_head = decision % heads if PER_HEAD else 0
    query_heads = GROUP if PER_HEAD else GROUP * heads                 # heads that decide together
    if block >= blocks:
        _combine(
            partial, tops, weight_sums, output, decision * query_heads + block - blocks, splits,
            HEAD_DIM, D_PAD, SPLITS,
        )
    else:
        s = block * BLOCK + tl.arange(0, BLOCK)
        in_row = s < slots
        s64 = s.to(tl.int64)
        holds = tl.load(occupied + b * occupied_b + k_head * occupied_h + s64 * occupied_s, mask=in_row, other=0) != 0
        if SPLIT:
            rank = _split_rank(
                logits, tops, weight_sums, magnitude, holds, s, decision * query_heads, query_heads, slots, splits,
                GROUP, HEADS, SPLITS, BLOCK,
            )
        else:
            kv_heads = 1 if PER_HEAD else heads
            rank = _row_rank(scores, s, decision * kv_heads, kv_heads, slots, HEADS, BLOCK)
        linear = tl.exp2(rank) / (query_heads * HEAD_DIM)
        held = holds & False
        if ARRIVAL:
            held = tl.load(positions + decision * slots + s, mask=in_row, other=0) < tl.load(sink_end + b)
            if PROTECT_NEWEST:
                held = held | (s == tl.load(slot + decision))          # still the slot just written
        if PROTECTED:
            held = tl.load(protected + b * mask_b + k_head * mask_h + s64 * mask_s, mask=in_row, other=0) != 0
        linear = tl.where(holds, tl.where(held, float("inf"), linear), float("-inf"))
        tl.store(score + decision * slots + s, linear, mask=in_row)
        # Rank above, index below: one integer minimum decides, ties included. Free and protected slots go by index.
        code = tl.where(holds, tl.where(held, _PROTECTED, sortable(rank)), _FREE)
        candidate = tl.where(in_row, (code.to(tl.int64) << 32) | s64, _NO_SLOT)
        tl.store(candidates + decision * blocks + block, tl.min(candidate, 0))
        tl.debug_barrier()
        if tl.atomic_add(arrivals + decision, 1, sem="acq_rel", scope="gpu") == blocks - 1:
            best = tl.full([64], _NO_SLOT, tl.int64)
            for start in range(0, blocks, 64):
                i = start + tl.arange(0, 64)
                found = tl.load(
                    candidates + decision * blocks + i, mask=i < blocks, other=_NO_SLOT, cache_modifier=".cg"
                )
                best = tl.minimum(best, found)
            tl.store(slot + decision, tl.min(best, 0) & _INDEX)
            tl.store(arrivals + decision, 0)                           # ready for the next step
        if ARRIVAL and (block == 0) & (decision == 0):
            tl.store(seen, tl.load(seen) + 1)
