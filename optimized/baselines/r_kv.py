"""R-KV on the GPU: heads that are due score their tokens in three launches, without an [S, S] matrix in memory.

`similarity_kernel` multiplies each tile of keys with all keys of its head. Since C is symmetric, the sums of its rows
are those of its columns. For each token it finds the token that is exempt from its row. `importance_kernel` subtracts
what is exempt from the sums and adds up the attention of the window's queries; `mix_kernel` makes the scores of both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference.baselines.r_kv import RKVConfig
from .._common.block_cache.observe import observe
from .._common.block_cache.state import Block, BlockState
from .._common.launch import INTERPRETED, SMALL_TILES, on_device_of, padded_head_dim
from .._common.numerics import LOG2_E, dot, finite_or_zero, float32, multiply, round_to

__all__ = ["RKVConfig", "RKVState"]

#: Keys per tile, and warps. The interpreter and float32 need small tiles: see `kernels.FLOAT32_TILE`.
TILE, WARPS = 64, 4
#: Slots per iteration of the last kernel, tiles that are merged at a time, and window queries per `tl.dot`.
CHUNK, MERGED, QUERIES = (16, 2, 16) if SMALL_TILES else (1024, 64, 16)
#: Added to the norm of a key, as in the authors' code.
_EPSILON = tl.constexpr(1e-8)
_NEVER = tl.constexpr(2**31 - 1)


class Scratch(NamedTuple):
    """Buffers between the launches. sums, exempt, means, importance float32 and target, age int32, all [B * Hkv, S];
    parts float32 [2, B * Hkv, W, S / 16]: maxima and sums of the window's softmaxes over each tile."""

    sums: Tensor
    exempt: Tensor
    means: Tensor
    importance: Tensor
    target: Tensor
    age: Tensor
    parts: Tensor


class RKVState(BlockState):
    """An R-KV cache. After a block or decode step, a KV head of a row with at least budget + interval tokens is due: it
    scores its tokens and evicts down to the budget. `score` is the score at the last time, +inf for tokens that were in
    the window then or came later. The device decides which heads are due, from its own token counts. A step without
    evictions costs attention and four launches whose programs return at once.
    """

    Config = RKVConfig
    _rule = "append"
    _library_attends = True

    def _allocate(self) -> None:
        batch, query_heads, heads, slots, head_dim = self.sizes
        observers = self.config.observers
        # A ring: the query of position p is at index p % observers.
        self._window_query = self._buffer(batch, query_heads, observers, head_dim, dtype=self.dtype)
        self._window_positions = self._buffer(batch, observers, dtype=torch.int64)
        self._window = self._window_query, self._window_positions
        self._numbers = self._buffer(4, batch * heads, slots, dtype=torch.int32)
        of_slots = [torch.float32] * 4 + [torch.int32] * 2
        sums, exempt, means, importance, target, age = (
            self._buffer(batch * heads, slots, dtype=dtype) for dtype in of_slots
        )
        parts = self._buffer(2, batch * heads, observers, triton.cdiv(slots, 16), dtype=torch.float32)
        self._between = Scratch(sums, exempt, means, importance, target, age, parts)

    def _buffers(self) -> tuple[Tensor, ...]:
        return self._window_query, self._window_positions

    def _clear(self) -> None:
        self._window_positions.fill_(-1)

    def _evict(self, block: Block, count: int) -> None:
        observe(block.query, block.valid, self._seen, self._window_query, self._window_positions)
        self._score_and_thin(count, appended=False)

    def _finish_step(self, query: Tensor) -> None:
        self._score_and_thin(1, appended=True)

    def _score_and_thin(self, count: int, *, appended: bool) -> None:
        config = self.config
        score_due(
            self._window_query, self._window_positions, self.key, self.occupied, self._token_index, self._valid_seen,
            self._counts, self._score, *self._between, self.scale, config.capacity, count, config.kernel_size,
            config.mix_lambda, config.threshold, config.exempts_first, appended,
        )
        self._thin(self._score, count, appended=appended)


