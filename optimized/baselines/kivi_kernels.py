"""KIVI's kernels: quantization of keys and values, and a decode step over codes and unquantized tokens.

Of the n tokens of a row, the keys of the first n - n mod R are quantized, and the values of the first n - R: see
`_quantized`. The other keys are in a buffer of R places, token t in place t mod R, the other values in one of R + 1, in
place t mod (R + 1). All boundaries follow from n, which is on the device. Codes are as in the reference's
`QuantizeResult`, int32 words of C = 32 / bits codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.launch import PTX
from .._common.numerics import dot, float32, multiply, round_output, round_to, without_sign_of_zero
from .._common.softmax import merge_outputs, merge_sums, weigh_tile

#: How a kernel finds tokens: EVERY group of a tensor, the prompt by a table of places, or the buffers of a step.
EVERY, PROMPT, STEP = (tl.constexpr(number) for number in range(3))
#: In `counters`: the tokens seen, padding included, before and after a step.
SEEN, SEEN_NEXT = tl.constexpr(0), tl.constexpr(1)
#: The bits of 2^23. As a float32, 2^23 + n is exact for small n and has n in its lowest bits.
_MAGIC_BITS = tl.constexpr(0x4B000000)
_MAGIC = tl.constexpr(8388608.0)
_PTX = tl.constexpr(PTX)


# Groups --------------------------------------------------------------------------------------------------------------


@triton.jit
def _quantized(count, residual):
    """The numbers of quantized keys and values of a row with `count` tokens."""
    return count - count % residual, tl.maximum(count - residual, 0)


@triton.jit
def _scales(low, high, finite, STORED: tl.constexpr, BITS: tl.constexpr):
    """The scale and the minimum of groups, rounded to STORED, from their float32 extremes. finite: int32, whether all
    numbers of the group are. A group that cannot be held has a scale of 0 and a minimum of NaN."""
    width = high - low
    low = round_to(without_sign_of_zero(low), STORED)
    scale = round_to(tl.div_rn(width, (1 << BITS) - 1.0), STORED)
    largest = tl.maximum(tl.maximum(width, float32(scale)), tl.abs(float32(low)))
    holds = (finite != 0) & (largest < float("inf"))
    scale32 = tl.where(holds, float32(scale), 0.0)
    low32 = tl.where(holds, float32(low), float("nan"))
    return scale32, low32


@triton.jit
def _code(x, low, scale, BITS: tl.constexpr):
    """The codes, int32, of x with scales and minima that broadcast against it."""
    some = scale > 0.0
    ratio = tl.div_rn(x - low, tl.where(some, scale, 1.0))
    ratio = tl.minimum(tl.maximum(ratio, 0.0), (1 << BITS) - 1.0)
    code = (ratio + _MAGIC).to(tl.int32, bitcast=True) - _MAGIC_BITS   # rounds halves to even
    return tl.where(some, code, 0)


@triton.jit
def _is_finite(x, inside):
    return tl.where(inside & ~(tl.abs(x) < float("inf")), 0, 1)


@triton.jit
def _extremes(x, inside, AXIS: tl.constexpr):
    """The least and the largest numbers along an axis, and whether all are finite (int32)."""
    low = tl.min(tl.where(inside, x, float("inf")), AXIS)
    high = tl.max(tl.where(inside, x, float("-inf")), AXIS)
    return low, high, tl.min(_is_finite(x, inside), AXIS)


@triton.jit
def _store_keys(
    x, there, codes, scale, minimum, first_word, group, d, HEAD_DIM: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Quantize and store a group of keys x [ROWS, BLOCK] float32 (channels d), of which the first GROUP rows exist."""
    C: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = ROWS // C
    low, high, finite = _extremes(x, there, 0)
    step, shift = _scales(low, high, finite, scale.dtype.element_ty, BITS)
    code = _code(x, shift[None, :], step[None, :], BITS)
    code = tl.reshape(tl.where(there, code, 0), (WORDS, C, BLOCK))
    word = tl.sum(code << (tl.arange(0, C) * BITS)[None, :, None], 1)
    in_head = d < HEAD_DIM
    at = (first_word + tl.arange(0, WORDS))[:, None] * HEAD_DIM + d[None, :]
    tl.store(codes + at, word, mask=in_head[None, :])
    tl.store(scale + group * HEAD_DIM + d, round_to(step, scale.dtype.element_ty), mask=in_head)
    tl.store(minimum + group * HEAD_DIM + d, round_to(shift, scale.dtype.element_ty), mask=in_head)


