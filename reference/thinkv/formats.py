"""ThinKV's element formats: a code per element, a scale per group (sections 3.2, C.4 and D.3, ablation E.8).

A format is a short list of magnitudes and a sign. An element x of a group with scale s gets the code of the magnitude
nearest to |x| / s. A code is sign << (bits - 1) | index of the magnitude; zero has no sign. The scale maps the group's
largest magnitude to the largest of the format: s = amax / largest, stored as E4M3 (as float32 for fp8).

Rounding is to nearest, ties to the even index. Divisions are in float32, correctly rounded. No other step rounds.

The format "unquantized" has neither codes nor scales. It keeps the elements' bits, NaN and the sign of zero included.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_ends

from ..contract.arguments import FLOATING, check_dtype
from ..contract.thinkv.formats import check_bits, check_bytes, check_packed, check_quantize, check_quantized
from ..contract.thinkv.types import BITS, Quantized

__all__ = ["dequantize", "pack", "quantize", "unpack"]

#: The magnitudes of E4M3 by code, up to 448. The next code is NaN; there is no infinity (D.3).
E4M3 = (*(n / 8 * 2.0**-6 for n in range(8)), *((1 + n % 8 / 8) * 2.0 ** (n // 8 - 7) for n in range(8, 127)))
#: The magnitudes of each format, ascending.
MAGNITUDES = {
    "fp8": E4M3,
    "nvfp4": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),  # E2M1
    "ternary": (0.0, 1.0),
    "int4": (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0),
    "int2": (0.0, 1.0),
}
#: The fractions of amax among which rule "mse" selects the scale, ties to the first.
FRACTIONS = tuple(k / 16 for k in range(16, 7, -1))
LARGEST = torch.finfo(torch.float32).max


def quantize(
    x: Tensor, fmt: str, *, axis: int, group: int = 16, scale_rule: str | None = None, tensor_scale: bool = False
) -> Quantized:
    """Quantize x [..., T, D]: groups of `group` elements along `axis` share a scale (C.4).

    fmt: "fp8", "nvfp4", "ternary", "int4", "int2" or "unquantized", which keeps x as it is (float64 as float32).
    axis: -2 for groups of tokens per channel, as ThinKV quantizes keys; -1 for groups of channels per token, as it
    quantizes values. The last group may be shorter. fp8 has one scale for all channels of `group` tokens on both axes.
    scale_rule: for ternary only. "amax" (the default), or "mse": the fraction k/16 of amax, k = 8..16, with the
    smallest sum of squared errors; errors are rounded to float32, their squares added in order in float64, ties to the
    largest k.
    tensor_scale: for nvfp4 only. A second scale g = amax(x) / 2688 in float32 uses the full range of E4M3 for any
    tensor: s = e4m3(amax / (6 g)), and an element represents its magnitude times s g.
    x: float64 (rounded to float32 first), float32, float16 or bfloat16. NaN gets code 0 and is ignored by scales;
    infinity counts as the largest float32. A scale that rounds to 0 makes its group zero; the largest scale is 448.
    "unquantized" keeps NaN, infinity and the sign of zero.
    TypeError or ValueError for invalid arguments.
    """
    x, axis, rule = check_quantize(x, fmt, axis, group, scale_rule, tensor_scale)
    if fmt == "unquantized":
        kept = (x.float() if x.dtype == torch.float64 else x).clone(memory_format=torch.contiguous_format)
        return Quantized(kept, torch.empty(0, dtype=torch.uint8, device=x.device), fmt, axis, group, x.shape)
    values, shape = table(MAGNITUDES[fmt], x), x.shape
    along = -2 if fmt == "fp8" else axis
    x = grouped(x.float(), along, min(group, x.shape[along]))                       # without padding to a huge group
    magnitude = x.abs().nan_to_num(nan=0.0, posinf=LARGEST)
    amax = magnitude.amax((-2, -1) if fmt == "fp8" else axis)
    second = None
    if fmt == "fp8":
        scales = divide(amax, values[-1])
    elif tensor_scale:
        second = divide(magnitude.amax(), MAGNITUDES["nvfp4"][-1] * E4M3[-1])
        scales = e4m3(divide(amax, second * MAGNITUDES["nvfp4"][-1]))
    elif rule == "mse":
        scales = least_squares(magnitude, amax, axis)
    else:
        scales = e4m3(divide(amax, values[-1]))
    step = per_element(scales, second, fmt, axis)
    index = nearest(divide(magnitude, step), values)
    sign = (x < 0) & (index > 0)
    codes = (index | sign.long() << (BITS[fmt] - 1)).to(torch.uint8)
    return Quantized(ungrouped(codes, along, shape), scales, fmt, axis, group, shape, tensor_scale=second)


def dequantize(q: Quantized, dtype: torch.dtype) -> Tensor:
    """Reconstruct a tensor of q.shape: magnitude times scale in float32, then rounded to `dtype`.

    Every zero is +0, except in the format "unquantized", whose elements are only rounded. TypeError or ValueError for
    invalid arguments.
    """
    q = check_quantized(q)
    check_dtype("dtype", dtype, FLOATING)
    if q.fmt == "unquantized":
        return q.codes.to(dtype, copy=True, memory_format=torch.contiguous_format)
    along = -2 if q.fmt == "fp8" else q.axis
    value = decode(grouped(q.codes, along, min(q.group, q.shape[along])), q.fmt)
    step = per_element(q.scales, q.tensor_scale, q.fmt, q.axis)
    return ungrouped(value * step + 0.0, along, q.shape).to(dtype)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., D] uint8 of 8, 4 or 2 bits into bytes [..., ceil(D bits / 8)], the first code in the lowest
    bits.

    Only the lowest `bits` bits of a code are used. Bits after the last code are 0. TypeError or ValueError for invalid
    arguments.
    """
    codes, bits = check_bytes("codes", codes), check_bits(bits)
    codes = grouped(codes & (1 << bits) - 1, -1, 8 // bits)                        # [..., bytes, codes per byte]
    return (codes << shifts(bits, codes)).sum(-1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    """The inverse of `pack`: the first `size` codes, [..., size] uint8. TypeError or ValueError for invalid arguments.
    """
    packed, bits = check_packed(packed, bits, size)
    codes = packed[..., None] >> shifts(bits, packed) & (1 << bits) - 1            # [..., bytes, codes per byte]
    return codes.flatten(-2)[..., :size].contiguous()


# Magnitudes ----------------------------------------------------------------------------------------------------------


def table(values: tuple[float, ...], like: Tensor) -> Tensor:
    """`values` as a float32 tensor on the device of `like`."""
    return torch.tensor(values, dtype=torch.float32, device=like.device)


def divide(numerator: Tensor, denominator: Tensor | float) -> Tensor:
    """Correctly rounded float32 division; 0 where the denominator is 0.

    The denominator is a tensor, since CUDA computes tensor / number as tensor * (1 / number).
    """
    denominator = torch.as_tensor(denominator, dtype=torch.float32, device=numerator.device)
    return (numerator / denominator).where(denominator > 0, 0.0)


def nearest(ratio: Tensor, values: Tensor) -> Tensor:
    """The index of the value nearest to each ratio >= 0; halfway between two, the even index."""
    halfway = (values[:-1] + values[1:]) / 2                                       # exact
    below = torch.bucketize(ratio.contiguous(), halfway)                           # how many are < ratio
    reached = torch.bucketize(ratio.contiguous(), halfway, right=True)             # how many are <= ratio
    return torch.where(below % 2 == 0, below, reached)


def e4m3(x: Tensor) -> Tensor:
    """The E4M3 code of x >= 0, rounded to nearest even, at most 448."""
    return nearest(x, table(E4M3, x)).to(torch.uint8)


def decode(codes: Tensor, fmt: str) -> Tensor:
    """The numbers that codes represent, without the scale, float32."""
    sign = codes >> (BITS[fmt] - 1) & 1
    index = codes & (1 << BITS[fmt] - 1) - 1
    values = table((*MAGNITUDES[fmt], float("nan")), codes)[index.long()]
    return values.where(sign == 0, -values)


def least_squares(magnitude: Tensor, amax: Tensor, axis: int) -> Tensor:
    """The E4M3 codes of the ternary scales by rule "mse", see `quantize`."""
    best, least = None, None
    for fraction in FRACTIONS:
        scales = e4m3(amax * fraction)
        scale = decode(scales, "fp8")
        error = torch.zeros(amax.shape, dtype=torch.float64, device=amax.device)
        for element in magnitude.unbind(axis):                                     # in order
            error += (element - scale.where(element > scale / 2, 0.0)).double() ** 2
        if best is None or least is None:
            best, least = scales, error
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    assert best is not None
    return best


# Groups --------------------------------------------------------------------------------------------------------------


def grouped(x: Tensor, axis: int, group: int) -> Tensor:
    """Reshape [..., T, D] to [..., T, groups, group] (axis -1) or [..., groups, group, D] (axis -2), padded with zeros.
    """
    short = -x.shape[axis] % group
    return pad_ends(x, (0, short) if axis == -1 else (0, 0, 0, short)).unflatten(axis, (-1, group))


def ungrouped(x: Tensor, axis: int, shape: torch.Size) -> Tensor:
    """The inverse of `grouped`."""
    return x.flatten(axis - 1, axis).narrow(axis, 0, shape[axis]).contiguous()


def per_element(scales: Tensor, tensor_scale: Tensor | None, fmt: str, axis: int) -> Tensor:
    """The scale of each element, float32, in a shape that broadcasts over the groups."""
    if fmt == "fp8":
        return scales[..., None, None]
    scale = decode(scales, "fp8").unsqueeze(axis)
    return scale if tensor_scale is None else scale * tensor_scale


def scale_of_elements(quantized: Quantized) -> Tensor:
    """The scale of each element of a quantized tensor [Hkv, n, D] that is one group of tokens, float32."""
    heads, tokens, head_dim = quantized.shape
    scale = per_element(quantized.scales, None, quantized.fmt, quantized.axis)
    if quantized.fmt != "fp8" and quantized.axis == -1:
        return scale.expand(*scale.shape[:-1], quantized.group).flatten(-2)[..., :head_dim]
    return scale[:, 0].expand(heads, tokens, head_dim)


def shifts(bits: int, like: Tensor) -> Tensor:
    """The bit offset of each code in a byte."""
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=like.device)


def in_words(size: float) -> int:
    """`size` bytes rounded up to a multiple of 4."""
    return 4 * ceil(size / 4)
