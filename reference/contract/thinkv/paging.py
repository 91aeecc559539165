"""Checks of the arguments of ThinKV's paged cache and state, for both sides. See `contract.arguments`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import (
    capturing,
    check_config,
    check_integer,
    check_like,
    check_product,
    check_shape,
    check_state_tensor,
    check_tensor,
    resolve_scale,
)
from ..attention import check_heads
from .config import ThinKVConfig
from .types import Thought


def check_paged_cache(config: object, batch: object, key_value_heads: object, head_dim: object) -> ThinKVConfig:
    """The config and the sizes of a paged cache. Returns the config."""
    checked = check_config(config, ThinKVConfig)
    for name, value in (("batch", batch), ("key_value_heads", key_value_heads), ("head_dim", head_dim)):
        check_integer(name, value, minimum=1)
    assert isinstance(batch, int) and isinstance(key_value_heads, int) and isinstance(head_dim, int)
    check_product(batch=batch, key_value_heads=key_value_heads, slots=checked.slots, head_dim=head_dim)
    return checked


def check_append(
    key: object, value: object, positions: object, *, shape: tuple[int, int, int], dtype: torch.dtype,
    device: torch.device,
) -> None:
    """The arguments of `append`: key and value of `shape` [B, Hkv, D], positions [B] int64."""
    for name, tensor in (("key", key), ("value", value)):
        checked = check_tensor(name, tensor, dims=3, layout="[B, Hkv, D]")
        check_shape(name, checked, shape, "[B, Hkv, D]")
        check_state_tensor(name, checked, dtype, device)
    check_numbers("positions", positions, shape[0], device)


def check_flush(rows: object, thought: object, segment: object, *, batch: int, device: torch.device) -> None:
    """The arguments of `flush`: rows [B] bool, thought and segment [B] int64."""
    check_rows("rows", rows, (batch,), "[B]", device)
    check_numbers("thought", thought, batch, device)
    check_numbers("segment", segment, batch, device)


def check_numbers(name: str, value: object, batch: int, device: torch.device) -> Tensor:
    """Return a tensor [B] int64."""
    tensor = check_tensor(name, value, dims=1, layout="[B]")
    check_shape(name, tensor, (batch,), "[B]")
    check_state_tensor(name, tensor, torch.int64, device)
    return tensor


def check_rows(name: str, mask: object, shape: tuple[int, ...], layout: str, device: torch.device) -> Tensor:
    """Return a bool mask of rows [B] or slots [B, S]."""
    tensor = check_tensor(name, mask, dims=len(shape), layout=layout)
    check_shape(name, tensor, shape, layout)
    check_state_tensor(name, tensor, torch.bool, device)
    return tensor


def check_decode(
    query: object, scale: float | None, sparsity_mask: object, *, shape: tuple[int, int, int], dtype: torch.dtype,
    device: torch.device,
) -> float:
    """The arguments of `decode_attention` on a cache of `shape` [B, Hkv, D]: query [B, Hq, D], sparsity_mask [B] bool
    or None.

    Returns the scale.
    """
    batch, heads, head_dim = shape
    tensor = check_tensor("query", query, dims=3, layout="[B, Hq, D]")
    if tensor.shape[0] != batch or tensor.shape[2] != head_dim:
        raise ValueError(
            f"query must be [B, Hq, D] with the cache's B = {batch} and D = {head_dim}, got {tuple(tensor.shape)}"
        )
    check_state_tensor("query", tensor, dtype, device)
    check_heads(tensor.shape[1], heads)
    if sparsity_mask is not None:
        check_rows("sparsity_mask", sparsity_mask, (batch,), "[B]", device)
    return resolve_scale(scale, head_dim)


def check_thought(value: object, like: Tensor) -> Tensor:
    """Return thought types [B] int64, from 0 to 2, with the device of `like`.

    Reads the elements (one synchronization) unless a CUDA graph is being captured.
    """
    value = check_tensor("thought", value, dims=1, layout="[B]")
    check_shape("thought", value, tuple(like.shape), "[B]")
    check_like("thought", value, like, "the state")
    if not capturing(value.device):
        low, high = int(value.min()), int(value.max())
        if low < min(Thought) or high > max(Thought):
            raise ValueError(f"thought must be from 0 to 2, got values from {low} to {high}")
    return value
