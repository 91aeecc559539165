"""PM-KVQ's attention of a decode step, over codes of any width and unquantized tokens. See pm_kvq_kernels.py for the
layout: a word is read once, for all tokens that have a field of it."""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.numerics import dot, float32, multiply, round_to
from .._common.softmax import merge_head, weigh_tile
from .kivi_kernels import number_of
from .kivi_step_kernels import bits_of, pair_of
from .pm_kvq_kernels import SEEN, SEEN_NEXT, field_start, quantized_count, width_after


@triton.jit
def _one_by_one(word, start, of_code, step, shift, DTYPE: tl.constexpr):
    even = number_of((word >> start) & of_code) * float32(step) + float32(shift)
    odd = number_of((word >> (16 + start)) & of_code) * float32(step) + float32(shift)
    return round_to(even, DTYPE), round_to(odd, DTYPE)


@triton.jit
def _numbers(word, start, width, step, shift, DTYPE: tl.constexpr):
    """The numbers, even and odd channels, of the codes of `width` bits at `start` of words. step, shift: scales and
    minima that broadcast."""
    of_code = (1 << width) - 1
    if tl.bfloat16 == DTYPE:
        if width <= 4:                                                  # both channels in one instruction
            codes = (word >> start) & (of_code * 0x10001)
            pair = pair_of(codes, bits_of(step) * 0x10001, bits_of(shift) * 0x10001, 4, DTYPE)
            even, odd = pair.to(tl.int16).to(DTYPE, bitcast=True), (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        else:
            even, odd = _one_by_one(word, start, of_code, step, shift, DTYPE)
    else:
        even, odd = _one_by_one(word, start, of_code, step, shift, DTYPE)
    return even, odd


@triton.jit
def _of_tokens(
    scale, minimum, token, holds, c, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr
):
    """The scales and minima of tokens, to broadcast against [tokens, channel pairs c]; 0 if not `holds`."""
    if GROUPS == 1:
        at, inside = token[:, None], holds[:, None]
    else:
        inside = holds[:, None] & (c < HEAD_DIM // 2)[None, :]
        at = token[:, None] * GROUPS + (2 * c // GROUP)[None, :]
    return tl.load(scale + at, mask=inside, other=0.0), tl.load(minimum + at, mask=inside, other=0.0)


@triton.jit(do_not_specialize=[
    "heads", "splits", "units", "capacity", "sinks", "window", "slots", "limit_16", "limit_8", "limit_4", "query_b",
    "query_h", "new_key_b", "new_key_h", "new_value_b", "new_value_h",
])
def attention_kernel(
    query, new_key, new_value, keys, values, key_words, key_scale, key_minimum, value_words, value_scale, value_minimum,
    count, counters, positions, partial, row_maxima, weight_sums,
    scale, heads, splits, units, capacity, sinks, window, slots, limit_16, limit_8, limit_4, query_b, query_h, query_d,
    new_key_b, new_key_h, new_key_d, new_value_b, new_value_h, new_value_d,
    GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):
    """Program: a share of what one KV head attends to. Its first `splits` programs share the units of quantized tokens;
    the last has the others, and stores the new token in the buffers. `scale` includes log2(e)."""
    HALF: tl.constexpr = HEAD_DIM // 2
    program = tl.program_id(0)
    split, row_head = program % (splits + 1), (program // (splits + 1)).to(tl.int64)
    b, h = row_head // heads, row_head % heads
    before, seen = tl.load(count + b), tl.load(counters + SEEN)
    arrives = seen < slots                                              # a token beyond the last slot is dropped
    packed = quantized_count(before, sinks, window)
    keys += row_head * (sinks + window) * HEAD_DIM
    values += row_head * (sinks + window) * HEAD_DIM
    c = tl.arange(0, HALF_PAD)
    row = tl.arange(0, ROWS)
    mask = (row < GROUP_HEADS)[:, None] & (c < HALF)[None, :]
    at = query + b * query_b + (h * GROUP_HEADS + row)[:, None] * query_h + (2 * c).to(tl.int64)[None, :] * query_d
    q_even, q_odd = tl.load(at, mask=mask, other=0.0), tl.load(at + query_d, mask=mask, other=0.0)
    acc_even = tl.zeros([ROWS, HALF_PAD], tl.float32)
    acc_odd = tl.zeros([ROWS, HALF_PAD], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    DTYPE: tl.constexpr = keys.dtype.element_ty
    if split < splits:
        width = width_after(seen, limit_16, limit_8, limit_4)
        used = tl.minimum(packed, units).to(tl.int32)
        each = tl.cdiv(tl.cdiv(used, BLOCK), splits) * BLOCK
        end = tl.minimum(split * each + each, used)
        key_words += row_head * units * HALF
        value_words += row_head * units * HALF
        key_scale += row_head * capacity * GROUPS
        key_minimum += row_head * capacity * GROUPS
        value_scale += row_head * capacity * GROUPS
        value_minimum += row_head * capacity * GROUPS
        for begin in range(split * each, end, BLOCK):
            unit = begin + tl.arange(0, BLOCK)
            tile = unit.to(tl.int64)[:, None] * HALF + c[None, :]
            inside = (unit < end)[:, None] & (c < HALF)[None, :]
            key_word = tl.load(key_words + tile, mask=inside, other=0)
            value_word = tl.load(value_words + tile, mask=inside, other=0)
            token = unit.to(tl.int64)
            holds = (unit < end) & (token < packed)
            # Scales and minima of a field are loaded ahead of the products of the field before.
            k_step, k_shift = _of_tokens(key_scale, key_minimum, token, holds, c, HEAD_DIM, GROUPS, GROUP)
            v_step, v_shift = _of_tokens(value_scale, value_minimum, token, holds, c, HEAD_DIM, GROUPS, GROUP)
            for field in range(0, tl.cdiv(packed - begin, units).to(tl.int32)):
                start = field_start(field)
                k_even, k_odd = _numbers(key_word, start, width, k_step, k_shift, DTYPE)
                v_even, v_odd = _numbers(value_word, start, width, v_step, v_shift, DTYPE)
                attended = holds[None, :]
                token += units
                holds = (unit < end) & (token < packed)
                k_step, k_shift = _of_tokens(key_scale, key_minimum, token, holds, c, HEAD_DIM, GROUPS, GROUP)
                v_step, v_shift = _of_tokens(value_scale, value_minimum, token, holds, c, HEAD_DIM, GROUPS, GROUP)
                # Channels beyond the head: the words are 0 there, but the minimum of the only group is not. q is 0.
                logit = dot(q_even, tl.trans(k_even)) + dot(q_odd, tl.trans(k_odd))
                logit = tl.where(attended, multiply(logit, scale), float("-inf"))
                p, row_max, weight_sum, rescale = weigh_tile(logit, row_max, weight_sum)
                weight = round_to(p, DTYPE)
                acc_even = acc_even * rescale[:, None] + dot(weight, v_even)
                acc_odd = acc_odd * rescale[:, None] + dot(weight, v_odd)
    else:
        # Places 0 to sinks - 1 have the sinks, and the next ones the window, in order.
        place = before - packed
        if arrives:
            inside = c < HALF
            d64 = (2 * c).to(tl.int64)
            k_at = new_key + b * new_key_b + h * new_key_h + d64 * new_key_d
            v_at = new_value + b * new_value_b + h * new_value_h + d64 * new_value_d
            to = place * HEAD_DIM + 2 * c
            tl.store(keys + to, tl.load(k_at, mask=inside), mask=inside)
            tl.store(keys + to + 1, tl.load(k_at + new_key_d, mask=inside), mask=inside)
            tl.store(values + to, tl.load(v_at, mask=inside), mask=inside)
            tl.store(values + to + 1, tl.load(v_at + new_value_d, mask=inside), mask=inside)
            if h == 0:
                tl.store(positions + b * slots + before, seen)
        tl.debug_barrier()                                              # this program also reads what it has written
        total = tl.where(arrives, place + 1, place).to(tl.int32)
        for begin in range(0, total, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            holds = i < total
            inside = holds[:, None] & (c < HALF)[None, :]
            tile = i.to(tl.int64)[:, None] * HEAD_DIM + (2 * c)[None, :]
            k_even = tl.load(keys + tile, mask=inside, other=0.0)
            k_odd = tl.load(keys + tile + 1, mask=inside, other=0.0)
            logit = dot(q_even, tl.trans(k_even)) + dot(q_odd, tl.trans(k_odd))
            logit = tl.where(holds[None, :], multiply(logit, scale), float("-inf"))
            p, row_max, weight_sum, rescale = weigh_tile(logit, row_max, weight_sum)
            weight = round_to(p, DTYPE)
            v_even = tl.load(values + tile, mask=inside, other=0.0)
            v_odd = tl.load(values + tile + 1, mask=inside, other=0.0)
            acc_even = acc_even * rescale[:, None] + dot(weight, v_even)
            acc_odd = acc_odd * rescale[:, None] + dot(weight, v_odd)
    part = (row_head * GROUP_HEADS + row) * (splits + 1) + split
    tl.store(row_maxima + part, row_max, mask=row < GROUP_HEADS)
    tl.store(weight_sums + part, weight_sum, mask=row < GROUP_HEADS)
    at = partial + part[:, None] * HEAD_DIM + (2 * c)[None, :]
    tl.store(at, acc_even, mask=mask)
    tl.store(at + 1, acc_odd, mask=mask)


@triton.jit(do_not_specialize=["heads", "parts", "slots"])
def merge_kernel(
    partial, row_maxima, weight_sums, output, count, counters, due, heads, parts, slots,
    GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, PARTS: tl.constexpr,
):
    """Program: a query head. Merges the shares of its attention. due [B] int64: the row's new number of tokens; 0 if
    none arrived."""
    merge_head(partial, row_maxima, weight_sums, output, parts, HEAD_DIM, D_PAD, PARTS)
    head = tl.program_id(0).to(tl.int64)
    b, h = head // (heads * GROUP_HEADS), head % (heads * GROUP_HEADS)
    before, seen = tl.load(count + b), tl.load(counters + SEEN)
    arrives = seen < slots
    if h == 0:
        tl.store(due + b, tl.where(arrives, before + 1, 0))
        if b == 0:
            tl.store(counters + SEEN_NEXT, tl.where(arrives, seen + 1, seen))
