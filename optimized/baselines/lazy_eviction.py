"""LazyEviction on the GPU: a block's attention, then the activations of each key, query by query. A step does both at
once: see `score_kernels.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference.baselines.lazy_eviction import LazyEvictionConfig
from .._common.block_cache.group_weights import group_weights, group_weights_tile
from .._common.block_cache.kernels import _arguments, _shape
from .._common.block_cache.score_kernels import importance
from .._common.block_cache.state import Block, BlockState, Policy
from .._common.launch import on_device_of
from .._common.numerics import logit_factors
from .._common.operation import operation

__all__ = ["LazyEvictionConfig", "LazyEvictionState"]


class LazyEvictionState(BlockState):
    """A LazyEviction cache. `score` is each token's importance after the last token. Positions below 2^31."""

    Config = LazyEvictionConfig
    _rule = "activate"
    #: last * 2^32 + gap of each token: the position of the query that activated it last, and its longest gap.
    _carries = torch.int64

    def _make_policy(self) -> Policy:
        return Policy(recent=self.config.recent, offset=int(self.config.shifted), alpha=self.config.alpha)

    def _update(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        end = block.end
        assert block.softmax_parts is not None
        assert self._carried is not None
        return activate(
            block.query, self.key[:, :, :end], self.occupied[..., :end], block.softmax_parts, self._score,
            self._carried, self._seen, self.scale, self.config.softcap, self.config.alpha, float(self.config.shifted),
        ), None


@operation("kvtwin::lazy_eviction_activate", mutates_args=("score", "carried"))
def activate(
    query: Tensor, key: Tensor, occupied: Tensor, softmax_parts: Tensor, score: Tensor, carried: Tensor, seen: Tensor,
    scale: float, softcap: float | None, alpha: float, shift: float,
) -> Tensor:
    """Update carried [B, Hkv, slots] int64 with the queries whose weight for a key, averaged over the group, is at
    least alpha, and store the importances in score [B, Hkv, slots]. Returns them for the S slots of the keys.

    query [B, Hq, Q, D], those of the last Q of the S slots; key [B, Hkv, S, D]; occupied [B, Hkv, S] bool;
    softmax_parts: see `kernels.Attended`; seen [1] int64: the position of the first query.
    """
    queries, block, warps = group_weights_tile(query, key)
    rank = torch.empty(key.shape[:3], dtype=torch.float32, device=key.device)
    with on_device_of(query):
        activate_kernel[(key.shape[0] * key.shape[1] * triton.cdiv(key.shape[2], block),)](
            query, key, occupied, softmax_parts, score, carried, rank, seen, *logit_factors(scale, softcap),
            alpha, shift, score.stride(1),
            *_arguments(query, key, key, occupied), **_shape(query, key, key), ROWS=queries, BLOCK=block,
            num_warps=warps,
        )
    return rank


@activate.register_fake
def _(key: Tensor) -> Tensor:
    return key.new_empty(key.shape[:3], dtype=torch.float32)


@triton.jit(do_not_specialize=[
    "score_h", "slots", "count", "heads", "query_b", "query_h", "query_q", "key_b", "key_h", "key_s", "value_b",
    "value_h", "value_s", "occupied_b", "occupied_h",
])
def activate_kernel(
    query, key, occupied, softmax_parts, score, carried, rank, seen, scale, softcap, alpha, shift, score_h,
    slots, count, heads, query_b, query_h, query_q, query_d,
    key_b, key_h, key_s, key_d, value_b, value_h, value_s, value_d, occupied_b, occupied_h, occupied_s,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (block of keys, KV head, row of the batch): their activations and importances. Times count from the
    block's first query."""
    blocks = tl.cdiv(slots, BLOCK)
    first = (tl.program_id(0) % blocks) * BLOCK
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    b, k_head = batch_head // heads, batch_head % heads
    key += (b * key_b + k_head * key_h) * UNIT
    occupied += b * occupied_b + k_head * occupied_h
    query += (b * query_b + k_head * GROUP * query_h) * UNIT
    softmax_parts += batch_head * GROUP * count
    all_queries = tl.num_programs(0).to(tl.int64) // blocks * GROUP * count
    past = slots - count
    d = tl.arange(0, D_PAD).to(tl.int64)
    in_head = (d < HEAD_DIM)[None, :]
    s = first + tl.arange(0, BLOCK)
    s64 = s.to(tl.int64)
    holds = tl.load(occupied + s64 * occupied_s, mask=s < slots, other=0) != 0
    k = tl.load(key + s64[:, None] * (key_s * UNIT) + d[None, :] * key_d, mask=holds[:, None] & in_head, other=0.0)
    at = batch_head * score_h + s64
    start = tl.load(seen)
    known = tl.load(carried + at, mask=holds, other=0)
    is_new = s >= past
    last = tl.where(is_new, s - past - 1, ((known >> 32) - start).to(tl.int32))
    gap = tl.where(is_new, 0, (known & 0xFFFFFFFF).to(tl.int32))
    nearest = tl.maximum(first - past, 0) // ROWS                      # earlier tiles attend to none of these keys
    for tile in range(nearest, tl.cdiv(count, ROWS)):
        r = tl.arange(0, ROWS)
        i = tile * ROWS + r
        asks = tl.load(occupied + (past + i).to(tl.int64) * occupied_s, mask=i < count, other=0) != 0
        weight = group_weights(
            k, query, softmax_parts, asks, i, count, all_queries, scale, softcap, query_h * UNIT, query_q * UNIT,
            query_d, GROUP, HEAD_DIM, D_PAD, ROWS, BLOCK,
        )
        sees = holds[:, None] & asks[None, :] & (s[:, None] <= (past + i)[None, :])
        # A bit per query, so that the queries can be gone through in their order.
        active = tl.sum(tl.where(sees & (weight / GROUP >= alpha), tl.full([ROWS], 1, tl.int64)[None, :] << r, 0), 1)
        for row in range(0, tl.minimum(ROWS, count - tile * ROWS)):
            now = tile * ROWS + row
            activates = ((active >> row) & 1) != 0
            gap = tl.where(activates, tl.maximum(gap, now - last), gap)
            last = tl.where(activates, now, last)
    tl.store(carried + at, ((start + last) << 32) + gap, mask=holds)
    found = importance(count - 1 - last, gap, shift)
    tl.store(score + at, found, mask=holds)
    tl.store(rank + batch_head * slots + s, found, mask=s < slots)
