"""The contents of a paged cache, dequantized by slot. `_paging_layout.py` describes the memory layout."""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.numerics import float32, without_sign_of_zero
from ._formats_kernels import decode
from ._paging_kernels import pick
from ._paging_layout import keys_at, values_at, whole_at

#: The modes of `read_kernel`.
NUMBERS, CODES, SCALES = 0, 1, 2
_NUMBERS, _CODES = tl.constexpr(NUMBERS), tl.constexpr(CODES)


@triton.jit
def _shown(code, scale, WHAT: tl.constexpr, FORMAT: tl.constexpr):
    if WHAT == _CODES:
        return code.to(tl.float32)
    elif WHAT == _NUMBERS:
        return without_sign_of_zero(decode(code, FORMAT) * scale)
    else:
        return scale + tl.zeros_like(code).to(tl.float32)


@triton.jit
def _read(
    key, value, words, pool, key_scales, chunk_scales, physical, group, mine, s, b, h, heads, groups, row_words, base,
    WHAT: tl.constexpr, FORMAT: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
):
    """Fill key and value [SLOTS, D_PAD] for the slots `mine`, which hold tokens of this format."""
    d = tl.arange(0, D_PAD)
    mask = mine[:, None] & (d < HEAD_DIM)[None, :]
    block = tl.load(physical, mask=mine, other=0)
    if LANES == 0:
        if WHAT == _NUMBERS:                                           # there are no codes and no scales
            key = tl.where(mask, whole_at(
                words, block, s % BLOCK, mine, d, b, h, heads, row_words, base, FORMAT, BLOCK, HEAD_DIM
            ), key)
            value = tl.where(mask, whole_at(
                words, block, s % BLOCK + BLOCK, mine, d, b, h, heads, row_words, base, FORMAT, BLOCK, HEAD_DIM
            ), value)
    else:
        code, scale = keys_at(
            words, key_scales, chunk_scales, block, group, s % BLOCK, mine, d, b, h, heads, groups, row_words, base,
            FORMAT, LANES, GROUP, BLOCK, HEAD_DIM,
        )
        key = tl.where(mask, _shown(code, scale, WHAT, FORMAT), key)
        code, scale = values_at(
            words, pool, chunk_scales, block, group, s % BLOCK, mine, d, b, h, heads, groups, row_words, base,
            FORMAT, LANES, GROUP, BLOCK, HEAD_DIM,
        )
        value = tl.where(mask, _shown(code, scale, WHAT, FORMAT), value)
    return key, value


@triton.jit(do_not_specialize=["heads", "slots", "entries", "groups", "tiles"])
def read_kernel(
    keys, values, words, pool, key_scales, chunk_scales, buffer_key, buffer_value, positions, slot_groups,
    block_thoughts, physical, heads, slots, entries, groups, tiles, row_words, base_0, base_1, base_2,
    WHAT: tl.constexpr, OF_T: tl.constexpr, OF_E: tl.constexpr, OF_R: tl.constexpr,
    FORMAT_0: tl.constexpr, FORMAT_1: tl.constexpr, FORMAT_2: tl.constexpr,
    LANES_0: tl.constexpr, LANES_1: tl.constexpr, LANES_2: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, SLOTS: tl.constexpr,
):
    """Program: SLOTS slots of a (row, KV head): keys and values [B, Hkv, S, D], 0 in unoccupied slots."""
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = batch_head // heads, batch_head % heads
    s = tl.program_id(0) % tiles * SLOTS + tl.arange(0, SLOTS)
    inside = s < slots
    group = tl.load(slot_groups + b * slots + s, mask=inside, other=-1)
    live = group >= 0
    entry = b * entries + s // BLOCK
    number = pick(tl.load(block_thoughts + entry, mask=live, other=0), OF_T, OF_E, OF_R)
    k = tl.zeros([SLOTS, D_PAD], tl.float32)
    v = tl.zeros([SLOTS, D_PAD], tl.float32)
    k, v = _read(
        k, v, words, pool, key_scales, chunk_scales, physical + entry, group, live & (number == 0), s, b, h, heads,
        groups, row_words, base_0, WHAT, FORMAT_0, LANES_0, GROUP, BLOCK, HEAD_DIM, D_PAD,
    )
    if FORMAT_1 != "":
        k, v = _read(
            k, v, words, pool, key_scales, chunk_scales, physical + entry, group, live & (number == 1), s, b, h,
            heads, groups, row_words, base_1, WHAT, FORMAT_1, LANES_1, GROUP, BLOCK, HEAD_DIM, D_PAD,
        )
    if FORMAT_2 != "":
        k, v = _read(
            k, v, words, pool, key_scales, chunk_scales, physical + entry, group, live & (number == 2), s, b, h,
            heads, groups, row_words, base_2, WHAT, FORMAT_2, LANES_2, GROUP, BLOCK, HEAD_DIM, D_PAD,
        )
    d = tl.arange(0, D_PAD)
    if WHAT == _NUMBERS:
        waits = inside & (s >= entries * BLOCK) & (tl.load(positions + b * slots + s, mask=inside, other=-1) >= 0)
        mask = waits[:, None] & (d < HEAD_DIM)[None, :]
        at = (batch_head * GROUP + s - entries * BLOCK)[:, None] * HEAD_DIM + d[None, :]
        k = tl.where(mask, float32(tl.load(buffer_key + at, mask=mask, other=0.0)), k)
        v = tl.where(mask, float32(tl.load(buffer_value + at, mask=mask, other=0.0)), v)
    at = (batch_head * slots + s)[:, None] * HEAD_DIM + d[None, :]
    mask = inside[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(keys + at, k.to(keys.dtype.element_ty), mask=mask)
    tl.store(values + at, v.to(values.dtype.element_ty), mask=mask)
