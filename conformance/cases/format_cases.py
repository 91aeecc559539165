"""Cases of `quantize`: shapes, groups, dtypes, layouts, and numbers that are hard for a format.

Tensors are made on the CPU from the case's seed and then moved, so a case's repr creates it again on any device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from .. import capabilities
from ..judge.format_oracle import BITS, MAGNITUDES, midpoints
from . import supported
from .layouts import lay_out

#: The formats with codes, and all.
FORMATS = tuple(BITS)
EVERY = (*FORMATS, "unquantized")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
#: Failing examples shrink to the first.
CONTENTS = ("ordinary", "sizes", "small_scales", "saturated", "outlier", "zeros", "halfway", "subnormal", "largest",
            "special", "mixed")  # fmt: skip
#: x [A, B, T, D] in memory; of fewer dimensions the last.
LAYOUTS = ("contiguous", "sliced", "spread", "channels_first", "transposed")


@dataclass(frozen=True)
class FormatCase:
    """Arguments of `quantize`. leading: the dimensions before T and D."""

    leading: tuple[int, ...] = ()
    tokens: int = 1
    channels: int = 1
    fmt: str = "nvfp4"
    axis: int = -1
    group: int = 16
    scale_rule: str | None = None
    tensor_scale: bool = False
    dtype: torch.dtype = torch.float32
    content: str = "ordinary"
    layout: str = "contiguous"
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `quantize`."""
        return {
            "fmt": self.fmt, "axis": self.axis, "group": self.group, "scale_rule": self.scale_rule,
            "tensor_scale": self.tensor_scale,
        }

    def x(self, device: torch.device | str = "cpu") -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (*self.leading, self.tokens, self.channels)
        x = fill(self.content, generator, shape, self.fmt).to(self.dtype)
        layout = self.layout if len(shape) > 2 or self.layout != "transposed" else "channels_first"
        return lay_out(x.to(device), layout)


def fill(content: str, generator: torch.Generator, shape: tuple[int, ...], fmt: str) -> Tensor:
    """Numbers [..., T, D] in float64; the case rounds them to its dtype."""
    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def between(low: float, high: float, *sizes: int) -> Tensor:
        return low + (high - low) * torch.rand(sizes or shape, generator=generator, dtype=torch.float64)

    magnitudes = MAGNITUDES.get(fmt, MAGNITUDES["fp8"])
    largest = float(magnitudes[-1])
    sizes = (*shape[:-1], 1)
    if content == "sizes":
        return normal() * 10 ** between(-9, 9, *sizes)
    if content == "small_scales":
        return normal() * largest * 2 ** between(-12, -5, *sizes)
    if content == "saturated":
        return normal() * largest * 2 ** between(7, 12, *sizes)
    if content == "outlier":
        return torch.where(between(0, 1) < 0.06, 1e4, 1) * normal()
    if content == "zeros":
        return torch.where(between(0, 1, *sizes) < 0.5, 0, normal()) * between(-1, 1).sign()
    if content == "halfway":
        # Midpoints of the format times numbers of few bits, some of which become the scale.
        halves = torch.tensor([0.0, *map(float, midpoints(magnitudes)), largest], dtype=torch.float64)
        chosen = torch.randint(len(halves), shape, generator=generator)
        chosen = torch.where(between(0, 1) < 0.2, len(halves) - 1, chosen)
        step = between(8, 16, *sizes).floor() * 2 ** between(-9, 4, *sizes).floor()
        return halves[chosen] * step * between(-1, 1).sign()
    if content == "subnormal":
        return normal() * 2 ** between(-149, -120, *sizes)
    if content == "largest":
        return normal() * 2 ** between(120, 129, *sizes)
    if content == "special":
        special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-46, -3.4028235e38], dtype=torch.float64)
        chosen = special[torch.randint(len(special), shape, generator=generator)]
        return torch.where(between(0, 1) < between(0, 1, *sizes) ** 2, chosen, normal())
    if content == "mixed":
        x = normal()
        for other in CONTENTS[1:-1]:
            x = torch.where(between(0, 1, *sizes) < 0.15, fill(other, generator, shape, fmt), x)
        return x
    return normal()


@st.composite
def format_cases(
    draw: st.DrawFn, *, formats: tuple[str, ...] = EVERY, content: tuple[str, ...] = CONTENTS, most: int = 40
) -> FormatCase:
    """At most `most` tokens and channels; complete groups, incomplete ones, and groups longer than the axis.

    Cases have few chunks of tokens, since kernels process one chunk at a time. float64, which no capability names, is
    left to implementations that declare none. If they declare head_dims, those are the channels.
    """
    fmt = draw(st.sampled_from(supported.values("fmt", formats)))
    leading = draw(st.sampled_from(((), (2,), (1, 2), (2, 1), (2, 2), (1, 1, 2))))
    rules = supported.values("scale_rule", (None, "mse", "amax") if fmt == "ternary" else (None,))
    rule = draw(st.sampled_from(rules))
    groups = (16, 16, 1, 5, 8, 32, 100) if rule != "mse" else (16, 5, 1)
    group = draw(st.sampled_from(supported.values("group", groups)))
    dtypes = supported.dtypes(DTYPES) if capabilities.current().outside() else DTYPES
    scaled = supported.values("tensor_scale", (False, True) if fmt == "nvfp4" else (False,))
    sizes = supported.sizes("head_dims", range(1, most + 1))
    channels = st.sampled_from((16, 32, 40)) | st.integers(1, most)
    if capabilities.current().head_dims is not None:
        channels = st.sampled_from(sizes)
    return FormatCase(
        leading=leading,
        tokens=draw(st.integers(1, min(most, group * (8 // math.prod(leading))))),
        channels=draw(channels),
        fmt=fmt,
        axis=draw(st.sampled_from(supported.values("axis", (-1, -2)))),
        group=group,
        scale_rule=rule,
        tensor_scale=draw(st.sampled_from(scaled)),
        dtype=draw(st.sampled_from(dtypes)),
        content=draw(st.sampled_from(content)),
        layout=draw(st.sampled_from(supported.layouts(LAYOUTS))),
        seed=draw(st.integers(0, 2**31 - 1)),
    )
