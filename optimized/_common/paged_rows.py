"""Device functions for slots in pages. `pages` points to a row's entries of the block table, pages_s apart; a page has
PAGE slots, and its stride is stride_p."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def offsets(pages, s, holds, stride_p, stride_s, pages_s, PAGE: tl.constexpr):
    """The offsets of slots s [N], int64. Entries are not read where `holds` is False; there, they count as page 0."""
    page = tl.load(pages + s // PAGE * pages_s, mask=holds, other=0).to(tl.int64)
    return page * stride_p + (s % PAGE).to(tl.int64) * stride_s


@triton.jit
def offset(pages, slot, stride_p, stride_s, pages_s, PAGE: tl.constexpr):
    """The offset of one slot, an int64 scalar."""
    return tl.load(pages + slot // PAGE * pages_s).to(tl.int64) * stride_p + slot % PAGE * stride_s


@triton.jit
def tile(
    key, value, pages, start, end, key_p, key_s, key_d, value_p, value_s, value_d, pages_s,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr,
):
    """Keys and values [BLOCK, D_PAD] of the slots from `start`, a multiple of BLOCK, on; with MASKED, zeros from `end`
    on, which are not read. Otherwise all of these slots exist."""
    i = tl.arange(0, BLOCK)
    d = tl.arange(0, D_PAD).to(tl.int64)
    s = start + i
    if PAGE % BLOCK == 0:                                              # the tile is in one page
        page = tl.load(pages + start // PAGE * pages_s).to(tl.int64)
    elif MASKED:
        page = tl.load(pages + s // PAGE * pages_s, mask=s < end, other=0).to(tl.int64)[:, None]
    else:
        page = tl.load(pages + s // PAGE * pages_s).to(tl.int64)[:, None]
    place = (s % PAGE).to(tl.int64)[:, None]
    keys = key + page * key_p + place * key_s + d[None, :] * key_d
    values = value + page * value_p + place * value_s + d[None, :] * value_d
    mask = (d < HEAD_DIM)[None, :]
    if MASKED:
        mask = mask & (s < end)[:, None]
    if MASKED or HEAD_DIM != D_PAD:
        return tl.load(keys, mask=mask, other=0.0), tl.load(values, mask=mask, other=0.0)
    else:
        return tl.load(keys), tl.load(values)
