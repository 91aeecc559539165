"""ThinKV's number formats on the GPU: quantize, dequantize, pack and unpack, bitwise equal to the reference.

Kernels that also quantize, such as those of the cache, use the device functions in `_formats_kernels.py`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...reference.contract.arguments import FLOATING, check_dtype
from ...reference.contract.thinkv.formats import (
    check_bits,
    check_bytes,
    check_packed,
    check_quantize,
    check_quantized,
    scales_shape,
)
from ...reference.contract.thinkv.types import Quantized
from .._common.launch import INTERPRETED, check_launchable, on_device_of
from .._common.operation import operation
from ._formats_kernels import (
    dequantize_kernel,
    largest_kernel,
    pack_kernel,
    quantize_fp8_kernel,
    quantize_kernel,
    unpack_kernel,
)

__all__ = ["dequantize", "pack", "quantize", "unpack"]

#: Elements per program. In the interpreter, a program's cost does not depend on its size. Small tensors get several
#: programs, so that tests cover what happens between them; larger tensors get few.
TILE = 2048
#: The largest group that fits in a tile.
MAX_GROUP = 1024


def quantize(
    x: Tensor, fmt: str, *, axis: int, group: int = 16, scale_rule: str | None = None, tensor_scale: bool = False
) -> Quantized:
    """Quantize x [..., T, D]: groups of `group` elements along `axis` share a scale (ThinKV C.4, D.3).

    Any strides; float64 (rounded to float32 first), float32, float16 or bfloat16; groups of up to 1024. Semantics,
    bitwise: `kvtwin.reference.thinkv.quantize`. TypeError or ValueError for invalid arguments, for inputs that require
    grad, and for CPU tensors outside Triton's interpreter.
    """
    x, axis, rule = check_quantize(x, fmt, axis, group, scale_rule, tensor_scale)
    if group > MAX_GROUP:
        raise ValueError(f"group must be at most {MAX_GROUP}, got {group}")
    x = x.float() if x.dtype == torch.float64 else x
    check_launchable(x=x)
    codes, scales, second = _quantize(x, fmt, axis, group, rule, tensor_scale)
    return Quantized(codes, scales, fmt, axis, group, x.shape, second if tensor_scale else None)


def dequantize(q: Quantized, dtype: torch.dtype) -> Tensor:
    """Reconstruct a tensor of q.shape from `quantize`. Semantics, bitwise: `kvtwin.reference.thinkv.dequantize`."""
    q = check_quantized(q)
    check_dtype("dtype", dtype, FLOATING)
    check_launchable(**{"q.codes": q.codes})
    kernel_dtype = torch.float32 if dtype == torch.float64 else dtype
    result: Tensor = _dequantize(q.codes, q.scales, q.tensor_scale, q.fmt, q.axis, q.group, kernel_dtype)
    return result.to(dtype)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., D] uint8 of 8, 4 or 2 bits into bytes [..., ceil(D bits / 8)], the first code in the lowest
    bits. Semantics: `kvtwin.reference.thinkv.pack`.
    """
    codes, bits = check_bytes("codes", codes), check_bits(bits)
    check_launchable(codes=codes)
    packed: Tensor = _pack(codes, bits)
    return packed


def unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    """The inverse of `pack`: the first `size` codes, [..., size] uint8. Semantics: `kvtwin.reference.thinkv.unpack`."""
    packed, bits = check_packed(packed, bits, size)
    check_launchable(packed=packed)
    codes: Tensor = _unpack(packed, bits, size)
    return codes


# Operations ----------------------------------------------------------------------------------------------------------


