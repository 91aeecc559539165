"""Checks of PM-KVQ's arguments, for both sides. See `arguments` for the errors."""

from __future__ import annotations

from fractions import Fraction
from math import inf

import torch
from torch import Tensor

from .arguments import FLOATING, check_dtype, check_integer, check_number, check_shape, check_tensor
from .kivi import check_group

#: The bits of a code, from those of new tokens to the fewest.
WIDTHS = (16, 8, 4, 2)


def check_width(name: str, bits: object, allowed: tuple[int, ...] = WIDTHS) -> int:
    """Return `bits` if it is one of the allowed widths."""
    if check_integer(name, bits) not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {bits}")
    assert isinstance(bits, int)
    return bits


def check_pair_group(name: str, group: object) -> int:
    """Return `group` if it is a power of two of at least 2: a word has two channels of a token."""
    if check_group(name, group) < 2:
        raise ValueError(f"{name} must be at least 2, got {group}")
    assert isinstance(group, int)
    return group


def check_least_scale(name: str, least: object) -> float:
    """Return `least` as a float if it is finite and not negative."""
    least = check_number(name, least)
    if not 0 <= least < inf:
        raise ValueError(f"{name} must be finite and at least 0, got {least}")
    return float(least)


def check_bits_budget(name: str, bits: object) -> None:
    """Raise unless `bits` is a finite number above 0."""
    number = check_number(name, bits)
    if not 0 < number < inf:
        raise ValueError(f"{name} must be finite and more than 0, got {bits}")


def check_head_dim(head_dim: int, group: int, name: str = "head_dim") -> None:
    """ValueError unless D is even, and a multiple of the group or less than it."""
    if head_dim % 2:
        raise ValueError(f"{name} must be even, got {head_dim}")
    if head_dim > group and head_dim % group:
        raise ValueError(f"{name} must be a multiple of group = {group} or less, got {head_dim}")


def groups_of(head_dim: int, group: int) -> int:
    """The groups of a token: a head of up to `group` channels has one."""
    return max(1, head_dim // group)


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scales: float32 for float16, in which the scale of 16 bits is subnormal, else the same."""
    return torch.float32 if dtype == torch.float16 else dtype


def tokens_that_fit(bits: float, max_tokens: int, sinks: int, window: int, width: int) -> int:
    """The most tokens for which, with codes of `width` bits, the memory of a sequence never exceeds bits * max_tokens
    per channel. Of n > sinks tokens, (n - sinks) mod window and the sinks take 16 bits, the others `width`.

    Memory grows until the window is full, and drops when its tokens are quantized.
    """
    room = Fraction(bits) * max_tokens
    # The first number of quantized windows with which a full window does not fit, and the first token that does not.
    quantized = max(0, (room - 16 * (sinks + window - 1)) // (width * window) + 1)
    beyond = (room - width * window * quantized) // 16 + 1
    return int(max(beyond, sinks if quantized else 0) + quantized * window) - 1


def check_quantize(
    x: object, bits: object, group: object, least_scale: object, dtype: torch.dtype | None
) -> tuple[Tensor, int, int, float, torch.dtype]:
    """The arguments of `quantize`; the dtype is x's if it is None."""
    x = check_tensor("x", x, dims=4, layout="[B, H, T, D]")
    check_dtype("x.dtype", x.dtype)
    bits, group = check_width("bits", bits), check_pair_group("group", group)
    check_head_dim(x.shape[-1], group, "x's D")
    least = check_least_scale("least_scale", least_scale)
    return x, bits, group, least, x.dtype if dtype is None else check_dtype("dtype", dtype, FLOATING)


def check_shrink(codes: object, scale: object, bits: object) -> tuple[Tensor, Tensor, int]:
    """The arguments of `shrink`."""
    codes, scale = _check_codes(codes, scale)
    return codes, scale, check_width("bits", bits, WIDTHS[:-1])


def check_dequantize(
    codes: object, scale: object, minimum: object, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    """The arguments of `dequantize`; the dtype is that of the minima if it is None."""
    codes, scale = _check_codes(codes, scale)
    minimum = check_tensor("minimum", minimum, dims=4, layout="[B, H, T, D / group]")
    check_dtype("minimum.dtype", minimum.dtype)
    check_shape("minimum", minimum, tuple(scale.shape), "scale's [B, H, T, D / group]")
    if minimum.device != scale.device:
        raise ValueError(f"minimum must be on {scale.device} like scale, got {minimum.device}")
    return codes, scale, minimum, minimum.dtype if dtype is None else check_dtype("dtype", dtype, FLOATING)


def _check_codes(codes: object, scale: object) -> tuple[Tensor, Tensor]:
    codes = check_tensor("codes", codes, dims=4, layout="[B, H, T, D]")
    if codes.dtype != torch.int32:
        raise TypeError(f"codes must have dtype torch.int32, got {codes.dtype}")
    scale = check_tensor("scale", scale, dims=4, layout="[B, H, T, D / group]")
    check_dtype("scale.dtype", scale.dtype)
    groups, channels = scale.shape[-1], codes.shape[-1]
    if tuple(scale.shape[:3]) != tuple(codes.shape[:3]) or groups < 1 or channels % groups:
        raise ValueError(
            f"scale must be [B, H, T, D / group] for codes of {tuple(codes.shape)}, got {tuple(scale.shape)}"
        )
    if scale.device != codes.device:
        raise ValueError(f"scale must be on {codes.device} like codes, got {scale.device}")
    return codes, scale
