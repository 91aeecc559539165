"""The kernels of CAKE: what the window observes in a prompt, and a decode step.

A prompt takes two passes over its keys: the normalisers of the window's softmaxes, then the indicators. A step takes
three launches. The programs of a KV head share its slots, store the new token and attend. Then some programs sort the
weights by the positions of their tokens, while others merge the shares of the output. Last, one program per KV head
pools the weights and evicts.

Tokens never move: a new one takes the slot that an evicted one has left. `order` lists the slots in the order of their
tokens' positions, along which the pool runs. Buffers per KV head: positions [slots] int64, -1 = free; order [slots]
int32; held, the number of tokens; free, the lowest free slot; seen, the number of tokens received, padding included.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.numerics import dot, multiply, round_output, round_to, sortable
from .._common.softmax import divide, merge_sums, weigh_tile

#: Above the key of every token, and below it.
_NEVER, _LOWEST = tl.constexpr(2**63 - 1), tl.constexpr(-(2**63) + 1)
_SMALLEST = tl.constexpr(1e-10)  # the authors add it to a weight before they take its logarithm
_LN_2 = tl.constexpr(0.6931471805599453)


# A prompt ------------------------------------------------------------------------------------------------------------


_SIZES = [
    "total", "window", "heads", "query_b", "query_h", "query_w", "key_b", "key_h", "key_t", "occupied_b", "occupied_t",
    "splits",
]


@triton.jit
def _load_queries(
    query, occupied, w, total, window, query_w, query_d, occupied_t, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr
):
    """The window's queries w of a head, [QUERIES, D_PAD], and which of them attend."""
    d = tl.arange(0, D_PAD).to(tl.int64)
    position = (total - window + w).to(tl.int64)
    attends = tl.load(occupied + position * occupied_t, mask=w < window, other=0) != 0
    q = tl.load(
        query + w.to(tl.int64)[:, None] * query_w + d[None, :] * query_d,
        mask=attends[:, None] & (d < HEAD_DIM)[None, :], other=0.0,
    )
    return q, attends


@triton.jit
def _window_logits(q, k, w, t, attends, holds, scale, total, window):
    """Base-2 logits [QUERIES, BLOCK] of window queries w and tokens t; -inf where w does not attend to t."""
    causal = t[None, :] <= (total - window + w)[:, None]
    logit = multiply(dot(q, tl.trans(k)), scale)
    return tl.where(attends[:, None] & holds[None, :] & causal, logit, float("-inf"))


@triton.jit(do_not_specialize=[*_SIZES, "share"])
def normaliser_kernel(
    query, key, occupied, row_maxima, weight_sums, scale, total, window, heads,
    query_b, query_h, query_w, query_d, key_b, key_h, key_t, key_d, occupied_b, occupied_t, splits, share,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
):
    """Program (split of the tokens, QUERIES window queries, query head, row): the maxima of the softmaxes, and the sums
    relative to them, over `share` tokens. heads: the query heads. `scale` includes log2(e)."""
    split = tl.program_id(0) % splits
    parts = tl.cdiv(window, QUERIES)
    head = tl.program_id(0) // splits // parts
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    w = tl.program_id(0) // splits % parts * QUERIES + tl.arange(0, QUERIES)
    d = tl.arange(0, D_PAD).to(tl.int64)
    occupied += b * occupied_b
    q, attends = _load_queries(
        query + b * query_b + h * query_h, occupied, w, total, window, query_w, query_d, occupied_t, HEAD_DIM, D_PAD
    )
    key += b * key_b + h // GROUP * key_h
    row_max = tl.full([QUERIES], float("-inf"), tl.float32)
    weight_sum = tl.zeros([QUERIES], tl.float32)
    for start in tl.range(split * share, tl.minimum((split + 1) * share, total), BLOCK):
        t = start + tl.arange(0, BLOCK)
        t64 = t.to(tl.int64)
        holds = tl.load(occupied + t64 * occupied_t, mask=t < total, other=0) != 0
        k = tl.load(
            key + t64[:, None] * key_t + d[None, :] * key_d, mask=holds[:, None] & (d < HEAD_DIM)[None, :], other=0.0
        )
        logit = _window_logits(q, k, w, t, attends, holds, scale, total, window)
        _, row_max, weight_sum, _ = weigh_tile(logit, row_max, weight_sum)
    part = ((b * heads + h) * window + w) * splits + split
    tl.store(row_maxima + part, row_max, mask=w < window)
    tl.store(weight_sums + part, weight_sum, mask=w < window)