@triton.jit
def _store_values(
    x, there, codes, scale, minimum, token, valid, HEAD_DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, D_PAD: tl.constexpr,
):
    """Quantize and store the values x [ROWS, D_PAD] float32 of tokens [ROWS] int64, those that are valid."""
    C: tl.constexpr = 32 // BITS
    x = tl.reshape(x, (ROWS, D_PAD // GROUP, GROUP))
    there = tl.reshape(there, (ROWS, D_PAD // GROUP, GROUP))
    low, high, finite = _extremes(x, there, 2)
    step, shift = _scales(low, high, finite, scale.dtype.element_ty, BITS)
    code = _code(x, shift[:, :, None], step[:, :, None], BITS)
    code = tl.reshape(tl.where(there, code, 0), (ROWS, D_PAD // C, C))
    word = tl.sum(code << (tl.arange(0, C) * BITS)[None, None, :], 2)
    w, group = tl.arange(0, D_PAD // C), tl.arange(0, D_PAD // GROUP)
    tl.store(
        codes + token[:, None] * (HEAD_DIM // C) + w[None, :], word,
        mask=valid[:, None] & (w < HEAD_DIM // C)[None, :],
    )
    at = token[:, None] * (HEAD_DIM // GROUP) + group[None, :]
    inside = valid[:, None] & (group < HEAD_DIM // GROUP)[None, :]
    tl.store(scale + at, round_to(step, scale.dtype.element_ty), mask=inside)
    tl.store(minimum + at, round_to(shift, scale.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[
    "heads", "groups", "capacity", "residual", "slots", "x_b", "x_h", "x_t",
])
def quantize_keys_kernel(
    x, place, count, due, counters, codes, scale, minimum, heads, groups, capacity, residual, slots, x_b, x_h, x_t, x_d,
    HEAD_DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    MODE: tl.constexpr,
):
    """Program: a group of keys of a row's KV head, BLOCK channels at a time. groups: those that each head has programs
    for; capacity: those that it has memory for.

    EVERY: x is [B, H, T, D]. PROMPT: so is x, and place [B, slots] int64 has the token of each slot; count [B] says how
    many there are. STEP: x is the buffer [B, H, R, D], with the keys to quantize if due[b] > 0, the row's new number of
    tokens; its first program also counts the tokens.
    """
    program = tl.program_id(0)
    i, row_head = program % groups, (program // groups).to(tl.int64)
    b, h = row_head // heads, row_head % heads
    group = i.to(tl.int64)
    active = True
    if MODE == PROMPT:
        keys, _ = _quantized(tl.load(count + b), residual)
        active = (group + 1) * GROUP <= keys
    if MODE == STEP:
        now = tl.load(due + b)
        keys, _ = _quantized(now, residual)
        active = (now > 0) & (keys == now)
        group += tl.maximum(now - residual, 0) // GROUP
        if (i == 0) & (h == 0) & (now > 0):
            tl.store(count + b, now)
            if b == 0:
                tl.store(counters + SEEN, tl.load(counters + SEEN_NEXT))
    if active:
        t = tl.arange(0, ROWS)
        token = group * GROUP + t
        if MODE == PROMPT:
            token = tl.load(place + b * slots + token, mask=t < GROUP, other=0)
        if MODE == STEP:
            token = token % residual
        for start in range(0, HEAD_DIM, BLOCK):
            d = start + tl.arange(0, BLOCK)
            there = (t < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
            at = b * x_b + h * x_h + token[:, None] * x_t + d.to(tl.int64)[None, :] * x_d
            y = float32(tl.load(x + at, mask=there, other=0.0))
            _store_keys(
                y, there, codes, scale, minimum, (row_head * capacity + group) * (ROWS * BITS // 32),
                row_head * capacity + group, d, HEAD_DIM, BITS, GROUP, ROWS, BLOCK,
            )


@triton.jit(do_not_specialize=[
    "heads", "tiles", "tokens", "capacity", "residual", "slots", "x_b", "x_h", "x_t",
])
def quantize_values_kernel(
    x, place, count, codes, scale, minimum, heads, tiles, tokens, capacity, residual, slots, x_b, x_h, x_t, x_d,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    MODE: tl.constexpr,
):
    """Program: ROWS values of a row's KV head, in modes EVERY and PROMPT of `quantize_keys_kernel`. tokens: T or, for a
    prompt, the most that are quantized; capacity: the values that a head has memory for."""
    program = tl.program_id(0)
    i, row_head = program % tiles, (program // tiles).to(tl.int64)
    b, h = row_head // heads, row_head % heads
    token = i.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = token < tokens
    source = token
    if MODE == PROMPT:
        _, values = _quantized(tl.load(count + b), residual)
        valid = valid & (token < values)
        source = tl.load(place + b * slots + token, mask=valid, other=0)
    d = tl.arange(0, D_PAD)
    there = valid[:, None] & (d < HEAD_DIM)[None, :]
    at = b * x_b + h * x_h + source[:, None] * x_t + d.to(tl.int64)[None, :] * x_d
    y = float32(tl.load(x + at, mask=there, other=0.0))
    # Without tokens, the extremes are infinite, but nothing is stored.
    _store_values(
        y, there, codes, scale, minimum, row_head * capacity + token, valid, HEAD_DIM, BITS, GROUP, ROWS, D_PAD
    )


# Numbers -------------------------------------------------------------------------------------------------------------


@triton.jit
def _number(code):
    """Small int32 codes >= 0 as float32. Cheaper than a conversion."""
    return (code | _MAGIC_BITS).to(tl.float32, bitcast=True) - _MAGIC


@triton.jit(do_not_specialize=["count", "rows", "channels", "groups"])
def dequantize_kernel(
    codes, scale, minimum, result, count, rows, channels, groups,
    BITS: tl.constexpr, AXIS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Program: BLOCK of the `count` numbers of result [heads, rows, channels]; groups: along the axis. WORDS: those of
    a group of tokens."""
    C: tl.constexpr = 32 // BITS
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = n < count
    d, t, head = n % channels, n // channels % rows, n // channels // rows
    if AXIS == -2:
        group, i = t // GROUP, (t % GROUP).to(tl.int32)
        of_group = (head * groups + group) * channels + d
        at = ((head * groups + group) * WORDS + i // C) * channels + d
    else:
        i = d.to(tl.int32)
        of_group = (head * rows + t) * groups + d // GROUP
        at = (head * rows + t) * (channels // C) + i // C
    code = (tl.load(codes + at, mask=inside, other=0) >> (i % C * BITS)) & ((1 << BITS) - 1)
    step = float32(tl.load(scale + of_group, mask=inside, other=0.0))
    value = multiply(_number(code), step) + float32(tl.load(minimum + of_group, mask=inside, other=0.0))
    tl.store(result + n, round_to(value, result.dtype.element_ty), mask=inside)


@triton.jit
def _bits(x):
    """The 16 bits of a number in the lower half of an int32."""
    return x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _pair(word, step, shift, NUMBER: tl.constexpr, BITS: tl.constexpr):
    """The numbers of the codes NUMBER and NUMBER + C / 2 of words: two 16-bit numbers in an int32, the first one below.
    step, shift: the scale and the minimum of both, 16-bit numbers.

    A code is the lowest bits of 128 (bfloat16) or 1024 (float16), from which that number is subtracted, exactly.
    The product and the sum are rounded once. Each instruction computes two numbers.
    """
    both, least = _bits(step) * 0x10001, _bits(shift) * 0x10001
    codes = word >> (NUMBER * BITS)
    MASK: tl.constexpr = ((1 << BITS) - 1) * 0x10001
    if _PTX and step.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x, one, less;
            mov.b32 one, 0x3F803F80;
            mov.b32 less, 0xC300C300;
            lop3.b32 x, $1, $4, 0x43004300, 0xEA;
            fma.rn.bf16x2 x, x, one, less;
            fma.rn.bf16x2 $0, x, $2, $3;
            }""", "=r,r,r,r,r", [codes, both, least, MASK], dtype=tl.int32, is_pure=True, pack=1,
        )
    elif _PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x, one, less;
            mov.b32 one, 0x3C003C00;
            mov.b32 less, 0xE400E400;
            lop3.b32 x, $1, $4, 0x64006400, 0xEA;
            fma.rn.f16x2 x, x, one, less;
            fma.rn.f16x2 $0, x, $2, $3;
            }""", "=r,r,r,r,r", [codes, both, least, MASK], dtype=tl.int32, is_pure=True, pack=1,
        )
    else:
        first = round_to(_number(codes & MASK & 0xFFFF) * float32(step) + float32(shift), step.dtype)
        second = round_to(_number((codes & MASK) >> 16) * float32(step) + float32(shift), step.dtype)
        return _bits(first) | (_bits(second) << 16)


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
        k = _number(code) * step[:, None, :] + shift[:, None, :]
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
        at = row * (HEAD_DIM // GROUP) + (w * C // GROUP)[None, :]
        step = tl.load(scale + at, mask=mask, other=0.0)
        shift = tl.load(minimum + at, mask=mask, other=0.0)
        return _numbers_of(packed, step, shift, BITS, BLOCK, D_PAD)
    else:
        code = (packed[:, :, None] >> (tl.arange(0, C) * BITS)[None, None, :]) & ((1 << BITS) - 1)
        d = tl.arange(0, D_PAD)
        mask = holds[:, None] & (d < HEAD_DIM)[None, :]
        at = row * (HEAD_DIM // GROUP) + (d // GROUP)[None, :]
        step = float32(tl.load(scale + at, mask=mask, other=0.0))
        shift = float32(tl.load(minimum + at, mask=mask, other=0.0))
        v = tl.reshape(_number(code), (BLOCK, D_PAD)) * step + shift
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
    keys_quantized, values_quantized = _quantized(before.to(tl.int32), residual)
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
        value_scale += row_head * value_rows * (HEAD_DIM // GROUP)
        value_minimum += row_head * value_rows * (HEAD_DIM // GROUP)
        words = keys_quantized // GROUP * WORDS
        each = tl.cdiv(tl.cdiv(words, BLOCK // C), splits) * (BLOCK // C)
        begin = split * each
        end = tl.minimum(begin + each, words)
        # Whole tiles whose values are all quantized.
        pure = tl.minimum(values_quantized // GROUP * WORDS, end)
        pure = begin + tl.maximum(pure - begin, 0) // (BLOCK // C) * (BLOCK // C)
        acc, row_max, weight_sum = _attend_codes(
            acc, row_max, weight_sum, q, key_codes, key_scale, key_minimum, value_codes, value_scale, value_minimum,
            values, begin, pure, values_quantized, residual, scale, channel, HEAD_DIM, KEY_BITS, VALUE_BITS, GROUP, WORDS,
            BLOCK, D_PAD, KEY_PAIRS, VALUE_PAIRS, False,
        )
        acc, row_max, weight_sum = _attend_codes(
            acc, row_max, weight_sum, q, key_codes, key_scale, key_minimum, value_codes, value_scale, value_minimum,
            values, pure, end, values_quantized, residual, scale, channel, HEAD_DIM, KEY_BITS, VALUE_BITS, GROUP, WORDS,
            BLOCK, D_PAD, KEY_PAIRS, VALUE_PAIRS, True,
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
    partial, row_maxima, weight_sums, output, values, value_codes, value_scale, value_minimum, count, counters, due,
    heads, parts, residual, slots, value_rows,
    GROUP_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr,
):
    """Program: a KV head. Merges the shares of its attention, and quantizes its oldest unquantized value if there are
    R + 1. due [B] int64: the row's new number of tokens; 0 if none arrived."""
    row_head = tl.program_id(0).to(tl.int64)
    b, h = row_head // heads, row_head % heads
    row, i = tl.arange(0, ROWS), tl.arange(0, PARTS)
    d = tl.arange(0, D_PAD)
    part = (row_head * GROUP_HEADS + row) * parts
    valid = row < GROUP_HEADS
    row_max, total = merge_sums(
        row_maxima, weight_sums, part[:, None] + i[None, :], valid[:, None] & (i < parts)[None, :], False
    )
    result = merge_outputs(partial, row_maxima, part, parts, row_max, total, valid, HEAD_DIM, D_PAD, False)
    tl.store(
        output + (row_head * GROUP_HEADS + row)[:, None] * HEAD_DIM + d[None, :],
        round_output(result, output.dtype.element_ty), mask=valid[:, None] & (d < HEAD_DIM)[None, :],
    )
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
        _store_values(
            v, there, value_codes, value_scale, value_minimum, row_head * value_rows + token, token >= 0, HEAD_DIM,
            BITS, GROUP, 1, D_PAD,
        )
