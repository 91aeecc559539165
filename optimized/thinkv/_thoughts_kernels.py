"""The sparsity of a decode step's attention without the attention matrix: logits are computed twice.

The first kernel stores each split's maxima and sums; the second one counts. Device functions shared with other kernels
are in `_common/softmax.py` and `_common/thoughts.py`. Logits are in base 2. `batch_head` is the index of a (row of the
batch, KV head). Scratch is contiguous: maxima and sums [batch_heads * GROUP, splits], counts [batch_heads, splits, 2].
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.numerics import divided, dot, float32
from .._common.softmax import denominators, weigh_tile
from .._common.thoughts import below_cut, largest_in_group, pooled_cut, thought_of
from ._mean_kernels import FREE, below_mean, pooled_weight


@triton.jit
def _load_query(
    query, b, k_head, query_b, query_h, query_d,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
):
    d = tl.arange(0, D_PAD).to(tl.int64)
    row = tl.arange(0, ROWS)
    return tl.load(
        query + b * query_b + (k_head * GROUP + row)[:, None] * query_h + d[None, :] * query_d,
        mask=(row < GROUP)[:, None] & (d < HEAD_DIM)[None, :], other=0.0,
    )


@triton.jit
def _tile_logits(
    q, key, occupied, start, end, scale, key_s, key_d, occupied_s,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
):
    """The logits [ROWS, BLOCK] of a tile, -inf for unoccupied slots, which are not read; and which are occupied."""
    s = start + tl.arange(0, BLOCK)
    s64 = s.to(tl.int64)
    d = tl.arange(0, D_PAD).to(tl.int64)
    holds = tl.load(occupied + s64 * occupied_s, mask=s < end, other=0) != 0
    mask = holds[:, None]
    if HEAD_DIM != D_PAD:
        mask = mask & (d < HEAD_DIM)[None, :]
    k = tl.load(key + s64[:, None] * key_s + d[None, :] * key_d, mask=mask, other=0.0)
    return tl.where(holds[None, :], dot(q, tl.trans(k)) * scale, float("-inf")), holds


_SIZES = [
    "slots", "split_size", "splits", "heads", "query_b", "query_h", "key_b", "key_h", "key_s", "occupied_b",
    "occupied_s",
]


@triton.jit(do_not_specialize=_SIZES)
def denominators_kernel(
    query, key, occupied, row_maxima, weight_sums, scale, slots, split_size, splits, heads,
    query_b, query_h, query_d, key_b, key_h, key_s, key_d, occupied_b, occupied_s,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Program (split, batch_head): the softmaxes' maxima and sums of a share of the slots. Strides of keys are over
    UNIT."""
    split = tl.program_id(0) % splits
    batch_head = (tl.program_id(0) // splits).to(tl.int64)
    b, k_head = batch_head // heads, batch_head % heads
    q = _load_query(query, b, k_head, query_b, query_h, query_d, GROUP, HEAD_DIM, D_PAD, ROWS)
    key += (b * key_b + k_head * key_h) * UNIT
    occupied += b * occupied_b
    end = tl.minimum(split * split_size + split_size, slots)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    for start in range(split * split_size, end, BLOCK):
        logit, _ = _tile_logits(
            q, key, occupied, start, end, scale, key_s * UNIT, key_d, occupied_s, HEAD_DIM, D_PAD, BLOCK
        )
        _, row_max, weight_sum, _ = weigh_tile(logit, row_max, weight_sum)
    row = tl.arange(0, ROWS)
    part = (batch_head * GROUP + row) * splits + split
    tl.store(row_maxima + part, row_max, mask=row < GROUP)
    tl.store(weight_sums + part, weight_sum, mask=row < GROUP)


@triton.jit(do_not_specialize=_SIZES)
def count_kernel(
    query, key, occupied, row_maxima, weight_sums, counts, pooled, scale, log_threshold, slots, split_size, splits,
    heads, query_b, query_h, query_d, key_b, key_h, key_s, key_d, occupied_b, occupied_s,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr, SPLITS: tl.constexpr, OF_MEAN: tl.constexpr,
):
    """Program (split, batch_head): counts the tokens of a share of the slots that are not attended to, and all tokens.
    With OF_MEAN, also stores the weight of each slot in the KV head, pooled [batch_heads, slots]."""
    split = tl.program_id(0) % splits
    batch_head = (tl.program_id(0) // splits).to(tl.int64)
    b, k_head = batch_head // heads, batch_head % heads
    q = _load_query(query, b, k_head, query_b, query_h, query_d, GROUP, HEAD_DIM, D_PAD, ROWS)
    key += (b * key_b + k_head * key_h) * UNIT
    occupied += b * occupied_b
    end = tl.minimum(split * split_size + split_size, slots)
    row_max, log_total = denominators(row_maxima, weight_sums, batch_head, splits, GROUP, ROWS, SPLITS)
    cut = pooled_cut(log_total, log_threshold, GROUP, ROWS)
    below = tl.zeros([BLOCK], tl.int32)
    num_tokens = tl.zeros([BLOCK], tl.int32)
    for start in range(split * split_size, end, BLOCK):
        logit, holds = _tile_logits(
            q, key, occupied, start, end, scale, key_s * UNIT, key_d, occupied_s, HEAD_DIM, D_PAD, BLOCK
        )
        if OF_MEAN:
            s = start + tl.arange(0, BLOCK)
            log_weight = largest_in_group(logit, row_max, log_total, GROUP, ROWS)
            weight = pooled_weight(tl.where(holds, log_weight, float("inf")))
            tl.store(pooled + batch_head * slots + s, weight, mask=s < end)
        below += (below_cut(logit, row_max, log_total, cut, GROUP, ROWS) & holds).to(tl.int32)
        num_tokens += holds.to(tl.int32)
    at = counts + (batch_head * splits + split) * 2
    tl.store(at, tl.sum(below, 0))
    tl.store(at + 1, tl.sum(num_tokens, 0))


@triton.jit(do_not_specialize=["num_partials"])
def share_kernel(counts, sparsity, num_partials, BLOCK: tl.constexpr):
    """Program b: the sparsity of a row from `num_partials` counts. KV heads hold the same tokens, so their mean is the
    share over all heads."""
    b = tl.program_id(0).to(tl.int64)
    below = tl.zeros([BLOCK], tl.int64)
    num_tokens = tl.zeros([BLOCK], tl.int64)
    for start in range(0, num_partials, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at = counts + (b * num_partials + i) * 2
        below += tl.load(at, mask=i < num_partials, other=0)
        num_tokens += tl.load(at + 1, mask=i < num_partials, other=0)
    tokens = tl.maximum(tl.sum(num_tokens, 0), 1).to(tl.float32)
    tl.store(sparsity + b, divided(tl.sum(below, 0).to(tl.float32), tokens))


@triton.jit(do_not_specialize=["heads", "slots"])
def mean_count_kernel(pooled, sums, counts, threshold, heads, slots, BLOCK: tl.constexpr):
    """Program b: counts the tokens of a row that are not attended to in the weights averaged over KV heads, and all
    tokens. Stores the sums of the weights on the way."""
    b = tl.program_id(0).to(tl.int64)
    pooled += b * heads * slots
    sums += b * heads
    num_tokens = tl.zeros([BLOCK], tl.int32)
    for head in range(0, heads):
        weight_sum = tl.zeros([BLOCK], tl.float32)
        for start in range(0, slots, BLOCK):
            s = start + tl.arange(0, BLOCK)
            weight = tl.load(pooled + head * slots + s, mask=s < slots, other=FREE)
            weight_sum += tl.where(weight == FREE, 0.0, weight)
            num_tokens += ((weight != FREE) & (head == 0)).to(tl.int32)
        tl.store(sums + head, tl.sum(weight_sum, 0))
    tl.debug_barrier()
    tl.store(counts + b * 2, below_mean(pooled, sums, slots, heads, slots, threshold, BLOCK))
    tl.store(counts + b * 2 + 1, tl.sum(num_tokens, 0))


@triton.jit(do_not_specialize=["count"])
def classify_kernel(sparsity, thought, low, high, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    share = float32(tl.load(sparsity + i, mask=i < count, other=0.0))
    tl.store(thought + i, thought_of(share, low, high), mask=i < count)
