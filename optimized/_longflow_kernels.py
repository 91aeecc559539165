"""The two kernels of a LongFlow decode step: `attend_kernel`, then `score_kernel`.

Logits, maxima and log scores are in base 2 throughout. Contiguous scratch is indexed by the flat number of the (row of
the batch, KV head), or of the (row, query head); strides of the caches come divided by UNIT (see _launch.stride_unit).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._numerics import dot, finite_or_zero, log2_or_minus_inf, round_output, round_to, sortable

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
    d = tl.arange(0, D_PAD).to(tl.int64)
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
    d = tl.arange(0, D_PAD).to(tl.int64)
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


@triton.jit(do_not_specialize=[
    "slots", "split_size", "splits", "heads", "query_b", "query_h", "key_b", "key_h", "key_s", "value_b", "value_h",
    "value_s", "occupied_b", "occupied_h", "new_key_b", "new_key_h", "new_value_b", "new_value_h",
])
def attend_kernel(
    query, key, value, occupied, new_key, new_value, slot, positions, seen, magnitude,
    logits, partial, tops, weight_sums,
    scale, slots, split_size, splits, heads,
    query_b, query_h, query_d, key_b, key_h, key_s, key_d, value_b, value_h, value_s, value_d,
    occupied_b, occupied_h, occupied_s, new_key_b, new_key_h, new_key_d, new_value_b, new_value_h, new_value_d,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, UNIT: tl.constexpr, PER_HEAD: tl.constexpr, ARRIVAL: tl.constexpr,
):
    """Program (split, flat): one share of the slots of a (row, KV head), for all its query heads. The logits and the
    share's maximum, sum and accumulator go to memory."""
    # One axis: the others end at 65,535 programs.
    split = tl.program_id(0) % splits
    flat = (tl.program_id(0) // splits).to(tl.int64)
    b, k_head = flat // heads, flat % heads
    begin = split * split_size
    end = tl.minimum(begin + split_size, slots)
    key += (b * key_b + k_head * key_h) * UNIT
    value += (b * value_b + k_head * value_h) * UNIT
    occupied += b * occupied_b + k_head * occupied_h
    magnitude += flat * slots
    d = tl.arange(0, D_PAD).to(tl.int64)
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


@triton.jit
def _finish_normalisers(
    tops, weight_sums, normalisers, first, count, splits, HEADS: tl.constexpr, SPLITS: tl.constexpr
):
    """log2 of the softmax denominators of query heads first to first + count, in two parts: maximum, log2 of the sum.

    Every program of a decision writes the same numbers to the same place, and reads back its own.
    """
    i = tl.arange(0, SPLITS)
    for start in range(0, count, HEADS):
        h = start + tl.arange(0, HEADS)
        part = (first + h)[:, None] * splits + i[None, :]
        there = (h < count)[:, None] & (i < splits)[None, :]
        split_top = tl.load(tops + part, mask=there, other=float("-inf"))
        split_sum = tl.load(weight_sums + part, mask=there, other=0.0)
        top = finite_or_zero(tl.max(split_top, 1))
        total = tl.sum(split_sum * tl.exp2(split_top - top[:, None]), 1)
        tl.store(normalisers + (first + h) * 2, top, mask=h < count)
        tl.store(normalisers + (first + h) * 2 + 1, log2_or_minus_inf(total), mask=h < count)
    tl.debug_barrier()


@triton.jit
def _rank(
    logits, normalisers, magnitude, holds, s, first, count, slots, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """log2 of the scores summed over KV heads first to first + count (flat numbers), [BLOCK]."""
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    # One vector per head, merged in registers: threads exchange nothing, and about 8 heads' loads are in flight.
    for start in range(0, count, (GROUP + 7) // GROUP):
        for k in tl.static_range((GROUP + 7) // GROUP):
            real = holds & (start + k + tl.zeros_like(s) < count)
            flat = first + tl.minimum(start + k, count - 1)
            highest = tl.full([BLOCK], float("-inf"), tl.float32)
            weight = tl.zeros([BLOCK], tl.float32)
            size = tl.load(magnitude + flat * slots + s, mask=real, other=0.0)
            for g in tl.static_range(GROUP):
                head = flat * GROUP + g
                logit = tl.load(logits + head * slots + s, mask=real, other=float("-inf"))
                # The normaliser's parts leave one by one, so that no digits of a large maximum are lost.
                x = (logit - tl.load(normalisers + head * 2)) - tl.load(normalisers + head * 2 + 1)
                x = tl.where(real, x, float("-inf"))
                higher = tl.maximum(highest, x)
                shift = finite_or_zero(higher)
                weight = weight * tl.exp2(highest - shift) + tl.exp2(x - shift)
                highest = higher
            x = finite_or_zero(highest) + log2_or_minus_inf(weight) + log2_or_minus_inf(size)
            higher = tl.maximum(top, x)
            shift = finite_or_zero(higher)
            total = total * tl.exp2(top - shift) + tl.exp2(x - shift)
            top = higher
    return finite_or_zero(top) + log2_or_minus_inf(total)


@triton.jit
def _combine(
    partial, tops, weight_sums, output, head, splits,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr,
):
    """One query head's output from its splits."""
    i = tl.arange(0, SPLITS)
    d = tl.arange(0, D_PAD).to(tl.int64)
    part = head * splits + i
    split_top = tl.load(tops + part, mask=i < splits, other=float("-inf"))
    split_sum = tl.load(weight_sums + part, mask=i < splits, other=0.0)
    share = tl.exp2(split_top - finite_or_zero(tl.max(split_top, 0)))
    total = tl.sum(split_sum * share, 0)
    mask = (i < splits)[:, None] & (d < HEAD_DIM)[None, :]
    pieces = tl.load(partial + part[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
    acc = tl.sum(pieces * share[:, None], 0)
    out = tl.where(total == 0.0, 0.0, acc / tl.where(total == 0.0, 1.0, total))
    tl.store(output + head * HEAD_DIM + d, round_output(out, output.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit(do_not_specialize=[
    "slots", "splits", "heads", "blocks", "occupied_b", "occupied_h", "mask_b", "mask_h",
])
def score_kernel(
    logits, partial, tops, weight_sums, normalisers, magnitude, occupied, protected, positions, sink_end, seen,
    output, score, slot, candidates, arrivals,
    slots, splits, heads, blocks,
    occupied_b, occupied_h, occupied_s, mask_b, mask_h, mask_s,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, PER_HEAD: tl.constexpr, ARRIVAL: tl.constexpr,
    PROTECTED: tl.constexpr, PROTECT_NEWEST: tl.constexpr,
):
    """Programs (block of slots, decision): scores summed over the heads that decide together, and the block's victim;
    the last block of a decision to finish picks among them. Further programs combine the outputs of query heads."""
    query_heads = GROUP if PER_HEAD else GROUP * heads                 # heads that decide together
    block = tl.program_id(0) % (blocks + query_heads)
    decision = (tl.program_id(0) // (blocks + query_heads)).to(tl.int64)
    b = decision // heads if PER_HEAD else decision
    k_head = decision % heads if PER_HEAD else 0
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
        _finish_normalisers(
            tops, weight_sums, normalisers, decision * query_heads, query_heads, splits, HEADS, SPLITS
        )
        kv_heads = query_heads // GROUP
        rank = _rank(logits, normalisers, magnitude, holds, s, decision * kv_heads, kv_heads, slots, GROUP, BLOCK)
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
