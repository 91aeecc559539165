"""Checks of FP8 keys and values with scales, for both sides. See `arguments` for the errors."""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import capturing, check_device, check_strided, readable

#: The types of FP8 keys and values, as they are in inference: with NaN, and E4M3 without infinity.
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_scales(
    key_scale: object, value_scale: object, *, key: Tensor, heads: int, of: str = "key", check_values: bool = False
) -> None:
    """Scales of FP8 keys and values: None, or float32, [] or [Hkv], on key's device.

    Their elements are checked if they are on the CPU, or with check_values, which synchronizes with a GPU: they must be
    positive, and small enough that the largest FP8 number times the scale is finite in float32. of: the name that
    messages use for key.
    """
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is None:
            continue
        if not isinstance(scale, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor [] or [Hkv], or None, got {type(scale).__name__}")
        if key.dtype not in FP8:
            raise TypeError(f"{name} must be None unless {of} is {' or '.join(map(str, FP8))}, got {key.dtype}")
        check_strided(name, scale)
        if scale.dtype != torch.float32:
            raise TypeError(f"{name} must have dtype torch.float32, got {scale.dtype}")
        if tuple(scale.shape) not in ((), (heads,)):
            raise ValueError(f"{name} must be [] or [Hkv] = ({heads},), got {tuple(scale.shape)}")
        check_device(name, scale, key.device, of)
        if check_values or scale.device.type == "cpu":
            _check_elements(name, scale, key.dtype)


def _check_elements(name: str, scale: Tensor, dtype: torch.dtype) -> None:
    """Reads the scales (one synchronization), unless a CUDA graph is being captured or torch.compile is tracing."""
    if capturing(scale.device) or not readable(scale):
        return
    largest = torch.finfo(torch.float32).max / torch.finfo(dtype).max
    for number in scale.flatten().tolist():
        if not 0 < number <= largest:
            raise ValueError(
                f"{name} must be above 0 and at most {largest:.4g}, so that its product with any {dtype} number is "
                f"finite in float32, got {number}"
            )
