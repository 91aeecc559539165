"""The operations of the block cache on a state's buffers: a block arrives, and as many tokens are evicted."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..launch import INTERPRETED, SMALL_TILES, dependent_launch, on_device_of, padded_head_dim
from ..operation import operation
from .choose_kernel import choose_kernel
from .evict_kernels import arrive_kernel, evict_kernel, settle_kernel

#: Tokens of a block from which their moves are a launch of their own, with more programs.
APART = 256
#: Warps of a program that chooses evictions among more than 1024 slots.
EVICTING_WARPS = 16
#: The most slots whose codes a program keeps in registers.
AT_ONCE = 4096
#: Warps of such a program, with few and with many heads, and the number of heads from which there are many.
CHOOSING_WARPS, CHOOSING_WARPS_OF_MANY, MANY = 8, 16, 32
#: The least number of codes in a tensor of theirs: fewer take as long, and each number is compiled.
LEAST_CODES = 1 if SMALL_TILES else 256
#: Options of a launch that waits for one on another stream, at the begin or the end of a branch of a graph.
INDEPENDENT = {"DEPENDENT": False}


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


@operation(
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
            COUNTS=counts is not None, RANDOM=offset is not None, num_warps=4, **dependent_launch(key.device),
        )


@operation("kvtwin::block_choose", mutates_args=("seen",))
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
def _(occupied: Tensor, count: int) -> Tensor:
    return occupied.new_empty((*occupied.shape[:2], count), dtype=torch.int32)


@operation(
    "kvtwin::block_settle",
    mutates_args=("key", "value", "occupied", "positions", "score", "token_index", "carried"),
)
def settle(
    destination: Tensor, key: Tensor, value: Tensor, occupied: Tensor, positions: Tensor, score: Tensor,
    token_index: Tensor, carried: Tensor | None, budget: int, apart: bool = True,
) -> None:
    """Move the tokens of a block to their destinations, [B, Hkv, count] as `choose` returns them, and free the block's
    slots. apart: the launch before may be on another stream."""
    start = INDEPENDENT if apart else dependent_launch(key.device)
    _settle(destination, (key, value, occupied, positions, score, token_index, carried), budget, start)


@operation(
    "kvtwin::block_evict",
    mutates_args=("key", "value", "occupied", "positions", "score", "token_index", "carried", "seen"),
)
def evict(
    rank: Tensor | None, protected: Tensor | None, key: Tensor, value: Tensor, occupied: Tensor, positions: Tensor,
    score: Tensor, token_index: Tensor, carried: Tensor | None, valid_seen: Tensor, seen: Tensor,
    budget: int, count: int, came: int, sinks: int, recent: int, apart: bool = False,
) -> None:
    """Each head evicts down to `budget`: the lowest rank first, ties to the lowest slot. Kept tokens of the block, in
    slots budget to budget + count - 1, take the free slots in ascending order, and the block's slots become free.

    rank [B, Hkv, end] float32 or int64 (from 0 to 2^61), or None for age; protected likewise, bool or None. The oldest
    `sinks` and the newest `recent` tokens are protected too. carried [B, Hkv, S], float32 or int64, moves with the
    tokens, or None. Adds `came` to seen.

    The launch before this one writes none of occupied, token_index and valid_seen, and waits before it lets this one
    start, if it does that early. Otherwise, `apart`.
    """
    tensors = key, value, occupied, positions, score, token_index, carried
    _launch(rank, protected, tensors, valid_seen, seen, budget, count, came, sinks, recent, moves=True, apart=apart)


def _launch(
    rank: Tensor | None, protected: Tensor | None, tensors: tuple[Tensor | None, ...], valid_seen: Tensor, seen: Tensor,
    budget: int, count: int, came: int, sinks: int, recent: int, *, moves: bool, apart: bool = False,
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
    ranking = token_index if rank is None else rank, occupied if protected is None else protected
    constants = {"BY_AGE": rank is None, "PROTECTED": protected is not None}
    numbers = slots, *(0 if mask is None else mask.stride(1) for mask in (rank, protected)), budget, sinks, recent
    start = dependent_launch(occupied.device) if moves and not apart else INDEPENDENT
    with on_device_of(occupied):
        if at_once(budget + count, count):
            choose_kernel[(batch * heads,)](
                *ranking, occupied, token_index, valid_seen, seen, free_slots, destination, count, came, *numbers,
                SLOTS=codes_at_once(budget), COUNT=codes_at_once(count), **constants,
                num_warps=choosing_warps(batch * heads), **start,
            )
            moved = 0
        else:
            moved = _launch_evict(
                ranking, constants, tensors, (valid_seen, seen), free_slots, destination, came, numbers, moves=moves
            )
        if moves and not moved:
            _settle(destination, tensors, budget, start)
    return destination


def codes_at_once(number: int) -> int:
    """The elements of a tensor for `number` codes."""
    return max(LEAST_CODES, triton.next_power_of_2(number))


def choosing_warps(heads: int) -> int:
    """See CHOOSING_WARPS. heads: of all rows of the batch."""
    return CHOOSING_WARPS_OF_MANY if heads >= MANY else CHOOSING_WARPS


def at_once(end: int, count: int) -> bool:
    """Whether a program chooses the evictions of a block of `count` tokens among `end` slots at once. In the
    interpreter, those of blocks with an even number of tokens, so that tests cover both cases."""
    return end <= AT_ONCE and (count % 2 == 0 if INTERPRETED else count > 1)


def _launch_evict(
    ranking: tuple[Tensor, Tensor], constants: dict[str, bool], tensors: tuple[Tensor | None, ...],
    counters: tuple[Tensor, Tensor], free_slots: Tensor, destination: Tensor, came: int, numbers: tuple[int, ...], *,
    moves: bool,
) -> int:
    """Launch `evict_kernel`. Returns how many tokens it moves at a time; 0 if `settle_kernel` is to move them."""
    (rank, protected), (key, *_, carried) = ranking, tensors
    (batch, heads, count), budget = destination.shape, numbers[3]
    end = budget + count
    wide = not constants["BY_AGE"] and rank.dtype == torch.int64
    codes = torch.empty(batch, heads, end, dtype=torch.int64 if wide else torch.int32, device=destination.device)
    head_dim = 16 if key is None else key.shape[3]
    moved = 0
    if key is not None and moves and count <= (32 if SMALL_TILES else APART):
        moved = 16 if count <= 16 else moved_at_once(key)
    evict_kernel[(batch * heads,)](
        rank, protected, *tensors, *counters, codes, free_slots, destination, count, came, *numbers,
        HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), CHUNK=chunk_size(end),
        TOKENS=16 if SMALL_TILES or count <= 16 else 128, CARRIED=carried is not None, MOVED=moved, **constants,
        num_warps=4 if end <= 1024 else EVICTING_WARPS,
    )
    return moved


def _settle(
    destination: Tensor, tensors: tuple[Tensor | None, ...], budget: int, start: dict[str, bool]
) -> None:
    key, carried = tensors[0], tensors[-1]
    assert key is not None
    batch, heads, slots, head_dim = key.shape
    count = destination.shape[2]
    destination = rows(destination)
    tokens = _tokens(count)
    with on_device_of(key):
        settle_kernel[(batch * heads * triton.cdiv(count, tokens),)](
            destination, *tensors, count, slots, budget, destination.stride(1), HEAD_DIM=head_dim,
            D_PAD=padded_head_dim(head_dim), TOKENS=tokens, CARRIED=carried is not None, num_warps=4, **start,
        )
