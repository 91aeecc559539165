"""A window of the last queries of a state: a block's queries enter it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..launch import SMALL_TILES, on_device_of, padded_head_dim
from ..operation import operation

#: Queries per program. In the interpreter few, so that tests cover several programs.
QUERIES = 2 if SMALL_TILES else 32


@operation("kvtwin::block_observe", mutates_args=("window_query", "window_positions"))
def observe(
    query: Tensor, valid: Tensor, seen: Tensor, window_query: Tensor, window_positions: Tensor, counted: bool = False
) -> None:
    """Store the last queries of a block in a ring of W: the query of position p at index p % W.

    query [B, Hq, Q, D]; valid [B, Q] bool; seen [1] int64, the tokens before the block, or,
    with `counted`, those of the block included; window_query [B, Hq, W, D] and
    window_positions [B, W] int64, contiguous. The position of padding is -1.
    """
    batch, query_heads, count, head_dim = query.shape
    observers = window_positions.shape[1]
    new = min(count, observers)
    with on_device_of(query):
        observe_kernel[(batch * query_heads * triton.cdiv(new, QUERIES),)](
            query, valid, seen, window_query, window_positions, count, count if counted else 0, new, query_heads,
            observers, *query.stride(),
            *valid.stride(), HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), TILE=QUERIES, num_warps=4,
        )


@triton.jit(do_not_specialize=[
    "count", "counted", "new", "query_heads", "observers", "query_b", "query_h", "query_q", "valid_b",
])
def observe_kernel(
    query, valid, seen, window_query, window_positions, count, counted, new, query_heads, observers,
    query_b, query_h, query_q, query_d, valid_b, valid_q,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr,
):
    """Program (TILE of the last `new` queries, query head, row of the batch)."""
    tiles = tl.cdiv(new, TILE)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // query_heads, head % query_heads
    number = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    inside = number < new
    i = (count - new + number).to(tl.int64)
    position = tl.load(seen) - counted + i
    place = position % observers
    d = tl.arange(0, D_PAD).to(tl.int64)
    mask = inside[:, None] & (d < HEAD_DIM)[None, :]
    rows = tl.load(query + b * query_b + h * query_h + i[:, None] * query_q + d[None, :] * query_d, mask=mask)
    tl.store(window_query + (head * observers + place)[:, None] * HEAD_DIM + d[None, :], rows, mask=mask)
    if h == 0:
        there = tl.load(valid + b * valid_b + i * valid_q, mask=inside, other=0) != 0
        tl.store(window_positions + b * observers + place, tl.where(there, position, -1), mask=inside)
