"""Cases of `quantize`: shapes, groups, dtypes, layouts, and numbers that are hard for a format.

Tensors are made on the CPU from the case's seed and then moved, so a case's repr creates it again on any device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...reference import thinkv
from ...reference.contract.thinkv.types import Quantized
from .. import capabilities
from . import draws, supported
from .case import Case
from .format_oracle import BITS, MAGNITUDES, midpoints
from .layouts import lay_out
from .strategies import default_device

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
    dtypes = supported.dtypes(DTYPES) if capabilities.current().outside() else DTYPES
    axes, layouts = supported.values("axis", (-1, -2)), supported.layouts(LAYOUTS)
    fmt = draw(st.sampled_from(supported.values("fmt", formats)))
    leading = draw(st.sampled_from(((), (2,), (1, 2), (2, 1), (2, 2), (1, 1, 2))))
    rules = supported.values("scale_rule", (None, "mse", "amax") if fmt == "ternary" else (None,))
    rule = draw(st.sampled_from(rules))
    groups = (16, 16, 1, 5, 8, 32, 100) if rule != "mse" else (16, 5, 1)
    group = draw(st.sampled_from(supported.values("group", groups)))
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
        axis=draw(st.sampled_from(axes)),
        group=group,
        scale_rule=rule,
        tensor_scale=draw(st.sampled_from(scaled)),
        dtype=draw(st.sampled_from(dtypes)),
        content=draw(st.sampled_from(content)),
        layout=draw(st.sampled_from(layouts)),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


# Cases that the verdict judges ---------------------------------------------------------------------------------------

#: Contents of groups that a format can hold, with halves between two codes, and of others.
ORDINARY, TIED = ("ordinary", "outlier"), ("halfway",)
EXTREME = ("sizes", "small_scales", "saturated", "zeros", "subnormal", "largest", "special", "mixed")


@dataclass(frozen=True, repr=False)
class FormatsCase(Case):
    """Arguments of `quantize`: x [B, H, T, D], H = key_value_heads. size: the numbers of a group. rule: scale_rule, ""
    for None. output: the dtype that `dequantize` gives. `group` is not used."""

    kind: ClassVar[str] = "formats"

    tokens: int = 1
    fmt: str = "nvfp4"
    axis: int = -1
    size: int = 16
    rule: str = ""
    tensor_scale: bool = False
    output: str = "float32"

    x = property(lambda self: self.tensor("x"))

    @property
    def output_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.output)
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch, self.key_value_heads, self.tokens, self.head_dim

    def make(self) -> dict[str, Tensor | None]:
        x = fill(self.content, torch.Generator().manual_seed(self.seed), self.shape, self.fmt)
        return {"x": x.to(self.dtype).to(self.device)}

    @property
    def options(self) -> dict[str, Any]:
        return {
            "fmt": self.fmt, "axis": self.axis, "group": self.size, "scale_rule": self.rule or None,
            "tensor_scale": self.tensor_scale,
        }

    @property
    def inputs(self) -> dict[str, Any]:
        self.used()
        return {"x": self.x, **self.options}


@dataclass(frozen=True, repr=False)
class QuantizedCase(FormatsCase):
    """Arguments of `dequantize`: the parts of a `Quantized`, made by the reference."""

    kind: ClassVar[str] = "quantized"

    def make(self) -> dict[str, Tensor | None]:
        x = super().make()["x"]
        assert x is not None
        found = thinkv.quantize(x, **self.options)
        return {"codes": found.codes, "scales": found.scales, "second": found.tensor_scale}

    def place(self, name: str, tensor: Tensor) -> Tensor:
        return super().place(name, tensor) if tensor.dim() > 2 else tensor

    @property
    def inputs(self) -> dict[str, Any]:
        self.used()
        return {**self.tensors, "fmt": self.fmt, "axis": self.axis, "size": self.size, "dtype": self.output_dtype}

    @staticmethod
    def arguments(inputs: dict[str, Any]) -> dict[str, Any]:
        """What `dequantize` gets of the inputs."""
        codes = inputs["codes"]
        q = Quantized(
            codes, inputs["scales"], inputs["fmt"], inputs["axis"], inputs["size"], codes.shape, inputs["second"]
        )
        return {"q": q, "dtype": inputs["dtype"]}


@dataclass(frozen=True, repr=False)
class BytesCase(Case):
    """Arguments of `pack` and `unpack`: codes uint8 [B, H, T, D], and the bytes that hold the lowest `bits` of each."""

    kind: ClassVar[str] = "bytes"
    dtype_name = ""

    tokens: int = 1
    bits: int = 4

    def make(self) -> dict[str, Tensor | None]:
        shape = (self.batch, self.key_value_heads, self.tokens, self.head_dim)
        codes = torch.randint(256, shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.uint8)
        return {"codes": codes.to(self.device), "packed": thinkv.pack(codes, self.bits).to(self.device)}

    @property
    def pack_inputs(self) -> dict[str, Any]:
        self.used()
        return {"codes": self.tensor("codes"), "bits": self.bits}

    @property
    def unpack_inputs(self) -> dict[str, Any]:
        self.used()
        return {"packed": self.tensor("packed"), "bits": self.bits, "size": self.head_dim}


@st.composite
def formats_cases(
    draw: st.DrawFn, *, made: type[FormatsCase] = FormatsCase, content: tuple[str, ...] = (*ORDINARY, *TIED, *EXTREME),
    layout: tuple[str, ...] = LAYOUTS, fmt: tuple[str, ...] = EVERY, tokens: tuple[int, int] | None = None,
    apart: tuple[bool, ...] = (False,),
) -> FormatsCase:
    """As `format_cases`, of 16-bit and 32-bit types. tokens: the least and the most T. apart: (True,) for cases whose
    rows do not depend on each other: without a scale of the whole tensor."""
    dtypes, layouts = supported.dtypes(DTYPES[:3]), supported.layouts(layout)
    case = draw(format_cases(formats=fmt, content=tuple(draws.plain_among(content, (*ORDINARY, *TIED)))))
    dtype = case.dtype if case.dtype in dtypes else dtypes[0]
    leading = (1, 1, *case.leading)[-2:]
    heads = supported.sizes("kv_heads", (leading[1],))
    return made(
        batch=supported.rows(leading[0]), key_value_heads=leading[1] if leading[1] in heads else heads[0],
        head_dim=case.channels, dtype=dtype, content=case.content, seed=case.seed, device=str(default_device()),
        layout=draw(st.sampled_from(layouts)),
        tokens=draw(st.integers(*tokens)) if tokens else case.tokens, fmt=case.fmt, axis=case.axis, size=case.group,
        rule=case.scale_rule or "", tensor_scale=case.tensor_scale and not apart[0],
        output=str(draw(st.sampled_from(dtypes))).removeprefix("torch."),
    )


@st.composite
def bytes_cases(
    draw: st.DrawFn, *, content: tuple[str, ...] = ("ordinary",), layout: tuple[str, ...] = LAYOUTS,
    tokens: tuple[int, int] = (1, 5),
) -> BytesCase:
    """Bytes that the last codes do not fill, among others."""
    layouts, widths = supported.layouts(layout), supported.values("bits", (4, 2, 8))
    return BytesCase(
        batch=draw(st.integers(1, supported.rows(2))),
        key_value_heads=draw(st.sampled_from(supported.sizes("kv_heads", (1, 2)))),
        head_dim=draw(st.sampled_from(supported.sizes("head_dims", (16, 1, 3, 37, 64)))), content=content[0],
        layout=draw(st.sampled_from(layouts)), seed=draw(st.integers(0, 2**31 - 1)),
        device=str(default_device()), tokens=draw(st.integers(*tokens)),
        bits=draw(st.sampled_from(widths)),
    )
