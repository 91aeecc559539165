"""R-KV's kernels: the similarities of the keys of a head, and the attention of a window's queries to them.

`prepare_kernel` computes the norms of the keys, the ages of the tokens, and the softmaxes of the window's queries, in
parts. `similarity_kernel` multiplies each tile of keys with all keys of its head. Since C is symmetric, the sums of its
rows are those of its columns. It also finds the most recent similar token j of each token i: the mean of j leaves out
C_ij. It adds what each mean leaves out, as integers, whose sum does not depend on the order. `importance_kernel`
subtracts these numbers from the sums, and adds up the attention of the window's queries. `mix_kernel` computes the
scores from both.

Buffers are as in `evict_kernels.py`. Programs of heads that are not due return at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..numerics import LOG2_E, dot, finite_or_zero, float32, multiply, round_to

#: Added to the norm of a key, as in the authors' code.
_EPSILON = tl.constexpr(1e-8)
#: Exponents, of float32, of keys whose squares and products are in range.
_LEAST, _MOST = tl.constexpr(127 - 15), tl.constexpr(127 + 40)
_NEVER = tl.constexpr(2**31 - 1)
#: A similarity of 1 among the integers. float32 similarities from 2^-16 on are multiples of 2^-40.
_ONE = tl.constexpr(2.0**40)


@triton.jit
def _observing(window_positions, b, window, QUERIES: tl.constexpr):
    """The number of the window's queries that are not padding."""
    total = tl.full([QUERIES], 0, tl.int32)
    for start in range(0, window, QUERIES):
        w = start + tl.arange(0, QUERIES)
        asks = tl.load(window_positions + b * window + w, mask=w < window, other=-1) >= 0
        total += tl.where(asks, 1, 0)
    return tl.sum(total, 0)


@triton.jit
def _factors(k):
    """Powers of two by which the keys k [TILE, D] are multiplied, so that no square overflows and none of the largest
    is lost: 1 unless the largest element is out of range, which in float16 it is not."""
    factor = tl.full([k.shape[0]], 1.0, tl.float32)
    if k.dtype != tl.float16:
        exponent = (tl.max(tl.abs(float32(k)), 1).to(tl.int32, bitcast=True) >> 23) & 0xFF
        power = ((254 - tl.minimum(tl.maximum(exponent, 1), 253)) << 23).to(tl.float32, bitcast=True)
        factor = tl.where((exponent >= _LEAST) & (exponent <= _MOST), factor, power)
    return factor


@triton.jit
def _scaled(k, factor):
    """k [TILE, D] times factor [TILE], exactly."""
    return round_to(float32(k) * factor[:, None], k.dtype)


@triton.jit
def _largest_logits(
    query, window_positions, k, w, b, k_head, heads, window, scale, d, in_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr,
):
    """Base-2 logits [QUERIES, TILE] of the window's queries w, the largest of the group; -inf for padding."""
    asks = tl.load(window_positions + b * window + w, mask=w < window, other=-1) >= 0
    largest = tl.full([QUERIES, TILE], float("-inf"), tl.float32)
    for g in range(GROUP):
        head = (b * heads + k_head) * GROUP + g
        q = tl.load(
            query + (head * window + w)[:, None] * HEAD_DIM + d[None, :], mask=asks[:, None] & in_head, other=0.0
        )
        largest = tl.maximum(largest, multiply(dot(q, tl.trans(k)), scale))
    return tl.where(asks[:, None], largest, float("-inf"))


@triton.jit
def _last_score(score, s, holds, capacity):
    """The scores of the last time; -inf for tokens that were not scored then (+inf) or came later."""
    last = tl.load(score + s, mask=holds & (s < capacity), other=float("-inf"))
    return tl.where(last == float("inf"), float("-inf"), last)


_SIZES = ["capacity", "end", "slots", "heads", "window", "parts_w"]


