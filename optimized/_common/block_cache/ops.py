"""The operations of the block cache on a state's buffers: a block arrives, evictions are chosen, kept tokens move."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..launch import SMALL_TILES, on_device_of, padded_head_dim
from .evict_kernels import arrive_kernel, choose_kernel, settle_kernel


def rows(tensor: Tensor) -> Tensor:
    """[B, Hkv, S] with one stride for both of the first axes, like a slice of a contiguous tensor's slots."""
    regular = tensor.stride(2) == 1 and tensor.stride(0) == tensor.shape[1] * tensor.stride(1)
    return tensor if regular else tensor.contiguous()


def chunk_sizes(end: int, most: int = 4096) -> tuple[int, int]:
    """Slots per iteration, of a pass over `end` slots and of a search among them. In the interpreter few, so that tests
    cover several iterations."""
    if SMALL_TILES:
        return 32, 32
    search = 128 if end <= 128 else 512 if end <= 1024 else 1024
    return min(most, max(128, triton.next_power_of_2(end))), min(most // 4, search)


def _tokens(count: int) -> int:
    return 16 if SMALL_TILES or count <= 16 else 32


@torch.library.custom_op(
    "kvtwin::block_arrive",
    mutates_args=("key", "value", "occupied", "positions", "score", "token_index", "magnitude"),
)
def arrive(
    new_key: Tensor, new_value: Tensor, valid: Tensor, key: Tensor, value: Tensor, occupied: Tensor, positions: Tensor,
    score: Tensor, token_index: Tensor, magnitude: Tensor | None, valid_seen: Tensor, seen: Tensor, budget: int,
) -> None:
    """Store the Q tokens of a block in slots budget to budget + Q - 1, with a score of 0. Padding leaves its slot free.

    new_key, new_value [B, Hkv, Q, D]; valid [B, Q] bool. A state's buffers: key, value [B, Hkv, S, D]; occupied,
    positions, score, token_index (int32) and magnitude (float32, for ||v||_1, or None) [B, Hkv, S]; valid_seen [B, Hkv]
    int32, the valid tokens that a row has seen; seen [1] int64, all tokens, padding included.
    """
    batch, heads, count, head_dim = new_key.shape
    tokens = _tokens(count)
    with on_device_of(key):
        arrive_kernel[(batch * heads * triton.cdiv(count, tokens),)](
            new_key, new_value, valid, key, value, occupied, positions, score, token_index, magnitude, valid_seen, seen,
            count, heads, key.shape[2], budget, *new_key.stride(), *new_value.stride(), *valid.stride(),
            HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), TOKENS=tokens, MAGNITUDE=magnitude is not None,
            num_warps=4,
        )


@arrive.register_fake
def _(
    new_key: Tensor, new_value: Tensor, valid: Tensor, key: Tensor, value: Tensor, occupied: Tensor, positions: Tensor,
    score: Tensor, token_index: Tensor, magnitude: Tensor | None, valid_seen: Tensor, seen: Tensor, budget: int,
) -> None:
    return None


@torch.library.custom_op("kvtwin::block_choose", mutates_args=())
def choose(
    rank: Tensor | None, protected: Tensor | None, occupied: Tensor, token_index: Tensor, valid_seen: Tensor,
    budget: int, count: int, sinks: int, recent: int,
) -> Tensor:
    """The destination of the tokens in slots budget to budget + count - 1: [B, Hkv, count] int32, a slot below budget
    or -1.

    Each head evicts down to `budget`: the lowest rank first, ties to the lowest slot. rank [B, Hkv, end] float32, or
    None for age; protected likewise, bool or None. The oldest `sinks` and the newest `recent` tokens are protected too.
    Kept tokens of the block take the free slots in ascending order.
    """
    batch, heads, slots = occupied.shape
    end = budget + count
    rank, protected = (None if mask is None else rows(mask) for mask in (rank, protected))
    destination = torch.empty(batch, heads, count, dtype=torch.int32, device=occupied.device)
    codes = torch.empty(batch * heads, end, dtype=torch.int32, device=occupied.device)
    chunk, search = chunk_sizes(end)
    with on_device_of(occupied):
        choose_kernel[(batch * heads,)](
            token_index if rank is None else rank, occupied if protected is None else protected, occupied, token_index,
            valid_seen, codes, torch.empty_like(destination), destination,
            count, slots, *(0 if mask is None else mask.stride(1) for mask in (rank, protected)),
            budget, sinks, recent,
            CHUNK=chunk, SEARCH=search, TOKENS=16 if SMALL_TILES or count <= 16 else 128,
            BY_AGE=rank is None, PROTECTED=protected is not None, num_warps=4 if end <= 1024 else 16,
        )
    return destination


@choose.register_fake
def _(
    rank: Tensor | None, protected: Tensor | None, occupied: Tensor, token_index: Tensor, valid_seen: Tensor,
    budget: int, count: int, sinks: int, recent: int,
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
    """Move the tokens of a block to the destinations that `choose` returned, and free the block's slots."""
    batch, heads, count = destination.shape
    head_dim, tokens = key.shape[3], _tokens(count)
    with on_device_of(key):
        settle_kernel[(batch * heads * triton.cdiv(count, tokens),)](
            destination, key, value, occupied, positions, score, token_index, carried, count, key.shape[2], budget,
            HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), TOKENS=tokens, CARRIED=carried is not None,
            num_warps=4,
        )


@settle.register_fake
def _(
    destination: Tensor, key: Tensor, value: Tensor, occupied: Tensor, positions: Tensor, score: Tensor,
    token_index: Tensor, carried: Tensor | None, budget: int,
) -> None:
    return None
