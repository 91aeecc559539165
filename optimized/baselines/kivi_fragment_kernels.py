"""KIVI's attention of a decode step in programs of one warp, which keep the numbers of a word where tensor cores read
them. For 16-bit numbers, heads of 64 or 128 channels, and up to 8 query heads per KV head.

The products are transposed, S^T = K q^T and O^T += V^T P^T: tokens or channels are the side of 16, and query heads the
side of 8. A lane makes the operands K and V^T of its own words (`kivi_fragment_operands.py`), so that only S and P pass
between lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.numerics import dot, float32, multiply, round_to
from .._common.softmax import weigh_columns
from .kivi_fragment_operands import (
    EIGHT,
    channel_of,
    channels,
    key_operand,
    key_words,
    value_operand,
    value_words,
)
from .kivi_kernels import SEEN, number_of, quantized_counts
from .kivi_order import key_scale_at, key_word_at, value_scale_at
from .kivi_scaled import UP

#: Tokens of a tile whose values are not quantized: one or two whole words of keys.
REST = tl.constexpr(16)


@triton.jit
def _add_values(
    acc, shares, found, HEAD_DIM: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, SCALED: tl.constexpr,
):
    """acc [D, 8] plus four operands of values, 16 tokens each, times shares [16, 8]. found: their `value_words`."""
    for i in tl.static_range(4):
        acc += dot(value_operand(found, i, HEAD_DIM, BITS, DTYPE, SCALED), round_to(shares[i], DTYPE))
    return acc


@triton.jit
def _attend_tile(
    acc, row_max, weight_sum, packed, step, shift, query_parts, key_codes, key_scales, value_codes, value_scales,
    tile, count, scale, HEAD_DIM: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    GROUP: tl.constexpr, WORDS: tl.constexpr, DTYPE: tl.constexpr, SCALED: tl.constexpr,
):
    """Update the online softmax with the tokens of the words 8 tile to 8 tile + 7, those before `count`. What a product
    needs is loaded before the product ahead of it. packed, step, shift: the first `key_words`; those of the next tile
    are returned. SCALED: acc is times 2^-16."""
    C: tl.constexpr = 32 // KEY_BITS
    TOKENS: tl.constexpr = 8 * C
    PARTS: tl.constexpr = HEAD_DIM // 16
    first = tile * TOKENS
    logit = tl.zeros([TOKENS, EIGHT], tl.float32)
    for part in tl.static_range(PARTS):
        words, steps, shifts = packed, step, shift
        if part + 1 < PARTS:
            packed, step, shift = key_words(key_codes, key_scales, tile * 8, part + 1, HEAD_DIM, WORDS)
        logit += dot(key_operand(words, steps, shifts, KEY_BITS, DTYPE, SCALED), query_parts[part])
    found = value_words(value_codes, value_scales, first, C, GROUP, HEAD_DIM, VALUE_BITS)
    m = tl.arange(0, TOKENS)
    token = first + m % 8 * C + m % 16 // 8 * (C // 2) + m // 16
    logit = multiply(logit, scale)
    if first + TOKENS > count:
        logit = tl.where((token < count)[:, None], logit, float("-inf"))
    p, row_max, weight_sum, rescale = weigh_columns(row_max, weight_sum, logit, TOKENS, EIGHT)
    acc = acc * rescale[None, :]
    # The rows of the operands of values, in registers: one operand for each number of a code.
    p = tl.permute(tl.reshape(p, (C // 2, 16, EIGHT)), (1, 2, 0))
    if KEY_BITS == 2:
        even, odd = tl.split(tl.reshape(p, (16, EIGHT, 2, 2, 2)))
        p_04, p_26 = tl.split(even)
        p_15, p_37 = tl.split(odd)
        p0, p4 = tl.split(p_04)
        p2, p6 = tl.split(p_26)
        p1, p5 = tl.split(p_15)
        p3, p7 = tl.split(p_37)
    else:
        even, odd = tl.split(tl.reshape(p, (16, EIGHT, 2, 2)))
        p0, p2 = tl.split(even)
        p1, p3 = tl.split(odd)
    if KEY_BITS == 2:
        more = value_words(value_codes, value_scales, first + 4, C, GROUP, HEAD_DIM, VALUE_BITS)
        acc = _add_values(acc, (p0, p1, p2, p3), found, HEAD_DIM, VALUE_BITS, DTYPE, SCALED)
        acc = _add_values(acc, (p4, p5, p6, p7), more, HEAD_DIM, VALUE_BITS, DTYPE, SCALED)
    else:
        acc = _add_values(acc, (p0, p1, p2, p3), found, HEAD_DIM, VALUE_BITS, DTYPE, SCALED)
    packed, step, shift = key_words(key_codes, key_scales, tile * 8 + 8, 0, HEAD_DIM, WORDS)
    return acc, row_max, weight_sum, packed, step, shift


@triton.jit
def _attend_tiles(
    acc, row_max, weight_sum, packed, step, shift, query_parts, key_codes, key_scales, value_codes, value_scales,
    begin, end, count, scale, HEAD_DIM: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    GROUP: tl.constexpr, WORDS: tl.constexpr, DTYPE: tl.constexpr, SCALED: tl.constexpr,
):
    """`_attend_tile` for the tiles `begin` to `end`. SCALED: the result acc is times 2^-16; scale: times 2^16."""
    for tile in range(begin, end):
        acc, row_max, weight_sum, packed, step, shift = _attend_tile(
            acc, row_max, weight_sum, packed, step, shift, query_parts, key_codes, key_scales, value_codes,
            value_scales, tile, count, scale, HEAD_DIM, KEY_BITS, VALUE_BITS, GROUP, WORDS, DTYPE, SCALED,
        )
    return acc, row_max, weight_sum


@triton.jit
def _keys_of_word(key_codes, key_scale, key_minimum, word, d, place, HEAD_DIM: tl.constexpr, BITS: tl.constexpr,
                  WORDS: tl.constexpr):
    """The keys of a word in the places [N] of its codes: [N, D] float32."""
    C: tl.constexpr = 32 // BITS
    packed = tl.load(key_codes + key_word_at(word, d, HEAD_DIM, True))[None, :]
    at = key_scale_at(word // WORDS, d, HEAD_DIM, True)
    step, shift = float32(tl.load(key_scale + at))[None, :], float32(tl.load(key_minimum + at))[None, :]
    return number_of((packed >> (place % C * BITS)[:, None]) & ((1 << BITS) - 1)) * step + shift


@triton.jit
def _attend_rest(
    acc, row_max, weight_sum, q, keys, values, key_codes, key_scale, key_minimum, begin, end, keys_quantized,
    residual, scale, channel, HEAD_DIM: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr,
):
    """Update the online softmax with the tokens `begin` to `end`, whose values are in the buffer. The first of their
    keys are quantized, the others in the buffer as well. q [D, 8]; channel [D]: those of the accumulator's rows."""
    C: tl.constexpr = 32 // BITS
    d, i = tl.arange(0, HEAD_DIM), tl.arange(0, REST)
    for start in range(begin // REST * REST, end, REST):
        token = start + i
        holds = (token >= begin) & (token < end)
        packed = token < keys_quantized
        k = tl.load(
            keys + (token % residual)[:, None] * HEAD_DIM + d[None, :], mask=(holds & (~packed))[:, None], other=0.0
        )
        if start < keys_quantized:
            word = start // C
            found = _keys_of_word(key_codes, key_scale, key_minimum, word, d, i, HEAD_DIM, BITS, WORDS)
            if BITS == 4:
                word = tl.minimum(word + 1, (keys_quantized - 1) // C)
                more = _keys_of_word(key_codes, key_scale, key_minimum, word, d, i, HEAD_DIM, BITS, WORDS)
                found = tl.where((i < C)[:, None], found, more)
            k = tl.where(packed[:, None], round_to(found, k.dtype), k)
        logit = tl.where(holds[:, None], multiply(dot(k, q), scale), float("-inf"))
        p, row_max, weight_sum, rescale = weigh_columns(row_max, weight_sum, logit, REST, EIGHT)
        v = tl.load(
            values + (token % (residual + 1))[None, :] * HEAD_DIM + channel[:, None], mask=holds[None, :], other=0.0
        )
        acc = acc * rescale[None, :] + dot(v, round_to(p, v.dtype))
    return acc, row_max, weight_sum


@triton.jit
def _forget_values_behind(scales, count, end, HEAD_DIM: tl.constexpr, KEY_BITS: tl.constexpr, GROUP: tl.constexpr):
    """Make the values behind the first `count` zero, up to `end`, which is at most a tile further: they have the weight
    0, but what lies there may not be finite."""
    token, group = count + tl.arange(0, 256 // KEY_BITS), tl.arange(0, HEAD_DIM // GROUP)
    zero = tl.zeros([256 // KEY_BITS, HEAD_DIM // GROUP], tl.int32)
    at = value_scale_at(token[:, None], group[None, :], HEAD_DIM // GROUP, True)
    tl.store(scales + at, zero, mask=(token < end)[:, None])
    tl.debug_barrier()


@triton.jit
def _query_part(query, d_stride, valid, NUMBER: tl.constexpr):
    """The rows `channels(NUMBER)` of q [D, 8]; query [1, 8]: pointers to its columns."""
    return tl.load(query + channels(NUMBER).to(tl.int64)[:, None] * d_stride, mask=valid, other=0.0)


@triton.jit
def _query_parts(query, d_stride, valid, HEAD_DIM: tl.constexpr):
    """`_query_part` of all parts."""
    q0, q1 = _query_part(query, d_stride, valid, 0), _query_part(query, d_stride, valid, 1)
    q2, q3 = _query_part(query, d_stride, valid, 2), _query_part(query, d_stride, valid, 3)
    if HEAD_DIM == 64:
        return q0, q1, q2, q3
    else:
        q4, q5 = _query_part(query, d_stride, valid, 4), _query_part(query, d_stride, valid, 5)
        q6, q7 = _query_part(query, d_stride, valid, 6), _query_part(query, d_stride, valid, 7)
        return q0, q1, q2, q3, q4, q5, q6, q7


@triton.jit(do_not_specialize=[
    "heads", "splits", "rests", "residual", "slots", "key_groups", "value_rows", "query_b", "query_h", "new_key_b",
    "new_key_h", "new_value_b", "new_value_h",
])
def fragment_kernel(
    query, new_key, new_value, keys, values, key_codes, key_scale, key_minimum, key_scales, value_codes,
    value_scales, extreme, count, counters, positions, partial, row_maxima, weight_sums,
    scale, heads, splits, rests, residual, slots, key_groups, value_rows, query_b, query_h, query_d, new_key_b,
    new_key_h, new_key_d, new_value_b, new_value_h, new_value_d,
    GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    GROUP: tl.constexpr, WORDS: tl.constexpr,
):
    """Program: a share of what one KV head attends to, as in `kivi_step_kernels.attention_kernel`, except that the
    last `rests` have all tokens whose values are not quantized. Codes and scales as in `kivi_order.py`, with FRAGMENTS.
    key_scales: the scales and minima of keys as int32, each of two channels; value_scales: those of values as int32, a
    scale and its minimum. extreme [B, Hkv] int32: not 0 where `kivi_scaled.py` does not apply.

    Programs for the last tokens come last: they are short, and between the others they would leave multiprocessors
    unevenly filled."""
    DTYPE: tl.constexpr = keys.dtype.element_ty
    parts = splits + rests
    whole = tl.num_programs(0) // parts * splits
    rest, behind = tl.program_id(0) >= whole, tl.program_id(0) - whole
    split = tl.where(rest, splits + behind % rests, tl.program_id(0) % splits)
    row_head = tl.where(rest, behind // rests, tl.program_id(0) // splits).to(tl.int64)
    b, h = row_head // heads, row_head % heads
    before, seen = tl.load(count + b), tl.load(counters + SEEN)
    is_scaled = tl.load(extreme + row_head) == 0
    arrives = seen < slots                                              # a token beyond the last slot is dropped
    total = tl.where(arrives, before + 1, before).to(tl.int32)
    keys_quantized, values_quantized = quantized_counts(before.to(tl.int32), residual)
    key_codes += row_head * key_groups * (WORDS * HEAD_DIM)
    head, d = tl.arange(0, EIGHT), tl.arange(0, HEAD_DIM)
    valid = (head < GROUP_HEADS)[None, :]
    query += b * query_b + (h * GROUP_HEADS + head)[None, :] * query_h
    acc = tl.zeros([HEAD_DIM, EIGHT], tl.float32)
    row_max = tl.full([EIGHT], float("-inf"), tl.float32)
    weight_sum = tl.zeros([EIGHT, EIGHT], tl.float32)
    channel = channel_of(d, HEAD_DIM, VALUE_BITS)
    if not rest:
        key_scales += row_head * key_groups * HEAD_DIM
        value_codes += row_head * value_rows * (HEAD_DIM * VALUE_BITS // 32)
        value_scales += row_head * value_rows * (HEAD_DIM // GROUP)
        query_parts = _query_parts(query, query_d, valid, HEAD_DIM)
        tiles = tl.cdiv(values_quantized, 256 // KEY_BITS)
        each = tl.cdiv(tiles, splits)
        # A program without tokens also reads keys: there is room for a tile behind the last one.
        packed, step, shift = key_words(
            key_codes, key_scales, tl.minimum(split * each, tiles) * 8, 0, HEAD_DIM, WORDS
        )
        end = tl.minimum(split * each + each, tiles)
        if end == tiles:
            _forget_values_behind(value_scales, values_quantized, tiles * (256 // KEY_BITS), HEAD_DIM, KEY_BITS, GROUP)
        if tl.bfloat16 == DTYPE and is_scaled:
            acc, row_max, weight_sum = _attend_tiles(
                acc, row_max, weight_sum, packed, step, shift, query_parts, key_codes, key_scales, value_codes,
                value_scales, split * each, end, values_quantized, scale * UP, HEAD_DIM, KEY_BITS, VALUE_BITS, GROUP,
                WORDS, DTYPE, True,
            )
            acc *= UP
        else:
            acc, row_max, weight_sum = _attend_tiles(
                acc, row_max, weight_sum, packed, step, shift, query_parts, key_codes, key_scales, value_codes,
                value_scales, split * each, end, values_quantized, scale, HEAD_DIM, KEY_BITS, VALUE_BITS, GROUP,
                WORDS, DTYPE, False,
            )
    else:
        keys += row_head * residual * HEAD_DIM
        values += row_head * (residual + 1) * HEAD_DIM
        aligned = values_quantized // REST * REST
        each = tl.cdiv(tl.cdiv(total - aligned, REST), rests) * REST
        begin = aligned + (split - splits) * each
        end = tl.minimum(begin + each, total)
        if arrives & (begin <= before) & (before < end):
            d64 = d.to(tl.int64)
            k_new = tl.load(new_key + b * new_key_b + h * new_key_h + d64 * new_key_d)
            v_new = tl.load(new_value + b * new_value_b + h * new_value_h + d64 * new_value_d)
            tl.store(keys + before % residual * HEAD_DIM + d, k_new)
            tl.store(values + before % (residual + 1) * HEAD_DIM + d, v_new)
            if h == 0:
                tl.store(positions + b * slots + before, seen)
        tl.debug_barrier()                                              # this program also reads what it has written
        q = tl.load(query + d.to(tl.int64)[:, None] * query_d, mask=valid, other=0.0)
        of_head = row_head * key_groups * (2 * HEAD_DIM)
        acc, row_max, weight_sum = _attend_rest(
            acc, row_max, weight_sum, q, keys, values, key_codes, key_scale + of_head, key_minimum + of_head,
            tl.maximum(begin, values_quantized), end, keys_quantized, residual, scale, channel, HEAD_DIM, KEY_BITS,
            WORDS,
        )
    part = (row_head * GROUP_HEADS + head) * parts + split
    tl.store(row_maxima + part, row_max, mask=head < GROUP_HEADS)
    tl.store(weight_sums + part, tl.sum(weight_sum, 0), mask=head < GROUP_HEADS)
    tl.store(partial + part[None, :] * HEAD_DIM + channel[:, None], acc, mask=valid)