@triton.jit(do_not_specialize=_SIZES)
def prepare_kernel(
    query, window_positions, key, occupied, token_index, valid_seen, counts, factors, inverses, age, by_age, left_out,
    parts, score, scale, capacity, end, slots, heads, window, parts_w,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr,
    BY_SCORE: tl.constexpr,
):
    """Program (TILE tokens i, batch_head). factors: see `_factors`; inverses: what makes a key, times its factor,
    k / (||k|| + EPSILON). age: the number of older tokens, or, BY_SCORE, of those before the token in the order of
    `score`, of the last time, which is None otherwise; by_age: the slot of each age. left_out: set to 0. parts: the
    maximum of each window query's logits over the tile's tokens before the window, and the sum of the exponentials
    relative to it."""
    tiles = tl.cdiv(end, TILE)
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    if tl.load(counts + batch_head) <= capacity:
        return
    tile = tl.program_id(0) % tiles
    b, k_head = batch_head // heads, batch_head % heads
    at = batch_head * slots
    d = tl.arange(0, D_PAD)
    in_head = (d < HEAD_DIM)[None, :]
    i = tile * TILE + tl.arange(0, TILE)
    holds = tl.load(occupied + at + i, mask=i < end, other=0) != 0
    index = tl.load(token_index + at + i, mask=holds, other=-1)
    k = tl.load(
        key + at * HEAD_DIM + i.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=holds[:, None] & in_head, other=0.0
    )
    factor = _factors(k)
    x = float32(_scaled(k, factor))
    tl.store(factors + at + i, factor, mask=i < end)
    tl.store(inverses + at + i, 1.0 / (tl.sqrt(tl.sum(x * x, 1)) + factor * _EPSILON), mask=i < end)
    older = tl.full([TILE, TILE], 0, tl.int32)
    for start in range(0, end, TILE):
        j = start + tl.arange(0, TILE)
        there = tl.load(occupied + at + j, mask=j < end, other=0) != 0
        other_index = tl.load(token_index + at + j, mask=there, other=_NEVER)
        earlier = other_index[None, :] < index[:, None]
        if BY_SCORE:
            own, other = _last_score(score + at, i, holds, capacity), _last_score(score + at, j, there, capacity)
            higher = other[None, :] > own[:, None]
            earlier = there[None, :] & (higher | ((other[None, :] == own[:, None]) & earlier))
        older += tl.where(earlier, 1, 0)
    place = tl.sum(older, 1)
    tl.store(age + at + i, place, mask=i < end)
    tl.store(by_age + at + place, i, mask=holds)
    tl.store(left_out + at + i, tl.full([TILE], 0, tl.int64), mask=i < end)
    in_prefix = holds & (index < tl.load(valid_seen + batch_head) - _observing(window_positions, b, window, QUERIES))
    batch_heads = tl.num_programs(0).to(tl.int64) // tiles
    for start in range(0, window, QUERIES):
        w = start + tl.arange(0, QUERIES)
        logit = _largest_logits(
            query, window_positions, k, w, b, k_head, heads, window, scale, d, in_head, GROUP, HEAD_DIM, TILE, QUERIES
        )
        logit = tl.where(in_prefix[None, :], logit, float("-inf"))
        row_max = tl.max(logit, 1)
        weight_sum = tl.sum(tl.exp2(logit - finite_or_zero(row_max)[:, None]), 1)
        part = (batch_head * window + w) * parts_w + tile
        tl.store(parts + part, row_max, mask=w < window)
        tl.store(parts + batch_heads * window * parts_w + part, weight_sum, mask=w < window)


@triton.jit
def _similar_tiles(
    first, last, total, latest, unit, limit, i, key, occupied, age, factors, inverses, end, d, in_head,
    HEAD_DIM: tl.constexpr, TILE: tl.constexpr, SCALED: tl.constexpr, DIAGONAL: tl.constexpr,
):
    """Add to `total` [ROWS, TILE] the products of the keys i with the unit keys in the slots from `first` to `last`.
    Raise `latest` to the ages of those whose product is above the limit. DIAGONAL: the slots include some of i."""
    for start in range(first, last, TILE):
        j = start + tl.arange(0, TILE)
        there = tl.load(occupied + j, mask=j < end, other=0) != 0
        other_age = tl.load(age + j, mask=there, other=-1)
        inverse = tl.load(inverses + j, mask=there, other=0.0)
        k = tl.load(key + j.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=there[:, None] & in_head, other=0.0)
        if SCALED:
            k = _scaled(k, tl.load(factors + j, mask=there, other=1.0))
        similar = multiply(dot(unit, tl.trans(k)), inverse[None, :])
        if DIAGONAL:
            similar = tl.where(i[:, None] != j[None, :], similar, 0.0)
        total += similar
        latest = tl.maximum(latest, tl.where(similar > limit[:, None], other_age[None, :], -1))
    return total, latest


@triton.jit
def _similar_rows(
    unit, limit, i, begin, key, occupied, age, factors, inverses, end, d, in_head,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SCALED: tl.constexpr,
):
    """Of each row i, ROWS from `begin` on: the sum of its products with all other unit keys, and the age of the most
    recent token whose product is above the limit, -1 for none. Kept per column and combined at the end."""
    total = tl.zeros([ROWS, TILE], tl.float32)
    latest = tl.full([ROWS, TILE], -1, tl.int32)
    after = tl.minimum(begin + ROWS, end)
    total, latest = _similar_tiles(
        0, begin, total, latest, unit, limit, i, key, occupied, age, factors, inverses, end, d, in_head,
        HEAD_DIM, TILE, SCALED, False,
    )
    total, latest = _similar_tiles(
        begin, after, total, latest, unit, limit, i, key, occupied, age, factors, inverses, end, d, in_head,
        HEAD_DIM, TILE, SCALED, True,
    )
    total, latest = _similar_tiles(
        after, end, total, latest, unit, limit, i, key, occupied, age, factors, inverses, end, d, in_head,
        HEAD_DIM, TILE, SCALED, False,
    )
    return tl.sum(total, 1), tl.max(latest, 1)


