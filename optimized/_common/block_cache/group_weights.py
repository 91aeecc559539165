"""A device function for methods that look at each weight of a block: the weights of a tile of queries and keys."""

from __future__ import annotations

import triton
import triton.language as tl

from ..numerics import dot, multiply


@triton.jit
def group_weights(
    k, query, softmax_parts, asks, i, count, all_queries, scale, query_h, query_q, query_d,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """The weights that queries i [ROWS] give to keys k [BLOCK, D_PAD], summed over the heads of the group:
    [BLOCK, ROWS]. Not causal. asks [ROWS]: False for padding. Pointers are at the KV head; query_h and query_q are in
    elements; all_queries: the number of queries of all heads of the batch, see `kernels.Attended`."""
    d = tl.arange(0, D_PAD).to(tl.int64)
    i64 = i.to(tl.int64)
    weight = tl.zeros([BLOCK, ROWS], tl.float32)
    for _ in range(GROUP):
        shift = tl.load(softmax_parts + i64, mask=asks, other=0.0)
        inverse = tl.load(softmax_parts + all_queries + i64, mask=asks, other=0.0)
        q = tl.load(
            query + i64[:, None] * query_q + d[None, :] * query_d,
            mask=asks[:, None] & (d < HEAD_DIM)[None, :], other=0.0,
        )
        part = tl.exp2(multiply(dot(k, tl.trans(q)), scale) - shift[None, :])
        weight += tl.where((inverse != 0.0)[None, :], part, 0.0) * inverse[None, :]
        query += query_h
        softmax_parts += count
    return weight
