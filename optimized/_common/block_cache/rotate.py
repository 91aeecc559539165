"""Rotary embedding by places in a cache of which the first tokens and the newest ones remain."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import SMALL_TILES, on_device_of, padded_head_dim
from ..numerics import float32, round_to
from ..operation import operation

#: Vectors per program.
BLOCK = 16 if SMALL_TILES else 32


@operation("kvtwin::block_rotate", mutates_args=())
def rotate(vector: Tensor, token_index: Tensor, evicted: Tensor, frequencies: Tensor, sinks: int) -> Tensor:
    """vector [B, H, N, D], rotated by its token's place, in its dtype and contiguous.

    The n frequencies [n] float32 rotate the channels d and d + n by the angle place * frequency; the other channels are
    unchanged. token_index [B, Hkv, N] int32: the token's index among all tokens of its row; H is Hkv or a multiple of
    it. evicted [B, Hkv] int32: the number of tokens that were evicted, which follow the first `sinks` tokens. Vectors
    of free slots give arbitrary vectors.
    """
    batch, heads, count, head_dim = vector.shape
    rotated = torch.empty(vector.shape, dtype=vector.dtype, device=vector.device)
    blocks = triton.cdiv(count, BLOCK)
    with on_device_of(vector):
        rotate_kernel[(batch * heads * blocks,)](
            vector, token_index, evicted, frequencies, rotated, heads, heads // token_index.shape[1], count, blocks,
            sinks, *vector.stride(), *token_index.stride(), PAIRS=frequencies.shape[0], HEAD_DIM=head_dim,
            D_PAD=padded_head_dim(head_dim), BLOCK=BLOCK, num_warps=4,
        )
    return rotated


@rotate.register_fake
def _(vector: Tensor) -> Tensor:
    return vector.new_empty(vector.shape)


@triton.jit(do_not_specialize=[
    "heads", "group", "count", "blocks", "sinks", "vector_b", "vector_h", "vector_n", "index_b", "index_h",
])
def rotate_kernel(
    vector, token_index, evicted, frequencies, rotated, heads, group, count, blocks, sinks,
    vector_b, vector_h, vector_n, vector_d, index_b, index_h, index_n,
    PAIRS: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
):
    """Program (block of vectors, batch_head)."""
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    b, head = batch_head // heads, batch_head % heads
    k_head = head // group
    n = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = n < count
    index = tl.load(token_index + b * index_b + k_head * index_h + n * index_n, mask=inside, other=0)
    gone = tl.load(evicted + b * (heads // group) + k_head)
    place = index - tl.where(index < sinks, 0, gone)
    d = tl.arange(0, D_PAD)
    turns = d < 2 * PAIRS
    frequency = tl.load(frequencies + d % PAIRS, mask=turns, other=0.0)
    angle = place.to(tl.float32)[:, None] * frequency[None, :]
    partner = tl.where(turns, tl.where(d < PAIRS, d + PAIRS, d - PAIRS), d).to(tl.int64)
    row = vector + b * vector_b + head * vector_h + n[:, None] * vector_n
    tile = inside[:, None] & (d < HEAD_DIM)[None, :]
    own = float32(tl.load(row + d.to(tl.int64)[None, :] * vector_d, mask=tile, other=0.0))
    other = float32(tl.load(row + partner[None, :] * vector_d, mask=tile, other=0.0))
    turned = own * tl.cos(angle) + tl.where(d < PAIRS, -other, other) * tl.sin(angle)
    result = tl.where(turns[None, :], turned, own)
    into = rotated + (batch_head * count + n[:, None]) * HEAD_DIM + d[None, :]
    tl.store(into, round_to(result, rotated.dtype.element_ty), mask=tile)