@triton.jit(do_not_specialize=["capacity", "end", "slots"])
def similarity_kernel(
    key, occupied, counts, factors, inverses, age, by_age, means, left_out, threshold, capacity, end, slots,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, EXEMPTS_FIRST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (ROWS tokens i, batch_head). means: sum_j C_ij. left_out: each token i adds its C_ij to the number of the
    token j whose mean leaves it out."""
    tiles = tl.cdiv(end, ROWS)
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    if tl.load(counts + batch_head) <= capacity:
        return
    at = batch_head * slots
    key += at * HEAD_DIM
    occupied += at
    age += at
    factors += at
    inverses += at
    unusual = tl.full([CHUNK], 0, tl.int32)
    for start in range(0, end, CHUNK):
        s = start + tl.arange(0, CHUNK)
        there = tl.load(occupied + s, mask=s < end, other=0) != 0
        unusual += tl.where(tl.load(factors + s, mask=there, other=1.0) != 1.0, 1, 0)
    d = tl.arange(0, D_PAD)
    in_head = (d < HEAD_DIM)[None, :]
    begin = tl.program_id(0) % tiles * ROWS
    i = begin + tl.arange(0, ROWS)
    holds = tl.load(occupied + i, mask=i < end, other=0) != 0
    k = tl.load(key + i.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=holds[:, None] & in_head, other=0.0)
    unit = _scaled(k, tl.load(factors + i, mask=holds, other=1.0))
    inverse = tl.load(inverses + i, mask=holds, other=1.0)
    limit = threshold / inverse
    if tl.sum(unusual, 0) > 0:
        total, latest = _similar_rows(
            unit, limit, i, begin, key, occupied, age, factors, inverses, end, d, in_head, HEAD_DIM, ROWS, TILE, True
        )
    else:
        total, latest = _similar_rows(
            unit, limit, i, begin, key, occupied, age, factors, inverses, end, d, in_head, HEAD_DIM, ROWS, TILE, False
        )
    tl.store(means + at + i, total * inverse, mask=i < end)
    if EXEMPTS_FIRST:
        exempts = holds
    else:
        exempts = holds & (latest >= 0)
    j = tl.load(by_age + at + tl.maximum(latest, 0), mask=exempts, other=0)
    k = tl.load(key + j.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=exempts[:, None] & in_head, other=0.0)
    other = _scaled(k, tl.load(factors + j, mask=exempts, other=1.0))
    similar = tl.sum(float32(unit) * float32(other), 1) * inverse * tl.load(inverses + j, mask=exempts, other=0.0)
    whole = (similar * _ONE).to(tl.int64)
    tl.atomic_add(left_out + at + j, whole, mask=exempts & (i != j), sem="relaxed")


@triton.jit(do_not_specialize=_SIZES)
def importance_kernel(
    query, window_positions, key, occupied, token_index, valid_seen, counts, age, left_out, parts, means, importance,
    scale, capacity, end, slots, heads, window, parts_w,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Program (TILE tokens j, batch_head). means: the sums become means, without what is left out. importance, by age:
    the mean weight that the window's queries give a token before the window."""
    tiles = tl.cdiv(end, TILE)
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    tokens = tl.load(counts + batch_head)
    if tokens <= capacity:
        return
    b, k_head = batch_head // heads, batch_head % heads
    at = batch_head * slots
    j = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    total = tl.load(means + at + j, mask=j < end, other=0.0)
    # Not `/ _ONE`: it has the same bits, but lanes of a warp may diverge in a division of float64, see numerics.py.
    exempt = (tl.load(left_out + at + j, mask=j < end, other=0).to(tl.float64) * (1.0 / _ONE)).to(tl.float32)
    tl.store(means + at + j, (total - exempt) / tokens.to(tl.float32), mask=j < end)

    d = tl.arange(0, D_PAD)
    in_head = (d < HEAD_DIM)[None, :]
    holds = tl.load(occupied + at + j, mask=j < end, other=0) != 0
    k = tl.load(
        key + at * HEAD_DIM + j.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=holds[:, None] & in_head, other=0.0
    )
    observing = _observing(window_positions, b, window, QUERIES)
    index = tl.load(token_index + at + j, mask=holds, other=_NEVER)
    in_prefix = holds & (index < tl.load(valid_seen + batch_head) - observing)
    batch_heads = tl.num_programs(0).to(tl.int64) // tiles
    received = tl.zeros([TILE], tl.float32)
    for start in range(0, window, QUERIES):
        w = start + tl.arange(0, QUERIES)
        logit = _largest_logits(
            query, window_positions, k, w, b, k_head, heads, window, scale, d, in_head, GROUP, HEAD_DIM, TILE, QUERIES
        )
        row_max = tl.full([QUERIES], float("-inf"), tl.float32)
        weight_sum = tl.zeros([QUERIES], tl.float32)
        for merged in range(0, tiles, MERGED):
            tile = merged + tl.arange(0, MERGED)
            part = ((batch_head * window + w) * parts_w)[:, None] + tile[None, :]
            mask = (w < window)[:, None] & (tile < tiles)[None, :]
            maxima = tl.load(parts + part, mask=mask, other=float("-inf"))
            found = tl.load(parts + batch_heads * window * parts_w + part, mask=mask, other=0.0)
            higher = tl.maximum(row_max, tl.max(maxima, 1))
            shift = finite_or_zero(higher)
            weight_sum = weight_sum * tl.exp2(row_max - shift) + tl.sum(found * tl.exp2(maxima - shift[:, None]), 1)
            row_max = higher
        inverse = tl.where(weight_sum == 0.0, 0.0, 1.0 / tl.where(weight_sum == 0.0, 1.0, weight_sum))
        weight = tl.exp2(logit - finite_or_zero(row_max)[:, None]) * inverse[:, None]
        received += tl.sum(tl.where(in_prefix[None, :], weight, 0.0), 0)
    place = tl.load(age + at + j, mask=in_prefix, other=0)
    tl.store(importance + at + place, received / tl.maximum(observing, 1).to(tl.float32), mask=in_prefix)


@triton.jit(do_not_specialize=["capacity", "end", "slots", "heads", "window", "kernel_size"])
def mix_kernel(
    window_positions, occupied, token_index, valid_seen, counts, means, importance, age, score, mix_lambda, rest,
    capacity, end, slots, heads, window, kernel_size, APPENDED: tl.constexpr, CHUNK: tl.constexpr,
):
    """Program batch_head: mix_lambda times the pooled importance minus `rest` times the softmax of the means; +inf for
    the window."""
    batch_head = tl.program_id(0).to(tl.int64)
    at = batch_head * slots
    due = tl.load(counts + batch_head) > capacity
    if not due:
        if not APPENDED:
            for start in range(capacity, end, CHUNK):
                s = start + tl.arange(0, CHUNK)
                holds = tl.load(occupied + at + s, mask=s < end, other=0) != 0
                tl.store(score + at + s, tl.full([CHUNK], float("inf"), tl.float32), mask=holds)
        return
    highest = tl.full([CHUNK], float("-inf"), tl.float32)
    for start in range(0, end, CHUNK):
        s = start + tl.arange(0, CHUNK)
        holds = tl.load(occupied + at + s, mask=s < end, other=0) != 0
        highest = tl.maximum(highest, tl.load(means + at + s, mask=holds, other=float("-inf")))
    top = tl.max(highest, 0)
    sums = tl.zeros([CHUNK], tl.float32)
    for start in range(0, end, CHUNK):
        s = start + tl.arange(0, CHUNK)
        holds = tl.load(occupied + at + s, mask=s < end, other=0) != 0
        mean = tl.load(means + at + s, mask=holds, other=float("-inf"))
        sums += tl.exp2((mean - top) * LOG2_E)
    total = tl.sum(sums, 0)
    prefix = tl.load(counts + batch_head) - _observing(window_positions, batch_head // heads, window, 16)
    for start in range(0, end, CHUNK):
        s = start + tl.arange(0, CHUNK)
        holds = tl.load(occupied + at + s, mask=s < end, other=0) != 0
        place = tl.load(age + at + s, mask=holds, other=0)
        pooled = tl.full([CHUNK], float("-inf"), tl.float32)
        for k in range(kernel_size):
            near = place + k - kernel_size // 2
            inside = holds & (near >= 0) & (near < prefix)
            pooled = tl.maximum(pooled, tl.load(importance + at + near, mask=inside, other=float("-inf")))
        mean = tl.load(means + at + s, mask=holds, other=0.0)
        repeated = tl.exp2((mean - top) * LOG2_E) / total
        pooled = tl.where(place < prefix, pooled, 0.0)
        mixed = tl.where(place < prefix, pooled * mix_lambda - repeated * rest, float("inf"))
        tl.store(score + at + s, mixed, mask=holds)
