"""Exact quantization errors of groups, and groups with the largest errors, for the claims about formats.

Errors are exact: elements are float32, codes times scales have few bits, and the differences fit into float64.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...cases.format_cases import fill
from ...harness.impl import Twins

CONTENTS = ("ordinary", "sizes", "small_scales", "saturated", "outlier", "halfway", "mixed")
NORMAL, LARGEST = 2.0**-6, 448.0  # of E4M3


class Quantization(NamedTuple):
    """Quantized groups [N, n] in float64: |x|, the error of each element, and amax and scale [N, 1]."""

    size: Tensor
    error: Tensor
    amax: Tensor
    scale: Tensor


def quantized(x: Tensor, fmt: str, twins: Twins, device: torch.device, **options: Any) -> Quantization:
    """Quantize the rows of x, each as one group."""
    module = twins.optimized.thinkv
    x = x.float()
    q = module.quantize(x.to(device), fmt, axis=-2 if fmt == "fp8" else -1, group=1 if fmt == "fp8" else x.shape[1],
                        **options)  # fmt: skip
    scale = q.scales if fmt == "fp8" else q.scales.view(torch.float8_e4m3fn)
    back = module.dequantize(q, torch.float32).cpu().double()
    x = x.double()
    return Quantization(x.abs(), (back - x).abs(), x.abs().amax(-1, keepdim=True),
                        scale.cpu().double().reshape(-1, 1))  # fmt: skip


@cache
def drawn(fmt: str) -> Tensor:
    """Groups of 16 of all kinds [N, 16], without NaN and infinity."""
    generator = torch.Generator().manual_seed(9)
    return torch.cat([fill(content, generator, (300, 16), fmt) for content in CONTENTS]).float().nan_to_num()


def ulps(x: Tensor, count: int) -> Tensor:
    """x and the `count` float32 numbers on either side of it."""
    steps = torch.arange(-count, count + 1, dtype=torch.int32)
    return (x.float().view(torch.int32)[:, None] + steps).flatten().view(torch.float32)


def just_past_halves(elements: list[float], largest: float, past: int) -> Tensor:
    """Groups whose scale is rounded up as much as possible: from just above 1.0625 to 1.125, times all powers of two.
    `elements` are in units of the scale."""
    powers = 2.0 ** torch.arange(-6, 8)
    amax = (powers * 1.0625 * largest).float()
    amax = (amax.view(torch.int32) + past).view(torch.float32)
    return torch.cat((amax[:, None], powers[:, None] * 1.125 * torch.tensor(elements)), 1)


def relative(found: Quantization, largest: float) -> Tensor:
    """Errors divided by amax, for groups whose scale is normal and not saturated."""
    inside = ((found.amax >= largest * NORMAL) & (found.amax <= largest * LARGEST)).flatten()
    return (found.error / found.amax)[inside]
