"""Kernels that copy tokens between the pool on the GPU and the bank in the host's memory, which they access directly.

Pool and bank are contiguous except for heads and rows: [B, F, slots, D] for the F heads that are not R-heads. Kernels
of an exchange are no-ops unless `due` is nonzero. They read the token range from `counters` (see `_attend_kernels`) and
the addresses of the bank's keys and values from `banks` [2] int64, 0 if there is no bank. So launches captured in a
graph are right for any step and for the bank that exists when they are replayed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._attend_kernels import EARLIER_FIRST_NEW, EARLIER_SINCE, SINCE


@triton.jit(do_not_specialize=[
    "source_b", "source_h", "source_t", "value_b", "value_h", "value_t", "first", "count", "heads", "units",
])
def store_kernel(
    source_key, source_value, bank_key, bank_value, members, source_b, source_h, source_t, source_d, value_b, value_h,
    value_t, value_d, bank_b, bank_h, first, count, heads, units,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
):
    """Copy `count` tokens to the bank's slots from `first` on. `members`: the source's head for each head of the bank.

    Units are blocks of tokens of a head. Programs take turns, since a few of them saturate the link.
    """
    blocks = tl.cdiv(count, BLOCK)
    d = tl.arange(0, D_PAD).to(tl.int64)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        batch_member = (unit // blocks).to(tl.int64)
        b, member = batch_member // heads, batch_member % heads
        head = tl.load(members + member).to(tl.int64)
        t = (unit % blocks * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
        tile = (t < count) & (d < HEAD_DIM)[None, :]
        k = tl.load(source_key + b * source_b + head * source_h + t * source_t + d[None, :] * source_d, mask=tile)
        v = tl.load(source_value + b * value_b + head * value_h + t * value_t + d[None, :] * value_d, mask=tile)
        into = b * bank_b + member * bank_h + (first + t) * HEAD_DIM + d[None, :]
        tl.store(bank_key + into, k, mask=tile)
        tl.store(bank_value + into, v, mask=tile)


@triton.jit
def _bank(banks, which: tl.constexpr, pool):
    """A pointer to the bank's keys (0) or values (1), of the pool's type."""
    return tl.multiple_of(tl.load(banks + which).to(pool.dtype), 16)


@triton.jit(do_not_specialize=["blocks", "heads", "units"])
def append_kernel(
    due, counters, banks, pool_key, pool_value, bank_b, bank_h, pool_b, pool_h, blocks, heads, units,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
):
    """Copy the tokens between the last two anticipations from their run in the pool to their slots in the bank.

    Units as in `store_kernel`, `blocks` of them per head.
    """
    if (tl.load(due) != 0) & (tl.load(banks) != 0):
        bank_key, bank_value = _bank(banks, 0, pool_key), _bank(banks, 1, pool_value)
        first, recent = tl.load(counters + EARLIER_SINCE), tl.load(counters + EARLIER_FIRST_NEW)
        count = tl.load(counters + SINCE) - first
        d = tl.arange(0, D_PAD).to(tl.int64)
        for unit in range(tl.program_id(0), units, tl.num_programs(0)):
            batch_member = (unit // blocks).to(tl.int64)
            b, member = batch_member // heads, batch_member % heads
            t = (unit % blocks * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
            tile = (t < count) & (d < HEAD_DIM)[None, :]
            at = b * pool_b + member * pool_h + (recent + t) * HEAD_DIM + d[None, :]
            into = b * bank_b + member * bank_h + (first + t) * HEAD_DIM + d[None, :]
            tl.store(bank_key + into, tl.load(pool_key + at, mask=tile), mask=tile)
            tl.store(bank_value + into, tl.load(pool_value + at, mask=tile), mask=tile)


@triton.jit(do_not_specialize=["slots", "capacity"])
def assign_kernel(
    due, chosen, tokens, places, free_places, entry_of, kept, next_places, fetch_tokens, fetch_places, fetch_counts,
    slots, capacity,
    CHUNK: tl.constexpr,
):
    """Program (row, list): finds which of the newly `chosen` tokens are in the pool, and assigns places to the
    others.

    Half of the pool's 2 * capacity places belong to the entries of the current set (`places`: p, or -1 - p for an entry
    without a token); the others are unused (`free_places`). A token in both sets keeps its place. The n-th of the other
    entries takes the n-th spare place, and the place of the n-th leaving entry becomes spare instead. `entry_of` [..,
    slots]: a token's index in `tokens`, the current set, -1 if absent. Results: `fetch_tokens` and `fetch_places`, the
    tokens to fetch and their places, `fetch_counts` of each. `kept` is all 0 between launches.
    """
    if tl.load(due) != 0:
        batch_list = tl.program_id(0).to(tl.int64)
        list_, mine = batch_list * capacity, batch_list * slots
        for start in range(0, capacity, CHUNK):
            entry = start + tl.arange(0, CHUNK)
            inside = entry < capacity
            token = tl.load(chosen + list_ + entry, mask=inside, other=-1)
            old_entry = tl.load(entry_of + mine + token, mask=token >= 0, other=-1)
            here = old_entry >= 0
            tl.store(kept + list_ + old_entry, 1, mask=here)
            place = tl.load(places + list_ + old_entry, mask=here, other=-1)
            tl.store(next_places + list_ + entry, place, mask=inside)
        # Below, this program reads what it has just written.
        tl.debug_barrier()
        fresh_before = 0
        fetch_before = 0
        for start in range(0, capacity, CHUNK):
            entry = start + tl.arange(0, CHUNK)
            inside = entry < capacity
            token = tl.load(chosen + list_ + entry, mask=inside, other=-1)
            fresh = inside & (tl.load(next_places + list_ + entry, mask=inside, other=0) < 0)
            number = fresh_before + tl.cumsum(fresh.to(tl.int32), 0) - 1
            place = tl.load(free_places + list_ + number, mask=fresh, other=0)
            to_fetch = fresh & (token >= 0)
            tl.store(next_places + list_ + entry, tl.where(to_fetch, place, -1 - place), mask=fresh)
            at = list_ + fetch_before + tl.cumsum(to_fetch.to(tl.int32), 0) - 1
            tl.store(fetch_tokens + at, token, mask=to_fetch)
            tl.store(fetch_places + at, place, mask=to_fetch)
            fresh_before += tl.sum(fresh.to(tl.int32), 0)
            fetch_before += tl.sum(to_fetch.to(tl.int32), 0)
        tl.store(fetch_counts + batch_list, fetch_before)
        tl.debug_barrier()
        left_before = 0
        for start in range(0, capacity, CHUNK):
            entry = start + tl.arange(0, CHUNK)
            inside = entry < capacity
            leaves = inside & (tl.load(kept + list_ + entry, mask=inside, other=1) == 0)
            place = tl.load(places + list_ + entry, mask=leaves, other=0)
            number = left_before + tl.cumsum(leaves.to(tl.int32), 0) - 1
            tl.store(free_places + list_ + number, tl.where(place < 0, -1 - place, place), mask=leaves)
            token = tl.load(tokens + list_ + entry, mask=leaves, other=-1)
            tl.store(entry_of + mine + token, -1, mask=token >= 0)
            left_before += tl.sum(leaves.to(tl.int32), 0)
        tl.debug_barrier()
        for start in range(0, capacity, CHUNK):
            entry = start + tl.arange(0, CHUNK)
            inside = entry < capacity
            token = tl.load(chosen + list_ + entry, mask=inside, other=-1)
            tl.store(places + list_ + entry, tl.load(next_places + list_ + entry, mask=inside), mask=inside)
            tl.store(tokens + list_ + entry, token, mask=inside)
            tl.store(entry_of + mine + token, entry, mask=token >= 0)
            tl.store(kept + list_ + entry, 0, mask=inside)


@triton.jit(do_not_specialize=["capacity", "batch", "lists", "heads", "few"])
def fetch_kernel(
    due, counters, banks, pool_key, pool_value, fetch_tokens, fetch_places, fetch_counts, list_indices, bank_b, bank_h,
    pool_b, pool_h, capacity, batch, lists, heads, few,
    LISTS: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr,
):
    """Fetch the tokens that `assign_kernel` found missing, for every head that follows a list, into their places in the
    pool: from the bank, or from the pool's own run for tokens that are only now being appended to the bank.

    Units are blocks of tokens of a head, first blocks first, as many as the longest list has. `few` programs take them,
    or all programs if more than SHARE tenths of a list are missing. LISTS >= batch * lists.
    """
    if (tl.load(due) != 0) & (tl.load(banks) != 0):
        bank_key, bank_value = _bank(banks, 0, pool_key), _bank(banks, 1, pool_value)
        since, recent = tl.load(counters + EARLIER_SINCE), tl.load(counters + EARLIER_FIRST_NEW)
        list_ = tl.arange(0, LISTS)
        most = tl.max(tl.load(fetch_counts + list_, mask=list_ < batch * lists, other=0), 0)
        d = tl.arange(0, D_PAD).to(tl.int64)
        units = tl.cdiv(most, BLOCK) * batch * heads
        programs = tl.num_programs(0)
        programs = tl.where(most * 10 > capacity * SHARE, programs, tl.minimum(few, programs))
        for unit in range(tl.where(tl.program_id(0) < programs, tl.program_id(0), units), units, programs):
            batch_member = (unit % (batch * heads)).to(tl.int64)
            b, member = batch_member // heads, batch_member % heads
            row = b * lists + tl.load(list_indices + member)
            number = unit // (batch * heads) * BLOCK + tl.arange(0, BLOCK)
            here = number < tl.load(fetch_counts + row)
            token = tl.load(fetch_tokens + row * capacity + number, mask=here, other=0)[:, None]
            place = tl.load(fetch_places + row * capacity + number, mask=here, other=0)[:, None]
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
