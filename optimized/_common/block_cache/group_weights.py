"""A device function for methods that look at each weight of a block: the weights of a tile of queries and keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import INTERPRETED, SMALL_TILES
from ..numerics import dot, scaled_logit

#: The tile for much work and short rows: (queries, slots, warps). The best measured on an H200.
TILE = (32, 128, 4)


def group_weights_tile(query: Tensor, key: Tensor) -> tuple[int, int, int]:
    """See TILE."""
    few = query.shape[2] <= 16
    if query.dtype == torch.float32 and not INTERPRETED:
        return 16, 16, 4                                               # see FLOAT32_TILE in kernels.py
    if SMALL_TILES:
        return 16, (16 if key.shape[2] <= 48 else 64), 4
    if query.shape[3] > 128:
        return (16 if few else 32), 64, 4
    return (16, 64, 4) if few else TILE


@triton.jit
def group_weights(
    k, query, softmax_parts, asks, i, count, all_queries, scale, softcap, query_h, query_q, query_d,
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
        part = tl.exp2(scaled_logit(dot(k, tl.trans(q)), scale, softcap) - shift[None, :])
        weight += tl.where((inverse != 0.0)[None, :], part, 0.0) * inverse[None, :]
        query += query_h
        softmax_parts += count
    return weight