@triton.jit(do_not_specialize=_SIZES)
def observe_kernel(
    query, key, occupied, row_maxima, weight_sums, indicator, dispersions, shifts, scale, gamma, total, window, heads,
    query_b, query_h, query_w, query_d, key_b, key_h, key_t, key_d, occupied_b, occupied_t, splits,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program: BLOCK tokens of a KV head. Stores mean + gamma * variance over the window's queries, summed over the
    group's heads, [B, Hkv, prefix], and the tile's parts of dispersion and shift, [B, Hkv, tiles].

    The variance is a mean of squared deviations. Those of QUERIES queries at a time are exact; Chan's formula merges
    them."""
    prefix = total - window
    tiles = tl.cdiv(prefix, BLOCK)
    row_head = tl.program_id(0) // tiles
    b, k_head = (row_head // heads).to(tl.int64), (row_head % heads).to(tl.int64)
    t = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    t64 = t.to(tl.int64)
    d = tl.arange(0, D_PAD).to(tl.int64)
    i = tl.arange(0, SPLITS)
    occupied += b * occupied_b
    holds = tl.load(occupied + t64 * occupied_t, mask=t < prefix, other=0) != 0
    k = tl.load(
        key + b * key_b + k_head * key_h + t64[:, None] * key_t + d[None, :] * key_d,
        mask=holds[:, None] & (d < HEAD_DIM)[None, :], other=0.0,
    )
    score = tl.zeros([BLOCK], tl.float32)
    shift = tl.zeros([BLOCK], tl.float32)
    dispersion = tl.zeros([BLOCK], tl.float32)
    for g in range(0, GROUP):
        h = k_head * GROUP + g
        mean = tl.zeros([BLOCK], tl.float32)
        squares = tl.zeros([BLOCK], tl.float64)
        before = tl.sum(tl.zeros([QUERIES], tl.float32), 0)            # queries in earlier rounds
        for start in range(0, window, QUERIES):
            w = start + tl.arange(0, QUERIES)
            q, attends = _load_queries(
                query + b * query_b + h * query_h, occupied, w, total, window, query_w, query_d, occupied_t, HEAD_DIM,
                D_PAD,
            )
            part = ((b * heads * GROUP + h) * window + w)[:, None] * splits + i[None, :]
            row_max, weight_sum = merge_sums(
                row_maxima, weight_sums, part, attends[:, None] & (i < splits)[None, :], False
            )
            weight_sum = tl.where(attends, weight_sum, 1.0)            # the logits of padding are -inf
            logit = _window_logits(q, k, w, t, attends, holds, scale, total, window)
            weight = tl.exp2(logit - row_max[:, None]) / weight_sum[:, None]
            count = tl.sum(tl.where(attends, 1.0, 0.0), 0)
            mean_here = tl.sum(weight, 0) / tl.maximum(count, 1.0)
            deviation = tl.where(attends[:, None], weight - mean_here[None, :], 0.0)
            deviation = deviation.to(tl.float64)                       # so that equal tokens tie, see sum_of_products
            share = count / tl.maximum(before + count, 1.0)
            away = mean_here - mean
            squares += tl.sum(deviation * deviation, 0) + away * away * (before * share)
            mean += away * share
            before += count
            dispersion -= tl.sum(weight * tl.log2(weight + _SMALLEST), 0)
        # Not in float64, in whose division lanes of a warp may diverge: see numerics.py.
        variance = squares.to(tl.float32) / tl.maximum(before - 1.0, 1.0)
        score += mean + gamma * variance
        shift += variance
    tl.store(indicator + row_head.to(tl.int64) * prefix + t, score, mask=t < prefix)
    tl.store(dispersions + tl.program_id(0), tl.sum(dispersion, 0) * _LN_2)
    tl.store(shifts + tl.program_id(0), tl.sum(shift, 0))


# A decode step -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=[
    "heads", "splits", "slots", "share", "query_b", "query_h", "new_key_b", "new_key_h", "new_value_b", "new_value_h",
])
def attention_kernel(
    query, new_key, new_value, key, value, positions, order, held, free, seen, logits, partial, row_maxima, weight_sums,
    scale, heads, splits, slots, share, query_b, query_h, query_d, new_key_b, new_key_h, new_key_d, new_value_b,
    new_value_h, new_value_d,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Program: `share` slots of a KV head. The program of the lowest free slot stores the new token there and lists it.
    logits [B, Hq, slots] float32, in base 2, -inf in free slots. `scale` includes log2(e)."""
    split, row_head = tl.program_id(0) % splits, (tl.program_id(0) // splits).to(tl.int64)
    b, h = row_head // heads, row_head % heads
    d = tl.arange(0, D_PAD)
    in_head = d < HEAD_DIM
    key += row_head * slots * HEAD_DIM
    value += row_head * slots * HEAD_DIM
    positions += row_head * slots
    begin = split * share
    end = tl.minimum(begin + share, slots)
    newest = tl.load(free + row_head)
    if (newest >= begin) & (newest < end):
        d64 = d.to(tl.int64)
        at = newest.to(tl.int64) * HEAD_DIM + d
        k = tl.load(new_key + b * new_key_b + h * new_key_h + d64 * new_key_d, mask=in_head)
        v = tl.load(new_value + b * new_value_b + h * new_value_h + d64 * new_value_d, mask=in_head)
        tl.store(key + at, k, mask=in_head)
        tl.store(value + at, v, mask=in_head)
        tl.store(positions + newest, tl.load(seen + row_head))
        tl.store(order + row_head * slots + tl.load(held + row_head), newest)
        tl.debug_barrier()                                              # this program also reads what it has written
    row = tl.arange(0, ROWS)
    mask = (row < GROUP)[:, None] & in_head[None, :]
    q = tl.load(
        query + b * query_b + (h * GROUP + row)[:, None] * query_h + d.to(tl.int64)[None, :] * query_d,
        mask=mask, other=0.0,
    )
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    for start in range(begin, end, BLOCK):
        s = start + tl.arange(0, BLOCK)
        holds = tl.load(positions + s, mask=s < end, other=-1) >= 0
        at = s.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
        tile = holds[:, None] & in_head[None, :]
        k = tl.load(key + at, mask=tile, other=0.0)
        logit = multiply(dot(q, tl.trans(k)), scale)
        logit = tl.where(holds[None, :] & (row < GROUP)[:, None], logit, float("-inf"))
        tl.store(
            logits + (row_head * GROUP + row)[:, None] * slots + s[None, :], logit,
            mask=(row < GROUP)[:, None] & (s < end)[None, :],
        )
        p, row_max, weight_sum, rescale = weigh_tile(logit, row_max, weight_sum)
        v = tl.load(value + at, mask=tile, other=0.0)
        acc = acc * rescale[:, None] + dot(round_to(p, v.dtype), v)
    part = (row_head * GROUP + row) * splits + split
    tl.store(row_maxima + part, row_max, mask=row < GROUP)
    tl.store(weight_sums + part, weight_sum, mask=row < GROUP)
    tl.store(partial + part[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)


@triton.jit
def _merge(
    partial, row_maxima, weight_sums, output, row, rows, splits,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr,
):
    """Merge the shares of query heads `row` [MERGED] of all rows."""
    i, d = tl.arange(0, SPLITS), tl.arange(0, D_PAD)
    part, there = row[:, None] * splits + i[None, :], (row < rows)[:, None] & (i < splits)[None, :]
    row_max, weight_sum = merge_sums(row_maxima, weight_sums, part, there, False)
    share = tl.exp2(tl.load(row_maxima + part, mask=there, other=float("-inf")) - row_max[:, None])
    each = tl.load(
        partial + part[:, :, None] * HEAD_DIM + d[None, None, :],
        mask=there[:, :, None] & (d < HEAD_DIM)[None, None, :], other=0.0,
    )
    result = divide(tl.sum(each * share[:, :, None], 1), weight_sum)    # [MERGED, D_PAD]
    tl.store(
        output + row[:, None] * HEAD_DIM + d[None, :], round_output(result, output.dtype.element_ty),
        mask=(row < rows)[:, None] & (d < HEAD_DIM)[None, :],
    )


@triton.jit
def _leaving(held, budgets, row_head, heads, window):
    """The number of tokens of a KV head, the new one included, and how many of them a step evicts."""
    count = tl.load(held + row_head) + 1
    most = (tl.load(budgets + row_head // heads) + window).to(tl.int32)
    return count, tl.maximum(count - most, 0)


@triton.jit(do_not_specialize=["row_heads", "heads", "tiles", "splits", "slots", "window"])
def merge_kernel(
    order, held, budgets, logits, received, partial, row_maxima, weight_sums, output,
    row_heads, heads, tiles, splits, slots, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    CHUNK: tl.constexpr, MERGED: tl.constexpr,
):
    """The first B * Hkv * tiles programs each write the weights of CHUNK tokens in order, summed over the heads of the
    group: received [B, Hkv, slots]. They have nothing to do for a KV head that evicts no token. The other programs each
    merge the shares of MERGED query heads."""
    number = tl.program_id(0).to(tl.int64)
    if number >= row_heads * tiles:
        query_head = (number - row_heads * tiles) * MERGED + tl.arange(0, MERGED)
        _merge(partial, row_maxima, weight_sums, output, query_head, row_heads * GROUP, splits, HEAD_DIM, D_PAD, SPLITS)
        return
    row_head, start = number // tiles, (number % tiles).to(tl.int32) * CHUNK
    count, leave = _leaving(held, budgets, row_head, heads, window)
    if (leave == 0) | (start >= count):
        return
    row, split = tl.arange(0, ROWS), tl.arange(0, SPLITS)
    part = (row_head * GROUP + row)[:, None] * splits + split[None, :]
    there = (row < GROUP)[:, None] & (split < splits)[None, :]
    row_max, weight_sum = merge_sums(row_maxima, weight_sums, part, there, False)
    weight_sum = tl.where(row < GROUP, weight_sum, 1.0)
    i = start + tl.arange(0, CHUNK)
    slot = tl.load(order + row_head * slots + i, mask=i < count, other=0)
    logit = tl.load(
        logits + (row_head * GROUP + row)[:, None] * slots + slot[None, :],
        mask=(row < GROUP)[:, None] & (i < count)[None, :], other=float("-inf"),
    )
    weight = tl.exp2(logit - row_max[:, None]) / weight_sum[:, None]
    tl.store(received + row_head * slots + i, tl.sum(weight, 0), mask=i < count)


@triton.jit
def _keys(received, i, prefix, kernel_size):
    """What orders the evictions of tokens i, int64: the pooled weights, then the index. The factor 1 / (kernel_size G)
    would not change the order."""
    total = tl.full(i.shape, 0.0, tl.float32)
    for k in range(kernel_size):
        near = i + k - kernel_size // 2
        total += tl.load(received + near, mask=(near >= 0) & (near < prefix) & (i < prefix), other=0.0)
    return tl.where(i < prefix, (sortable(total).to(tl.int64) << 32) + i, _NEVER)


@triton.jit
def _evict(positions, order, received, count, prefix, leave, kernel_size, CHUNK: tl.constexpr):
    """Evict `leave` of the first `prefix` tokens of `order`, and take them off the list. Returns the slot of one."""
    last = leave.to(tl.int64) * 0 + _LOWEST
    for _ in range(leave):                                              # one, except after a short prompt
        best = tl.full([CHUNK], _NEVER, tl.int64)
        for start in range(0, prefix, CHUNK):
            key = _keys(received, start + tl.arange(0, CHUNK), prefix, kernel_size)
            best = tl.minimum(best, tl.where(key > last, key, _NEVER))
        last = tl.min(best, 0)
    if leave == 1:
        victim = (last & 0xFFFFFFFF).to(tl.int32)
        left = tl.load(order + victim)
        tl.debug_barrier()                                              # all have read before one overwrites
        tl.store(positions + left, -1)
        for start in range(victim, count - 1, CHUNK):
            i = start + tl.arange(0, CHUNK)
            slot = tl.load(order + i + 1, mask=i < count - 1, other=0)
            tl.debug_barrier()
            tl.store(order + i, slot, mask=i < count - 1)
    else:
        left = leave * 0
        removed = leave * 0
        for start in range(0, count, CHUNK):
            i = start + tl.arange(0, CHUNK)
            slot = tl.load(order + i, mask=i < count, other=0)
            leaves = tl.where(_keys(received, i, prefix, kernel_size) <= last, 1, 0)
            tl.store(positions + slot, tl.full([CHUNK], -1, tl.int64), mask=leaves != 0)
            to = i - removed - (tl.cumsum(leaves, 0) - leaves)
            tl.debug_barrier()
            tl.store(order + to, slot, mask=(i < count) & (leaves == 0))
            removed += tl.sum(leaves, 0)
    return left


@triton.jit
def _lowest_free(positions, slots, CHUNK: tl.constexpr):
    lowest = tl.full([CHUNK], 2**31 - 1, tl.int32)
    for start in range(0, slots, CHUNK):
        s = start + tl.arange(0, CHUNK)
        is_free = tl.load(positions + s, mask=s < slots, other=0) < 0
        lowest = tl.minimum(lowest, tl.where(is_free, s, 2**31 - 1))
    return tl.min(lowest, 0)


@triton.jit(do_not_specialize=["heads", "slots", "window", "kernel_size"])
def evict_kernel(
    positions, order, held, free, seen, budgets, received, heads, slots, window, kernel_size, CHUNK: tl.constexpr
):
    """Program: a KV head evicts down to budget + window tokens, counts the new token, and finds its next free slot."""
    row_head = tl.program_id(0).to(tl.int64)
    positions += row_head * slots
    order += row_head * slots
    received += row_head * slots
    count, leave = _leaving(held, budgets, row_head, heads, window)
    now = tl.load(seen + row_head) + 1
    left = leave * 0
    if leave > 0:
        in_window = tl.full([CHUNK], 0, tl.int32)
        for start in range(tl.maximum(count - window, 0), count, CHUNK):
            i = start + tl.arange(0, CHUNK)
            slot = tl.load(order + i, mask=i < count, other=0)
            position = tl.load(positions + slot, mask=i < count, other=-1)
            in_window += tl.where(position >= now - window, 1, 0)
        prefix = count - tl.sum(in_window, 0)
        left = _evict(positions, order, received, count, prefix, leave, kernel_size, CHUNK)
        tl.debug_barrier()
    count -= leave
    if (leave != 1) | (count < slots - 1):
        left = _lowest_free(positions, slots, CHUNK)
    tl.store(held + row_head, count)
    tl.store(free + row_head, left)
    tl.store(seen + row_head, now)
