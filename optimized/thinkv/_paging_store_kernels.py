"""Kernels that quantize and pack a buffer in a flush. `_paging_layout.py` describes the memory layout."""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.numerics import float32
from ._formats_kernels import decode_scale, encode, fp8_scale, magnitude, scale_code
from ._paging_kernels import PLAN_COUNT, PLAN_FORMAT, PLAN_GROUP, PLAN_SLOTS
from ._paging_layout import (
    fields,
    key_fields,
    record_at,
    record_of_whole,
    scale_at,
    scale_to_byte,
    value_slot,
    value_unit,
)
from ._prompt_kernels import group_of_prompt


@triton.jit
def _together(codes, magnitude_at, sign_at, LANES: tl.constexpr, TOKENS: tl.constexpr, MANY: tl.constexpr,
              EACH: tl.constexpr):
    """Pack codes [TOKENS, MANY * EACH], EACH per word or half word: [TOKENS, MANY] int32."""
    SIGN: tl.constexpr = 8 // LANES - 1
    bits = (codes & ((1 << SIGN) - 1)) << magnitude_at[None, :]
    bits |= (codes >> SIGN) << sign_at[None, :]
    return tl.sum(tl.reshape(bits, (TOKENS, MANY, EACH)), 2)                       # bits are disjoint


