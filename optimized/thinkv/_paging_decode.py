"""Elements of quantized blocks as float16 in registers, for any query dtype. `_paging_layout.py` describes the layout.

A code times its E4M3 scale has at most 7 bits and is a multiple of 2^-10, so a power of two makes it exact in float16.
A code's bits are moved to float16's exponent and mantissa, which gives the code times 2^-14 (2^-17 for int4). A scale's
byte is moved likewise and gives the scale times 2^7. One float16 product of the two is the element times 1 / UNIT. Two
codes are extracted from a word at once. fp8's codes are returned without their scale, times 2^-8.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._paging_layout import scale_word, value_unit

#: Masks for both halves of a word: the sign bit of a float16; the sign and E2M1's bits; the sign and the bit of 2^-14.
_SIGNS, _E2M1, _ONE = (tl.constexpr(bits - 2**32) for bits in (0x80008000, 0x8E008E00, 0x84008400))


@triton.jit
def _shifted(word, LEFT: tl.constexpr):
    if LEFT >= 0:
        return word << LEFT
    else:
        return word >> -LEFT


@triton.jit
def pair(word, J: tl.constexpr, FORMAT: tl.constexpr):
    """The J-th codes of the halves of words, as the two float16 of an int32: times 2^-14, for int4 2^-17, for fp8 2^-8.

    `_paging_layout.fields` gives their bit positions. Codes that need only one shift have sign and magnitude as far
    apart as float16 has.
    """
    if FORMAT == "fp8":
        return (_shifted(word, 8 - 8 * J) & _SIGNS) | (_shifted(word, 7 - 8 * J) & 0x3F803F80)
    elif FORMAT == "nvfp4":
        if J == 0:
            return word & _E2M1
        elif J == 1:
            return (word << 9) & _E2M1
        elif J == 2:
            return ((word << 8) & _SIGNS) | ((word << 6) & 0x0E000E00)
        else:
            return ((word << 7) & _SIGNS) | ((word >> 3) & 0x0E000E00)
    elif FORMAT == "int4":
        if J == 0:
            return (word & _SIGNS) | ((word >> 2) & 0x03800380)
        elif J == 1:
            return ((word << 9) & _SIGNS) | ((word << 7) & 0x03800380)
        elif J == 2:
            return ((word << 8) & _SIGNS) | ((word << 4) & 0x03800380)
        else:
            return ((word << 7) & _SIGNS) | ((word >> 5) & 0x03800380)
    else:
        if J < 5:
            return (word << (10 - J)) & _ONE
        elif J == 5:
            return word & _ONE
        elif J == 6:
            return ((word << 2) & _SIGNS) | ((word >> 1) & 0x04000400)
        else:
            return ((word << 1) & _SIGNS) | ((word >> 2) & 0x04000400)


@triton.jit
def low(two):
    return two.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def high(two):
    return (two >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _interleave_2_pairs(first, second):
    """The elements of words with two pairs each, in order. Compiled, this only renames registers."""
    return tl.interleave(tl.interleave(low(first), low(second)), tl.interleave(high(first), high(second)))


@triton.jit
def _interleave_4_pairs(a, b, c, d):
    return tl.interleave(
        tl.interleave(tl.interleave(low(a), low(c)), tl.interleave(low(b), low(d))),
        tl.interleave(tl.interleave(high(a), high(c)), tl.interleave(high(b), high(d))),
    )


@triton.jit
def _interleave_8(a, b, c, d, e, f, g, h):
    """Interleave eight tensors [..., n]: [..., 8 n]."""
    return tl.interleave(
        tl.interleave(tl.interleave(a, e), tl.interleave(c, g)), tl.interleave(tl.interleave(b, f), tl.interleave(d, h))
    )


@triton.jit
def _interleave_8_pairs(a, b, c, d, e, f, g, h):
    return tl.interleave(
        _interleave_8(low(a), low(b), low(c), low(d), low(e), low(f), low(g), low(h)),
        _interleave_8(high(a), high(b), high(c), high(d), high(e), high(f), high(g), high(h)),
    )


@triton.jit
def codes(at, live, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, FORMAT: tl.constexpr, LANES: tl.constexpr):
    """The codes of tokens whose words begin at `at` [TILE], as returned by `pair`: [TILE, D_PAD] float16."""
    n = tl.arange(0, WIDTH_PAD)
    mask = live[:, None]
    if WIDTH != WIDTH_PAD:
        mask = mask & (n < WIDTH)[None, :]
    word = tl.load(at[:, None] + n[None, :], mask=mask, other=0)
    if LANES == 1:
        return _interleave_2_pairs(pair(word, 0, FORMAT), pair(word, 1, FORMAT))
    elif LANES == 2:
        return _interleave_4_pairs(
            pair(word, 0, FORMAT), pair(word, 1, FORMAT), pair(word, 2, FORMAT), pair(word, 3, FORMAT)
        )
    else:
        return _interleave_8_pairs(
            pair(word, 0, FORMAT), pair(word, 1, FORMAT), pair(word, 2, FORMAT), pair(word, 3, FORMAT),
            pair(word, 4, FORMAT), pair(word, 5, FORMAT), pair(word, 6, FORMAT), pair(word, 7, FORMAT),
        )


@triton.jit
def _halves(at, mask, FORMAT: tl.constexpr, LANES: tl.constexpr):
    """The codes of half words, in order: [TILE, n * 2 * LANES] float16."""
    half = tl.load(at, mask=mask, other=0).to(tl.int32)
    if LANES == 1:
        return tl.interleave(low(pair(half, 0, FORMAT)), low(pair(half, 1, FORMAT)))
    elif LANES == 2:
        return tl.interleave(
            tl.interleave(low(pair(half, 0, FORMAT)), low(pair(half, 2, FORMAT))),
            tl.interleave(low(pair(half, 1, FORMAT)), low(pair(half, 3, FORMAT))),
        )
    else:
        return _interleave_8(
            low(pair(half, 0, FORMAT)), low(pair(half, 1, FORMAT)), low(pair(half, 2, FORMAT)),
            low(pair(half, 3, FORMAT)), low(pair(half, 4, FORMAT)), low(pair(half, 5, FORMAT)),
            low(pair(half, 6, FORMAT)), low(pair(half, 7, FORMAT)),
        )


@triton.jit
def key_scales(at, live, LANES: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr):
    """The scales of the channels, stored from `at` [TILE] on: [TILE, D_PAD] float16, times 2^7."""
    m = tl.arange(0, D_PAD // 4)
    mask = live[:, None] & (m * 4 < HEAD_DIM)[None, :]
    word = tl.load(at[:, None] + scale_word(m, LANES, HEAD_DIM)[None, :], mask=mask, other=0)
    return _interleave_2_pairs((word << 7) & 0x7F807F80, (word >> 1) & 0x7F807F80)


@triton.jit
def _factor(byte):
    """Scales as float16, times 2^7, at most 57,344."""
    return low(byte.to(tl.int32) << 7)


@triton.jit
def values(
    halves, scales_at, live, FORMAT: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
):
    """Values [TILE, D_PAD] float16, times 1 / UNIT, of tokens whose codes are at halves and scales at scales_at [TILE].
    """
    u = tl.arange(0, D_PAD // (2 * LANES))
    mask = live[:, None] & (u * (2 * LANES) < HEAD_DIM)[None, :]
    numbers = _halves(halves[:, None] + value_unit(u, LANES, BLOCK, HEAD_DIM)[None, :], mask, FORMAT, LANES)
    if FORMAT == "fp8":
        return numbers
    elif GROUP % (2 * LANES) == 0:                                     # all codes of a unit share a scale
        byte = tl.load(scales_at[:, None] + (u * (2 * LANES) // GROUP * BLOCK)[None, :], mask=mask, other=0)
        scale = _factor(byte)
        scale = tl.interleave(scale, scale)
        scale = tl.interleave(scale, scale)
        if LANES == 4:
            scale = tl.interleave(scale, scale)
        return numbers * scale
    else:
        d = tl.arange(0, D_PAD)
        mask = live[:, None] & (d < HEAD_DIM)[None, :]
        return numbers * _factor(tl.load(scales_at[:, None] + (d // GROUP * BLOCK)[None, :], mask=mask, other=0))
