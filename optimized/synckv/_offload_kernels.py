"""Kernels that move tokens between the pool of a GPU and the bank in the host's memory, which they read and write.

Both are contiguous but for their heads and rows: [B, F, slots, D] for the F heads that do not look for themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=[
    "source_b", "source_h", "source_t", "value_b", "value_h", "value_t", "bank_b", "bank_h", "first", "count", "heads",
    "units",
])
def store_kernel(
    source_key, source_value, bank_key, bank_value, members, source_b, source_h, source_t, source_d, value_b, value_h,
    value_t, value_d, bank_b, bank_h, first, count, heads, units,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
):
    """`count` tokens go to the bank's slots from `first` on; `members` says which head of the source is which.

    Units are blocks of tokens of a head, taken by turns: a few programs fill the wire.
    """
    blocks = tl.cdiv(count, BLOCK)
    d = tl.arange(0, D_PAD).to(tl.int64)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        flat = (unit // blocks).to(tl.int64)
        b, member = flat // heads, flat % heads
        head = tl.load(members + member).to(tl.int64)
        t = (unit % blocks * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
        tile = (t < count) & (d < HEAD_DIM)[None, :]
        k = tl.load(source_key + b * source_b + head * source_h + t * source_t + d[None, :] * source_d, mask=tile)
        v = tl.load(source_value + b * value_b + head * value_h + t * value_t + d[None, :] * value_d, mask=tile)
        into = b * bank_b + member * bank_h + (first + t) * HEAD_DIM + d[None, :]
        tl.store(bank_key + into, k, mask=tile)
        tl.store(bank_value + into, v, mask=tile)


@triton.jit(do_not_specialize=[
    "bank_b", "bank_h", "pool_b", "pool_h", "since", "recent", "capacity", "lookers", "heads", "units",
])
def fetch_kernel(
    bank_key, bank_value, pool_key, pool_value, tokens, places, wanted, clusters, bank_b, bank_h, pool_b, pool_h,
    since, recent, capacity, lookers, heads, units,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
):
    """Tokens [B, N_r, capacity] that are `wanted` go to their places in the pool, for every head of the cluster: from
    the bank, and from token `since` on out of the pool itself, where they lie from slot `recent` on."""
    blocks = tl.cdiv(capacity, BLOCK)
    d = tl.arange(0, D_PAD).to(tl.int64)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        flat = (unit // blocks).to(tl.int64)
        b, member = flat // heads, flat % heads
        cluster = tl.load(clusters + member).to(tl.int64)
        number = unit % blocks * BLOCK + tl.arange(0, BLOCK)
        entry = (b * lookers + cluster) * capacity + number
        here = tl.load(wanted + entry, mask=number < capacity, other=0) != 0
        token = tl.load(tokens + entry, mask=here, other=0)[:, None]
        place = tl.load(places + entry, mask=here, other=0)[:, None]
        tile = here[:, None] & (d < HEAD_DIM)[None, :]
        near = token >= since
        bank = b * bank_b + member * bank_h + token * HEAD_DIM + d[None, :]
        pool = b * pool_b + member * pool_h
        own = pool + (recent + token - since) * HEAD_DIM + d[None, :]
        k = tl.load(bank_key + bank, mask=tile & (token < since), other=0.0)
        v = tl.load(bank_value + bank, mask=tile & (token < since), other=0.0)
        k = tl.where(near, tl.load(pool_key + own, mask=tile & near, other=0.0), k)
        v = tl.where(near, tl.load(pool_value + own, mask=tile & near, other=0.0), v)
        into = pool + place * HEAD_DIM + d[None, :]
        tl.store(pool_key + into, k, mask=tile)
        tl.store(pool_value + into, v, mask=tile)
