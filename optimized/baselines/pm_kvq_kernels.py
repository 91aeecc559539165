"""PM-KVQ's kernels that quantize keys and values, shrink their codes, and read them again.

Of the n tokens of a row, the first `sinks` and the newest (n - sinks) mod window are unquantized, in a buffer of
sinks + window places, in order. The others are quantized: token `sinks` + t is the row's quantized token t, see
`quantized_count`. Everything follows from the number of tokens of the row and of those seen, which are on the device.

Memory is for P quantized tokens in 16 bits. Its words, int32, have two channels of a token, 2c in the lower half and
2c + 1 in the upper half. In 16 bits, a word has one token; in 8, 4 or 2 bits, each half has 2, 4 or 8 fields, of the
tokens t, t + P, t + 2P and so on. Shrinking a field leaves its lower half in place and frees the upper half, so that
no code moves: field number f of a word, 0 to 7, begins at the bit that `field_start` says in every width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.numerics import divided, float32, multiply, round_to, without_sign_of_zero
from .kivi_kernels import code_of, extremes, number_of

#: How `settle_kernel` finds tokens: in the PROMPT by a table of places, or in the buffer of a STEP.
PROMPT, STEP = tl.constexpr(0), tl.constexpr(1)
#: In `counters`: the tokens seen, padding included, before and after a step.
SEEN, SEEN_NEXT = tl.constexpr(0), tl.constexpr(1)


# Widths --------------------------------------------------------------------------------------------------------------


@triton.jit
def width_after(seen, limit_16, limit_8, limit_4):
    """The bits of a code after `seen` tokens."""
    return tl.where(seen <= limit_16, 16, tl.where(seen <= limit_8, 8, tl.where(seen <= limit_4, 4, 2)))


@triton.jit
def quantized_count(count, sinks, window):
    """The number of quantized tokens of a row with `count` tokens."""
    return tl.maximum(count - sinks, 0) // window * window


@triton.jit
def field_start(field):
    """The first bit, in half a word, of the field with this number: 0, 8, 4, 12, 2, 10, 6, 14."""
    return (field & 1) * 8 + (field & 2) * 2 + (field & 4) // 2


@triton.jit
def shrunk(code, TO: tl.constexpr):
    """Codes of 2 TO bits, int32, in TO bits. The reference's formula is a division, rounded to nearest, without ties:
    by an odd number."""
    return (code + (1 << (TO - 1))) // ((1 << TO) + 1)


@triton.jit
def shrunk_words(word, TO: tl.constexpr):
    """Words of 32 / (2 TO) fields, each shrunk to TO bits. The freed bits are 0."""
    result = word & 0
    for field in tl.static_range(0, 16 // TO):
        code = (word >> (field * 2 * TO)) & ((1 << (2 * TO)) - 1)
        result |= shrunk(code, TO) << (field * 2 * TO)
    return result


# Groups --------------------------------------------------------------------------------------------------------------


@triton.jit
def scales_of(low, high, finite, least, SCALE: tl.constexpr, STORED: tl.constexpr, BITS: tl.constexpr):
    """The scale and the minimum of groups, rounded to their types, from their float32 extremes. finite: int32, whether
    all numbers of the group are. A group that cannot be held has a scale of 0 and a minimum of NaN."""
    width = high - low
    low = float32(round_to(without_sign_of_zero(low), STORED))
    scale = float32(round_to(tl.maximum(divided(width, (1 << BITS) - 1.0), least), SCALE))
    largest = tl.maximum(tl.maximum(width, scale), tl.abs(low))
    holds = (finite != 0) & (largest < float("inf"))
    return tl.where(holds, scale, 0.0), tl.where(holds, low, float("nan"))


@triton.jit
def quantized(
    even, odd, there, least, SCALE: tl.constexpr, STORED: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HALF_PAD: tl.constexpr,
):
    """Quantize tokens of which `even` and `odd` [ROWS, HALF_PAD] have every other channel, float32, if `there`.

    Returns the codes of both, int32, and scales and minima, float32 [ROWS, GROUPS padded]. GROUP channels share a
    scale; all of the head if GROUPS is 1.
    """
    PAIRS: tl.constexpr = HALF_PAD if GROUPS == 1 else GROUP // 2
    NUMBER: tl.constexpr = HALF_PAD // PAIRS
    there3 = tl.reshape(there, (ROWS, NUMBER, PAIRS))
    even3, odd3 = tl.reshape(even, (ROWS, NUMBER, PAIRS)), tl.reshape(odd, (ROWS, NUMBER, PAIRS))
    low_even, high_even, finite_even = extremes(even3, there3, 2)
    low_odd, high_odd, finite_odd = extremes(odd3, there3, 2)
    step, shift = scales_of(
        tl.minimum(low_even, low_odd), tl.maximum(high_even, high_odd), tl.minimum(finite_even, finite_odd), least,
        SCALE, STORED, BITS,
    )
    code_even = code_of(even3, shift[:, :, None], step[:, :, None], BITS)
    code_odd = code_of(odd3, shift[:, :, None], step[:, :, None], BITS)
    return tl.reshape(code_even, (ROWS, HALF_PAD)), tl.reshape(code_odd, (ROWS, HALF_PAD)), step, shift


@triton.jit
def group_numbers(GROUPS: tl.constexpr, GROUP: tl.constexpr, HALF_PAD: tl.constexpr):
    """The numbers of a token's groups, as `quantized` returns them."""
    NUMBER: tl.constexpr = 1 if GROUPS == 1 else HALF_PAD // (GROUP // 2)
    return tl.arange(0, NUMBER)


