"""Eviction at intervals, after a block or a step: heads that are due evict down to the budget and close gaps.

A head is due if it holds more than `capacity` tokens, the most that it may hold between calls. For heads that are not
due, programs return at once. Buffers are as in `evict_kernels.py`.

`thin` evicts by given ranks, in one launch. `compress` is SnapKV's: heads that are due score their tokens first. Before
it, `weigh_window` launches the softmaxes of the window's queries and the attention that each key receives from them.
Scores are pooled along tokens in order of arrival. For tokens that arrived since the last compression, this is the
order of their slots. For the `budget` tokens kept by that compression, `order` lists their slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....reference.contract import Sizes
from ..launch import on_device_of, padded_head_dim
from ..operation import operation
from .evict_kernels import (
    COUNTED,
    NEVER,
    _free_among,
    _leaving,
    _threshold,
    _valid_before,
    _write_codes,
    count_all,
    ends_of,
    move,
)
from .kernels import Window, launch_attention, launch_received
from .ops import chunk_size, moved_at_once, rows

#: Warps, and slots per iteration, of programs that usually return at once. With 16 warps, or 4096 slots, only one such
#: program fits on a multiprocessor at a time.
PASSING_WARPS, PASSING_CHUNK = 8, 2048
#: The first axis of `numbers`: slots in order of arrival, ranks as integers, free slots, new slots.
_SLOTS_BY_AGE, _FREE_SLOTS, _DEST_SLOTS = (tl.constexpr(place) for place in (0, 2, 3))


class Between(NamedTuple):
    """Buffers passed between the launches of a compression. softmax_parts float32: see `kernels.Attended`; received
    float32: the attention that each slot's key received; numbers [4, B * Hkv, S] int32: see `compress_kernel` and
    `choose_pooled_kernel`."""

    softmax_parts: Tensor
    received: Tensor
    numbers: Tensor


@torch.inference_mode(False)
def between(sizes: Sizes, observers: int, device: torch.device) -> Between:
    """Allocate the buffers for a state's compressions."""
    batch_heads = sizes.batch * sizes.key_value_heads
    return Between(
        torch.zeros(2, sizes.batch, sizes.query_heads, observers, dtype=torch.float32, device=device),
        torch.zeros(batch_heads * sizes.slots, dtype=torch.float32, device=device),
        torch.zeros(4, batch_heads, sizes.slots, dtype=torch.int32, device=device),
    )


@operation(
    "kvtwin::block_weigh_window", mutates_args=("softmax_parts", "received", "completion_counters")
)
def weigh_window(
    window_query: Tensor, window_positions: Tensor, key: Tensor, occupied: Tensor, positions: Tensor, counts: Tensor,
    softmax_parts: Tensor, received: Tensor, completion_counters: Tensor,
    sink_logits: Tensor | None, scale: float, softcap: float | None, budget: int, capacity: int, count: int,
) -> None:
    """Store the attention that the window's queries give to each key, for `compress`, in `received`. If capacity is
    larger than the budget, only for heads that are due.

    window_query [B, Hq, W, D] and window_positions [B, W] int64: the queries of the last tokens, -1 for padding.
    softmax_parts, received: of a Between; completion_counters: zeros, at least `kernels.counters_of`. Otherwise as in
    `compress`.
    """
    end = capacity + count
    keys, there, places = key[:, :, :end], occupied[:, :, :end], positions[:, :, :end]
    window = Window(window_positions, places, None if capacity == budget else counts, capacity)
    launch_attention(
        window_query, keys, None, there, window, None, softmax_parts, completion_counters, scale, softcap=softcap,
        sink_logits=sink_logits,
    )
    launch_received(window_query, keys, there, window, softmax_parts, received, scale, mean=True, softcap=softcap)


