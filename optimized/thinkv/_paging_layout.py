"""Where a paged cache's pool has what, and what is read from there element by element. Attention has quicker ways:
`_paging_decode.py`, `_paged_fragment_kernels.py`.

All blocks of all rows lie in one pool, row by row, in a row format by format. A block is cut by KV head into records of
whole words of 4 bytes: the keys' codes of its slots, slot by slot; the values' codes, whose order `value_slot` and
`value_unit` give; then, but for fp8, the values' scales, a byte each, those of a group of channels side by side. A
group's scales of keys are a byte per channel, in words too (see `scale_word`).

Order is that in which the operands of a tensor core's product are held by the lanes of a warp: for D = 128, nvfp4 and
blocks of 8, what a lane needs of four tokens' keys is 16 bytes of each token, and of a block's values 16 bytes. Keys
multiply along channels: two in a register are neighbours in a word's halves. Values multiply along tokens: there a
word's halves are the same channels of two slots.

A scale's byte is bits 14 to 7 of the float16 of 2^7 times it: 5 bits of exponent and E4M3's 3 bits, so that all scales
are normal numbers, and one shift makes a factor of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

_DOWN, _UP = tl.constexpr(2.0**-105), tl.constexpr(2.0**105)


@triton.jit
def scale_to_byte(scale):
    """The byte, int32, of a scale that is an E4M3 number, 0 or more: exactly, bits of a float32 2^-105 times it."""
    return (scale * _DOWN).to(tl.int32, bitcast=True) >> 20


@triton.jit
def scale_of_byte(byte):
    return (byte.to(tl.int32) << 20).to(tl.float32, bitcast=True) * _UP


@triton.jit
def record_at(b, physical, h, row_words, base, heads, RECORD: tl.constexpr):
    """The word at which the record of a KV head in a physical block of a format begins; `base`: the format's first."""
    return b * row_words + base + (physical.to(tl.int64) * heads + h) * RECORD


@triton.jit
def fields(j, LANES: tl.constexpr):
    """Where half a word has its j-th code, of 2 * LANES: the lowest bit of its magnitude, and the bit of its sign.

    That is up to what is quick to take apart, see `_paging_decode.pair`.
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
    """Where channel d of a key is in its word, d // (4 * LANES): every other channel is in the upper half, at the same
    place as the one before it in the lower half."""
    magnitude_at, sign_at = fields(d % (4 * LANES) // 2, LANES)
    return d % 2 * 16 + magnitude_at, d % 2 * 16 + sign_at


@triton.jit
def value_slot(place, LANES: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Values' codes lie in halves of words, a unit of 2 * LANES channels each. The half with unit u of the slot `place`
    is value_slot(place) + value_unit(u).

    Where they can be, units are in eight runs: run by run, pair of slots by pair of slots, unit by unit, slot by slot.
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
    """Which word of a group's scales of keys has those of channels 4 m to 4 m + 3: first come the scales of the first
    four channels of each word of codes, then those of the second four, and so on."""
    WORDS: tl.constexpr = (HEAD_DIM + 3) // 4
    part = m % LANES
    return part * (WORDS // LANES) + tl.minimum(part, WORDS % LANES) + m // LANES


@triton.jit
def scale_at(d, LANES: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Which byte of a group's scales of keys is channel d's; of a word's four channels the order is 0, 2, 1, 3."""
    return scale_word(d // 4, LANES, HEAD_DIM) * 4 + d % 2 * 2 + d % 4 // 2


@triton.jit
def _code(bits, magnitude_at, sign_at, LANES: tl.constexpr):
    SIGN: tl.constexpr = 8 // LANES - 1
    return ((bits >> magnitude_at[None, :]) & ((1 << SIGN) - 1)) | (((bits >> sign_at[None, :]) & 1) << SIGN)


@triton.jit
def keys_at(
    words, key_scales, chunk_scales, physical, group, place, holds, d, b, h, heads, groups, row_words, base,
    FORMAT: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
):
    """Codes and scales of the channels d of keys, [tokens, d], int32 and float32, 0 where masked.

    The tokens, all of one format, lie at `place` in physical blocks `physical`, with scales `group`; holds [tokens]
    says which there are. key_scales as bytes.
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
    """As `keys_at`, of values; pool: the words as bytes."""
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
