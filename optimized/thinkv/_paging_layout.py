"""Where a paged cache's pool has what, and what is read from there element by element. Attention has quicker ways:
`_paging_decode.py`.

All blocks of all rows lie in one pool, row by row, in a row format by format. A block is cut by KV head into records of
whole words of 4 bytes: the keys' codes of its slots, then the values' codes, both in words per slot (see `fields`),
then, but for fp8, the values' scales, a byte each. A group's scales of keys are a byte per channel, in words too (see
`scale_byte`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._formats_kernels import decode_scale


@triton.jit
def record_at(b, physical, h, row_words, base, heads, RECORD: tl.constexpr):
    """The word at which the record of a KV head in a physical block of a format begins; `base`: the format's first."""
    return b * row_words + base + (physical.to(tl.int64) * heads + h) * RECORD


@triton.jit
def fields(d, LANES: tl.constexpr):
    """Where a word has the code of channel d: the lowest bit of its magnitude, and the bit of its sign.

    A word holds 4 * LANES codes, every other one in its upper half, at the same place as the one before it in the lower
    half. Where that is is up to what is quick to take apart, see `_paging_decode._pair`.
    """
    j = d % (4 * LANES) // 2
    half = d % 2 * 16
    if LANES == 1:
        return half + 8 * j, half + 8 * j + 7
    elif LANES == 2:
        magnitude_at = tl.where(j == 0, 9, tl.where(j == 1, 0, tl.where(j == 2, 3, 12)))
        sign_at = tl.where(j == 0, 15, tl.where(j == 1, 6, tl.where(j == 2, 7, 8)))
        return half + magnitude_at, half + sign_at
    else:
        magnitude_at = tl.where(j < 5, j, j + 5)
        sign_at = tl.where(j < 5, j + 5, tl.where(j == 5, 15, j + 7))
        return half + magnitude_at, half + sign_at


@triton.jit
def scale_byte(d):
    """Which byte of a row of scales is channel d's: of four channels 0, 2, 1, 3."""
    return d // 4 * 4 + d % 2 * 2 + d % 4 // 2


@triton.jit
def codes_at(words_at, d, mask, LANES: tl.constexpr):
    """The codes of channels d, [tokens, d] int32, of tokens whose words begin at words_at [tokens]."""
    SIGN: tl.constexpr = 8 // LANES - 1
    word = tl.load(words_at[:, None] + (d // (4 * LANES))[None, :], mask=mask, other=0)
    magnitude_at, sign_at = fields(d, LANES)
    return ((word >> magnitude_at[None, :]) & ((1 << SIGN) - 1)) | (((word >> sign_at[None, :]) & 1) << SIGN)


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
    code = codes_at(words + record + place * WIDTH, d, mask, LANES)
    scales_at = (b * groups + group) * heads + h
    if FORMAT == "fp8":
        return code, tl.load(chunk_scales + scales_at * 2, mask=holds, other=0.0)[:, None]
    else:
        at = key_scales + scales_at[:, None] * ((HEAD_DIM + 3) // 4 * 4) + scale_byte(d)[None, :]
        return code, decode_scale(tl.load(at, mask=mask, other=0))


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
    code = codes_at(words + record + (BLOCK + place) * WIDTH, d, mask, LANES)
    if FORMAT == "fp8":
        scales_at = ((b * groups + group) * heads + h) * 2 + 1
        return code, tl.load(chunk_scales + scales_at, mask=holds, other=0.0)[:, None]
    else:
        at = pool + ((record + 2 * BLOCK * WIDTH) * 4 + place * PER_TOKEN)[:, None] + (d // GROUP)[None, :]
        return code, decode_scale(tl.load(at, mask=mask, other=0))
