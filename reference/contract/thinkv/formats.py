"""Checks of the arguments of ThinKV's number formats, for both sides. See `contract.arguments`."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor

from ..arguments import (
    check_choice,
    check_device,
    check_dtype,
    check_flag,
    check_integer,
    check_shape,
    check_strided,
    check_tensor,
)
from .arguments import check_format
from .types import BITS, SCALE_RULES, Quantized

#: The possible sizes of a code, in bits, and the dtypes of elements that are not quantized.
WIDTHS = tuple(sorted({bits for fmt, bits in BITS.items() if fmt != "unquantized"}))
WHOLE = (torch.float32, torch.float16, torch.bfloat16)


def check_quantize(
    x: object, fmt: object, axis: object, group: object, scale_rule: object, tensor_scale: object
) -> tuple[Tensor, int, str]:
    """The arguments of `quantize`. Returns x, the axis as -1 or -2, and the scale rule, "amax" for None."""
    x = check_dimensions("x", x)
    check_dtype("x.dtype", x.dtype)
    fmt = check_format("fmt", fmt)
    axis = check_axis(axis, x.dim())
    check_integer("group", group, minimum=1)
    if check_flag("tensor_scale", tensor_scale) and fmt != "nvfp4":
        raise ValueError(f"tensor_scale must be False but for nvfp4, got True for {fmt}")
    if scale_rule is None:
        return x, axis, SCALE_RULES[0]
    rule = check_choice("scale_rule", scale_rule, SCALE_RULES)
    if fmt != "ternary":
        raise ValueError(f"scale_rule must be None but for ternary, got {rule!r} for {fmt}")
    return x, axis, rule


def check_quantized(q: object) -> Quantized:
    """Return a `Quantized` whose fields have types, dtypes and shapes that fit each other."""
    if not isinstance(q, Quantized):
        raise TypeError(f"q must be a Quantized, got {type(q).__name__}")
    fmt = check_format("q.fmt", q.fmt)
    codes = check_dimensions("q.codes", q.codes)
    check_dtype("q.codes.dtype", codes.dtype, WHOLE if fmt == "unquantized" else (torch.uint8,))
    if not isinstance(q.shape, tuple):
        raise TypeError(f"q.shape must be a torch.Size, got {type(q.shape).__name__}")
    check_shape("q.codes", codes, tuple(q.shape), "q.shape")
    if check_integer("q.axis", q.axis) not in (-1, -2):
        raise ValueError(f"q.axis must be -1 or -2, got {q.axis}")
    shape = scales_shape(q.shape, fmt, q.axis, check_integer("q.group", q.group, minimum=1))
    check_part("q.scales", q.scales, torch.float32 if fmt == "fp8" else torch.uint8, shape, codes)
    if q.tensor_scale is not None:
        if fmt != "nvfp4":
            raise ValueError(f"q.tensor_scale must be None but for nvfp4, got one for {fmt}")
        check_part("q.tensor_scale", q.tensor_scale, torch.float32, (), codes)
    return q


def check_part(name: str, value: object, dtype: torch.dtype, shape: tuple[int, ...], codes: Tensor) -> None:
    """A field of `Quantized`: a tensor of the given dtype and shape on the device of codes."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    check_strided(name, value)
    check_dtype(f"{name}.dtype", value.dtype, (dtype,))
    check_shape(name, value, shape, "its shape for such codes")
    check_device(name, value, codes.device, "q.codes")


def scales_shape(shape: Sequence[int], fmt: str, axis: int, group: int) -> tuple[int, ...]:
    """The shape of `Quantized.scales` for a tensor [..., T, D]."""
    *rows, tokens, channels = shape
    if fmt == "unquantized":
        return (0,)
    if fmt == "fp8":
        return (*rows, ceil(tokens / group))
    return (*rows, ceil(tokens / group), channels) if axis == -2 else (*rows, tokens, ceil(channels / group))


def check_dimensions(name: str, value: object) -> Tensor:
    """Return a tensor [..., T, D]."""
    if isinstance(value, Tensor) and value.dim() < 2:
        raise ValueError(f"{name} must be [..., T, D], got a tensor of {value.dim()} dimensions: {tuple(value.shape)}")
    return check_tensor(name, value, dims=value.dim() if isinstance(value, Tensor) else 2, layout="[..., T, D]")


def check_axis(axis: object, dims: int) -> int:
    """Return one of the last two dimensions as -1 or -2."""
    number = check_integer("axis", axis)
    if number not in (-1, -2, dims - 1, dims - 2):
        raise ValueError(f"axis must be one of the last two dimensions, -1 or -2, got {number} of {dims}")
    return number if number < 0 else number - dims


def check_bytes(name: str, value: object) -> Tensor:
    """Return a uint8 tensor [..., D]."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor [..., D], got {type(value).__name__}")
    check_tensor(name, value, dims=max(1, value.dim()), layout="[..., D]")
    check_dtype(f"{name}.dtype", value.dtype, (torch.uint8,))
    return value


def check_bits(bits: object) -> int:
    """Return the size of a code in bits: 2, 4 or 8."""
    number = check_integer("bits", bits)
    if number not in WIDTHS:
        raise ValueError(f"bits must be one of {', '.join(map(str, WIDTHS))}, got {number}")
    return number


def check_packed(packed: object, bits: object, size: object) -> tuple[Tensor, int]:
    """The arguments of `unpack`. Returns packed and bits."""
    packed, number = check_bytes("packed", packed), check_bits(bits)
    width = ceil(check_integer("size", size, minimum=1) * number / 8)
    if packed.shape[-1] != width:
        raise ValueError(f"packed must have {width} bytes for {size} codes of {number} bits, got {packed.shape[-1]}")
    return packed, number
