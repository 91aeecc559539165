"""KIVI's words as operands of tensor cores, in programs of one warp (`kivi_fragment_kernels.py`).

A lane holds rows g and g + 8 of an operand [16, 16], and columns 2 t + i and 8 + 2 t + i, with g = lane / 4,
t = lane % 4 and i = 0, 1. The 32 bits of a register are two columns.

Rows come from codes that are half a word apart: code j of word g is row g of the j-th operand, and code j + C / 2 is
row g + 8. So a lane takes its numbers from its own words, two at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.launch import PTX
from .kivi_order import LANES, PART, VECTOR
from .kivi_scaled import scaled_pair, scaled_shifts, scaled_steps
from .kivi_step_kernels import pair_of

_PTX = tl.constexpr(PTX)
#: The words of a tile, the lanes that share a value, and the side of query heads in a product.
EIGHT = LANES


@triton.jit
def hidden(index):
    """int32 whose values the compiler does not see. If it saw consecutive indices, it would assign neighbouring lanes
    to them, but here these are rows, which the layout of an operand assigns to distant lanes."""
    if _PTX:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [index], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return index


@triton.jit
def _lower_halves(one, other):
    """The lower halves of two int32, `one` below."""
    if _PTX:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [one, other], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (one & 0xFFFF) | (other << 16)


@triton.jit
def _upper_halves(one, other):
    if _PTX:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [one, other], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return ((one >> 16) & 0xFFFF) | (other & -65536)


@triton.jit
def _rows(
    lower, upper, steps, shifts, NUMBER: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, SCALED: tl.constexpr,
):
    """The pairs of codes NUMBER and NUMBER + C / 2 of words, given as lower and upper halves: [..., 2] int32. SCALED:
    see `kivi_scaled.py`; steps: `scaled_steps`, shifts: `scaled_shifts`. Else steps: a tuple of the scales."""
    if SCALED:
        return tl.join(
            scaled_pair(lower, steps, shifts, NUMBER, BITS), scaled_pair(upper, steps, shifts, NUMBER, BITS)
        )
    else:
        # As many codes as the lower bits of a 16-bit number have need one shift.
        TOGETHER: tl.constexpr = (7 if tl.bfloat16 == DTYPE else 10) // BITS
        RIGHT: tl.constexpr = NUMBER // TOGETHER * TOGETHER * BITS
        AT: tl.constexpr = NUMBER % TOGETHER * BITS
        return tl.join(
            pair_of(lower >> RIGHT, steps[0], shifts, BITS, DTYPE, AT),
            pair_of(upper >> RIGHT, steps[0], shifts, BITS, DTYPE, AT),
        )


@triton.jit
def _all_rows(lower, upper, steps, shifts, BITS: tl.constexpr, DTYPE: tl.constexpr, SCALED: tl.constexpr):
    """`_rows` of all codes: [..., row, bits of the number, the highest first]. steps, shifts: as stored."""
    if SCALED:
        steps, shifts = scaled_steps(steps, BITS), scaled_shifts(shifts)
    else:
        steps = (steps,)
    y0 = _rows(lower, upper, steps, shifts, 0, BITS, DTYPE, SCALED)
    y1 = _rows(lower, upper, steps, shifts, 1, BITS, DTYPE, SCALED)
    y2 = _rows(lower, upper, steps, shifts, 2, BITS, DTYPE, SCALED)
    y3 = _rows(lower, upper, steps, shifts, 3, BITS, DTYPE, SCALED)
    if BITS == 2:
        y4 = _rows(lower, upper, steps, shifts, 4, BITS, DTYPE, SCALED)
        y5 = _rows(lower, upper, steps, shifts, 5, BITS, DTYPE, SCALED)
        y6 = _rows(lower, upper, steps, shifts, 6, BITS, DTYPE, SCALED)
        y7 = _rows(lower, upper, steps, shifts, 7, BITS, DTYPE, SCALED)
        return tl.join(
            tl.join(tl.join(y0, y4), tl.join(y2, y6)), tl.join(tl.join(y1, y5), tl.join(y3, y7))
        )
    else:
        return tl.join(tl.join(y0, y2), tl.join(y1, y3))


@triton.jit
def _unpacked(y, DTYPE: tl.constexpr):
    """Both numbers of pairs: [..., 2]."""
    return tl.join(y.to(tl.int16).to(DTYPE, bitcast=True), (y >> 16).to(tl.int16).to(DTYPE, bitcast=True))


@triton.jit
def channels(NUMBER: tl.constexpr):
    """The channels of the NUMBER-th operand of keys and queries."""
    return tl.arange(0, PART) + NUMBER * PART


@triton.jit
def key_words(codes, scales, first, NUMBER: tl.constexpr, HEAD_DIM: tl.constexpr, WORDS: tl.constexpr):
    """The channels `channels(NUMBER)` of the 8 words of keys from `first` on, and the scales and minima of two channels
    in an int32. scales: those of keys as int32."""
    # What differs between parts, and between a lane's numbers, is constant and becomes part of the load. `first` is a
    # multiple of 8, and WORDS a power of two, since a group divides the head dim.
    word, i = tl.arange(0, EIGHT), tl.arange(0, PART)
    packed = tl.load(
        codes + first * HEAD_DIM + (word[:, None] * PART + i[None, :]) + NUMBER * (EIGHT * PART)
    )
    both = tl.load(
        scales + first // WORDS * HEAD_DIM + ((word // WORDS)[:, None] * HEAD_DIM + i[None, :]) + NUMBER * PART
    )
    step, shift = tl.split(tl.reshape(both, (EIGHT, 4, 2, 2)))                          # word, t, two columns
    return packed, step, shift


@triton.jit
def key_operand(packed, step, shift, BITS: tl.constexpr, DTYPE: tl.constexpr, SCALED: tl.constexpr):
    """Keys [8 C, 16] from `key_words`; row ((j, h), g) is code j + h C / 2 of word g. SCALED: times 2^-16."""
    C: tl.constexpr = 32 // BITS
    one, other = tl.split(tl.reshape(packed, (EIGHT, 4, 2, 2)))
    y = _all_rows(_lower_halves(one, other), _upper_halves(one, other), step, shift, BITS, DTYPE, SCALED)
    y = _unpacked(y, DTYPE)
    if BITS == 2:
        y = tl.permute(y, (4, 5, 6, 3, 0, 1, 2, 7))
    else:
        y = tl.permute(y, (4, 5, 3, 0, 1, 2, 6))
    return tl.reshape(y, (8 * C, 16))


@triton.jit
def _four(x):
    """The four tensors [4, 8] along the last dimension, in their order."""
    even, odd = tl.split(tl.reshape(x, (4, EIGHT, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _four_of_four(x):
    """The four tensors [4, 8, 4] along the last dimension, in their order."""
    even, odd = tl.split(tl.reshape(x, (4, EIGHT, 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def value_words(codes, scales, first, STRIDE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                BITS: tl.constexpr):
    """What four operands of values need, see `value_operand`: a lane's words of the first ones and of the others, and
    the scale, below, and the minimum of these words. Column 8 h + g of operand n is token
    first + n + g STRIDE + h STRIDE / 2. scales: those of values as int32."""
    # A lane has the columns 4 t to 4 t + 3 of each operand, so the four operands of a column have one load.
    t, i = tl.arange(0, 4)[:, None, None, None], tl.arange(0, 4)[None, None, :, None]
    e = tl.arange(0, VECTOR)[None, None, None, :]
    token = t % 2 * (4 * STRIDE) + t // 2 * (STRIDE // 2) + i * STRIDE
    EACH: tl.constexpr = HEAD_DIM * BITS // 32
    at = first * EACH + (token * EACH + hidden(tl.arange(0, EIGHT))[None, :, None, None] * VECTOR + e)
    words = tl.load(codes + at)
    others = words
    if EACH == 2 * EIGHT:
        others = tl.load(codes + at + 2 * EACH)
    GROUPS: tl.constexpr = HEAD_DIM // GROUP
    group = hidden(tl.arange(0, EIGHT) * (HEAD_DIM // EIGHT) // GROUP)[None, :, None, None]
    return words, others, tl.load(scales + first * GROUPS + (token * GROUPS + group * VECTOR + e))


@triton.jit
def _of_two_tokens(one, other, scale, other_scale, BITS: tl.constexpr, DTYPE: tl.constexpr, SCALED: tl.constexpr):
    """The values of words of two tokens: [t, word, row, bits of the number], pairs of tokens."""
    return _all_rows(
        _lower_halves(one, other), _upper_halves(one, other), _lower_halves(scale, other_scale),
        _upper_halves(scale, other_scale), BITS, DTYPE, SCALED,
    )


@triton.jit
def _of_four_tokens(words, scales, BITS: tl.constexpr, DTYPE: tl.constexpr, SCALED: tl.constexpr):
    """The values of words of four tokens, in two pairs."""
    return tl.join(
        _of_two_tokens(words[0], words[1], scales[0], scales[1], BITS, DTYPE, SCALED),
        _of_two_tokens(words[2], words[3], scales[2], scales[3], BITS, DTYPE, SCALED),
    )


@triton.jit
def value_operand(
    found, NUMBER: tl.constexpr, HEAD_DIM: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, SCALED: tl.constexpr,
):
    """V^T [D, 16], the NUMBER-th of four operands whose `value_words` were found; row m is channel `channel_of(m)`.
    SCALED: times 2^-16."""
    scales = _four(_four_of_four(found[2])[NUMBER])
    if HEAD_DIM * BITS == 512:
        units = _four_of_four(found[NUMBER // 2])
        words, others = _four(units[NUMBER % 2 * 2]), _four(units[NUMBER % 2 * 2 + 1])
        y = tl.join(
            _of_four_tokens(words, scales, BITS, DTYPE, SCALED), _of_four_tokens(others, scales, BITS, DTYPE, SCALED)
        )
    else:
        y = _of_four_tokens(_four(_four_of_four(found[0])[NUMBER]), scales, BITS, DTYPE, SCALED)
    y = _unpacked(y, DTYPE)                           # t, word, row, bits of the number, two pairs, (unit,) pair
    if BITS == 2:
        y = tl.permute(y, (3, 4, 5, 2, 1, 0, 6, 7))
    elif HEAD_DIM * BITS == 512:
        y = tl.permute(y, (6, 3, 4, 2, 1, 0, 5, 7))
    else:
        y = tl.permute(y, (3, 4, 2, 1, 0, 5, 6))
    return tl.reshape(y, (HEAD_DIM, 16))


@triton.jit
def channel_of(m, HEAD_DIM: tl.constexpr, BITS: tl.constexpr):
    """The channel of row m of V^T and of the accumulator."""
    C: tl.constexpr = 32 // BITS
    UNITS: tl.constexpr = HEAD_DIM * BITS // 256
    unit_number = m // 16
    unit, number = unit_number // (C // 2), unit_number % (C // 2)
    return (m % 8 * UNITS + unit) * C + m % 16 // 8 * (C // 2) + number
