"""KIVI's kernels of a decode step, over codes and unquantized tokens. See kivi_kernels.py for the layout.

16-bit numbers of which a word has one scale are computed in pairs: one instruction computes two of them, and both stay
in one register, so that the columns of a tile are not in the order of the codes (`_code_of`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.launch import PTX
from .._common.numerics import dot, float32, multiply, round_to
from .._common.softmax import merge_head, weigh_tile
from .kivi_kernels import APART, SEEN, SEEN_NEXT, number_of, quantized_counts, store_values

_PTX = tl.constexpr(PTX)


@triton.jit
def bits_of(x):
    """The 16 bits of a number in the lower half of an int32."""
    return x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def lower_of(pair, DTYPE: tl.constexpr):
    """The lower of two 16-bit numbers in an int32, as float32."""
    return float32((pair & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True))


@triton.jit
def both(lower, upper, DTYPE: tl.constexpr):
    """Two float32, rounded to 16 bits, in an int32."""
    return bits_of(round_to(lower, DTYPE)) | (bits_of(round_to(upper, DTYPE)) << 16)


@triton.jit
def pair_of(codes, steps, shifts, BITS: tl.constexpr, DTYPE: tl.constexpr, AT: tl.constexpr = 0):
    """The numbers of the codes from bit AT on in both halves of an int32: two 16-bit numbers of type DTYPE in an int32.
    steps, shifts: their scales and minima, two each.

    A code is in the 7 lowest bits of 128 (bfloat16), or the 10 lowest ones of 1024 (float16). That number is subtracted
    and the rest divided by 2^AT, exactly. The product and the sum are rounded once. Each instruction computes two
    numbers.
    """
    MASK: tl.constexpr = ((1 << BITS) - 1) * 0x10001 << AT
    if _PTX and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x;
            lop3.b32 x, $1, $4, 0x43004300, 0xEA;
            fma.rn.bf16x2 x, x, $5, $6;
            fma.rn.bf16x2 $0, x, $2, $3;
            }""", "=r,r,r,r,r,r,r",
            [codes, steps, shifts, MASK, (0x3F80 - (AT << 7)) * 0x10001, (0xC300 - (AT << 7)) * 0x10001 - 2**32],
            dtype=tl.int32, is_pure=True, pack=1,
        )
    elif _PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x;
            lop3.b32 x, $1, $4, 0x64006400, 0xEA;
            fma.rn.f16x2 x, x, $5, $6;
            fma.rn.f16x2 $0, x, $2, $3;
            }""", "=r,r,r,r,r,r,r",
            [codes, steps, shifts, MASK, (0x3C00 - (AT << 10)) * 0x10001, (0xE400 - (AT << 10)) * 0x10001 - 2**32],
            dtype=tl.int32, is_pure=True, pack=1,
        )
    else:
        codes = (codes & MASK) >> AT
        first = number_of(codes & 0xFFFF) * lower_of(steps, DTYPE) + lower_of(shifts, DTYPE)
        second = number_of(codes >> 16) * lower_of(steps >> 16, DTYPE) + lower_of(shifts >> 16, DTYPE)
        return both(first, second, DTYPE)


@triton.jit
def _pair(word, step, shift, NUMBER: tl.constexpr, BITS: tl.constexpr):
    """The numbers of the codes NUMBER and NUMBER + C / 2 of words, see `pair_of`. step, shift: the scale and the
    minimum of both, 16-bit numbers."""
    steps, shifts = bits_of(step) * 0x10001, bits_of(shift) * 0x10001
    return pair_of(word >> (NUMBER * BITS), steps, shifts, BITS, step.dtype)


@triton.jit
def _numbers_of(word, step, shift, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The numbers of words [ROWS, COLUMNS / C], each with a scale and a minimum: [ROWS, COLUMNS] in their 16-bit type.

    Column n has the code `_code_of(n % C)` of its word, so that both halves of a register stay together.
    """
    if BITS == 2:
        y = tl.join(
            tl.join(
                tl.join(_pair(word, step, shift, 0, BITS), _pair(word, step, shift, 4, BITS)),
                tl.join(_pair(word, step, shift, 2, BITS), _pair(word, step, shift, 6, BITS)),
            ),
            tl.join(
                tl.join(_pair(word, step, shift, 1, BITS), _pair(word, step, shift, 5, BITS)),
                tl.join(_pair(word, step, shift, 3, BITS), _pair(word, step, shift, 7, BITS)),
            ),
        )
    else:
        y = tl.join(
            tl.join(_pair(word, step, shift, 0, BITS), _pair(word, step, shift, 2, BITS)),
            tl.join(_pair(word, step, shift, 1, BITS), _pair(word, step, shift, 3, BITS)),
        )
    first = y.to(tl.int16).to(step.dtype, bitcast=True)
    second = (y >> 16).to(tl.int16).to(step.dtype, bitcast=True)
    return tl.reshape(tl.join(first, second), (ROWS, COLUMNS))


