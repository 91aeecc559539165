"""The memory layout of a paged cache's pool, and element-wise reads. `_paging_decode.py` and
`_paged_fragment_kernels.py` have faster reads for attention.

All blocks of all rows are in one pool, ordered by row, then by format. A block has one record per KV head, of whole
words of 4 bytes: the codes of its slots' keys, slot by slot; the codes of the values, in the order that `value_slot`
and `value_unit` define; and, except for fp8, the scales of the values, one byte each, with those of one group of
channels next to each other. The key scales of a scale group take a byte per channel, also in words (see `scale_word`).
A format with LANES 0 is the name of a dtype: elements that are not quantized. They are stored in order, slot by slot,
first the keys and then the values, and have no scales.

The order is that in which the lanes of a warp hold the operands of a tensor core's product. For D = 128, nvfp4 and
blocks of 8, a lane needs 16 bytes of each token for four tokens' keys, and 16 bytes for a block's values. Products with
keys run along channels: the two channels in a register are neighbours, in the halves of a word. Products with values
run along tokens: the halves of a word hold the same channels of two slots.

A scale's byte is bits 14 to 7 of the float16 of 2^7 times the scale: 5 bits of exponent and E4M3's 3 mantissa bits. So
all scales are normal numbers, and one shift turns a byte into a factor.
"""

from __future__ import annotations

import triton
import triton.language as tl

_DOWN, _UP = tl.constexpr(2.0**-105), tl.constexpr(2.0**105)


@triton.jit
def scale_to_byte(scale):
    """The byte, int32, of an E4M3 scale >= 0: exact, from the bits of a float32 that is 2^-105 times the scale."""
    return (scale * _DOWN).to(tl.int32, bitcast=True) >> 20


@triton.jit
def scale_of_byte(byte):
    return (byte.to(tl.int32) << 20).to(tl.float32, bitcast=True) * _UP


@triton.jit
def record_at(b, physical, h, row_words, base, heads, RECORD: tl.constexpr):
    """The first word of a KV head's record in a physical block of a format, whose first word is `base`."""
    return b * row_words + base + (physical.to(tl.int64) * heads + h) * RECORD


@triton.jit
def fields(j, LANES: tl.constexpr):
    """The bit positions of the j-th of 2 * LANES codes in half a word: the lowest bit of its magnitude, and its sign.

    They are chosen for fast decoding, see `_paging_decode.pair`.
    """
    if LANES == 1:
        return 8 * j, 8 * j + 7
    elif LANES == 2:
        magnitude_at = tl.where(j == 0, 9, tl.where(j == 1, 0, tl.where(j == 2, 3, 12)))
        sign_at = tl.where(j == 0, 15, tl.where(j == 1, 6, tl.where(j == 2, 7, 8)))
        return magnitude_at, sign_at
    else:
        magnitude_at = tl.where(j < 5, j, j + 5)
        sign_at = tl.where(j < 5, j + 5, tl.where(j == 5, 15, j + 7))
        return magnitude_at, sign_at