@triton.jit(do_not_specialize=["rows", "tokens", "heads", "x_b", "x_h", "x_t"])
def quantize_kernel(
    x, codes, scale, minimum, least, rows, tokens, heads, x_b, x_h, x_t, x_d, HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr,
):
    """Program: ROWS of the tokens of x [B, H, T, D], of which there are `rows` = B H T."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    batch_head, t = row // tokens, row % tokens
    c = tl.arange(0, HALF_PAD)
    valid = row < rows
    there = valid[:, None] & (c < HEAD_DIM // 2)[None, :]
    at = (batch_head // heads * x_b + batch_head % heads * x_h + t * x_t)[:, None] + (2 * c).to(tl.int64)[None, :] * x_d
    even, odd = float32(tl.load(x + at, mask=there, other=0.0)), float32(tl.load(x + at + x_d, mask=there, other=0.0))
    code_even, code_odd, step, shift = quantized(
        even, odd, there, least, scale.dtype.element_ty, minimum.dtype.element_ty, BITS, GROUPS, GROUP, ROWS, HALF_PAD
    )
    to = codes + row[:, None] * HEAD_DIM + (2 * c)[None, :]
    tl.store(to, code_even, mask=there)
    tl.store(to + 1, code_odd, mask=there)
    group = group_numbers(GROUPS, GROUP, HALF_PAD)
    of_group, inside = row[:, None] * GROUPS + group[None, :], valid[:, None] & (group < GROUPS)[None, :]
    tl.store(scale + of_group, round_to(step, scale.dtype.element_ty), mask=inside)
    tl.store(minimum + of_group, round_to(shift, minimum.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "scales"])
def shrink_kernel(codes, scale, new_codes, new_scale, count, scales, TO: tl.constexpr, BLOCK: tl.constexpr):
    """Program: BLOCK of the `count` codes and, if there are as many, of the scales, which are contiguous."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(new_codes + n, shrunk(tl.load(codes + n, mask=n < count, other=0), TO), mask=n < count)
    step = multiply(float32(tl.load(scale + n, mask=n < scales, other=0.0)), (1 << TO) + 1.0)
    tl.store(new_scale + n, round_to(step, new_scale.dtype.element_ty), mask=n < scales)


