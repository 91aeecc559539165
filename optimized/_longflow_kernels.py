"""The three kernels of a LongFlow decode step. Logits, maxima and log scores are in base 2 throughout."""

from __future__ import annotations

import triton
import triton.language as tl

from ._numerics import dot, finite_or_zero, log2_or_minus_inf, round_to, sortable

_FREE = tl.constexpr(-(2**31))
_PROTECTED = tl.constexpr(2**31 - 1)
_NO_SLOT = tl.constexpr(2**63 - 1)
_INDEX = tl.constexpr(2**32 - 1)


@triton.jit(do_not_specialize=[
    "slots", "split_size", "splits", "heads", "query_b", "query_h", "key_b", "key_h", "key_s", "value_b", "value_h",
    "value_s", "occupied_b", "occupied_h", "occupied_s", "new_key_b", "new_key_h", "new_value_b", "new_value_h",
])
def attend_kernel(
    query, key, value, occupied, new_key, new_value, slot, positions, seen, magnitude,
    logits, partial, tops, weight_sums,
    scale, slots, split_size, splits, heads,
    query_b, query_h, query_d, key_b, key_h, key_s, key_d, value_b, value_h, value_s, value_d,
    occupied_b, occupied_h, occupied_s, new_key_b, new_key_h, new_key_d, new_value_b, new_value_h, new_value_d,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr, PER_HEAD: tl.constexpr, ARRIVAL: tl.constexpr,
):
    """Program (split, KV head, row): its share of the slots for all G query heads of the KV head.

    Strides of key and value (but for the last) come divided by UNIT. `scale` includes log2(e).
    """
    split = tl.program_id(0)
    k_head = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    begin = split * split_size
    end = tl.minimum(begin + split_size, slots)
    d = tl.arange(0, D_PAD)
    in_head = d < HEAD_DIM
    row = tl.arange(0, ROWS)
    in_group = row < GROUP
    head = k_head * GROUP + row                                        # query heads of this group
    flat = b * heads + k_head                                          # this (row, KV head) in contiguous buffers
    key += b * key_b * UNIT + k_head.to(tl.int64) * key_h * UNIT
    value += b * value_b * UNIT + k_head.to(tl.int64) * value_h * UNIT
    occupied += b * occupied_b + k_head.to(tl.int64) * occupied_h
    q = tl.load(
        query + b * query_b + head.to(tl.int64)[:, None] * query_h + d[None, :] * query_d,
        mask=in_group[:, None] & in_head[None, :], other=0.0,
    )

    newest = -1
    if ARRIVAL:
        decision = flat if PER_HEAD else b
        newest = tl.load(slot + decision).to(tl.int32)
        if (newest >= begin) & (newest < end):
            at = newest.to(tl.int64)
            k_new = tl.load(new_key + b * new_key_b + k_head * new_key_h + d * new_key_d, mask=in_head)
            v_new = tl.load(
                new_value + b * new_value_b + k_head * new_value_h + d * new_value_d, mask=in_head, other=0.0
            )
            tl.store(key + at * key_s * UNIT + d * key_d, k_new, mask=in_head)
            tl.store(value + at * value_s * UNIT + d * value_d, v_new, mask=in_head)
            tl.store(magnitude + flat * slots + at, tl.sum(tl.abs(v_new.to(tl.float32)), 0))
            if PER_HEAD or k_head == 0:
                tl.store(occupied + at * occupied_s, 1)
                tl.store(positions + decision * slots + at, tl.load(seen))
        # The tile below that holds the slot is read by this very program: it must see what was just written.
        tl.debug_barrier()

    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    logit_row = logits + (flat * GROUP + row)[:, None] * slots
    for start in range(begin, end, BLOCK):
        s = start + tl.arange(0, BLOCK)
        s64 = s.to(tl.int64)
        # A shared mask is being written by the KV head 0 program; the new slot is taken as occupied here instead.
        holds = tl.load(occupied + s64 * occupied_s, mask=s < end, other=0) != 0
        holds = (holds | (s == newest)) & (s < end)
        tile = holds[:, None] & in_head[None, :]
        k = tl.load(key + s64[:, None] * key_s * UNIT + d[None, :] * key_d, mask=tile, other=0.0)
        logit = dot(q, tl.trans(k)) * scale                            # [ROWS, BLOCK]
        logit = tl.where(holds[None, :], logit, float("-inf"))
        tl.store(logit_row + s[None, :], logit, mask=in_group[:, None] & (s < end)[None, :])
        new_top = tl.maximum(top, tl.max(logit, 1))
        shift = finite_or_zero(new_top)
        p = tl.exp2(logit - shift[:, None])
        rescale = tl.exp2(top - shift)
        weight_sum = weight_sum * rescale + tl.sum(p, 1)
        v = tl.load(value + s64[:, None] * value_s * UNIT + d[None, :] * value_d, mask=tile, other=0.0)
        if not ARRIVAL:
            tl.store(magnitude + flat * slots + s, tl.sum(tl.abs(v.to(tl.float32)), 1), mask=s < end)
        acc = acc * rescale[:, None] + dot(round_to(p, v.dtype), v)
        top = new_top
    part = (flat * GROUP + row) * splits + split
    tl.store(tops + part, top, mask=in_group)
    tl.store(weight_sums + part, weight_sum, mask=in_group)
    tl.store(partial + part[:, None] * HEAD_DIM + d[None, :], acc, mask=in_group[:, None] & in_head[None, :])


