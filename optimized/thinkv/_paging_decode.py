"""Elements of quantized blocks in registers, as float16, whatever the type of the queries; see `_paging_layout.py` for
where they lie.

A code times its E4M3 scale has at most 7 bits and is a multiple of 2^-10: with a power of two it is exact in float16.
So a code's bits go where float16 has its exponent and mantissa, which gives it times 2^-14 (2^-17 for int4), a scale's
bits likewise, times 2^7, and one float16 product gives the element, times 1 / UNIT. Two codes are taken out of a word
at once. fp8's codes come without their scale, times 2^-8.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Of both halves of a word: the sign of a float16; with it E2M1's bits, or that of 2^-14.
_SIGNS, _E2M1, _ONE = (tl.constexpr(bits - 2**32) for bits in (0x80008000, 0x8E008E00, 0x84008400))


@triton.jit
def _shifted(word, LEFT: tl.constexpr):
    if LEFT >= 0:
        return word << LEFT
    else:
        return word >> -LEFT


@triton.jit
def _pair(word, J: tl.constexpr, FORMAT: tl.constexpr):
    """The J-th two codes of words, as the two float16 of an int32: times 2^-14, of int4 2^-17, of fp8 2^-8.

    `_paging_layout.fields` says where they are. Those that need not be taken apart have sign and magnitude as far from
    each other as float16 has.
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
def _low(pair):
    return pair.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _high(pair):
    return (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _four(first, second):
    """Of words with two pairs each: their elements in order. Compiled, registers get other names."""
    return tl.interleave(tl.interleave(_low(first), _low(second)), tl.interleave(_high(first), _high(second)))


@triton.jit
def _eight(a, b, c, d):
    return tl.interleave(
        tl.interleave(tl.interleave(_low(a), _low(c)), tl.interleave(_low(b), _low(d))),
        tl.interleave(tl.interleave(_high(a), _high(c)), tl.interleave(_high(b), _high(d))),
    )


@triton.jit
def _quarters(a, b, c, d, e, f, g, h):
    """[..., n] eight times, interleaved: [..., 8 n]."""
    return tl.interleave(
        tl.interleave(tl.interleave(a, e), tl.interleave(c, g)), tl.interleave(tl.interleave(b, f), tl.interleave(d, h))
    )


@triton.jit
def _sixteen(a, b, c, d, e, f, g, h):
    return tl.interleave(
        _quarters(_low(a), _low(b), _low(c), _low(d), _low(e), _low(f), _low(g), _low(h)),
        _quarters(_high(a), _high(b), _high(c), _high(d), _high(e), _high(f), _high(g), _high(h)),
    )


@triton.jit
def codes(at, live, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, FORMAT: tl.constexpr, LANES: tl.constexpr):
    """The codes of tokens whose words begin at `at` [TILE], as `_pair` gives them: [TILE, D_PAD] float16."""
    n = tl.arange(0, WIDTH_PAD)
    mask = live[:, None]
    if WIDTH != WIDTH_PAD:
        mask = mask & (n < WIDTH)[None, :]
    word = tl.load(at[:, None] + n[None, :], mask=mask, other=0)
    if LANES == 1:
        return _four(_pair(word, 0, FORMAT), _pair(word, 1, FORMAT))
    elif LANES == 2:
        return _eight(
            _pair(word, 0, FORMAT), _pair(word, 1, FORMAT), _pair(word, 2, FORMAT), _pair(word, 3, FORMAT)
        )
    else:
        return _sixteen(
            _pair(word, 0, FORMAT), _pair(word, 1, FORMAT), _pair(word, 2, FORMAT), _pair(word, 3, FORMAT),
            _pair(word, 4, FORMAT), _pair(word, 5, FORMAT), _pair(word, 6, FORMAT), _pair(word, 7, FORMAT),
        )


@triton.jit
def key_scales(at, live, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr):
    """E4M3 scales of channels, four to a word, from `at` [TILE] on: [TILE, D_PAD] float16, times 2^7."""
    n = tl.arange(0, WIDTH_PAD)
    mask = live[:, None]
    if WIDTH != WIDTH_PAD:
        mask = mask & (n < WIDTH)[None, :]
    word = tl.load(at[:, None] + n[None, :], mask=mask, other=0)
    return _four((word << 7) & 0x3F803F80, (word >> 1) & 0x3F803F80) * tl.full([1, 1], 32768.0, tl.float16)


@triton.jit
def _value_scales(byte):
    """E4M3 scales, float16: times 2^7, at most 57,344."""
    bits = (byte.to(tl.int32) << 7) & 0x3F80
    return bits.to(tl.int16).to(tl.float16, bitcast=True) * tl.full([1, 1], 32768.0, tl.float16)


@triton.jit
def values(
    words, scales_at, live, FORMAT: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, PER_TOKEN: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr,
):
    """Values [TILE, D_PAD] float16, times 1 / UNIT."""
    numbers = codes(words, live, WIDTH, D_PAD // (4 * LANES), FORMAT, LANES)
    if FORMAT == "fp8":
        return numbers
    elif GROUP % (4 * LANES) == 0:
        n = tl.arange(0, D_PAD // (4 * LANES))                         # a word's codes share a scale
        mask = live[:, None] & (n < WIDTH)[None, :]
        scale = _value_scales(tl.load(scales_at[:, None] + (n * (4 * LANES) // GROUP)[None, :], mask=mask, other=0))
        scale = tl.interleave(scale, scale)
        scale = tl.interleave(scale, scale)
        scale = tl.interleave(scale, scale)
        if LANES == 4:
            scale = tl.interleave(scale, scale)
        return numbers * scale
    else:
        d = tl.arange(0, D_PAD)
        mask = live[:, None] & (d < HEAD_DIM)[None, :]
        return numbers * _value_scales(tl.load(scales_at[:, None] + (d // GROUP)[None, :], mask=mask, other=0))
