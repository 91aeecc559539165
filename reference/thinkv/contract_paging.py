"""What both sides of ThinKV's paged cache share: what it shows of itself, and the checks of arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import check_heads, check_integer, check_shape, check_state_tensor, check_tensor, resolve_scale
from .contract import ThinKVConfig, Thought


class BlockEntry(NamedTuple):
    """An entry of a sequence's block table, in the words of section 4.2 and figure 5.

    entry: its number in the table. physical: the block's number in its format's pool. filled: tokens that it holds.
    thought: their type. start_indices: the first position of every segment that has tokens here, ascending.
    segment_masks: for each of these, which of the block's slots hold its tokens. eviction_mask: slots whose token was
    evicted, for new ones to take. Masks are tuples of 0 and 1.
    """

    entry: int
    physical: int
    filled: int
    thought: int
    start_indices: tuple[int, ...]
    segment_masks: tuple[tuple[int, ...], ...]
    eviction_mask: tuple[int, ...]


class PagedCodes(NamedTuple):
    """What a paged cache holds of its quantized tokens, by slot, all [B, Hkv, S, D] and 0 where there is none.

    keys, values: uint8, a code per element. key_scales, value_scales: float32, what one unit of each element is worth.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor


def pool_blocks(config: ThinKVConfig, fmt: str) -> int:
    """Physical blocks of a format that a sequence may hold: those of all thought types that are stored in it."""
    return config.blocks_per_thought * sum(config.format_of(thought) == fmt for thought in Thought)


def check_paged_cache(config: object, batch: object, key_value_heads: object, head_dim: object) -> ThinKVConfig:
    if not isinstance(config, ThinKVConfig):
        raise TypeError(f"config must be a ThinKVConfig, got {type(config).__name__}")
    for name, value in (("batch", batch), ("key_value_heads", key_value_heads), ("head_dim", head_dim)):
        check_integer(name, value, minimum=1)
    return config


def check_append(
    key: object, value: object, positions: object, *, shape: tuple[int, int, int], dtype: torch.dtype,
    device: torch.device,
) -> None:
    """One token per row: key and value of `shape` [B, Hkv, D], positions [B] int64."""
    for name, tensor in (("key", key), ("value", value)):
        checked = check_tensor(name, tensor, dims=3, layout="[B, Hkv, D]")
        check_shape(name, checked, shape, "[B, Hkv, D]")
        check_state_tensor(name, checked, dtype, device)
    check_numbers("positions", positions, shape[0], device)


def check_flush(rows: object, thought: object, segment: object, *, batch: int, device: torch.device) -> None:
    """rows [B] bool, thought and segment [B] int64."""
    check_rows("rows", rows, (batch,), "[B]", device)
    check_numbers("thought", thought, batch, device)
    check_numbers("segment", segment, batch, device)


def check_numbers(name: str, value: object, batch: int, device: torch.device) -> Tensor:
    """An int64 per row."""
    tensor = check_tensor(name, value, dims=1, layout="[B]")
    check_shape(name, tensor, (batch,), "[B]")
    check_state_tensor(name, tensor, torch.int64, device)
    return tensor


def check_rows(name: str, mask: object, shape: tuple[int, ...], layout: str, device: torch.device) -> Tensor:
    """A bool mask of rows [B], or of their slots [B, S]."""
    tensor = check_tensor(name, mask, dims=len(shape), layout=layout)
    check_shape(name, tensor, shape, layout)
    check_state_tensor(name, tensor, torch.bool, device)
    return tensor


def check_decode(
    query: object, scale: float | None, look: object, *, shape: tuple[int, int, int], dtype: torch.dtype,
    device: torch.device,
) -> float:
    """query [B, Hq, D] against a cache of `shape` [B, Hkv, D]; look [B] bool or None. Returns the scale."""
    batch, heads, head_dim = shape
    tensor = check_tensor("query", query, dims=3, layout="[B, Hq, D]")
    if tensor.shape[0] != batch or tensor.shape[2] != head_dim:
        raise ValueError(
            f"query must be [B, Hq, D] with the cache's B = {batch} and D = {head_dim}, got {tuple(tensor.shape)}"
        )
    check_state_tensor("query", tensor, dtype, device)
    check_heads(tensor.shape[1], heads)
    if look is not None:
        check_rows("look", look, (batch,), "[B]", device)
    return resolve_scale(scale, head_dim)