@triton.jit
def key_fields(d, LANES: tl.constexpr):
    """The bit positions of channel d of a key in its word, d // (4 * LANES). Every other channel is in the upper half,
    at the position of the channel before it in the lower half."""
    magnitude_at, sign_at = fields(d % (4 * LANES) // 2, LANES)
    return d % 2 * 16 + magnitude_at, d % 2 * 16 + sign_at


@triton.jit
def value_slot(place, LANES: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The codes of values are in half words, units of 2 * LANES channels each. Unit u of the slot `place` is the half
    word value_slot(place) + value_unit(u).

    If possible, there are eight runs of units, ordered by run, then pair of slots, unit, and slot.
    """
    RUN: tl.constexpr = HEAD_DIM // (16 * LANES) if HEAD_DIM % (16 * LANES) == 0 else 1
    STEP: tl.constexpr = 2 - BLOCK % 2
    return place // STEP * (RUN * STEP) + place % STEP


@triton.jit
def value_unit(u, LANES: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr):
    """See `value_slot`."""
    RUN: tl.constexpr = HEAD_DIM // (16 * LANES) if HEAD_DIM % (16 * LANES) == 0 else 1
    STEP: tl.constexpr = 2 - BLOCK % 2
    return u // RUN * (RUN * BLOCK) + u % RUN * STEP


@triton.jit
def scale_word(m, LANES: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The word of a group's key scales that has channels 4 m to 4 m + 3. The scales of the first four channels of each
    word of codes come first, then those of the second four, and so on."""
    WORDS: tl.constexpr = (HEAD_DIM + 3) // 4
    part = m % LANES
    return part * (WORDS // LANES) + tl.minimum(part, WORDS % LANES) + m // LANES


@triton.jit
def scale_at(d, LANES: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The byte of a group's key scales that belongs to channel d. The order of a word's channels is 0, 2, 1, 3."""
    return scale_word(d // 4, LANES, HEAD_DIM) * 4 + d % 2 * 2 + d % 4 // 2


@triton.jit
def _code(bits, magnitude_at, sign_at, LANES: tl.constexpr):
    SIGN: tl.constexpr = 8 // LANES - 1
    return ((bits >> magnitude_at[None, :]) & ((1 << SIGN) - 1)) | (((bits >> sign_at[None, :]) & 1) << SIGN)


@triton.jit
def record_of_whole(b, physical, h, row_words, base, heads, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
                    HEAD_DIM: tl.constexpr):
    """`record_at` for elements that are not quantized, and the words of a key or a value."""
    WIDTH: tl.constexpr = HEAD_DIM if FORMAT == "float32" else (HEAD_DIM + 1) // 2
    return record_at(b, physical, h, row_words, base, heads, 2 * BLOCK * WIDTH)


@triton.jit
def whole_at(
    words, physical, place, holds, d, b, h, heads, row_words, base, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Elements [tokens, d] that are not quantized, float32, 0 where masked: of keys, or of values if `place` is that
    of the slot plus BLOCK."""
    WIDTH: tl.constexpr = HEAD_DIM if FORMAT == "float32" else (HEAD_DIM + 1) // 2
    mask = holds[:, None] & (d < HEAD_DIM)[None, :]
    at = record_of_whole(b, physical, h, row_words, base, heads, FORMAT, BLOCK, HEAD_DIM) + place * WIDTH
    if FORMAT == "float32":
        word = tl.load(words + at[:, None] + d[None, :], mask=mask, other=0)
        return word.to(tl.float32, bitcast=True)
    else:
        half = tl.load(words + at[:, None] + (d // 2)[None, :], mask=mask, other=0) >> (d % 2 * 16)[None, :]
        if FORMAT == "bfloat16":
            return (half << 16).to(tl.float32, bitcast=True)
        else:
            return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def keys_at(
    words, key_scales, chunk_scales, physical, group, place, holds, d, b, h, heads, groups, row_words, base,
    FORMAT: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
):
    """Codes and scales of the channels d of keys, [tokens, d], int32 and float32, 0 where masked.

    The tokens, all of one format, are at `place` in physical blocks `physical`, with scales `group`; holds [tokens]:
    which of them exist. key_scales is addressed in bytes. Not for elements that are not quantized, see `whole_at`.
    """
    WIDTH: tl.constexpr = (HEAD_DIM + 4 * LANES - 1) // (4 * LANES)
    PER_TOKEN: tl.constexpr = 0 if FORMAT == "fp8" else (HEAD_DIM + GROUP - 1) // GROUP
    RECORD: tl.constexpr = BLOCK * 2 * WIDTH + (BLOCK * PER_TOKEN + 3) // 4
    mask = holds[:, None] & (d < HEAD_DIM)[None, :]
    record = record_at(b, physical, h, row_words, base, heads, RECORD)
    word = tl.load(words + (record + place * WIDTH)[:, None] + (d // (4 * LANES))[None, :], mask=mask, other=0)
    magnitude_at, sign_at = key_fields(d, LANES)
    code = _code(word, magnitude_at, sign_at, LANES)
    scales_at = (b * groups + group) * heads + h
    if FORMAT == "fp8":
        return code, tl.load(chunk_scales + scales_at * 2, mask=holds, other=0.0)[:, None]
    else:
        at = key_scales + scales_at[:, None] * ((HEAD_DIM + 3) // 4 * 4) + scale_at(d, LANES, HEAD_DIM)[None, :]
        return code, scale_of_byte(tl.load(at, mask=mask, other=0))


@triton.jit
def values_at(
    words, pool, chunk_scales, physical, group, place, holds, d, b, h, heads, groups, row_words, base,
    FORMAT: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
):
    """As `keys_at`, for values. pool: the words, addressed in bytes."""
    WIDTH: tl.constexpr = (HEAD_DIM + 4 * LANES - 1) // (4 * LANES)
    PER_TOKEN: tl.constexpr = 0 if FORMAT == "fp8" else (HEAD_DIM + GROUP - 1) // GROUP
    RECORD: tl.constexpr = BLOCK * 2 * WIDTH + (BLOCK * PER_TOKEN + 3) // 4
    mask = holds[:, None] & (d < HEAD_DIM)[None, :]
    record = record_at(b, physical, h, row_words, base, heads, RECORD)
    half = (
        value_slot(place, LANES, BLOCK, HEAD_DIM)[:, None]
        + value_unit(d // (2 * LANES), LANES, BLOCK, HEAD_DIM)[None, :]
    )
    word = tl.load(words + (record + BLOCK * WIDTH)[:, None] + half // 2, mask=mask, other=0)
    magnitude_at, sign_at = fields(d % (2 * LANES), LANES)
    code = _code(word >> (half % 2 * 16).to(tl.int32), magnitude_at, sign_at, LANES)
    if FORMAT == "fp8":
        scales_at = ((b * groups + group) * heads + h) * 2 + 1
        return code, tl.load(chunk_scales + scales_at, mask=holds, other=0.0)[:, None]
    else:
        at = pool + ((record + 2 * BLOCK * WIDTH) * 4 + place)[:, None] + (d // GROUP * BLOCK)[None, :]
        return code, scale_of_byte(tl.load(at, mask=mask, other=0))
