"""RaaS on the GPU: a block's attention, then each key's last query that renews its timestamp."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference.baselines.raas import RaaSConfig
from .._common.block_cache.group_weights import group_weights
from .._common.block_cache.kernels import _arguments, _received_tile, _shape
from .._common.block_cache.state import Block, BlockState
from .._common.launch import on_device_of
from .._common.numerics import LOG2_E

__all__ = ["RaaSConfig", "RaaSState"]


class RaaSState(BlockState):
    """A RaaS cache. Of equal timestamps, the oldest token is evicted. `score` is each token's timestamp, in float32,
    which is exact for positions below 2^24."""

    Config = RaaSConfig
    _rule = "renew"

    def _allocate(self) -> None:
        self._sinks, self._recent, self._alpha = self.config.sinks, self.config.recent, self.config.alpha

    def _update(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        end = block.end
        assert block.softmax_parts is not None
        return renew(
            block.query, self.key[:, :, :end], self.occupied[..., :end], block.softmax_parts, self._score,
            self.positions, self._seen, self.scale, self.config.alpha,
        ), None


@torch.library.custom_op("kvtwin::raas_renew", mutates_args=("score",))
def renew(
    query: Tensor, key: Tensor, occupied: Tensor, softmax_parts: Tensor, score: Tensor, positions: Tensor, seen: Tensor,
    scale: float, alpha: float,
) -> Tensor:
    """Store in score [B, Hkv, slots] the position of the last query whose weight for a key, averaged over the group, is
    at least alpha, if there is one; of the block's own keys at least their positions. Returns the ranks [B, Hkv, S]
    int64: score * 2^31 + position.

    query [B, Hq, Q, D], those of the last Q of the S slots; key [B, Hkv, S, D]; occupied [B, Hkv, S] bool;
    softmax_parts: see `kernels.Attended`; seen [1] int64: the position of the first query.
    """
    queries, block, _, warps = _received_tile(query, key)
    rank = torch.empty(key.shape[:3], dtype=torch.int64, device=key.device)
    with on_device_of(query):
        renew_kernel[(key.shape[0] * key.shape[1] * triton.cdiv(key.shape[2], block),)](
            query, key, occupied, softmax_parts, score, positions, rank, seen, scale * LOG2_E.value, alpha,
            score.stride(1),
            *_arguments(query, key, key, occupied), **_shape(query, key, key), ROWS=queries, BLOCK=block,
            num_warps=warps,
        )
    return rank


@renew.register_fake
def _(
    query: Tensor, key: Tensor, occupied: Tensor, softmax_parts: Tensor, score: Tensor, positions: Tensor, seen: Tensor,
    scale: float, alpha: float,
) -> Tensor:
    return key.new_empty(key.shape[:3], dtype=torch.int64)


@triton.jit(do_not_specialize=[
    "score_h", "slots", "count", "heads", "query_b", "query_h", "query_q", "key_b", "key_h", "key_s", "value_b",
    "value_h", "value_s", "occupied_b", "occupied_h",
])
def renew_kernel(
    query, key, occupied, softmax_parts, score, positions, rank, seen, scale, alpha, score_h,
    slots, count, heads, query_b, query_h, query_q, query_d,
    key_b, key_h, key_s, key_d, value_b, value_h, value_s, value_d, occupied_b, occupied_h, occupied_s,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (block of keys, KV head, row of the batch): their timestamps and ranks."""
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
    last = tl.where(s >= past, s - past, -1)                           # the block's own tokens are renewed on arrival
    nearest = tl.maximum(first - past, 0) // ROWS                      # earlier tiles attend to none of these keys
    for tile in range(nearest, tl.cdiv(count, ROWS)):
        i = tile * ROWS + tl.arange(0, ROWS)
        asks = tl.load(occupied + (past + i).to(tl.int64) * occupied_s, mask=i < count, other=0) != 0
        weight = group_weights(
            k, query, softmax_parts, asks, i, count, all_queries, scale, query_h * UNIT, query_q * UNIT, query_d,
            GROUP, HEAD_DIM, D_PAD, ROWS, BLOCK,
        )
        sees = holds[:, None] & asks[None, :] & (s[:, None] <= (past + i)[None, :])
        renewed = tl.where(sees & (weight / GROUP >= alpha), i[None, :], -1)
        last = tl.maximum(last, tl.max(renewed, 1))
    at = batch_head * score_h + s64
    old = tl.load(score + at, mask=holds, other=0.0)
    time = tl.where(last >= 0, tl.load(seen) + last, old.to(tl.int64))
    tl.store(score + at, time.to(tl.float32), mask=holds)
    position = tl.load(positions + at, mask=holds, other=0)
    tl.store(rank + batch_head * slots + s, (time << 31) + position, mask=s < slots)
