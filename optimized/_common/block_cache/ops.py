"""The operations of the block cache on a state's buffers: a block arrives, and as many tokens are evicted."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..launch import INTERPRETED, SMALL_TILES, multiprocessors, on_device_of, padded_head_dim
from .count_kernels import place_and_settle_kernel, place_kernel, stay_kernel
from .evict_kernels import arrive_kernel, evict_kernel, settle_kernel

#: Tokens of a block from which their moves are a launch of their own, with more programs.
APART = 256
#: Warps of a program that chooses evictions among more than 1024 slots.
EVICTING_WARPS = 16
#: The slots of a program that counts which tokens are evicted earlier, and the tokens it compares them with at a time.
COUNTING_TILE = (16, 32) if SMALL_TILES else (64, 256)
#: The most comparisons of a tile of slots with a token, for each multiprocessor, that many programs may make. With
#: more, one program per head is faster.
COMPARISONS = 2**13


def rows(tensor: Tensor) -> Tensor:
    """[B, Hkv, S] with one stride for both of the first axes, like a slice of a contiguous tensor's slots."""
    regular = tensor.stride(2) == 1 and tensor.stride(0) == tensor.shape[1] * tensor.stride(1)
    return tensor if regular else tensor.contiguous()


def chunk_size(end: int, most: int = 4096) -> int:
    """Slots per iteration of a pass over `end` slots. In the interpreter few, so that tests cover several iterations.
    """
    return 32 if SMALL_TILES else min(most, max(128, triton.next_power_of_2(end)))


def moved_at_once(key: Tensor) -> int:
    """Tokens that a program moves at a time: 32 KB of keys at most."""
    return 16 if SMALL_TILES else min(128, 32768 // (padded_head_dim(key.shape[3]) * key.element_size()))


def _tokens(count: int) -> int:
    return 16 if SMALL_TILES or count <= 16 else 32


@torch.library.custom_op(
    "kvtwin::block_arrive",
    mutates_args=(
        "key", "value", "occupied", "positions", "score", "token_index", "magnitude", "valid_seen", "counts",
        "completion_counters",
    ),
)
def arrive(
    new_key: Tensor, new_value: Tensor, valid: Tensor, key: Tensor, value: Tensor, occupied: Tensor, positions: Tensor,
    score: Tensor, token_index: Tensor, magnitude: Tensor | None, valid_seen: Tensor, seen: Tensor,
    counts: Tensor | None, completion_counters: Tensor, budget: int, offset: int | None,
) -> None:
    """Store the Q tokens of a block in slots budget to budget + Q - 1, with a score of 0. Padding leaves its slot free.

    new_key, new_value [B, Hkv, Q, D]; valid [B, Q] bool. A state's buffers: key, value [B, Hkv, S, D]; occupied,
    positions, score, token_index (int32) and magnitude (float32, for ||v||_1, or None) [B, Hkv, S]; seen [1] int64, the
    tokens before the block, padding included. The block's valid tokens are added to valid_seen and counts (or None),
    both [B, Hkv] int32. completion_counters: zeros, one per head. With an offset, the scores are random: see
    `score_kernels.random_score`.
    """
    batch, heads, count, head_dim = new_key.shape
    tokens = _tokens(count)
    with on_device_of(key):
        arrive_kernel[(batch * heads * triton.cdiv(count, tokens),)](
            new_key, new_value, valid, key, value, occupied, positions, score, token_index, magnitude, valid_seen, seen,
            counts, completion_counters, count, heads, key.shape[2], budget, offset or 0,
            *new_key.stride(), *new_value.stride(), *valid.stride(),
            HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), TOKENS=tokens, MAGNITUDE=magnitude is not None,
            COUNTS=counts is not None, RANDOM=offset is not None, num_warps=4,
        )


@arrive.register_fake
def _(
    new_key: Tensor, new_value: Tensor, valid: Tensor, key: Tensor, value: Tensor, occupied: Tensor, positions: Tensor,
    score: Tensor, token_index: Tensor, magnitude: Tensor | None, valid_seen: Tensor, seen: Tensor,
    counts: Tensor | None, completion_counters: Tensor, budget: int, offset: int | None,
) -> None:
    return None