@torch.library.custom_op(
    "kvtwin::r_kv_score", mutates_args=("score", "sums", "exempt", "means", "importance", "target", "age", "parts")
)
def score_due(
    window_query: Tensor, window_positions: Tensor, key: Tensor, occupied: Tensor, token_index: Tensor,
    valid_seen: Tensor, counts: Tensor, score: Tensor, sums: Tensor, exempt: Tensor, means: Tensor, importance: Tensor,
    target: Tensor, age: Tensor, parts: Tensor, scale: float, capacity: int, count: int, kernel_size: int,
    mix_lambda: float, threshold: float, exempts_first: bool, appended: bool,
) -> None:
    """Store the scores of heads with more than `capacity` tokens, after `count` tokens arrived. The tokens that arrived
    in other heads, unless `appended`, get +inf.

    window_query [B, Hq, W, D] and window_positions [B, W] int64: the queries of the last tokens, -1 for padding. A
    state's buffers as in `ops.arrive`; valid_seen and counts include the new tokens; the others: a Scratch.
    """
    batch, heads, slots, head_dim = key.shape
    window, end = window_positions.shape[1], capacity + count
    small = SMALL_TILES or (key.dtype == torch.float32 and not INTERPRETED)
    tile = 16 if small else TILE // 2 if head_dim > 128 else TILE
    tiles, batch_heads = triton.cdiv(end, tile), batch * heads
    shape = {
        "GROUP": window_query.shape[1] // heads, "HEAD_DIM": head_dim, "D_PAD": padded_head_dim(head_dim), "TILE": tile,
        "QUERIES": QUERIES, "num_warps": WARPS,
    }
    of_window = window_query, window_positions, key, occupied, token_index, valid_seen, counts
    sizes = scale * LOG2_E.value, capacity, end, slots, heads, window, parts.shape[3]
    with on_device_of(key):
        similarity_kernel[(batch_heads * tiles,)](
            *of_window, sums, exempt, target, age, parts, threshold, *sizes, EXEMPTS_FIRST=exempts_first, **shape
        )
        importance_kernel[(batch_heads * tiles,)](
            *of_window, sums, exempt, target, age, parts, means, importance, *sizes, MERGED=MERGED, **shape
        )
        mix_kernel[(batch_heads,)](
            window_positions, occupied, token_index, valid_seen, counts, means, importance, age, score, mix_lambda,
            1.0 - mix_lambda, capacity, end, slots, heads, window, kernel_size, APPENDED=appended, CHUNK=CHUNK,
            num_warps=4,
        )


@score_due.register_fake
def _(
    window_query: Tensor, window_positions: Tensor, key: Tensor, occupied: Tensor, token_index: Tensor,
    valid_seen: Tensor, counts: Tensor, score: Tensor, sums: Tensor, exempt: Tensor, means: Tensor, importance: Tensor,
    target: Tensor, age: Tensor, parts: Tensor, scale: float, capacity: int, count: int, kernel_size: int,
    mix_lambda: float, threshold: float, exempts_first: bool, appended: bool,
) -> None:
    return None


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
def _unit(k):
    """The keys k [TILE, D], multiplied by powers of two so that no square overflows, and the factors that make them
    k / (||k|| + EPSILON). Float16 is not multiplied: its squares are in range, its smallest numbers would be lost."""
    x = float32(k)
    factor = tl.full([x.shape[0]], 1.0, tl.float32)
    if k.dtype != tl.float16:
        exponent = (tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23) & 0xFF
        exponent = tl.minimum(tl.maximum(exponent, 1), 253)
        factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        x = x * factor[:, None]
    return round_to(x, k.dtype), 1.0 / (tl.sqrt(tl.sum(x * x, 1)) + _EPSILON * factor)


