"""R-KV's kernels: the similarities of the keys of a head, and the attention of a window's queries to them.

`prepare_kernel` computes the norms of the keys, the ages of the tokens, the sum of all unit keys, and the softmaxes of
the window's queries, in parts. Since C is symmetric, the sum of a column is that of a row, the product of a unit key
with the sum of all others. `latest_kernel` multiplies each tile of keys with all keys of its head, until it has found
the most recent similar token j of each token i: the mean of j leaves out C_ij. `importance_kernel` computes the sums,
adds what each mean leaves out, and the attention of the window's queries. `mix_kernel` computes the scores from all.
What several programs add are integers, whose sum does not depend on the order.

Buffers are as in `evict_kernels.py`. Those between the kernels are by age, in rows of `width` numbers, but for `age`.
Programs of heads that are not due return at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..numerics import LOG2_E, dot, finite_or_zero, float32, multiply, tanh
from .similarity_kernels import keys_of, scaled

#: Added to the norm of a key, as in the authors' code.
_EPSILON = tl.constexpr(1e-8)
#: Exponents, of float32, of keys whose squares and products are in range.
_LEAST, _MOST = tl.constexpr(127 - 15), tl.constexpr(127 + 40)
_NEVER = tl.constexpr(2**31 - 1)
#: A similarity of 1 among the integers. float32 similarities from 2^-16 on are multiples of 2^-40.
_ONE = tl.constexpr(2.0**40)
#: Places behind the last token that `latest_kernel` may read, at most a tile.
_BEHIND = tl.constexpr(128)


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
def _largest_logits(
    query, window_positions, k, w, b, k_head, heads, window, scale, softcap, d, in_head,
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
    if softcap is not None:                                            # once: it keeps the order
        largest = multiply(tanh(largest), softcap)
    return tl.where(asks[:, None], largest, float("-inf"))


@triton.jit
def _last_score(score, s, holds, capacity):
    """The scores of the last time; -inf for tokens that were not scored then (+inf) or came later."""
    last = tl.load(score + s, mask=holds & (s < capacity), other=float("-inf"))
    return tl.where(last == float("inf"), float("-inf"), last)


_SIZES = ["capacity", "end", "slots", "heads", "window", "parts_w"]


@triton.jit(do_not_specialize=_SIZES)
def prepare_kernel(
    query, window_positions, key, occupied, token_index, valid_seen, counts, age, by_age, factors, inverses, left_out,
    sums, parts, score, scale, softcap, capacity, end, slots, width, heads, window, parts_w,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr,
    BY_SCORE: tl.constexpr, OTHERS: tl.constexpr,
):
    """Program (slots i of a tile, batch_head). age: the number of older tokens, or, BY_SCORE, of those before the token
    in the order of `score`, of the last time, which is None otherwise; by_age: the slot of each age. factors: see
    `_factors`; inverses: what makes a key, times its factor, k / (||k|| + EPSILON), 0 behind the last token. sums: grow
    by the unit keys. left_out: set to 0. parts: the maximum of each window query's logits over the tile's tokens before
    the window, and the sum of the exponentials relative to it. OTHERS: tokens that are compared at a time."""
    tiles = tl.cdiv(end, TILE)
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    tokens = tl.load(counts + batch_head)
    if tokens <= capacity:
        return
    tile = tl.program_id(0) % tiles
    b, k_head = batch_head // heads, batch_head % heads
    at, row = batch_head * slots, batch_head * width
    d = tl.arange(0, D_PAD)
    in_head = (d < HEAD_DIM)[None, :]
    i = tile * TILE + tl.arange(0, TILE)
    holds = tl.load(occupied + at + i, mask=i < end, other=0) != 0
    index = tl.load(token_index + at + i, mask=holds, other=-1)
    k = tl.load(
        key + at * HEAD_DIM + i.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=holds[:, None] & in_head, other=0.0
    )
    place = tl.full([TILE], 0, tl.int32)
    for start in range(0, end, OTHERS):
        j = start + tl.arange(0, OTHERS)
        there = tl.load(occupied + at + j, mask=j < end, other=0) != 0
        other_index = tl.load(token_index + at + j, mask=j < end, other=_NEVER)   # without waiting for `there`
        other_index = tl.where(there, other_index, _NEVER)
        earlier = other_index[None, :] < index[:, None]
        if BY_SCORE:
            own, other = _last_score(score + at, i, holds, capacity), _last_score(score + at, j, there, capacity)
            higher = other[None, :] > own[:, None]
            earlier = there[None, :] & (higher | ((other[None, :] == own[:, None]) & earlier))
        place += tl.sum(tl.where(earlier, 1, 0), 1)
    tl.store(age + at + i, place, mask=holds)
    tl.store(by_age + row + place, i, mask=holds)
    tl.store(left_out + row + place, tl.full([TILE], 0, tl.int64), mask=holds)
    factor = _factors(k)
    x = float32(scaled(k, factor))
    inverse = 1.0 / (tl.sqrt(tl.sum(x * x, 1)) + factor * _EPSILON)
    tl.store(factors + row + place, factor, mask=holds)
    tl.store(inverses + row + place, inverse, mask=holds)
    if tile == 0:
        behind = tokens + tl.arange(0, _BEHIND)
        tl.store(inverses + row + behind, tl.zeros([_BEHIND], tl.float32), mask=behind < width)
    total = tl.sum(x.to(tl.float64) * inverse.to(tl.float64)[:, None], 0)
    tl.atomic_add(sums + batch_head * HEAD_DIM + d, (total * _ONE).to(tl.int64), mask=d < HEAD_DIM, sem="relaxed")
    in_prefix = holds & (index < tl.load(valid_seen + batch_head) - _observing(window_positions, b, window, QUERIES))
    batch_heads = tl.num_programs(0).to(tl.int64) // tiles
    for start in range(0, window, QUERIES):
        w = start + tl.arange(0, QUERIES)
        logit = _largest_logits(
            query, window_positions, k, w, b, k_head, heads, window, scale, softcap, d, in_head,
            GROUP, HEAD_DIM, TILE, QUERIES
        )
        logit = tl.where(in_prefix[None, :], logit, float("-inf"))
        row_max = tl.max(logit, 1)
        weight_sum = tl.sum(tl.exp2(logit - finite_or_zero(row_max)[:, None]), 1)
        part = (batch_head * window + w) * parts_w + tile
        tl.store(parts + part, row_max, mask=w < window)
        tl.store(parts + batch_heads * window * parts_w + part, weight_sum, mask=w < window)


@triton.jit(do_not_specialize=[*_SIZES, "splits"])
def importance_kernel(
    query, window_positions, key, counts, by_age, factors, inverses, left_out, sums, parts, latest, means, importance,
    scale, softcap, capacity, end, slots, width, heads, window, parts_w, splits,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr,
    MERGED: tl.constexpr, EXEMPTS_FIRST: tl.constexpr,
):
    """Program (TILE tokens i, batch_head). means: the sums of the similarities to all other tokens. left_out: each
    token i adds its C_ij to the number of the token j whose mean leaves it out. importance: the mean weight that the
    window's queries give a token before the window."""
    tiles = tl.cdiv(end, TILE)
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * TILE
    tokens = tl.load(counts + batch_head)
    if tokens <= capacity:
        return
    if first >= tokens:
        return
    b, k_head = batch_head // heads, batch_head % heads
    row, batch_heads = batch_head * width, tl.num_programs(0).to(tl.int64) // tiles
    d = tl.arange(0, D_PAD)
    in_head = (d < HEAD_DIM)[None, :]
    i = first + tl.arange(0, TILE)
    holds = i < tokens
    recent = tl.full([TILE], -1, tl.int32)
    for split in range(splits):
        recent = tl.maximum(recent, tl.load(latest + split * batch_heads * width + row + i, mask=holds, other=-1))
    key += batch_head * slots * HEAD_DIM
    k = keys_of(key, tl.load(by_age + row + i, mask=holds, other=0), HEAD_DIM, D_PAD)
    unit = float32(scaled(k, tl.load(factors + row + i, mask=holds, other=1.0)))
    by = tl.load(inverses + row + i, mask=holds, other=0.0)
    exempts = holds
    if not EXEMPTS_FIRST:
        exempts = holds & (recent >= 0)
    j = tl.maximum(recent, 0)
    other = keys_of(key, tl.load(by_age + row + j, mask=holds, other=0), HEAD_DIM, D_PAD)
    other = float32(scaled(other, tl.load(factors + row + j, mask=holds, other=1.0)))
    similar = tl.sum(unit * other, 1) * by * tl.load(inverses + row + j, mask=holds, other=0.0)
    whole = (similar * _ONE).to(tl.int64)
    tl.atomic_add(left_out + row + j, whole, mask=exempts & (i != j), sem="relaxed")
    # In float64, since a token is similar to itself, and the others may not be.
    wide = unit.to(tl.float64)
    own = wide * by.to(tl.float64)[:, None]
    all_keys = tl.load(sums + batch_head * HEAD_DIM + d, mask=d < HEAD_DIM, other=0).to(tl.float64) * (1.0 / _ONE)
    total = tl.sum(wide * (all_keys[None, :] - own), 1).to(tl.float32)
    tl.store(means + row + i, total * by, mask=holds)

    observing = _observing(window_positions, b, window, QUERIES)
    in_prefix = i < tokens - observing
    received = tl.zeros([TILE], tl.float32)
    for start in range(0, window, QUERIES):
        w = start + tl.arange(0, QUERIES)
        logit = _largest_logits(
            query, window_positions, k, w, b, k_head, heads, window, scale, softcap, d, in_head,
            GROUP, HEAD_DIM, TILE, QUERIES
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
    tl.store(importance + row + i, received / tl.maximum(observing, 1).to(tl.float32), mask=in_prefix)


@triton.jit(do_not_specialize=["capacity", "end", "slots", "heads", "window", "kernel_size"])
def mix_kernel(
    window_positions, occupied, counts, age, left_out, sums, means, importance, score, mix_lambda, rest, capacity, end,
    slots, width, heads, window, kernel_size,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, APPENDED: tl.constexpr, CHUNK: tl.constexpr,
):
    """Program batch_head: mix_lambda times the pooled importance minus `rest` times the softmax of the means; +inf for
    the window. means: the sums become means, without what is left out. sums: set to 0, for the next time."""
    batch_head = tl.program_id(0).to(tl.int64)
    at, row = batch_head * slots, batch_head * width
    tokens = tl.load(counts + batch_head)
    due = tokens > capacity
    if not due:
        if not APPENDED:
            for start in range(capacity, end, CHUNK):
                s = start + tl.arange(0, CHUNK)
                holds = tl.load(occupied + at + s, mask=s < end, other=0) != 0
                tl.store(score + at + s, tl.full([CHUNK], float("inf"), tl.float32), mask=holds)
        return
    d = tl.arange(0, D_PAD)
    tl.store(sums + batch_head * HEAD_DIM + d, tl.full([D_PAD], 0, tl.int64), mask=d < HEAD_DIM)
    highest = tl.full([CHUNK], float("-inf"), tl.float32)
    for start in range(0, tokens, CHUNK):
        i = start + tl.arange(0, CHUNK)
        similar = tl.load(means + row + i, mask=i < tokens, other=float("-inf"))
        # Not `/ _ONE`: it has the same bits, but lanes of a warp may diverge in a division of float64, see numerics.py.
        exempt = (tl.load(left_out + row + i, mask=i < tokens, other=0).to(tl.float64) * (1.0 / _ONE)).to(tl.float32)
        mean = (similar - exempt) / tokens.to(tl.float32)
        tl.store(means + row + i, mean, mask=i < tokens)
        highest = tl.maximum(highest, mean)
    top = tl.max(highest, 0)
    tl.debug_barrier()
    exponentials = tl.zeros([CHUNK], tl.float32)
    for start in range(0, tokens, CHUNK):
        i = start + tl.arange(0, CHUNK)
        mean = tl.load(means + row + i, mask=i < tokens, other=float("-inf"))
        exponentials += tl.exp2((mean - top) * LOG2_E)
    total = tl.sum(exponentials, 0)
    prefix = tokens - _observing(window_positions, batch_head // heads, window, 16)
    for start in range(0, end, CHUNK):
        s = start + tl.arange(0, CHUNK)
        holds = tl.load(occupied + at + s, mask=s < end, other=0) != 0
        place = tl.load(age + at + s, mask=holds, other=0)
        pooled = tl.full([CHUNK], float("-inf"), tl.float32)
        for k in range(kernel_size):
            near = place + k - kernel_size // 2
            inside = holds & (near >= 0) & (near < prefix)
            pooled = tl.maximum(pooled, tl.load(importance + row + near, mask=inside, other=float("-inf")))
        mean = tl.load(means + row + place, mask=holds, other=0.0)
        repeated = tl.exp2((mean - top) * LOG2_E) / total
        pooled = tl.where(place < prefix, pooled, 0.0)
        mixed = tl.where(place < prefix, pooled * mix_lambda - repeated * rest, float("inf"))
        tl.store(score + at + s, mixed, mask=holds)