@torch.library.custom_op("kvtwin::block_choose", mutates_args=("seen",))
def choose(
    rank: Tensor | None, protected: Tensor | None, occupied: Tensor, token_index: Tensor, valid_seen: Tensor,
    seen: Tensor, budget: int, count: int, came: int, sinks: int, recent: int,
) -> Tensor:
    """The destination of the tokens in slots budget to budget + count - 1: [B, Hkv, count] int32, a slot below budget
    or -1. Arguments as in `evict`."""
    return _launch(
        rank, protected, (None, None, occupied, None, None, token_index, None), valid_seen, seen, budget, count, came,
        sinks, recent, moves=False,
    )


@choose.register_fake
def _(
    rank: Tensor | None, protected: Tensor | None, occupied: Tensor, token_index: Tensor, valid_seen: Tensor,
    seen: Tensor, budget: int, count: int, came: int, sinks: int, recent: int,
) -> Tensor:
    return occupied.new_empty((*occupied.shape[:2], count), dtype=torch.int32)


@torch.library.custom_op(
    "kvtwin::block_settle",
    mutates_args=("key", "value", "occupied", "positions", "score", "token_index", "carried"),
)
def settle(
    destination: Tensor, key: Tensor, value: Tensor, occupied: Tensor, positions: Tensor, score: Tensor,
    token_index: Tensor, carried: Tensor | None, budget: int,
) -> None:
    """Move the tokens of a block to their destinations, [B, Hkv, count] as `choose` returns them, and free the block's
    slots."""
    _settle(destination, (key, value, occupied, positions, score, token_index, carried), budget)


@settle.register_fake
def _(
    destination: Tensor, key: Tensor, value: Tensor, occupied: Tensor, positions: Tensor, score: Tensor,
    token_index: Tensor, carried: Tensor | None, budget: int,
) -> None:
    return None


@torch.library.custom_op(
    "kvtwin::block_evict",
    mutates_args=("key", "value", "occupied", "positions", "score", "token_index", "carried", "seen"),
)
def evict(
    rank: Tensor | None, protected: Tensor | None, key: Tensor, value: Tensor, occupied: Tensor, positions: Tensor,
    score: Tensor, token_index: Tensor, carried: Tensor | None, valid_seen: Tensor, seen: Tensor,
    budget: int, count: int, came: int, sinks: int, recent: int,
) -> None:
    """Each head evicts down to `budget`: the lowest rank first, ties to the lowest slot. Kept tokens of the block, in
    slots budget to budget + count - 1, take the free slots in ascending order, and the block's slots become free.

    rank [B, Hkv, end] float32 or int64 (from 0 on), or None for age; protected likewise, bool or None. The oldest
    `sinks` and the newest `recent` tokens are protected too. carried [B, Hkv, S], float32 or int64, moves with the
    tokens, or None. Adds `came` to seen.
    """
    tensors = key, value, occupied, positions, score, token_index, carried
    _launch(rank, protected, tensors, valid_seen, seen, budget, count, came, sinks, recent, moves=True)


@evict.register_fake
def _(
    rank: Tensor | None, protected: Tensor | None, key: Tensor, value: Tensor, occupied: Tensor, positions: Tensor,
    score: Tensor, token_index: Tensor, carried: Tensor | None, valid_seen: Tensor, seen: Tensor,
    budget: int, count: int, came: int, sinks: int, recent: int,
) -> None:
    return None


def _launch(
    rank: Tensor | None, protected: Tensor | None, tensors: tuple[Tensor | None, ...], valid_seen: Tensor, seen: Tensor,
    budget: int, count: int, came: int, sinks: int, recent: int, *, moves: bool,
) -> Tensor:
    """`choose`, and with `moves` what `settle` does. tensors: those of `evict`; without moves only occupied and
    token_index."""
    occupied, token_index = tensors[2], tensors[5]
    assert occupied is not None and token_index is not None
    batch, heads, slots = occupied.shape
    rank, protected = (None if mask is None else rows(mask) for mask in (rank, protected))
    destination, free_slots = (
        torch.empty(batch, heads, count, dtype=torch.int32, device=occupied.device) for _ in range(2)
    )
    ranking = (
        token_index if rank is None else rank, occupied if protected is None else protected,
        rank is not None and rank.dtype == torch.int64,
        {"BY_AGE": rank is None, "PROTECTED": protected is not None},
    )
    numbers = slots, *(0 if mask is None else mask.stride(1) for mask in (rank, protected)), budget, sinks, recent
    counters = valid_seen, seen
    with on_device_of(occupied):
        if many_programs(batch * heads, budget + count, count, occupied.device):
            _launch_counting(ranking, tensors, counters, free_slots, destination, came, numbers, moves=moves)
        else:
            apart = count > (32 if SMALL_TILES else APART)
            _launch_evict(
                ranking, tensors, counters, free_slots, destination, came, numbers, moves=moves and not apart
            )
            if moves and apart:
                _settle(destination, tensors, budget)
    return destination