@triton.jit
def _largest_logits(
    query, window_positions, k, w, b, k_head, heads, window, scale, d, in_head,
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
    return tl.where(asks[:, None], largest, float("-inf"))


_SIZES = ["capacity", "end", "slots", "heads", "window", "parts_w"]


@triton.jit(do_not_specialize=_SIZES)
def similarity_kernel(
    query, window_positions, key, occupied, token_index, valid_seen, counts, sums, exempt, target, age, parts,
    threshold, scale, capacity, end, slots, heads, window, parts_w,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr,
    EXEMPTS_FIRST: tl.constexpr,
):
    """Program (TILE tokens i, batch_head). sums: sum_j C_ij. target: the slot of the token for which row i does not
    count, -1 for none; exempt: its C_ij. age: the number of older tokens. parts: the maximum of each window query's
    logits over the tile's tokens before the window, and the sum of the exponentials relative to it."""
    tiles = tl.cdiv(end, TILE)
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    if tl.load(counts + batch_head) <= capacity:
        return
    tile = tl.program_id(0) % tiles
    b, k_head = batch_head // heads, batch_head % heads
    at = batch_head * slots
    key += at * HEAD_DIM
    occupied += at
    token_index += at
    d = tl.arange(0, D_PAD)
    in_head = (d < HEAD_DIM)[None, :]
    i = tile * TILE + tl.arange(0, TILE)
    holds = tl.load(occupied + i, mask=i < end, other=0) != 0
    index = tl.load(token_index + i, mask=holds, other=-1)
    keys = tl.load(key + i.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=holds[:, None] & in_head, other=0.0)
    unit, inverse = _unit(keys)
    total = tl.zeros([TILE], tl.float32)
    older = tl.full([TILE], 0, tl.int32)
    last = tl.full([TILE], -1, tl.int32)
    last_slot = tl.full([TILE], -1, tl.int32)
    last_value = tl.zeros([TILE], tl.float32)
    first_value = tl.zeros([TILE], tl.float32)
    first = tl.full([], _NEVER, tl.int32)
    first_slot = tl.full([], -1, tl.int32)
    for start in range(0, end, TILE):
        j = start + tl.arange(0, TILE)
        there = tl.load(occupied + j, mask=j < end, other=0) != 0
        other_index = tl.load(token_index + j, mask=there, other=_NEVER)
        k = tl.load(key + j.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=there[:, None] & in_head, other=0.0)
        other_unit, other_inverse = _unit(k)
        similar = dot(unit, tl.trans(other_unit)) * inverse[:, None] * other_inverse[None, :]
        similar = tl.where(there[None, :] & (i[:, None] != j[None, :]), similar, 0.0)
        total += tl.sum(similar, 1)
        older += tl.sum(tl.where(other_index[None, :] < index[:, None], 1, 0), 1)
        hit = (similar > threshold) & there[None, :] & (i[:, None] != j[None, :])
        hit_index = tl.where(hit, other_index[None, :], -1)
        latest = tl.max(hit_index, 1)
        is_latest = hit & (hit_index == latest[:, None])
        newer = latest > last
        last_slot = tl.where(newer, tl.sum(tl.where(is_latest, j[None, :], 0), 1), last_slot)
        last_value = tl.where(newer, tl.sum(tl.where(is_latest, similar, 0.0), 1), last_value)
        last = tl.maximum(last, latest)
        if EXEMPTS_FIRST:
            oldest = tl.min(other_index, 0)
            is_oldest = there & (other_index == oldest)
            earlier = oldest < first
            first_value = tl.where(earlier, tl.sum(tl.where(is_oldest[None, :], similar, 0.0), 1), first_value)
            first_slot = tl.where(earlier, tl.sum(tl.where(is_oldest, j, 0), 0), first_slot)
            first = tl.minimum(first, oldest)
    tl.store(sums + at + i, total, mask=i < end)
    tl.store(age + at + i, older, mask=i < end)
    tl.store(target + at + i, tl.where(holds, tl.where(last >= 0, last_slot, first_slot), -1), mask=i < end)
    tl.store(exempt + at + i, tl.where(last >= 0, last_value, first_value), mask=i < end)
    in_prefix = holds & (index < tl.load(valid_seen + batch_head) - _observing(window_positions, b, window, QUERIES))
    batch_heads = tl.num_programs(0).to(tl.int64) // tiles
    for start in range(0, window, QUERIES):
        w = start + tl.arange(0, QUERIES)
        logit = _largest_logits(
            query, window_positions, keys, w, b, k_head, heads, window, scale, d, in_head,
            GROUP, HEAD_DIM, TILE, QUERIES,
        )
        logit = tl.where(in_prefix[None, :], logit, float("-inf"))
        row_max = tl.max(logit, 1)
        weight_sum = tl.sum(tl.exp2(logit - finite_or_zero(row_max)[:, None]), 1)
        part = (batch_head * window + w) * parts_w + tile
        tl.store(parts + part, row_max, mask=w < window)
        tl.store(parts + batch_heads * window * parts_w + part, weight_sum, mask=w < window)


@triton.jit(do_not_specialize=_SIZES)
def importance_kernel(
    query, window_positions, key, occupied, token_index, valid_seen, counts, sums, exempt, target, age, parts, means,
    importance, scale, capacity, end, slots, heads, window, parts_w,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Program (TILE tokens j, batch_head). means: the mean over the head's tokens i of C_ij, without what is exempt.
    importance, by age: the mean weight that the window's queries give a token before the window."""
    tiles = tl.cdiv(end, TILE)
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    tokens = tl.load(counts + batch_head)
    if tokens <= capacity:
        return
    b, k_head = batch_head // heads, batch_head % heads
    at = batch_head * slots
    j = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    left_out = tl.zeros([TILE], tl.float32)
    for start in range(0, end, TILE):
        i = start + tl.arange(0, TILE)
        to = tl.load(target + at + i, mask=i < end, other=-1)
        value = tl.load(exempt + at + i, mask=i < end, other=0.0)
        left_out += tl.sum(tl.where(to[None, :] == j[:, None], value[None, :], 0.0), 1)
    total = tl.load(sums + at + j, mask=j < end, other=0.0)
    tl.store(means + at + j, (total - left_out) / tokens.to(tl.float32), mask=j < end)

    d = tl.arange(0, D_PAD)
    in_head = (d < HEAD_DIM)[None, :]
    holds = tl.load(occupied + at + j, mask=j < end, other=0) != 0
    k = tl.load(
        key + at * HEAD_DIM + j.to(tl.int64)[:, None] * HEAD_DIM + d[None, :], mask=holds[:, None] & in_head, other=0.0
    )
    observing = _observing(window_positions, b, window, QUERIES)
    index = tl.load(token_index + at + j, mask=holds, other=_NEVER)
    in_prefix = holds & (index < tl.load(valid_seen + batch_head) - observing)
    batch_heads = tl.num_programs(0).to(tl.int64) // tiles
    received = tl.zeros([TILE], tl.float32)
    for start in range(0, window, QUERIES):
        w = start + tl.arange(0, QUERIES)
        logit = _largest_logits(
            query, window_positions, k, w, b, k_head, heads, window, scale, d, in_head, GROUP, HEAD_DIM, TILE, QUERIES
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
    place = tl.load(age + at + j, mask=in_prefix, other=0)
    tl.store(importance + at + place, received / tl.maximum(observing, 1).to(tl.float32), mask=in_prefix)


@triton.jit(do_not_specialize=["capacity", "end", "slots", "heads", "window", "kernel_size"])
def mix_kernel(
    window_positions, occupied, token_index, valid_seen, counts, means, importance, age, score, mix_lambda, rest,
    capacity, end, slots, heads, window, kernel_size, APPENDED: tl.constexpr, CHUNK: tl.constexpr,
):
    """Program batch_head: mix_lambda times the pooled importance minus `rest` times the softmax of the means; +inf for
    the window."""
    batch_head = tl.program_id(0).to(tl.int64)
    at = batch_head * slots
    due = tl.load(counts + batch_head) > capacity
    if not due:
        if not APPENDED:
            for start in range(capacity, end, CHUNK):
                s = start + tl.arange(0, CHUNK)
                holds = tl.load(occupied + at + s, mask=s < end, other=0) != 0
                tl.store(score + at + s, tl.full([CHUNK], float("inf"), tl.float32), mask=holds)
        return
    highest = tl.full([CHUNK], float("-inf"), tl.float32)
    for start in range(0, end, CHUNK):
        s = start + tl.arange(0, CHUNK)
        holds = tl.load(occupied + at + s, mask=s < end, other=0) != 0
        highest = tl.maximum(highest, tl.load(means + at + s, mask=holds, other=float("-inf")))
    top = tl.max(highest, 0)
    sums = tl.zeros([CHUNK], tl.float32)
    for start in range(0, end, CHUNK):
        s = start + tl.arange(0, CHUNK)
        holds = tl.load(occupied + at + s, mask=s < end, other=0) != 0
        mean = tl.load(means + at + s, mask=holds, other=float("-inf"))
        sums += tl.exp2((mean - top) * 1.4426950408889634)
    total = tl.sum(sums, 0)
    prefix = tl.load(counts + batch_head) - _observing(window_positions, batch_head // heads, window, 16)
    for start in range(0, end, CHUNK):
        s = start + tl.arange(0, CHUNK)
        holds = tl.load(occupied + at + s, mask=s < end, other=0) != 0
        place = tl.load(age + at + s, mask=holds, other=0)
        pooled = tl.full([CHUNK], float("-inf"), tl.float32)
        for k in range(kernel_size):
            near = place + k - kernel_size // 2
            inside = holds & (near >= 0) & (near < prefix)
            pooled = tl.maximum(pooled, tl.load(importance + at + near, mask=inside, other=float("-inf")))
        mean = tl.load(means + at + s, mask=holds, other=0.0)
        repeated = tl.exp2((mean - top) * 1.4426950408889634) / total
        mixed = tl.where(place < prefix, pooled * mix_lambda - repeated * rest, float("inf"))
        tl.store(score + at + s, mixed, mask=holds)