@triton.jit
def _store_keys(
    at, codes, there, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr
):
    """Store codes [TOKENS, D_PAD] of the tokens `there` as words, from `at` [TOKENS] on."""
    EACH: tl.constexpr = 4 * LANES
    magnitude_at, sign_at = key_fields(tl.arange(0, D_PAD), LANES)
    word = _together(codes, magnitude_at, sign_at, LANES, TOKENS, D_PAD // EACH, EACH)
    n = tl.arange(0, D_PAD // EACH)
    tl.store(at[:, None] + n[None, :], word, mask=there[:, None] & (n * EACH < HEAD_DIM)[None, :])


@triton.jit
def _store_values(
    at, codes, there, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Store codes [TOKENS, D_PAD] of the tokens `there` as half words, from `at` [TOKENS] on."""
    EACH: tl.constexpr = 2 * LANES
    magnitude_at, sign_at = fields(tl.arange(0, D_PAD) % EACH, LANES)
    half = _together(codes, magnitude_at, sign_at, LANES, TOKENS, D_PAD // EACH, EACH)
    u = tl.arange(0, D_PAD // EACH)
    tl.store(
        at[:, None] + value_unit(u, LANES, BLOCK, HEAD_DIM)[None, :], half.to(tl.int16),
        mask=there[:, None] & (u * EACH < HEAD_DIM)[None, :],
    )


@triton.jit
def _value_scales(size, scales_at, there, FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
                  HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr):
    """The scale of each element of values with magnitudes size [TOKENS, D_PAD], from those of GROUP channels of its
    token. Stores the scales of the tokens `there` from scales_at [TOKENS] on."""
    PER_TOKEN: tl.constexpr = (HEAD_DIM + GROUP - 1) // GROUP
    if D_PAD % GROUP == 0:
        MANY: tl.constexpr = D_PAD // GROUP
        n = tl.arange(0, MANY)
        scale = decode_scale(scale_code(tl.max(tl.reshape(size, (TOKENS, MANY, GROUP)), 2), FORMAT))
        tl.store(
            scales_at[:, None] + n[None, :] * BLOCK, scale_to_byte(scale).to(tl.uint8),
            mask=there[:, None] & (n < PER_TOKEN)[None, :],
        )
        return tl.reshape(tl.broadcast_to(scale[:, :, None], (TOKENS, MANY, GROUP)), (TOKENS, D_PAD))
    else:
        scales = tl.zeros([TOKENS, D_PAD], tl.float32)
        for number in range(PER_TOKEN):
            mine = (tl.arange(0, D_PAD) // GROUP == number)[None, :]
            one = decode_scale(scale_code(tl.max(tl.where(mine, size, 0.0), 1), FORMAT))
            tl.store(scales_at + number * BLOCK, scale_to_byte(one).to(tl.uint8), mask=there)
            scales = tl.where(mine, one[:, None], scales)
        return scales


@triton.jit
def _store_quantized(
    x, VALUES: tl.constexpr, slot, there, words, halves, pool, key_scales, chunk_scales, physical, group, b, h, heads,
    groups, row_words, base, FORMAT: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr,
):
    """Quantize keys, or values, x [TOKENS, D_PAD] float32 of one KV head as one group, and store the tokens `there` in
    their slots."""
    d = tl.arange(0, D_PAD)
    WIDTH: tl.constexpr = (HEAD_DIM + 4 * LANES - 1) // (4 * LANES)
    PER_TOKEN: tl.constexpr = 0 if FORMAT == "fp8" else (HEAD_DIM + GROUP - 1) // GROUP
    RECORD: tl.constexpr = BLOCK * 2 * WIDTH + (BLOCK * PER_TOKEN + 3) // 4
    record = record_at(b, tl.load(physical + slot // BLOCK, mask=there, other=0), h, row_words, base, heads, RECORD)
    place = slot % BLOCK
    scales_at = (b * groups + group) * heads + h
    size = magnitude(x)
    if FORMAT == "fp8":
        scale = fp8_scale(tl.max(tl.max(size, 1), 0))
        tl.store(chunk_scales + scales_at * 2 + VALUES, scale)
        codes = encode(x, scale, FORMAT)
    elif VALUES:
        value_scales_at = pool + (record + 2 * BLOCK * WIDTH) * 4 + place
        codes = encode(
            x, _value_scales(size, value_scales_at, there, FORMAT, GROUP, BLOCK, HEAD_DIM, D_PAD, TOKENS), FORMAT
        )
    else:
        key_scale = decode_scale(scale_code(tl.max(size, 0), FORMAT))
        tl.store(
            key_scales + scales_at * ((HEAD_DIM + 3) // 4 * 4) + scale_at(d, LANES, HEAD_DIM),
            scale_to_byte(key_scale).to(tl.uint8), mask=d < HEAD_DIM
        )
        codes = encode(x, key_scale[None, :], FORMAT)
    if VALUES:
        values_at = halves + (record + BLOCK * WIDTH) * 2 + value_slot(place, LANES, BLOCK, HEAD_DIM)
        _store_values(values_at, codes, there, HEAD_DIM, D_PAD, LANES, BLOCK, TOKENS)
    else:
        _store_keys(words + record + place * WIDTH, codes, there, HEAD_DIM, D_PAD, LANES, TOKENS)


@triton.jit
def _store_whole(
    x, VALUES: tl.constexpr, slot, there, words, halves, physical, b, h, heads, row_words, base, FORMAT: tl.constexpr,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
):
    """Store keys, or values, x [TOKENS, D_PAD], in the dtype of the cache, of the tokens `there`, bit by bit."""
    d = tl.arange(0, D_PAD)
    mask = there[:, None] & (d < HEAD_DIM)[None, :]
    page = tl.load(physical + slot // BLOCK, mask=there, other=0)
    record = record_of_whole(b, page, h, row_words, base, heads, FORMAT, BLOCK, HEAD_DIM)
    if FORMAT == "float32":
        at = words + (record + slot % BLOCK * HEAD_DIM)[:, None] + d[None, :] + VALUES * BLOCK * HEAD_DIM
        tl.store(at, x.to(tl.int32, bitcast=True), mask=mask)
    else:
        WIDTH: tl.constexpr = (HEAD_DIM + 1) // 2
        at = halves + ((record + slot % BLOCK * WIDTH) * 2)[:, None] + d[None, :] + VALUES * 2 * BLOCK * WIDTH
        tl.store(at, x.to(tl.int16, bitcast=True), mask=mask)


@triton.jit
def _store_half(
    x, VALUES: tl.constexpr, slot, there, words, halves, pool, key_scales, chunk_scales, physical, group, b, h, heads,
    groups, row_words, base, FORMAT: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr,
):
    """Store the keys, or with VALUES the values, x [TOKENS, D_PAD] of a group's tokens `there`."""
    if LANES == 0:
        _store_whole(
            x, VALUES, slot, there, words, halves, physical, b, h, heads, row_words, base, FORMAT, BLOCK, HEAD_DIM,
            D_PAD,
        )
    else:
        _store_quantized(
            float32(x), VALUES, slot, there, words, halves, pool, key_scales, chunk_scales, physical, group, b, h,
            heads, groups, row_words, base, FORMAT, LANES, GROUP, BLOCK, HEAD_DIM, D_PAD, TOKENS,
        )


@triton.jit
def _store_if(
    wanted, k, v, slot, there, words, halves, pool, key_scales, chunk_scales, physical, group, b, h, heads, groups,
    row_words, base, FORMAT: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr,
):
    if wanted:
        _store_half(
            k, 0, slot, there, words, halves, pool, key_scales, chunk_scales, physical, group, b, h, heads, groups,
            row_words, base, FORMAT, LANES, GROUP, BLOCK, HEAD_DIM, D_PAD, TOKENS,
        )
        _store_half(
            v, 1, slot, there, words, halves, pool, key_scales, chunk_scales, physical, group, b, h, heads, groups,
            row_words, base, FORMAT, LANES, GROUP, BLOCK, HEAD_DIM, D_PAD, TOKENS,
        )


@triton.jit(do_not_specialize=["heads", "entries", "groups"])
def store_kernel(
    buffer_key, buffer_value, words, halves, pool, key_scales, chunk_scales, physical, plan,
    heads, entries, groups, row_words, base_0, base_1, base_2,
    FORMAT_0: tl.constexpr, FORMAT_1: tl.constexpr, FORMAT_2: tl.constexpr,
    LANES_0: tl.constexpr, LANES_1: tl.constexpr, LANES_2: tl.constexpr,
    GROUP: tl.constexpr, NEW: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program (row, KV head): quantizes its buffer and stores it as planned by `assign_kernel`."""
    b, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    plan += b * (PLAN_SLOTS + GROUP + 2 * NEW)
    count = tl.load(plan + PLAN_COUNT)
    if count > 0:
        number, group = tl.load(plan + PLAN_FORMAT), tl.load(plan + PLAN_GROUP)
        i, d = tl.arange(0, TOKENS), tl.arange(0, D_PAD)
        at = ((b * heads + h) * GROUP + i[:, None]) * HEAD_DIM + d[None, :]
        there = i < count
        mask = there[:, None] & (d < HEAD_DIM)[None, :]
        slot = tl.load(plan + PLAN_SLOTS + i, mask=there, other=0)
        k = tl.load(buffer_key + at, mask=mask, other=0.0)
        v = tl.load(buffer_value + at, mask=mask, other=0.0)
        physical += b * entries
        _store_if(
            number == 0, k, v, slot, there, words, halves, pool, key_scales, chunk_scales, physical, group, b, h, heads,
            groups, row_words, base_0, FORMAT_0, LANES_0, GROUP, BLOCK, HEAD_DIM, D_PAD, TOKENS,
        )
        if FORMAT_1 != "":
            _store_if(
                number == 1, k, v, slot, there, words, halves, pool, key_scales, chunk_scales, physical, group, b, h,
                heads, groups, row_words, base_1, FORMAT_1, LANES_1, GROUP, BLOCK, HEAD_DIM, D_PAD, TOKENS,
            )
        if FORMAT_2 != "":
            _store_if(
                number == 2, k, v, slot, there, words, halves, pool, key_scales, chunk_scales, physical, group, b, h,
                heads, groups, row_words, base_2, FORMAT_2, LANES_2, GROUP, BLOCK, HEAD_DIM, D_PAD, TOKENS,
            )


@triton.jit(do_not_specialize=[
    "heads", "slots", "entries", "groups", "all_groups", "total", "tau", "parts", "order_b", "key_b", "key_h", "key_n",
    "value_b", "value_h", "value_n",
])
def store_prompt_kernel(
    key, value, order, place, words, halves, pool, key_scales, chunk_scales, slot_groups, physical,
    heads, slots, entries, groups, all_groups, total, tau, parts, order_b, key_b, key_h, key_n, key_d,
    value_b, value_h, value_n, value_d, row_words, base,
    FORMAT: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr, TOKENS: tl.constexpr,
):
    """Program (row, group of the prompt, KV head, keys or values): quantizes the group, and stores the tokens that have
    a place. See `_prompt_kernels.py`."""
    program = (tl.program_id(0) // 2).to(tl.int64)
    h, number, b = program % heads, program // heads % all_groups, program // heads // all_groups
    at = group_of_prompt(order, b, number, order_b, total, tau, parts, GROUP, TOKENS)
    slot = tl.load(place + b * total + at, mask=at >= 0, other=-1)
    there = slot >= 0
    if tl.max(slot, 0) >= 0:
        d = tl.arange(0, D_PAD)
        mask = (at >= 0)[:, None] & (d < HEAD_DIM)[None, :]
        d64 = d.to(tl.int64)[None, :]
        # All tokens of a group have the same scale group, and those with a place have one: it is not negative.
        group = tl.max(tl.load(slot_groups + b * slots + slot, mask=there, other=-1), 0)
        slot = tl.maximum(slot, 0)
        physical += b * entries
        if tl.program_id(0) % 2 == 0:
            k = tl.load(key + b * key_b + h * key_h + at[:, None] * key_n + d64 * key_d, mask=mask, other=0.0)
            _store_half(
                k, 0, slot, there, words, halves, pool, key_scales, chunk_scales, physical, group, b, h, heads, groups,
                row_words, base, FORMAT, LANES, GROUP, BLOCK, HEAD_DIM, D_PAD, TOKENS,
            )
        else:
            v = tl.load(value + b * value_b + h * value_h + at[:, None] * value_n + d64 * value_d, mask=mask, other=0.0)
            _store_half(
                v, 1, slot, there, words, halves, pool, key_scales, chunk_scales, physical, group, b, h, heads, groups,
                row_words, base, FORMAT, LANES, GROUP, BLOCK, HEAD_DIM, D_PAD, TOKENS,
            )