@triton.jit
def _code_of(n, BITS: tl.constexpr, PAIRS: tl.constexpr):
    """The number in its word of the code in place n, see `_numbers_of`; without PAIRS, n itself."""
    if PAIRS:
        return n // 2 + n % 2 * (16 // BITS)
    else:
        return n


@triton.jit
def _keys_of_words(
    codes, scale, minimum, word, words, d, HEAD_DIM: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr,
    COUNT: tl.constexpr, D_PAD: tl.constexpr, PAIRS: tl.constexpr,
):
    """The keys of COUNT words [COUNT] of a head, transposed: [D_PAD, COUNT * C] in the type of the scales, 0 beyond
    `words`. Place n of a word has the token `_code_of(n)`."""
    C: tl.constexpr = 32 // BITS
    if PAIRS:
        mask = (d < HEAD_DIM)[:, None] & (word < words)[None, :]
        packed = tl.load(codes + d[:, None] + word.to(tl.int64)[None, :] * HEAD_DIM, mask=mask, other=0)
        at = d[:, None] + (word // WORDS).to(tl.int64)[None, :] * HEAD_DIM
        step = tl.load(scale + at, mask=mask, other=0.0)
        shift = tl.load(minimum + at, mask=mask, other=0.0)
        return _numbers_of(packed, step, shift, BITS, D_PAD, COUNT * C)
    else:
        mask = (word < words)[:, None] & (d < HEAD_DIM)[None, :]
        packed = tl.load(codes + word.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0)
        at = (word // WORDS).to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
        step = float32(tl.load(scale + at, mask=mask, other=0.0))
        shift = float32(tl.load(minimum + at, mask=mask, other=0.0))
        code = (packed[:, None, :] >> (tl.arange(0, C) * BITS)[None, :, None]) & ((1 << BITS) - 1)
        k = number_of(code) * step[:, None, :] + shift[:, None, :]
        return tl.trans(tl.reshape(round_to(k, scale.dtype.element_ty), (COUNT * C, D_PAD)))


@triton.jit
def _values_of_tokens(
    codes, scale, minimum, token, holds, HEAD_DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, D_PAD: tl.constexpr, PAIRS: tl.constexpr,
):
    """The values of tokens [BLOCK] that `holds`: [BLOCK, D_PAD] in the type of the scales, 0 for others. Place n of a
    word has the channel `_code_of(n)`."""
    C: tl.constexpr = 32 // BITS
    w = tl.arange(0, D_PAD // C)
    row = token.to(tl.int64)[:, None]
    mask = holds[:, None] & (w < HEAD_DIM // C)[None, :]
    packed = tl.load(codes + row * (HEAD_DIM // C) + w[None, :], mask=mask, other=0)
    if PAIRS:
        at = (row * (HEAD_DIM // GROUP) + (w * C // GROUP)[None, :]) * APART
        step = tl.load(scale + at, mask=mask, other=0.0)
        shift = tl.load(minimum + at, mask=mask, other=0.0)
        return _numbers_of(packed, step, shift, BITS, BLOCK, D_PAD)
    else:
        code = (packed[:, :, None] >> (tl.arange(0, C) * BITS)[None, None, :]) & ((1 << BITS) - 1)
        d = tl.arange(0, D_PAD)
        mask = holds[:, None] & (d < HEAD_DIM)[None, :]
        at = (row * (HEAD_DIM // GROUP) + (d // GROUP)[None, :]) * APART
        step = float32(tl.load(scale + at, mask=mask, other=0.0))
        shift = float32(tl.load(minimum + at, mask=mask, other=0.0))
        v = tl.reshape(number_of(code), (BLOCK, D_PAD)) * step + shift
        return round_to(v, scale.dtype.element_ty)


# A step --------------------------------------------------------------------------------------------------------------


@triton.jit
def _attend_codes(
    acc, row_max, weight_sum, q, key_codes, key_scale, key_minimum, value_codes, value_scale, value_minimum, values,
    begin, end, values_quantized, residual, scale, channel, HEAD_DIM: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, D_PAD: tl.constexpr,
    KEY_PAIRS: tl.constexpr, VALUE_PAIRS: tl.constexpr, MIXED: tl.constexpr,
):
    """Update the online softmax of q with the words `begin` to `end` of quantized keys. With MIXED, some of their
    values may not be quantized; those are read from the buffer. channel [D_PAD]: those of the accumulator."""
    C: tl.constexpr = 32 // KEY_BITS
    d = tl.arange(0, D_PAD)
    place = tl.arange(0, BLOCK)
    for start in range(begin, end, BLOCK // C):
        k = _keys_of_words(
            key_codes, key_scale, key_minimum, start + tl.arange(0, BLOCK // C), end, d, HEAD_DIM, KEY_BITS, WORDS,
            BLOCK // C, D_PAD, KEY_PAIRS,
        )
        word = start + place // C
        within = word % WORDS * C + _code_of(place % C, KEY_BITS, KEY_PAIRS)  # the token's number in its group
        token = word // WORDS * GROUP + within
        holds = (word < end) & (within < GROUP)
        logit = multiply(dot(q, k), scale)
        logit = tl.where(holds[None, :], logit, float("-inf"))
        p, row_max, weight_sum, rescale = weigh_tile(logit, row_max, weight_sum)
        if MIXED:
            packed = holds & (token < values_quantized)
        else:
            packed = holds
        v = _values_of_tokens(
            value_codes, value_scale, value_minimum, token, packed, HEAD_DIM, VALUE_BITS, GROUP, BLOCK, D_PAD,
            VALUE_PAIRS,
        )
        if MIXED:
            whole = holds & (token >= values_quantized)
            v_whole = tl.load(
                values + (token % (residual + 1)).to(tl.int64)[:, None] * HEAD_DIM + channel[None, :],
                mask=whole[:, None] & (channel < HEAD_DIM)[None, :], other=0.0,
            )
            v = tl.where(whole[:, None], v_whole, v)
        acc = acc * rescale[:, None] + dot(round_to(p, v.dtype), v)
    return acc, row_max, weight_sum


@triton.jit(do_not_specialize=[
    "heads", "splits", "residual", "slots", "key_groups", "value_rows", "query_b", "query_h", "new_key_b", "new_key_h",
    "new_value_b", "new_value_h",
])
def attention_kernel(
    query, new_key, new_value, keys, values, key_codes, key_scale, key_minimum, value_codes, value_scale, value_minimum,
    count, counters, positions, partial, row_maxima, weight_sums,
    scale, heads, splits, residual, slots, key_groups, value_rows, query_b, query_h, query_d, new_key_b, new_key_h,
    new_key_d, new_value_b, new_value_h, new_value_d,
    GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, KEY_PAIRS: tl.constexpr,
    VALUE_PAIRS: tl.constexpr,
):
    """Program: a share of what one KV head attends to. Its first `splits` programs share the quantized keys; the last
    has the others, and stores the new token in the buffers. `scale` includes log2(e)."""
    C: tl.constexpr = 32 // KEY_BITS
    program = tl.program_id(0)
    split, row_head = program % (splits + 1), (program // (splits + 1)).to(tl.int64)
    b, h = row_head // heads, row_head % heads
    before, seen = tl.load(count + b), tl.load(counters + SEEN)
    arrives = seen < slots                                              # a token beyond the last slot is dropped
    total = tl.where(arrives, before + 1, before).to(tl.int32)
    keys_quantized, values_quantized = quantized_counts(before.to(tl.int32), residual)
    keys += row_head * residual * HEAD_DIM
    values += row_head * (residual + 1) * HEAD_DIM
    d = tl.arange(0, D_PAD)
    in_head = d < HEAD_DIM
    row = tl.arange(0, ROWS)
    mask = (row < GROUP_HEADS)[:, None] & in_head[None, :]
    q = tl.load(
        query + b * query_b + (h * GROUP_HEADS + row)[:, None] * query_h + d.to(tl.int64)[None, :] * query_d,
        mask=mask, other=0.0,
    )
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    channel = d                                                         # of the accumulator's columns
    if split < splits:
        V: tl.constexpr = 32 // VALUE_BITS
        channel = d // V * V + _code_of(d % V, VALUE_BITS, VALUE_PAIRS)
        key_codes += row_head * key_groups * WORDS * HEAD_DIM
        key_scale += row_head * key_groups * HEAD_DIM
        key_minimum += row_head * key_groups * HEAD_DIM
        value_codes += row_head * value_rows * (HEAD_DIM * VALUE_BITS // 32)
        value_scale += row_head * value_rows * (HEAD_DIM // GROUP * APART)
        value_minimum += row_head * value_rows * (HEAD_DIM // GROUP * APART)
        words = keys_quantized // GROUP * WORDS
        each = tl.cdiv(tl.cdiv(words, BLOCK // C), splits) * (BLOCK // C)
        begin = split * each
        end = tl.minimum(begin + each, words)
        # Whole tiles whose values are all quantized.
        pure = tl.minimum(values_quantized // GROUP * WORDS, end)
        pure = begin + tl.maximum(pure - begin, 0) // (BLOCK // C) * (BLOCK // C)
        acc, row_max, weight_sum = _attend_codes(
            acc, row_max, weight_sum, q, key_codes, key_scale, key_minimum, value_codes, value_scale, value_minimum,
            values, begin, pure, values_quantized, residual, scale, channel, HEAD_DIM, KEY_BITS, VALUE_BITS, GROUP,
            WORDS, BLOCK, D_PAD, KEY_PAIRS, VALUE_PAIRS, False,
        )
        acc, row_max, weight_sum = _attend_codes(
            acc, row_max, weight_sum, q, key_codes, key_scale, key_minimum, value_codes, value_scale, value_minimum,
            values, pure, end, values_quantized, residual, scale, channel, HEAD_DIM, KEY_BITS, VALUE_BITS, GROUP,
            WORDS, BLOCK, D_PAD, KEY_PAIRS, VALUE_PAIRS, True,
        )
    else:
        if arrives:
            d64 = d.to(tl.int64)
            k_new = tl.load(new_key + b * new_key_b + h * new_key_h + d64 * new_key_d, mask=in_head)
            v_new = tl.load(new_value + b * new_value_b + h * new_value_h + d64 * new_value_d, mask=in_head)
            tl.store(keys + before % residual * HEAD_DIM + d, k_new, mask=in_head)
            tl.store(values + before % (residual + 1) * HEAD_DIM + d, v_new, mask=in_head)
            if h == 0:
                tl.store(positions + b * slots + before, seen)
        tl.debug_barrier()                                              # this program also reads what it has written
        for start in range(keys_quantized, total, BLOCK):
            token = start + tl.arange(0, BLOCK)
            holds = token < total
            tile = holds[:, None] & in_head[None, :]
            k = tl.load(
                keys + (token % residual).to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=tile, other=0.0
            )
            logit = multiply(dot(q, tl.trans(k)), scale)
            logit = tl.where(holds[None, :], logit, float("-inf"))
            p, row_max, weight_sum, rescale = weigh_tile(logit, row_max, weight_sum)
            v = tl.load(
                values + (token % (residual + 1)).to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=tile, other=0.0
            )
            acc = acc * rescale[:, None] + dot(round_to(p, v.dtype), v)
    part = (row_head * GROUP_HEADS + row) * (splits + 1) + split
    tl.store(row_maxima + part, row_max, mask=row < GROUP_HEADS)
    tl.store(weight_sums + part, weight_sum, mask=row < GROUP_HEADS)
    mask = (row < GROUP_HEADS)[:, None] & (channel < HEAD_DIM)[None, :]
    tl.store(partial + part[:, None] * HEAD_DIM + channel[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["heads", "parts", "residual", "slots", "value_rows"])
def merge_kernel(
    partial, row_maxima, weight_sums, output, values, value_codes, value_scale, value_minimum, extreme, count, counters,
    due, heads, parts, residual, slots, value_rows,
    GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, FRAGMENTS: tl.constexpr,
):
    """Program: a query head. Merges the shares of its attention. The first of a KV head also quantizes the oldest
    unquantized value if there are R + 1. due [B] int64: the row's new number of tokens; 0 if none arrived. extreme: see
    `store_values`."""
    merge_head(partial, row_maxima, weight_sums, output, parts, HEAD_DIM, D_PAD, PARTS)
    row_head = tl.program_id(0).to(tl.int64) // GROUP_HEADS
    if tl.program_id(0) % GROUP_HEADS != 0:
        return
    b, h = row_head // heads, row_head % heads
    d = tl.arange(0, D_PAD)
    before, seen = tl.load(count + b), tl.load(counters + SEEN)
    arrives = seen < slots
    if h == 0:
        tl.store(due + b, tl.where(arrives, before + 1, 0))
        if b == 0:
            tl.store(counters + SEEN_NEXT, tl.where(arrives, seen + 1, seen))
    if arrives & (before >= residual):
        token = before - residual + tl.zeros([1], tl.int64)
        there = (d < HEAD_DIM)[None, :] & (token >= 0)[:, None]
        at = (row_head * (residual + 1) + token % (residual + 1))[:, None] * HEAD_DIM + d[None, :]
        v = float32(tl.load(values + at, mask=there, other=0.0))
        store_values(
            v, there, value_codes, value_scale, value_minimum, extreme + row_head, row_head * value_rows + token,
            token >= 0, HEAD_DIM, BITS, GROUP, 1, D_PAD, APART, FRAGMENTS,
        )