@operation(
    "kvtwin::block_compress",
    mutates_args=(
        "key", "value", "occupied", "positions", "score", "token_index", "seen", "counts", "order", "numbers",
    ),
)
def compress(
    window_positions: Tensor, received: Tensor, key: Tensor, value: Tensor, occupied: Tensor, positions: Tensor,
    score: Tensor, token_index: Tensor, valid_seen: Tensor, seen: Tensor, counts: Tensor, order: Tensor,
    numbers: Tensor, budget: int, capacity: int, count: int, kernel_size: int, appended: bool, moves: bool = True,
) -> None:
    """Update scores and evict after `count` tokens arrived, in the slots from `capacity` on or, if `appended`, after
    one token arrived in the slot behind the others.

    window_positions [B, W] int64 and received: as `weigh_window` had and stored them. A state's buffers are as in
    `ops.arrive`; valid_seen includes the new tokens. Adds `count` to seen, unless `appended`. counts [B, Hkv] int32:
    the tokens that a head holds, new ones included; order [B, Hkv, budget] int32: the slots of its first tokens in
    order of arrival. numbers: of a Between. If capacity equals the budget, the scores of all heads are updated;
    otherwise only those of heads that are due, and the new tokens of the other heads get a score of +inf. Without
    `moves`, the tokens stay where they arrived; numbers[3] has their destinations, for `ops.settle`.
    """
    batch, heads, slots, head_dim = key.shape
    batch_heads, end, always = batch * heads, capacity + count, capacity == budget
    chunk = chunk_size(end, 4096 if always else PASSING_CHUNK)
    with on_device_of(key):
        compress_kernel[(batch_heads,)](
            received, key, value, occupied, positions, score, token_index, score, valid_seen, seen, counts, order,
            window_positions, numbers, numbers[1], budget, capacity, count, slots, heads, window_positions.shape[1],
            kernel_size, 0, 0, end, HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), CHUNK=chunk,
            TOKENS=moved_at_once(key), ALWAYS=always,
            APPENDED=appended, OBSERVES=True, CARRIED=False, MOVES=moves, PAGE=1,
            num_warps=4 if end <= 1024 else 16 if always else PASSING_WARPS,
        )


@operation(
    "kvtwin::block_thin",
    mutates_args=(
        "key", "value", "occupied", "positions", "score", "token_index", "carried", "seen", "counts", "numbers"
    ),
)
def thin(
    rank: Tensor, key: Tensor, value: Tensor, occupied: Tensor, positions: Tensor, score: Tensor, token_index: Tensor,
    carried: Tensor | None, valid_seen: Tensor, seen: Tensor, counts: Tensor, numbers: Tensor,
    budget: int, capacity: int, count: int, sinks: int, recent: int, appended: bool, page: int = 1,
) -> None:
    """Evict after `count` tokens arrived, in the slots from `capacity` on or, if `appended`, after one token arrived in
    the slot behind the others.

    rank [B, Hkv, capacity + count or more] float32 or int64: heads that are due evict the lowest first, ties by
    slot. The first `sinks` and the newest `recent` tokens are protected. A state's buffers are as in `ops.evict`;
    valid_seen and counts [B, Hkv] int32: the valid tokens that a row has seen and that a head holds, the new ones
    included. Adds `count` to seen, unless `appended`. numbers [4, B * Hkv, S] int32: scratch.

    With a `page` above 1, a head that is due keeps `budget` tokens of complete pages, which are so many successive
    tokens of a row, and the tokens of the incomplete page. The ranks must order the tokens page by page. sinks and
    budget are multiples of page, and recent is rounded up: whole pages are protected.
    """
    batch, heads, slots, head_dim = key.shape
    end = capacity + count
    rank = rows(rank)
    wide = rank.dtype == torch.int64
    codes = torch.empty(batch * heads, slots, dtype=rank.dtype, device=key.device) if wide else numbers[1]
    chunk = chunk_size(end, PASSING_CHUNK)
    with on_device_of(key):
        compress_kernel[(batch * heads,)](
            rank, key, value, occupied, positions, score, token_index, score if carried is None else carried,
            valid_seen, seen, counts, numbers, valid_seen, numbers, codes, budget, capacity, count, slots, heads, 0, 0,
            sinks,
            recent, rank.stride(1), HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), CHUNK=chunk,
            TOKENS=moved_at_once(key), ALWAYS=False, APPENDED=appended, OBSERVES=False,
            CARRIED=carried is not None, MOVES=True, PAGE=page,
            num_warps=4 if end <= 1024 else PASSING_WARPS,
        )


@triton.jit
def _list_by_age(slots_by_age, order, occupied, before, budget, capacity, count, CHUNK: tl.constexpr):
    """List the slots of a head's tokens in order of arrival: `before` tokens of the cache, then the block's."""
    for start in range(0, before, CHUNK):
        i = start + tl.arange(0, CHUNK)
        first = tl.load(order + i, mask=i < tl.minimum(before, budget), other=0)
        tl.store(slots_by_age + i, tl.where(i < budget, first, i), mask=i < before)
    listed = before
    for start in range(0, count, COUNTED):
        i = start + tl.arange(0, COUNTED)
        here = tl.where(tl.load(occupied + capacity + i, mask=i < count, other=0) != 0, 1, 0)
        tl.store(slots_by_age + listed + tl.cumsum(here, 0) - here, capacity + i, mask=here != 0)
        listed += tl.sum(here, 0)
    tl.debug_barrier()


