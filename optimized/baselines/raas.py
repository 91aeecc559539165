"""RaaS on the GPU: a block's attention, then each key's last query that renews its timestamp, or each page's.

With pages there are four launches: `list_kernel` lists the pages that a head holds, `place_kernel` the slots of their
tokens, `bound_kernel` computes the bounds of each page for all queries, and `time_kernel` each page's timestamp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference.baselines.raas import RaaSConfig
from .._common.block_cache.compress import thin
from .._common.block_cache.group_weights import group_weights, group_weights_tile
from .._common.block_cache.kernels import _arguments, _shape
from .._common.block_cache.state import Block, BlockState, Policy
from .._common.launch import SMALL_TILES, on_device_of, padded_head_dim
from .._common.numerics import float32, logit_factors
from .._common.operation import operation

__all__ = ["RaaSConfig", "RaaSState"]


#: Tokens of a page that are read at a time, and queries of a block whose bounds are computed or compared at a time.
TOKENS, ROWS = 16, 16
#: Slots that list_kernel reads at a time, slots of a program of place_kernel, and pages that it compares at a time.
LISTED, CHUNK, MATCHED = (16, 16, 16) if SMALL_TILES else (1024, 128, 16)
#: Pages of a program of time_kernel and pages that they are compared with at a time: in a block, and in a step.
IN_BLOCK, IN_STEP = ((4, 16), (4, 16)) if SMALL_TILES else ((8, 16), (16, 64))


class RaaSState(BlockState):
    """A RaaS cache. Of equal timestamps, the oldest token or page is evicted. `score` is each token's timestamp, or its
    page's, in float32, which is exact for positions below 2^24. With a page_size, a step runs the kernels for blocks,
    and bounds of logits are computed in float32."""

    Config = RaaSConfig
    _rule = "renew"

    @property
    def _page(self) -> int | None:
        return self.config.page_size

    def _make_policy(self) -> Policy:
        config = self.config
        if self._page is not None:
            return Policy(triton.cdiv(config.sinks, self._page) * self._page, config.recent, by_blocks=True)
        return Policy(config.sinks, config.recent, alpha=config.alpha or 0.0)

    def _update(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        end = block.end
        assert block.softmax_parts is not None
        if self._page is not None:
            return renew_pages(
                block.query, self.key, self.occupied, self.positions, self._token_index, self._valid_seen, self._score,
                self._seen, self.config.capacity, self._page, self.config.page_budget // 2, self.scale < 0,
            ), None
        return renew(
            block.query, self.key[:, :, :end], self.occupied[..., :end], block.softmax_parts, self._score,
            self.positions, self._seen, self.scale, self.config.softcap, self._policy.alpha,
        ), None

    def _thin(self, rank: Tensor, count: int, *, appended: bool) -> None:
        """Evict at intervals: heads that are due, by rank, after `count` tokens. Pages leave whole."""
        if self._page is None:
            super()._thin(rank, count, appended=appended)
            return
        thin(
            rank, self.key, self.value, self.occupied, self.positions, self._score, self._token_index, self._carried,
            self._valid_seen, self._seen, self._counts, self._numbers, self.config.page_budget * self._page,
            self.config.capacity, count, self._policy.sinks, self._policy.recent, appended, self._page,
        )


@operation("kvtwin::raas_renew", mutates_args=("score",))
def renew(
    query: Tensor, key: Tensor, occupied: Tensor, softmax_parts: Tensor, score: Tensor, positions: Tensor, seen: Tensor,
    scale: float, softcap: float | None, alpha: float,
) -> Tensor:
    """Store in score [B, Hkv, slots] the position of the last query whose weight for a key, averaged over the group, is
    at least alpha, if there is one; of the block's own keys at least their positions. Returns the ranks [B, Hkv, S]
    int64: score * 2^31 + position.

    query [B, Hq, Q, D], those of the last Q of the S slots; key [B, Hkv, S, D]; occupied [B, Hkv, S] bool;
    softmax_parts: see `kernels.Attended`; seen [1] int64: the position of the first query.
    """
    queries, block, warps = group_weights_tile(query, key)
    rank = torch.empty(key.shape[:3], dtype=torch.int64, device=key.device)
    with on_device_of(query):
        renew_kernel[(key.shape[0] * key.shape[1] * triton.cdiv(key.shape[2], block),)](
            query, key, occupied, softmax_parts, score, positions, rank, seen, *logit_factors(scale, softcap),
            alpha, score.stride(1),
            *_arguments(query, key, key, occupied), **_shape(query, key, key), ROWS=queries, BLOCK=block,
            num_warps=warps,
        )
    return rank


@renew.register_fake
def _(key: Tensor) -> Tensor:
    return key.new_empty(key.shape[:3], dtype=torch.int64)


@triton.jit(do_not_specialize=[
    "score_h", "slots", "count", "heads", "query_b", "query_h", "query_q", "key_b", "key_h", "key_s", "value_b",
    "value_h", "value_s", "occupied_b", "occupied_h",
])
def renew_kernel(
    query, key, occupied, softmax_parts, score, positions, rank, seen, scale, softcap, alpha, score_h,
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
            k, query, softmax_parts, asks, i, count, all_queries, scale, softcap,
            query_h * UNIT, query_q * UNIT, query_d, GROUP, HEAD_DIM, D_PAD, ROWS, BLOCK,
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


# Pages ---------------------------------------------------------------------------------------------------------------


@operation("kvtwin::raas_renew_pages", mutates_args=("score",))
def renew_pages(
    query: Tensor, key: Tensor, occupied: Tensor, positions: Tensor, token_index: Tensor, valid_seen: Tensor,
    score: Tensor, seen: Tensor, capacity: int, size: int, best: int, negative: bool,
) -> Tensor:
    """Store in `score` each token's timestamp: the position of the last query that renews its page, or of the page's
    newest token. A query renews `best` of the complete pages before its own: those with the highest bounds, summed over
    the group, the oldest of equal ones. Returns the ranks [B, Hkv, capacity + Q] int64: score * 2^31 + position.

    query [B, Hq, Q, D], of the tokens in slots capacity to capacity + Q - 1; a state's buffers as in `ops.arrive`,
    valid_seen with these tokens included; seen [1] int64: the position of the first query. A page is `size` successive
    tokens of a row, padding not counted, and a head holds all of them or none. negative: bounds of -q . k.
    """
    batch, heads, slots, head_dim = key.shape
    count = query.shape[2]
    end, group = capacity + count, query.shape[1] // heads
    pages = triton.cdiv(end, size)                                             # that a head can hold
    queries, (together, compared) = (1, IN_STEP) if count == 1 else (ROWS, IN_BLOCK)
    places = torch.empty(batch * heads, pages, size, dtype=torch.int32, device=key.device)
    numbers = torch.full((batch * heads, pages), -1, dtype=torch.int32, device=key.device)
    bounds = torch.empty(batch * heads, count, pages, dtype=torch.float32, device=key.device)
    rank = torch.zeros(batch, heads, end, dtype=torch.int64, device=key.device)
    with on_device_of(key):
        list_kernel[(batch * heads,)](
            occupied, token_index, numbers, end, slots, size, pages, CHUNK=LISTED, num_warps=4,
        )
        place_kernel[(batch * heads * triton.cdiv(end, CHUNK),)](
            occupied, token_index, places, numbers, end, slots, size, pages, CHUNK=CHUNK, MATCHED=MATCHED, num_warps=1,
        )
        bound_kernel[(batch * heads * pages,)](
            query, key, occupied, places, numbers, valid_seen, bounds, capacity, count, heads, slots, size, pages,
            *query.stride(), GROUP=group, HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), NEGATIVE=negative,
            TOKENS=TOKENS, ROWS=queries, num_warps=1 if count == 1 else 4,
        )
        time_kernel[(batch * heads * triton.cdiv(pages, together),)](
            occupied, positions, token_index, valid_seen, seen, places, numbers, bounds, score, rank, capacity, count,
            slots, size, pages, best, PAGES=together, COMPARED=compared, TOKENS=TOKENS, ROWS=queries, num_warps=4,
        )
    return rank


@renew_pages.register_fake
def _(query: Tensor, key: Tensor, capacity: int) -> Tensor:
    return key.new_empty((*key.shape[:2], capacity + query.shape[2]), dtype=torch.int64)


@triton.jit(do_not_specialize=["end", "slots", "size", "pages"])
def list_kernel(occupied, token_index, numbers, end, slots, size, pages, CHUNK: tl.constexpr):
    """Program batch_head: the pages that a head holds, in the order of the slots of their first tokens. numbers
    [pages]: a page's number in its row, -1 behind the last one."""
    batch_head = tl.program_id(0).to(tl.int64)
    occupied += batch_head * slots
    token_index += batch_head * slots
    numbers += batch_head * pages
    listed = size * 0
    for start in range(0, end, CHUNK):
        s = start + tl.arange(0, CHUNK)
        holds = tl.load(occupied + s, mask=s < end, other=0) != 0
        token = tl.load(token_index + s, mask=holds, other=0)
        first = tl.where(holds & (token % size == 0), 1, 0)
        tl.store(numbers + listed + tl.cumsum(first, 0) - first, token // size, mask=first != 0)
        listed += tl.sum(first, 0)


@triton.jit(do_not_specialize=["end", "slots", "size", "pages"])
def place_kernel(
    occupied, token_index, places, numbers, end, slots, size, pages, CHUNK: tl.constexpr, MATCHED: tl.constexpr
):
    """Program (block of slots, batch_head): places [pages, size], the slots of each page's tokens by age."""
    chunks = tl.cdiv(end, CHUNK)
    batch_head = (tl.program_id(0) // chunks).to(tl.int64)
    occupied += batch_head * slots
    token_index += batch_head * slots
    numbers += batch_head * pages
    s = (tl.program_id(0) % chunks) * CHUNK + tl.arange(0, CHUNK)
    holds = tl.load(occupied + s, mask=s < end, other=0) != 0
    token = tl.load(token_index + s, mask=holds, other=0)
    place = tl.zeros([CHUNK], tl.int32)
    for from_page in range(0, pages, MATCHED):
        page = from_page + tl.arange(0, MATCHED)
        number = tl.load(numbers + page, mask=page < pages, other=-1)
        mine = number[:, None] == (token // size)[None, :]
        place += tl.sum(tl.where(mine, page[:, None], 0), 0)
    tl.store(places + (batch_head * pages + place) * size + token % size, s, mask=holds)


@triton.jit(do_not_specialize=[
    "capacity", "count", "heads", "slots", "size", "pages", "query_b", "query_h", "query_q",
])
def bound_kernel(
    query, key, occupied, places, numbers, valid_seen, bounds, capacity, count, heads, slots, size, pages,
    query_b, query_h, query_q, query_d,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, NEGATIVE: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (page, batch_head): the bounds of a complete page, [Q, pages]: the sum over the group and the channels of
    the greater one of q low and q high. low and high: the range of the page's keys in a channel."""
    page = tl.program_id(0) % pages
    batch_head = (tl.program_id(0) // pages).to(tl.int64)
    b, head = batch_head // heads, batch_head % heads
    number = tl.load(numbers + batch_head * pages + page)
    if (number >= 0) & (number < tl.load(valid_seen + batch_head) // size):
        places += (batch_head * pages + page) * size
        key += batch_head * slots * HEAD_DIM
        occupied += batch_head * slots + capacity
        query += b * query_b + head * GROUP * query_h
        d = tl.arange(0, D_PAD)
        d64 = d.to(tl.int64)
        in_head = d < HEAD_DIM
        low = tl.full([D_PAD], float("inf"), tl.float32)
        high = tl.full([D_PAD], float("-inf"), tl.float32)
        for start in range(0, size, TOKENS):
            t = start + tl.arange(0, TOKENS)
            slot = tl.load(places + t, mask=t < size, other=0).to(tl.int64)
            tile = (t < size)[:, None] & in_head[None, :]
            x = float32(tl.load(key + slot[:, None] * HEAD_DIM + d[None, :], mask=tile, other=0.0))
            low = tl.minimum(low, tl.min(tl.where((t < size)[:, None], x, float("inf")), 0))
            high = tl.maximum(high, tl.max(tl.where((t < size)[:, None], x, float("-inf")), 0))
        for start in range(0, count, ROWS):
            i = start + tl.arange(0, ROWS)
            asks = tl.load(occupied + i, mask=i < count, other=0) != 0
            at = i.to(tl.int64)[:, None] * query_q + d64[None, :] * query_d
            bound = tl.zeros([ROWS], tl.float32)
            for g in range(GROUP):
                tile = asks[:, None] & in_head[None, :]
                q = float32(tl.load(query + tl.cast(g, tl.int64) * query_h + at, mask=tile, other=0.0))
                if NEGATIVE:
                    q = -q
                bound += tl.sum(tl.maximum(q * low[None, :], q * high[None, :]), 1)
            bound = tl.where(bound == bound, bound, float("-inf"))     # NaN ranks lowest
            tl.store(bounds + (batch_head * count + i) * pages + page, bound, mask=i < count)


@triton.jit(do_not_specialize=["capacity", "count", "slots", "size", "pages", "best"])
def time_kernel(
    occupied, positions, token_index, valid_seen, seen, places, numbers, bounds, score, rank, capacity, count, slots,
    size, pages, best, PAGES: tl.constexpr, COMPARED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):
    """Program (several pages, batch_head): their timestamps, and the ranks of their tokens. A query renews a page if it
    is after it and fewer than `best` pages come first: those with a higher bound, and older ones with an equal bound.
    """
    programs = tl.cdiv(pages, PAGES)
    page = (tl.program_id(0) % programs) * PAGES + tl.arange(0, PAGES)
    batch_head = (tl.program_id(0) // programs).to(tl.int64)
    at = batch_head * slots
    numbers += batch_head * pages
    places += (batch_head * pages + page) * size
    bounds += batch_head * count * pages
    number = tl.load(numbers + page, mask=page < pages, other=-1)
    held = number >= 0
    total = tl.load(valid_seen + batch_head)
    complete = held & (number < total // size)
    tokens = tl.where(complete, size, tl.where(held, total % size, 0))
    last = tl.full([PAGES], -1, tl.int32)
    for start in range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        asks = tl.load(occupied + at + capacity + i, mask=i < count, other=0) != 0
        own = tl.load(token_index + at + capacity + i, mask=asks, other=0) // size
        row = bounds + i.to(tl.int64) * pages
        mine = tl.load(row[None, :] + page[:, None], mask=complete[:, None] & asks[None, :], other=0.0)
        ahead = tl.zeros([PAGES, ROWS], tl.int32)
        for from_page in range(0, pages, COMPARED):
            j = from_page + tl.arange(0, COMPARED)
            other = tl.load(numbers + j, mask=j < pages, other=-1)
            before = asks[:, None] & (other >= 0)[None, :] & (other[None, :] < own[:, None])
            theirs = tl.load(row[:, None] + j[None, :], mask=before, other=float("-inf"))
            older = (other[None, :] < number[:, None])[:, None, :]
            first = (theirs[None, :, :] > mine[:, :, None]) | ((theirs[None, :, :] == mine[:, :, None]) & older)
            ahead += tl.sum(tl.where(before[None, :, :] & first, 1, 0), 2)
        renews = complete[:, None] & asks[None, :] & (number[:, None] < own[None, :]) & (ahead < best)
        last = tl.maximum(last, tl.max(tl.where(renews, i[None, :], -1), 1))
    newest = tl.load(positions + at + tl.load(places + tokens - 1, mask=held, other=0), mask=held, other=0)
    known = tl.load(score + at + tl.load(places, mask=held, other=0), mask=held, other=0.0)
    time = tl.maximum(newest, known.to(tl.int64))                      # known: 0 if the first token is new
    time = tl.where(last >= 0, tl.maximum(time, tl.load(seen) + last), time)
    tl.debug_barrier()                                                 # the old score is read before the new one is set
    for start in range(0, size, TOKENS):
        t = start + tl.arange(0, TOKENS)
        there = t[None, :] < tokens[:, None]
        slot = tl.load(places[:, None] + t[None, :], mask=there, other=0)
        tl.store(score + at + slot, tl.zeros([PAGES, TOKENS], tl.float32) + time.to(tl.float32)[:, None], mask=there)
        position = tl.load(positions + at + slot, mask=there, other=0)
        tl.store(rank + batch_head * (capacity + count) + slot, position + (time << 31)[:, None], mask=there)
