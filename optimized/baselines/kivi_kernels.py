"""KIVI's kernels that quantize keys and values, and read them again.

Of the n tokens of a row, the keys of the first n - n mod R are quantized, and the values of the first n - R: see
`quantized_counts`. The other keys are in a buffer of R places, token t in place t mod R, the other values in one of
R + 1, in place t mod (R + 1). All boundaries follow from n, which is on the device. Codes are as in the reference's
`QuantizeResult`, int32 words of C = 32 / bits codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.numerics import divided, float32, multiply, round_to, without_sign_of_zero
from .kivi_order import key_scale_at, key_word_at, value_scale_at, value_word_at

#: How a kernel finds tokens: EVERY group of a tensor, the prompt by a table of places, or the buffers of a step.
EVERY, PROMPT, STEP = (tl.constexpr(number) for number in range(3))
#: In `counters`: the tokens seen, padding included, before and after a step.
SEEN, SEEN_NEXT = tl.constexpr(0), tl.constexpr(1)
#: The distance of two scales, and of two minima, of the values in a state.
APART = tl.constexpr(2)
#: The bits of 2^23. As a float32, 2^23 + n is exact for small n and has n in its lowest bits.
_MAGIC_BITS = tl.constexpr(0x4B000000)
_MAGIC = tl.constexpr(8388608.0)
#: The range of scales and minima, other than 0, outside which `kivi_scaled.py` does not apply; minima may be larger.
#: Times 2^117, larger scales would not be finite. Numbers from smaller ones could be below 2^-110, and times 2^-16
#: subnormal: two numbers of at least 2^-103 with 8 bits each have a sum of 0, or of at least 2^-110.
_LEAST, _BEYOND = tl.constexpr(2.0**-103), tl.constexpr(2.0**11)


# Groups --------------------------------------------------------------------------------------------------------------


@triton.jit
def quantized_counts(count, residual):
    """The numbers of quantized keys and values of a row with `count` tokens."""
    return count - count % residual, tl.maximum(count - residual, 0)


@triton.jit
def _scales(low, high, finite, STORED: tl.constexpr, BITS: tl.constexpr):
    """The scale and the minimum of groups, rounded to STORED, from their float32 extremes. finite: int32, whether all
    numbers of the group are. A group that cannot be held has a scale of 0 and a minimum of NaN."""
    width = high - low
    low = round_to(without_sign_of_zero(low), STORED)
    scale = round_to(divided(width, (1 << BITS) - 1.0), STORED)
    largest = tl.maximum(tl.maximum(width, float32(scale)), tl.abs(float32(low)))
    holds = (finite != 0) & (largest < float("inf"))
    scale32 = tl.where(holds, float32(scale), 0.0)
    low32 = tl.where(holds, float32(low), float("nan"))
    return scale32, low32


@triton.jit
def is_extreme(scale, minimum):
    """Whether numbers of this scale and minimum, float32, cannot be computed as in `kivi_scaled.py`."""
    small = (scale < _LEAST) & (scale != 0.0) | (tl.abs(minimum) < _LEAST) & (minimum != 0.0)
    return small | (scale >= _BEYOND)


@triton.jit
def _note_extremes(extreme, scale, minimum, inside):
    """Set `extreme`, the int32 of a KV head, to 1 if any scale or minimum that is inside is extreme. Several programs
    may store the same 1; nothing but a reset stores 0."""
    found = tl.max((is_extreme(scale, minimum) & inside).to(tl.int32), None)
    tl.store(extreme, 1, mask=found > 0)


@triton.jit
def code_of(x, low, scale, BITS: tl.constexpr):
    """The codes, int32, of x with scales and minima that broadcast against it."""
    some = scale > 0.0
    ratio = divided(x - low, tl.where(some, scale, 1.0))
    ratio = tl.minimum(tl.maximum(ratio, 0.0), (1 << BITS) - 1.0)
    code = (ratio + _MAGIC).to(tl.int32, bitcast=True) - _MAGIC_BITS   # rounds halves to even
    return tl.where(some, code, 0)


@triton.jit
def _is_finite(x, inside):
    return tl.where(inside & ~(tl.abs(x) < float("inf")), 0, 1)


@triton.jit
def extremes(x, inside, AXIS: tl.constexpr):
    """The least and the largest numbers along an axis, and whether all are finite (int32)."""
    low = tl.min(tl.where(inside, x, float("inf")), AXIS)
    high = tl.max(tl.where(inside, x, float("-inf")), AXIS)
    return low, high, tl.min(_is_finite(x, inside), AXIS)


@triton.jit
def _store_keys(
    x, there, codes, scale, minimum, extreme, first_word, group, d, HEAD_DIM: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FRAGMENTS: tl.constexpr,
):
    """Quantize and store a group of keys x [ROWS, BLOCK] float32 (channels d), of which the first GROUP rows exist.
    FRAGMENTS: see `kivi_order.py`; extreme: `_note_extremes`."""
    C: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = ROWS // C
    low, high, finite = extremes(x, there, 0)
    step, shift = _scales(low, high, finite, scale.dtype.element_ty, BITS)
    code = code_of(x, shift[None, :], step[None, :], BITS)
    code = tl.reshape(tl.where(there, code, 0), (WORDS, C, BLOCK))
    word = tl.sum(code << (tl.arange(0, C) * BITS)[None, :, None], 1)
    in_head = d < HEAD_DIM
    at = key_word_at((first_word + tl.arange(0, WORDS))[:, None], d[None, :], HEAD_DIM, FRAGMENTS)
    tl.store(codes + at, word, mask=in_head[None, :])
    at = key_scale_at(group, d, HEAD_DIM, FRAGMENTS)
    tl.store(scale + at, round_to(step, scale.dtype.element_ty), mask=in_head)
    tl.store(minimum + at, round_to(shift, scale.dtype.element_ty), mask=in_head)
    if FRAGMENTS:
        _note_extremes(extreme, step, shift, in_head)


@triton.jit
def store_values(
    x, there, codes, scale, minimum, extreme, token, valid, HEAD_DIM: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D_PAD: tl.constexpr, DISTANCE: tl.constexpr, FRAGMENTS: tl.constexpr,
):
    """Quantize and store the values x [ROWS, D_PAD] float32 of tokens [ROWS] int64, those that are valid. DISTANCE:
    that of two scales, and of two minima. FRAGMENTS: see `kivi_order.py`; extreme: `_note_extremes`."""
    C: tl.constexpr = 32 // BITS
    x = tl.reshape(x, (ROWS, D_PAD // GROUP, GROUP))
    there = tl.reshape(there, (ROWS, D_PAD // GROUP, GROUP))
    low, high, finite = extremes(x, there, 2)
    step, shift = _scales(low, high, finite, scale.dtype.element_ty, BITS)
    code = code_of(x, shift[:, :, None], step[:, :, None], BITS)
    code = tl.reshape(tl.where(there, code, 0), (ROWS, D_PAD // C, C))
    word = tl.sum(code << (tl.arange(0, C) * BITS)[None, None, :], 2)
    w, group = tl.arange(0, D_PAD // C), tl.arange(0, D_PAD // GROUP)
    tl.store(
        codes + value_word_at(token[:, None], w[None, :], HEAD_DIM, BITS, FRAGMENTS), word,
        mask=valid[:, None] & (w < HEAD_DIM // C)[None, :],
    )
    at = value_scale_at(token[:, None], group[None, :], HEAD_DIM // GROUP, FRAGMENTS) * DISTANCE
    inside = valid[:, None] & (group < HEAD_DIM // GROUP)[None, :]
    tl.store(scale + at, round_to(step, scale.dtype.element_ty), mask=inside)
    tl.store(minimum + at, round_to(shift, scale.dtype.element_ty), mask=inside)
    if FRAGMENTS:
        _note_extremes(extreme, step, shift, inside)


@triton.jit(do_not_specialize=[
    "heads", "groups", "capacity", "residual", "slots", "x_b", "x_h", "x_t",
])
def quantize_keys_kernel(
    x, place, count, due, counters, codes, scale, minimum, extreme, heads, groups, capacity, residual, slots, x_b, x_h,
    x_t, x_d,
    HEAD_DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    MODE: tl.constexpr, FRAGMENTS: tl.constexpr,
):
    """Program: a group of keys of a row's KV head, BLOCK channels at a time. groups: those that each head has programs
    for; capacity: those that it has memory for.

    EVERY: x is [B, H, T, D]. PROMPT: so is x, and place [B, slots] int64 has the token of each slot; count [B] says how
    many there are. STEP: x is the buffer [B, H, R, D], with the keys to quantize if due[b] > 0, the row's new number of
    tokens; its first program also counts the tokens. extreme [B, H] int32: see `_note_extremes`.
    """
    program = tl.program_id(0)
    i, row_head = program % groups, (program // groups).to(tl.int64)
    b, h = row_head // heads, row_head % heads
    group = i.to(tl.int64)
    active = True
    if MODE == PROMPT:
        keys, _ = quantized_counts(tl.load(count + b), residual)
        active = (group + 1) * GROUP <= keys
    if MODE == STEP:
        now = tl.load(due + b)
        keys, _ = quantized_counts(now, residual)
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
                y, there, codes, scale, minimum, extreme + row_head,
                (row_head * capacity + group) * (ROWS * BITS // 32), row_head * capacity + group, d, HEAD_DIM, BITS,
                GROUP, ROWS, BLOCK, FRAGMENTS,
            )


@triton.jit(do_not_specialize=[
    "heads", "tiles", "tokens", "capacity", "residual", "slots", "x_b", "x_h", "x_t",
])
def quantize_values_kernel(
    x, place, count, codes, scale, minimum, extreme, heads, tiles, tokens, capacity, residual, slots, x_b, x_h, x_t,
    x_d, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    MODE: tl.constexpr, DISTANCE: tl.constexpr, FRAGMENTS: tl.constexpr,
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
        _, values = quantized_counts(tl.load(count + b), residual)
        valid = valid & (token < values)
        source = tl.load(place + b * slots + token, mask=valid, other=0)
    d = tl.arange(0, D_PAD)
    there = valid[:, None] & (d < HEAD_DIM)[None, :]
    at = b * x_b + h * x_h + source[:, None] * x_t + d.to(tl.int64)[None, :] * x_d
    y = float32(tl.load(x + at, mask=there, other=0.0))
    # Without tokens, the extremes are infinite, but nothing is stored.
    store_values(
        y, there, codes, scale, minimum, extreme + row_head, row_head * capacity + token, valid, HEAD_DIM, BITS, GROUP,
        ROWS, D_PAD, DISTANCE, FRAGMENTS,
    )


# Numbers -------------------------------------------------------------------------------------------------------------


@triton.jit
def number_of(code):
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
    value = multiply(number_of(code), step) + float32(tl.load(minimum + of_group, mask=inside, other=0.0))
    tl.store(result + n, round_to(value, result.dtype.element_ty), mask=inside)