def many_programs(heads: int, end: int, count: int, device: torch.device) -> bool:
    """Whether many programs per head choose the evictions of a block of `count` tokens. In the interpreter, those of
    blocks with an even number of tokens, so that tests cover both cases."""
    if INTERPRETED:
        return count % 2 == 0
    programs = heads * triton.cdiv(end, COUNTING_TILE[0])
    return count > 1 and programs * end <= COMPARISONS * multiprocessors(device)


#: What ranks the tokens, and what protects them; whether ranks are int64; constants of the kernels.
_Ranking = tuple[Tensor, Tensor, bool, dict[str, bool]]


def _launch_counting(
    ranking: _Ranking, tensors: tuple[Tensor | None, ...], counters: tuple[Tensor, Tensor], free_slots: Tensor,
    destination: Tensor, came: int, numbers: tuple[int, ...], *, moves: bool,
) -> None:
    (rank, protected, wide, constants), (key, _, occupied, _, _, token_index, carried) = ranking, tensors
    assert occupied is not None
    (batch, heads, count), (slots, _, _, budget, _, _) = destination.shape, numbers
    end = budget + count
    stays = torch.empty(batch, heads, end, dtype=torch.int8, device=occupied.device)
    own, compared = COUNTING_TILE
    blocks = triton.cdiv(end, own)
    stay_kernel[(batch * heads * blocks,)](
        rank, protected, occupied, token_index, *counters, stays, end, came, *numbers, blocks, SLOTS=own,
        CHUNK=compared, WIDE=wide, **constants, num_warps=4 if SMALL_TILES else 8,
    )
    tokens, chunk = _tokens(count), chunk_size(budget)
    programs = batch * heads * triton.cdiv(count, tokens)
    if not moves:
        place_kernel[(programs,)](
            stays, free_slots, destination, count, budget, CHUNK=chunk, TOKENS=tokens, num_warps=4
        )
        return
    assert key is not None
    place_and_settle_kernel[(programs,)](
        stays, free_slots, destination, *tensors, count, slots, budget, HEAD_DIM=key.shape[3],
        D_PAD=padded_head_dim(key.shape[3]), CHUNK=chunk, TOKENS=tokens, CARRIED=carried is not None, num_warps=4,
    )


def _launch_evict(
    ranking: _Ranking, tensors: tuple[Tensor | None, ...], counters: tuple[Tensor, Tensor], free_slots: Tensor,
    destination: Tensor, came: int, numbers: tuple[int, ...], *, moves: bool,
) -> None:
    (rank, protected, wide, constants), (key, *_, carried) = ranking, tensors
    (batch, heads, count), budget = destination.shape, numbers[3]
    end = budget + count
    codes = torch.empty(batch, heads, end, dtype=torch.int64 if wide else torch.int32, device=destination.device)
    head_dim = 16 if key is None else key.shape[3]
    moved = 0 if key is None or not moves else 16 if count <= 16 else moved_at_once(key)
    evict_kernel[(batch * heads,)](
        rank, protected, *tensors, *counters, codes, free_slots, destination, count, came, *numbers,
        HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), CHUNK=chunk_size(end),
        TOKENS=16 if SMALL_TILES or count <= 16 else 128, CARRIED=carried is not None, MOVED=moved, **constants,
        num_warps=4 if end <= 1024 else EVICTING_WARPS,
    )


def _settle(destination: Tensor, tensors: tuple[Tensor | None, ...], budget: int) -> None:
    key, carried = tensors[0], tensors[-1]
    assert key is not None
    batch, heads, slots, head_dim = key.shape
    count = destination.shape[2]
    destination = rows(destination)
    tokens = _tokens(count)
    with on_device_of(key):
        settle_kernel[(batch * heads * triton.cdiv(count, tokens),)](
            destination, *tensors, count, slots, budget, destination.stride(1), HEAD_DIM=head_dim,
            D_PAD=padded_head_dim(head_dim), TOKENS=tokens, CARRIED=carried is not None, num_warps=4,
        )