@triton.jit
def _pool(score, received, by_age, slots_by_age, tokens, prefix, kernel_size, CHUNK: tl.constexpr):
    """Store the scores of a head's tokens. The first `prefix` tokens get the mean of what their neighbours received,
    with 0 beyond either end. The others are the window and get +inf. by_age: scratch, int32, for what the tokens
    received, in order of arrival: neighbours are read several times."""
    for start in range(0, prefix, CHUNK):
        i = start + tl.arange(0, CHUNK)
        slot = tl.load(slots_by_age + i, mask=i < prefix, other=0)
        weight = tl.load(received + slot, mask=i < prefix, other=0.0)
        tl.store(by_age + i, weight.to(tl.int32, bitcast=True), mask=i < prefix)
    tl.debug_barrier()
    for start in range(0, tokens, CHUNK):
        i = start + tl.arange(0, CHUNK)
        total = tl.full([CHUNK], 0.0, tl.float32)
        for k in range(kernel_size):
            near = i + k - kernel_size // 2
            inside = (near >= 0) & (near < prefix) & (i < prefix)
            total += tl.load(by_age + near, mask=inside, other=0).to(tl.float32, bitcast=True)
        slot = tl.load(slots_by_age + i, mask=i < tokens, other=0)
        tl.store(score + slot, tl.where(i < prefix, total / kernel_size, float("inf")), mask=i < tokens)
    tl.debug_barrier()


@triton.jit
def _choose(
    codes, free_slots, dest_slot, rank, occupied, token_index, before, leave, sinks, recent_from, budget, end,
    CHUNK: tl.constexpr,
):
    """Evict `leave` of a head's tokens: lowest rank first, ties to the lowest slot. dest_slot [end]: the new slot of
    each slot's token, -1 for none. The j-th kept token behind the first `budget` slots moves to the j-th free slot
    among those. `before`: the number of the cache's slots that held tokens."""
    _, never = ends_of(codes.dtype.element_ty)
    lowest, highest = _write_codes(
        codes, rank, occupied, occupied, token_index, end, sinks, recent_from, CHUNK, False, False
    )
    threshold, below = _threshold(codes, lowest, highest, end, leave, CHUNK)
    ties = leave - below
    tied = leave * 0
    free = leave * 0
    for start in range(0, budget, CHUNK):
        s = start + tl.arange(0, CHUNK)
        is_free, tied = _free_among(codes, s, before, threshold, tied, ties, budget)
        tl.store(free_slots + free + tl.cumsum(is_free, 0) - is_free, s, mask=is_free != 0)
        tl.store(dest_slot + s, tl.where(is_free != 0, -1, s), mask=s < budget)
        free += tl.sum(is_free, 0)
    tl.debug_barrier()
    moved = leave * 0
    for start in range(budget, end, CHUNK):
        s = start + tl.arange(0, CHUNK)
        code = tl.load(codes + s, mask=s < end, other=never)
        leaves, tied = _leaving(code, threshold, tied, ties)
        holds = tl.load(occupied + s, mask=s < end, other=0) != 0
        moves = tl.where(holds & (leaves == 0), 1, 0)
        to = tl.load(free_slots + moved + tl.cumsum(moves, 0) - moves, mask=moves != 0, other=-1)
        tl.store(dest_slot + s, to, mask=s < end)
        moved += tl.sum(moves, 0)
    tl.debug_barrier()


@triton.jit
def _follow(order, slots_by_age, dest_slot, tokens, CHUNK: tl.constexpr):
    """Update `order` after a compression: the new slots of the kept tokens, in order of arrival."""
    num_kept = tokens * 0
    for start in range(0, tokens, CHUNK):
        i = start + tl.arange(0, CHUNK)
        to = tl.load(dest_slot + tl.load(slots_by_age + i, mask=i < tokens, other=0), mask=i < tokens, other=-1)
        kept = tl.where(to >= 0, 1, 0)
        tl.store(order + num_kept + tl.cumsum(kept, 0) - kept, to, mask=kept != 0)
        num_kept += tl.sum(kept, 0)