@triton.jit
def log_normaliser(tops, weight_sums, part, in_group, splits, ROWS: tl.constexpr):
    """log2 sum_j 2^s_j over all splits, for the heads at `part`."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    for split in range(0, splits):
        t = tl.load(tops + part + split, mask=in_group, other=float("-inf"))
        w = tl.load(weight_sums + part + split, mask=in_group, other=0.0)
        new_top = tl.maximum(top, t)
        shift = finite_or_zero(new_top)
        weight_sum = weight_sum * tl.exp2(top - shift) + w * tl.exp2(t - shift)
        top = new_top
    return finite_or_zero(top), weight_sum


@triton.jit(do_not_specialize=[
    "slots", "splits", "heads", "occupied_b", "occupied_h", "occupied_s", "mask_b", "mask_h", "mask_s",
])
def score_kernel(
    logits, tops, weight_sums, magnitude, occupied, protected, positions, sink_end, seen, score, candidates,
    slots, splits, heads,
    occupied_b, occupied_h, occupied_s, mask_b, mask_h, mask_s,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PER_HEAD: tl.constexpr, ARRIVAL: tl.constexpr, PROTECTED: tl.constexpr, PROTECT_NEWEST: tl.constexpr,
):
    """Program (block of slots, KV head or 0, row): log scores summed over the heads that share the decision."""
    block = tl.program_id(0)
    k_head = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    s = block * BLOCK + tl.arange(0, BLOCK)
    in_row = s < slots
    s64 = s.to(tl.int64)
    row = tl.arange(0, ROWS)
    in_group = row < GROUP
    decision = b * heads + k_head if PER_HEAD else b
    holds = tl.load(occupied + b * occupied_b + k_head * occupied_h + s64 * occupied_s, mask=in_row, other=0) != 0

    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    first = k_head if PER_HEAD else 0
    for head in range(first, first + 1 if PER_HEAD else heads):
        flat = b * heads + head
        part = (flat * GROUP + row) * splits
        head_top, head_sum = log_normaliser(tops, weight_sums, part, in_group, splits, ROWS)
        valid = in_group[:, None] & holds[None, :]
        logit = tl.load(logits + (flat * GROUP + row)[:, None] * slots + s[None, :], mask=valid, other=float("-inf"))
        # log2 of the weight: the normaliser's two parts leave one by one, so that no digits of a large maximum are lost.
        log_weight = (logit - head_top[:, None]) - log2_or_minus_inf(tl.where(in_group, head_sum, 1.0))[:, None]
        group_top = tl.max(log_weight, 0)
        shift = finite_or_zero(group_top)
        group_sum = tl.sum(tl.exp2(log_weight - shift[None, :]), 0)
        size = tl.load(magnitude + flat * slots + s, mask=holds, other=0.0)
        log_score = shift + log2_or_minus_inf(group_sum) + log2_or_minus_inf(size)
        new_top = tl.maximum(top, log_score)
        new_shift = finite_or_zero(new_top)
        total = total * tl.exp2(top - new_shift) + tl.exp2(log_score - new_shift)
        top = new_top
    rank = finite_or_zero(top) + log2_or_minus_inf(total)
    heads_summed = GROUP if PER_HEAD else GROUP * heads
    linear = tl.exp2(rank) / (heads_summed * HEAD_DIM)

    held = holds & False
    if ARRIVAL:
        position = tl.load(positions + decision * slots + s, mask=in_row, other=-1)
        held = position < tl.load(sink_end + b)
        if PROTECT_NEWEST:
            held = held | (position == tl.load(seen))
    if PROTECTED:
        held = tl.load(protected + b * mask_b + k_head * mask_h + s64 * mask_s, mask=in_row, other=0) != 0
    linear = tl.where(holds, tl.where(held, float("inf"), linear), float("-inf"))
    tl.store(score + decision * slots + s, linear, mask=in_row)
    code = tl.where(held, _PROTECTED, sortable(rank))
    code = tl.where(holds, code, _FREE)
    # Rank above, index below: one integer minimum decides, ties included. Protected slots go by index alone too.
    candidate = (code.to(tl.int64) << 32) | s64
    candidate = tl.where(in_row, candidate, _NO_SLOT)
    tl.store(candidates + decision * tl.num_programs(0) + block, tl.min(candidate, 0))


@triton.jit(do_not_specialize=["splits", "heads", "blocks"])
def finish_kernel(
    partial, tops, weight_sums, candidates, output, slot, seen, splits, heads, blocks,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
    PER_HEAD: tl.constexpr, ARRIVAL: tl.constexpr,
):
    """Program (KV head, row): the group's output from its splits, and the slot from its blocks' candidates."""
    k_head = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D_PAD)
    row = tl.arange(0, ROWS)
    in_group = row < GROUP
    head = (b * heads + k_head) * GROUP + row
    part = head * splits
    top, weight_sum = log_normaliser(tops, weight_sums, part, in_group, splits, ROWS)
    mask = in_group[:, None] & (d < HEAD_DIM)[None, :]
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    for split in range(0, splits):
        t = tl.load(tops + part + split, mask=in_group, other=float("-inf"))
        piece = tl.load(partial + (part + split)[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        acc += piece * tl.exp2(t - top)[:, None]
    empty = weight_sum == 0.0
    acc = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, weight_sum)[:, None])
    tl.store(output + head[:, None] * HEAD_DIM + d[None, :], round_to(acc, output.dtype.element_ty), mask=mask)

    if PER_HEAD or k_head == 0:
        decision = b * heads + k_head if PER_HEAD else b
        best = tl.full([], _NO_SLOT, tl.int64)
        for start in range(0, blocks, 16):
            i = start + tl.arange(0, 16)
            candidate = tl.load(candidates + decision * blocks + i, mask=i < blocks, other=_NO_SLOT)
            best = tl.minimum(best, tl.min(candidate, 0))
        tl.store(slot + decision, best & _INDEX)
    if ARRIVAL and k_head == 0 and b == 0:
        tl.store(seen, tl.load(seen) + 1)