@operation("kvtwin::thinkv_quantize", mutates_args=())
def _quantize(
    x: Tensor, fmt: str, axis: int, group: int, rule: str, tensor_scale: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The codes, scales, and second scale (a scalar, 0 if unused) of x [..., T, D]."""
    codes, scales, second = _results(x, fmt, axis, group)
    second.zero_()
    if fmt == "unquantized":
        return codes.copy_(x), scales, second
    tokens, channels = x.shape[-2:]
    view = _four_dimensions(x)
    rows, along = view.shape[0] * view.shape[1], channels if axis == -1 and fmt != "fp8" else tokens
    sizes = (view.shape[1], tokens, channels, triton.cdiv(along, group), *view.stride())
    shape = {"GROUP": group, "GROUP_PAD": triton.next_power_of_2(group)}
    groups = sizes[3]
    with on_device_of(x):
        if fmt == "fp8":
            block = _block(channels, shape["GROUP_PAD"])
            quantize_fp8_kernel[(rows * groups,)](view, codes, scales, *sizes, **shape, BLOCK=block)
            return codes, scales, second
        largest = None
        if tensor_scale:
            largest = torch.zeros(1, dtype=torch.int32, device=x.device)
            height, block = _block(tokens, 16), 16
            tiles = triton.cdiv(tokens, height)
            largest_kernel[(rows * tiles,)](view, largest, *sizes, tiles, TOKENS=height, BLOCK=block)
        units = tokens * groups if axis == -1 else channels
        block = _block(units, shape["GROUP_PAD"])
        tiles = triton.cdiv(units, block) * (1 if axis == -1 else groups)
        quantize_kernel[(rows * tiles,)](
            view, codes, scales, largest, second, *sizes, tiles,
            FORMAT=fmt, AXIS=axis, RULE=rule, TENSOR=tensor_scale, **shape, BLOCK=block,
        )
    return codes, scales, second


@_quantize.register_fake
def _(x: Tensor, fmt: str, axis: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    return _results(x, fmt, axis, group)


@operation("kvtwin::thinkv_dequantize", mutates_args=())
def _dequantize(
    codes: Tensor, scales: Tensor, second: Tensor | None, fmt: str, axis: int, group: int, dtype: torch.dtype
) -> Tensor:
    result = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if fmt == "unquantized":
        return result.copy_(codes)
    tokens, channels = codes.shape[-2:]
    groups = triton.cdiv(channels if axis == -1 else tokens, group)
    if fmt == "fp8":
        axis, groups = -2, triton.cdiv(tokens, group)
    count = result.numel() // (tokens * channels)
    block = _block(channels, 1)
    height = _block(count * tokens, block)
    with on_device_of(codes):
        dequantize_kernel[(triton.cdiv(count * tokens, height) * triton.cdiv(channels, block),)](
            codes.contiguous(), scales.contiguous(), second, result, count, tokens, channels, groups,
            FORMAT=fmt, AXIS=axis, TENSOR=second is not None, GROUP=group, TOKENS=height, BLOCK=block,
        )
    return result


@_dequantize.register_fake
def _(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


@operation("kvtwin::thinkv_pack", mutates_args=())
def _pack(codes: Tensor, bits: int) -> Tensor:
    size = codes.shape[-1]
    packed = torch.empty(*codes.shape[:-1], _width(size, bits), dtype=torch.uint8, device=codes.device)
    block = _block(packed.numel(), 1)
    with on_device_of(codes):
        pack_kernel[(triton.cdiv(packed.numel(), block),)](
            codes.contiguous(), packed, size, packed.shape[-1], packed.numel(), BITS=bits, BLOCK=block
        )
    return packed


@_pack.register_fake
def _(codes: Tensor, bits: int) -> Tensor:
    return codes.new_empty(*codes.shape[:-1], _width(codes.shape[-1], bits))


@operation("kvtwin::thinkv_unpack", mutates_args=())
def _unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    codes = torch.empty(*packed.shape[:-1], size, dtype=torch.uint8, device=packed.device)
    block = _block(codes.numel(), 1)
    with on_device_of(packed):
        unpack_kernel[(triton.cdiv(codes.numel(), block),)](
            packed.contiguous(), codes, size, packed.shape[-1], codes.numel(), BITS=bits, BLOCK=block
        )
    return codes


@_unpack.register_fake
def _(packed: Tensor, size: int) -> Tensor:
    return packed.new_empty(*packed.shape[:-1], size)


def _results(x: Tensor, fmt: str, axis: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape, dtype=x.dtype if fmt == "unquantized" else torch.uint8),
        x.new_empty(scales_shape(x.shape, fmt, axis, group), dtype=torch.float32 if fmt == "fp8" else torch.uint8),
        x.new_empty((), dtype=torch.float32),
    )


def _four_dimensions(x: Tensor) -> Tensor:
    """[..., T, D] as [A, B, T, D]; copied only if the dimensions before T cannot be merged to two."""
    if x.dim() > 4:
        return x.flatten(0, -4)
    return x[(None,) * (4 - x.dim())]


def _width(size: int, bits: int) -> int:
    """The number of bytes that hold `size` codes."""
    return (size * bits + 7) // 8


def _block(count: int, each: int) -> int:
    """How many of `count` units of `each` elements a program processes, a power of two."""
    most = TILE
    if INTERPRETED:
        most = 256 if count * each <= 512 else 65536
    return min(triton.next_power_of_2(count), max(1, most // each))
