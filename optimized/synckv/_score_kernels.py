"""The log-weights of R-heads: keys are read once and logits are stored, then normalized and pooled over the group.

Logits and everything derived from them are in base 2. `batch_head` is the index of a (row of the batch, R-head).
Scratch is contiguous: logits [batch_heads, GROUP, slots], maxima and sums [batch_heads * GROUP, splits], weights
[batch_heads, slots].
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.numerics import dot
from .._common.softmax import denominators, weigh_tile


@triton.jit(do_not_specialize=[
    "slots", "split_size", "splits", "heads", "query_b", "query_h", "key_b", "key_h", "key_s", "occupied_b",
    "occupied_s",
])
def logits_kernel(
    query, key, occupied, members, logits, row_maxima, weight_sums, scale, slots, split_size, splits, heads,
    query_b, query_h, query_d, key_b, key_h, key_s, key_d, occupied_b, occupied_s,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Program (split, batch_head): the logits of a share of the slots, their maxima and sums. Strides of keys are over
    UNIT.

    Unoccupied slots are not read; their logits are -inf. members [heads]: the KV heads of the R-heads; None: all.
    """
    split = tl.program_id(0) % splits
    batch_head = (tl.program_id(0) // splits).to(tl.int64)
    b, head = batch_head // heads, batch_head % heads
    if members is not None:
        head = tl.load(members + head).to(tl.int64)
    row = tl.arange(0, ROWS)
    d = tl.arange(0, D_PAD).to(tl.int64)
    valid, inside = row < GROUP, d < HEAD_DIM
    q = tl.load(
        query + b * query_b + (head * GROUP + row)[:, None] * query_h + d[None, :] * query_d,
        mask=valid[:, None] & inside[None, :], other=0.0,
    )
    key += (b * key_b + head * key_h) * UNIT
    occupied += b * occupied_b
    logits += batch_head * GROUP * slots
    end = tl.minimum(split * split_size + split_size, slots)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    for start in range(split * split_size, end, BLOCK):
        s = start + tl.arange(0, BLOCK)
        s64 = s.to(tl.int64)
        holds = tl.load(occupied + s64 * occupied_s, mask=s < end, other=0) != 0
        reads = holds[:, None]
        if HEAD_DIM != D_PAD:
            reads = reads & inside[None, :]
        k = tl.load(key + s64[:, None] * (key_s * UNIT) + d[None, :] * key_d, mask=reads, other=0.0)
        logit = tl.where(holds[None, :], dot(q, tl.trans(k)) * scale, float("-inf"))
        tl.store(
            logits + row[:, None].to(tl.int64) * slots + s64[None, :], logit, mask=valid[:, None] & (s < end)[None, :]
        )
        _, row_max, weight_sum, _ = weigh_tile(logit, row_max, weight_sum)
    part = (batch_head * GROUP + row) * splits + split
    tl.store(row_maxima + part, row_max, mask=valid)
    tl.store(weight_sums + part, weight_sum, mask=valid)


@triton.jit(do_not_specialize=["slots", "splits", "chunks"])
def pool_kernel(
    logits, row_maxima, weight_sums, weights, slots, splits, chunks,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):
    """Program (chunk, batch_head): log2 of the largest weight that the query heads of a group give each slot."""
    chunk = tl.program_id(0) % chunks
    batch_head = (tl.program_id(0) // chunks).to(tl.int64)
    row_max, log_total = denominators(row_maxima, weight_sums, batch_head, splits, GROUP, ROWS, SPLITS)
    row = tl.arange(0, ROWS)
    s = chunk * CHUNK + tl.arange(0, CHUNK)
    s64 = s.to(tl.int64)
    logit = tl.load(
        logits + (batch_head * GROUP + row)[:, None] * slots + s64[None, :],
        mask=(row < GROUP)[:, None] & (s < slots)[None, :], other=float("-inf"),
    )
    free = logit == float("-inf")
    # Subtract row_max and log_total one after the other: their sum would lose digits if the maximum is large. If no
    # slot is occupied, log_total is -inf too.
    weight = (tl.where(free, 0.0, logit) - row_max[:, None]) - log_total[:, None]
    tl.store(weights + batch_head * slots + s64, tl.max(tl.where(free, logit, weight), 0), mask=s < slots)