@triton.jit(do_not_specialize=[
    "budget", "capacity", "count", "slots", "heads", "observers", "kernel_size", "sinks", "recent", "rank_h",
])
def compress_kernel(
    rank, key, value, occupied, positions, score, token_index, carried, valid_seen, seen, counts, order,
    window_positions, numbers, codes, budget, capacity, count, slots, heads, observers, kernel_size, sinks, recent,
    rank_h,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr,
    ALWAYS: tl.constexpr, APPENDED: tl.constexpr, OBSERVES: tl.constexpr, CARRIED: tl.constexpr, MOVES: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Program batch_head. numbers, per batch_head: slots in order of arrival, ranks as integers, free slots, new slots.
    rank, with rows of rank_h slots: with OBSERVES, what each slot's key received; SnapKV's scores follow from it.
    Otherwise the order of eviction itself. codes: the ranks as integers."""
    batch_head = tl.program_id(0).to(tl.int64)
    tokens = tl.load(counts + batch_head)
    if not APPENDED:                                                   # a step has counted its token
        count_all(seen, count)
    if APPENDED and not ALWAYS:
        settled = tokens <= capacity                                   # the token is already in its place
        if settled:
            return
    end = capacity + count
    each = tl.num_programs(0).to(tl.int64) * slots
    at = batch_head * slots
    slots_by_age = numbers + each * _SLOTS_BY_AGE + at
    dest_slot = numbers + each * _DEST_SLOTS + at
    key += at * HEAD_DIM
    value += at * HEAD_DIM
    occupied += at
    positions += at
    score += at
    token_index += at
    carried += at
    order += batch_head * budget
    arrived = _valid_before(occupied + capacity, 1, count, COUNTED)
    before = tokens - arrived
    if PAGE > 1:                                                       # the incomplete page stays beside the complete
        budget += tl.load(valid_seen + batch_head) % PAGE
    leave = tl.where(tokens > capacity, tokens - budget, 0)
    rank += batch_head * rank_h
    recent_from = tl.where(recent > 0, tl.load(valid_seen + batch_head) - recent, NEVER)
    if PAGE > 1:
        recent_from = (tl.load(valid_seen + batch_head) - recent) // PAGE * PAGE
    if OBSERVES:
        observing = tl.full([COUNTED], 0, tl.int32)
        for start in range(0, observers, COUNTED):
            i = start + tl.arange(0, COUNTED)
            asks = tl.load(window_positions + batch_head // heads * observers + i, mask=i < observers, other=-1) >= 0
            observing += tl.where(asks, 1, 0)
        # The window's valid tokens are the newest of the row and are always kept: the budget has room for them.
        window = tl.sum(observing, 0)
        recent_from = tl.load(valid_seen + batch_head) - window
        if ALWAYS or leave > 0:
            _list_by_age(slots_by_age, order, occupied, before, budget, capacity, count, CHUNK)
            _pool(score, rank, codes + at, slots_by_age, tokens, tokens - window, kernel_size, CHUNK)
        rank = score
    if leave > 0:
        _choose(
            codes + at, numbers + each * _FREE_SLOTS + at, dest_slot, rank, occupied, token_index, before, leave,
            sinks, recent_from, budget, end, CHUNK,
        )
        if OBSERVES:
            _follow(order, slots_by_age, dest_slot, tokens, CHUNK)
        if MOVES:
            move(
                dest_slot, key, value, occupied, positions, score, token_index, carried, budget, end,
                HEAD_DIM, D_PAD, TOKENS, CARRIED,
            )
    elif not APPENDED:
        placed = before
        for start in range(0, count, COUNTED):
            i = start + tl.arange(0, COUNTED)
            holds = tl.load(occupied + capacity + i, mask=i < count, other=0) != 0
            here = tl.where(holds, 1, 0)
            tl.store(dest_slot + capacity + i, tl.where(holds, placed + tl.cumsum(here, 0) - here, -1), mask=i < count)
            if OBSERVES and not ALWAYS:
                tl.store(score + capacity + i, tl.full([COUNTED], float("inf"), tl.float32), mask=holds)
            placed += tl.sum(here, 0)
        if MOVES:
            tl.debug_barrier()
            move(
                dest_slot, key, value, occupied, positions, score, token_index, carried, capacity, end,
                HEAD_DIM, D_PAD, TOKENS, CARRIED,
            )
    tl.store(counts + batch_head, tokens - leave)