@triton.jit(do_not_specialize=["count", "each"])
def dequantize_kernel(codes, scale, minimum, result, count, each, BLOCK: tl.constexpr):
    """Program: BLOCK of the `count` numbers; `each`: the channels of a group. All tensors are contiguous."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = n < count
    step = float32(tl.load(scale + n // each, mask=inside, other=0.0))
    shift = float32(tl.load(minimum + n // each, mask=inside, other=0.0))
    value = multiply(number_of(tl.load(codes + n, mask=inside, other=0)), step) + shift
    tl.store(result + n, round_to(value, result.dtype.element_ty), mask=inside)


# A state's memory ----------------------------------------------------------------------------------------------------


@triton.jit
def scaled_down(step, old, new):
    """Scales of codes of `old` bits for their codes in `new` bits: one product, rounded, for each halving."""
    if (old == 16) & (new < 16):
        step = round_to(multiply(float32(step), 257.0), step.dtype)
    if (old >= 8) & (new < 8):
        step = round_to(multiply(float32(step), 17.0), step.dtype)
    if (old >= 4) & (new < 4):
        step = round_to(multiply(float32(step), 5.0), step.dtype)
    return step


@triton.jit
def _shrink_scales(
    scale, row_head, unit, units, tokens, capacity, old, new, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Scale the `tokens` quantized tokens of units [BLOCK], whose codes shrink from `old` to `new` bits. capacity: the
    tokens that a head has memory for."""
    group = group_numbers(GROUPS, GROUP, HALF_PAD)
    for field in range(0, 16 // old):
        token = unit + field * units
        at = scale + (row_head * capacity + token)[:, None] * GROUPS + group[None, :]
        inside = ((unit < units) & (token < tokens))[:, None] & (group < GROUPS)[None, :]
        tl.store(at, scaled_down(tl.load(at, mask=inside, other=0.0), old, new), mask=inside)


@triton.jit
def _inserted(
    word, x, x_t, x_d, source, valid, field, scale, minimum, row_head, token, capacity, width, least, c,
    HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):
    """Words [BLOCK, HALF_PAD] with the codes, of `width` bits, of the valid tokens x[source] in their fields. Stores
    the scales and minima of the tokens."""
    there = valid[:, None] & (c < HEAD_DIM // 2)[None, :]
    at = x + source[:, None] * x_t + (2 * c).to(tl.int64)[None, :] * x_d
    even, odd = float32(tl.load(at, mask=there, other=0.0)), float32(tl.load(at + x_d, mask=there, other=0.0))
    SCALE: tl.constexpr = scale.dtype.element_ty
    even, odd, step, shift = quantized(
        even, odd, there, least, SCALE, minimum.dtype.element_ty, 16, GROUPS, GROUP, BLOCK, HALF_PAD
    )
    if width < 16:
        even, odd = shrunk(even, 8), shrunk(odd, 8)
    if width < 8:
        even, odd = shrunk(even, 4), shrunk(odd, 4)
    if width < 4:
        even, odd = shrunk(even, 2), shrunk(odd, 2)
    group = group_numbers(GROUPS, GROUP, HALF_PAD)
    of_group = (row_head * capacity + token)[:, None] * GROUPS + group[None, :]
    inside = valid[:, None] & (group < GROUPS)[None, :]
    tl.store(scale + of_group, scaled_down(round_to(step, SCALE), 16, width), mask=inside)
    tl.store(minimum + of_group, round_to(shift, minimum.dtype.element_ty), mask=inside)
    start = field_start(field)[:, None]
    mask = (1 << width) - 1
    kept = word & ~((mask << start) | (mask << (16 + start)))
    return tl.where(there, kept | (even << start) | (odd << (16 + start)), word)


@triton.jit
def _settle(
    x, x_t, x_d, place, words, scale, minimum, row_head, unit, units, capacity, before, after, old, width, sinks, least,
    HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    MODE: tl.constexpr,
):
    """Shrink the codes of `before` quantized tokens from `old` to `width` bits, and quantize those until `after`."""
    c = tl.arange(0, HALF_PAD)
    at = words + (row_head * units + unit)[:, None] * (HEAD_DIM // 2) + c[None, :]
    inside = (unit < units)[:, None] & (c < HEAD_DIM // 2)[None, :]
    if MODE == PROMPT:
        word = tl.zeros([BLOCK, HALF_PAD], tl.int32)
        for field in range(0, 16 // width):
            token = field * units + unit
            valid = (unit < units) & (token < after)
            source = tl.load(place + sinks + token, mask=valid, other=0)
            word = _inserted(
                word, x, x_t, x_d, source, valid, tl.zeros([BLOCK], tl.int32) + field, scale, minimum, row_head, token,
                capacity, width, least, c, HEAD_DIM, HALF_PAD, GROUPS, GROUP, BLOCK,
            )
    else:
        word = tl.load(at, mask=inside, other=0)
        if width < old:
            if (old == 16) & (width < 16):
                word = shrunk_words(word, 8)
            if (old >= 8) & (width < 8):
                word = shrunk_words(word, 4)
            if (old >= 4) & (width < 4):
                word = shrunk_words(word, 2)
            _shrink_scales(scale, row_head, unit, units, before, capacity, old, width, GROUPS, GROUP, HALF_PAD)
        # At most one of the new tokens belongs to a unit: there are at least as many units as a window has tokens.
        ahead = unit - before % units
        token = before + tl.where(ahead < 0, ahead + units, ahead)
        valid = (unit < units) & (token < after)
        word = _inserted(
            word, x, x_t, x_d, sinks + token - before, valid, (token // units).to(tl.int32), scale, minimum, row_head,
            token, capacity, width, least, c, HEAD_DIM, HALF_PAD, GROUPS, GROUP, BLOCK,
        )
    tl.store(at, word, mask=inside)


@triton.jit(do_not_specialize=[
    "heads", "parts", "units", "capacity", "sinks", "window", "slots", "limit_16", "limit_8", "limit_4", "seen",
    "key_b", "key_h", "key_t", "value_b", "value_h", "value_t",
])
def settle_kernel(
    key, value, place, count, due, counters, key_words, key_scale, key_minimum, value_words, value_scale, value_minimum,
    least, heads, parts, units, capacity, sinks, window, slots, limit_16, limit_8, limit_4, seen, key_b, key_h, key_t,
    key_d, value_b, value_h, value_t, value_d,
    HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    MODE: tl.constexpr,
):
    """Program: every `parts`-th tile of BLOCK of the `units` of a row's KV head, of keys and of values. Quantizes and
    shrinks what is due.

    PROMPT: key and value are [B, H, T, D], place [B, slots] int64 has the token of each slot, and count [B] says how
    many there are, of `seen` with padding. STEP: key and value are the buffers of unquantized tokens, due [B] has the
    row's new number of tokens, 0 if none arrived; the first program of a row also counts the tokens.
    """
    program = tl.program_id(0)
    part, row_head = program % parts, (program // parts).to(tl.int64)
    b, h = row_head // heads, row_head % heads
    if MODE == PROMPT:
        before, after = tl.zeros([], tl.int64), quantized_count(tl.load(count + b), sinks, window)
        width = width_after(seen, limit_16, limit_8, limit_4)
        old = width
        active = after > 0
        place += b * slots
    else:
        now = tl.load(due + b)
        new_seen = tl.load(counters + SEEN_NEXT)
        before = quantized_count(tl.maximum(now - 1, 0), sinks, window)
        after = quantized_count(now, sinks, window)
        old = width_after(new_seen - 1, limit_16, limit_8, limit_4)
        width = width_after(new_seen, limit_16, limit_8, limit_4)
        active = (now > 0) & ((before < after) | ((width < old) & (before > 0)))
        if (part == 0) & (h == 0) & (now > 0):
            tl.store(count + b, now)
            if b == 0:
                tl.store(counters + SEEN, new_seen)
    # If nothing is due, the loop has no iterations.
    for tile in range(part, tl.where(active, tl.cdiv(units, BLOCK), 0), parts):
        unit = tl.cast(tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        _settle(
            key + b * key_b + h * key_h, key_t, key_d, place, key_words, key_scale, key_minimum, row_head, unit, units,
            capacity, before, after, old, width, sinks, least, HEAD_DIM, HALF_PAD, GROUPS, GROUP, BLOCK, MODE,
        )
        _settle(
            value + b * value_b + h * value_h, value_t, value_d, place, value_words, value_scale, value_minimum,
            row_head, unit, units, capacity, before, after, old, width, sinks, least, HEAD_DIM, HALF_PAD, GROUPS, GROUP,
            BLOCK, MODE,
        )
