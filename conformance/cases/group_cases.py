"""Cases of functions that quantize groups of numbers, KIVI's and PM-KVQ's, and of those that read their codes.

The numbers are made group by group: [B, H, lines, groups, size], where a line is a token or, for groups of tokens, a
channel. So each content says what one group is like, whatever the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...reference.baselines import kivi, pm_kvq
from ...reference.contract.kivi import WORD, words_of
from ...reference.contract.pm_kvq import groups_of, scale_dtype
from . import draws, supported
from .case import Case
from .strategies import DTYPES, PLAIN_DTYPES, _counts, _layouts, contents_of, default_device

#: Groups of ordinary numbers: of one size, of sizes from 1e-4 to 1e4, and far from 0. Failing examples shrink to the
#: first.
ORDINARY = ("ordinary", "sizes", "shifted")
#: Groups with numbers half-way between two codes.
TIED = ("halves",)
#: Constant groups, groups of one number, numbers at the ends of the type, NaN and infinity, and groups of which
#: float16 can store the minimum and the scale, one of them, or none.
EXTREME = ("constant", "single", "subnormal", "largest", "special", "wide")
PM_KVQ_EXTREME = tuple(content for content in EXTREME if content not in ("single", "wide"))
LAYOUTS = ("contiguous", "transposed", "sliced", "spread", "channels_first", "far")
#: Scales and minima have x's dtype, or another one.
STORED = ("", "", "float32", "float16", "bfloat16")
#: Of a dtype, the bits of its significand.
DIGITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
#: KIVI's (bits, axis, group, head_dim) on a GPU, where each is compiled.
KIVI_FORMS = (
    (2, -2, 32, 128), (4, -1, 32, 128), (2, -1, 16, 64), (4, -2, 16, 80), (4, -2, 2, 32), (2, -2, 8, 96),
)
#: PM-KVQ's (head_dim, group).
PM_KVQ_GROUPS = ((16, 128), (24, 8), (32, 2), (48, 16), (80, 128), (96, 32), (128, 64), (128, 128), (18, 128))


def fill(content: str, generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, levels: int) -> Tensor:
    """Numbers [B, H, lines, groups, size] in float64; the case rounds them to `dtype`. levels: 2^bits - 1."""
    device, of_group = generator.device, (*shape[:-1], 1)
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny

    def between(low: float, high: float, sizes: tuple[int, ...] = of_group) -> Tensor:
        return low + (high - low) * torch.rand(sizes, generator=generator, device=device, dtype=torch.float64)

    x = torch.randn(shape, generator=generator, device=device, dtype=torch.float64)
    first = between(0, shape[-1]).floor().long()
    second = (first + between(1, shape[-1]).floor().long()) % shape[-1]
    if content in ORDINARY:
        # Two numbers of each group are so far apart that the type can tell them, also far from 0.
        x = x.scatter(-1, second, x.gather(-1, first) + between(0.5, 2))
        if content == "sizes":
            return x * 10 ** between(-4, 4)
        return x * 2 ** (13 - DIGITS[dtype]) + between(-500, 500) if content == "shifted" else x
    if content == "halves":
        # Multiples of half a step from 0 to `levels` steps, both ends among them, minus some whole steps.
        half = between(0, 2 * levels + 1, shape).floor() / 2
        half = half.scatter(-1, second, float(levels)).scatter(-1, first, 0.0)
        return (half - between(0, levels + 1).floor()) * 2 ** between(-3, 3).floor()
    if content == "constant":
        kind = between(0, 4)
        zero = x.sign() * 0.0
        return torch.where(kind < 1, zero, torch.where(kind < 3, between(-2, 2).expand(shape), x))
    if content == "subnormal":
        return x * least * 2 ** between(-DIGITS[dtype], 1)
    if content == "largest":
        # Of one sign; of both, within a range that the type can hold; of both, beyond it.
        kind, size = between(0, 3), between(0, 1, shape)
        one = (0.5 + 0.5 * size) * between(-1, 1).sign()
        return most * torch.where(kind < 1, one, torch.where(kind < 2, size - 0.5, 2 * size - 1))
    if content == "wide":
        # Scales, and minima, of up to twice the largest float16 number.
        end = torch.finfo(torch.float16).max
        return (end * levels * between(0, 2) * between(0, 1, shape)).scatter(-1, first, 0.0) - end * between(0, 2)
    if content == "special":
        other = torch.tensor([torch.nan, torch.inf, -torch.inf, most, -most, -0.0], dtype=torch.float64, device=device)
        chosen = other[between(0, len(other), shape).long()]
        several = torch.where(between(0, 1) * between(0, 1, shape) > 0.6, chosen, x)
        # Every second group has one such number alone, in each place in turn.
        number = torch.arange(first.numel(), device=device).view(of_group) + int(first.sum())
        place = number // 2 % shape[-1]
        return torch.where(number % 2 == 0, x.scatter(-1, place, chosen.gather(-1, place)), several)
    return x


@dataclass(frozen=True, repr=False)
class GroupCase(Case):
    """Arguments of a `quantize`: x [B, H, T, D], H = key_value_heads. `group` is not used.

    size: the numbers of a group. With axis -2, T is `tokens`, rounded up to whole groups. stored: the dtype of minima
    and, as the method says, of scales; "" for x's. output: the dtype of numbers that are read again; "" for the
    method's default. least_scale: PM-KVQ's.
    """

    kind: ClassVar[str] = "groups"
    fixed: ClassVar[tuple[str, ...]] = ("head_dim",)

    tokens: int = 1
    size: int = 4
    bits: int = 4
    axis: int = -1
    stored: str = ""
    output: str = ""
    least_scale: float = 0.0

    x = property(lambda self: self.tensor("x"))

    @property
    def levels(self) -> int:
        return (1 << self.bits) - 1

    @property
    def each(self) -> int:
        """The numbers of a group."""
        return 1 if self.content == "single" else self.size

    @property
    def shape(self) -> tuple[int, ...]:
        """That of x."""
        tokens = self.tokens if self.axis == -1 else -(-self.tokens // self.each) * self.each
        return self.batch, self.key_value_heads, tokens, self.head_dim

    @property
    def minimum_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.stored) if self.stored else self.dtype
        return found

    @property
    def scale_dtype(self) -> torch.dtype:
        return self.minimum_dtype

    @property
    def output_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.output) if self.output else self.minimum_dtype
        return found

    def make(self) -> dict[str, Tensor | None]:
        batch, heads, *rest = self.shape
        lines, length = rest if self.axis == -1 else reversed(rest)
        shape = (batch, heads, lines, length // self.each, self.each)
        x = fill(self.content, self.generator(), shape, self.dtype, self.levels).flatten(-2)
        return {"x": (x if self.axis == -1 else x.mT).to(self.dtype).contiguous()}

    def in_groups(self, x: Tensor) -> Tensor:
        """Numbers [B, H, T, D] as [B, H, lines, groups, size]."""
        return (x if self.axis == -1 else x.mT).unflatten(-1, (-1, self.each))

    def of_lines(self, scale: Tensor) -> Tensor:
        """Scales or minima as [B, H, lines, groups]."""
        return scale if self.axis == -1 else scale.mT

    @property
    def scales_shape(self) -> tuple[int, ...]:
        batch, heads, tokens, channels = self.shape
        if self.axis == -1:
            return batch, heads, tokens, channels // self.each
        return batch, heads, tokens // self.each, channels

    @property
    def codes_shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def unpacked(self, codes: Tensor) -> Tensor:
        """Codes in the method's layout as [B, H, lines, groups, size] int64."""
        raise NotImplementedError

    def read(self, codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        """What the reference reads, [B, H, T, D]. Exact, if scales and minima are in float64."""
        raise NotImplementedError

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the function."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class KIVICase(GroupCase):
    """Arguments of KIVI's `quantize`."""

    kind: ClassVar[str] = "kivi"

    @property
    def inputs(self) -> dict[str, Any]:
        self.used()
        return {"x": self.x, **self.options, "dtype": getattr(torch, self.stored) if self.stored else None}

    @property
    def options(self) -> dict[str, Any]:
        return {"bits": self.bits, "axis": self.axis, "group": self.each}

    @property
    def codes_shape(self) -> tuple[int, ...]:
        batch, heads, tokens, channels = self.shape
        if self.axis == -1:
            return batch, heads, tokens, channels * self.bits // WORD
        return batch, heads, tokens // self.each * words_of(self.each, self.bits), channels

    def unpacked(self, codes: Tensor) -> Tensor:
        found = kivi.unpack(codes, self.bits, self.axis, self.each).long()
        return found if self.axis == -1 else found.movedim(-1, 2)      # [B, H, T/g, g, D] -> [B, H, D, T/g, g]

    def read(self, codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        return kivi.dequantize(codes, scale, minimum, **self.options)


@dataclass(frozen=True, repr=False)
class PMKVQCase(GroupCase):
    """Arguments of PM-KVQ's `quantize`: groups of channels, of which a head may have less than one."""

    kind: ClassVar[str] = "pm_kvq"

    @property
    def each(self) -> int:
        return self.head_dim // groups_of(self.head_dim, self.size)

    @property
    def scale_dtype(self) -> torch.dtype:
        return scale_dtype(self.minimum_dtype)

    @property
    def inputs(self) -> dict[str, Any]:
        self.used()
        return {
            "x": self.x, "bits": self.bits, "group": self.size, "least_scale": self.least_scale,
            "dtype": getattr(torch, self.stored) if self.stored else None,
        }

    @property
    def codes_shape(self) -> tuple[int, ...]:
        return self.shape

    def unpacked(self, codes: Tensor) -> Tensor:
        return self.in_groups(codes).long()

    def read(self, codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        return pm_kvq.dequantize(codes, scale, minimum)


class Coded:
    """Makes a case one of a `dequantize`: its tensors are the codes, scales and minima of the numbers."""

    def make(self) -> dict[str, Tensor | None]:
        given = super().make()["x"]  # type: ignore[misc]
        return dict(self.quantized(given)._asdict())

    def quantized(self, x: Tensor) -> Any:
        raise NotImplementedError

    @property
    def parts(self) -> dict[str, Any]:
        """The codes, scales and minima, and the dtype of the result."""
        self.used()  # type: ignore[attr-defined]
        output: str = self.output  # type: ignore[attr-defined]
        return {**self.tensors, "dtype": getattr(torch, output) if output else None}  # type: ignore[attr-defined]


@dataclass(frozen=True, repr=False)
class KIVICodesCase(Coded, KIVICase):
    """Arguments of KIVI's `dequantize`."""

    kind: ClassVar[str] = "kivi_codes"

    def quantized(self, x: Tensor) -> Any:
        return kivi.quantize(x, **self.options, dtype=self.minimum_dtype)

    @property
    def inputs(self) -> dict[str, Any]:
        return {**self.parts, **self.options}


@dataclass(frozen=True, repr=False)
class PMKVQCodesCase(Coded, PMKVQCase):
    """Arguments of PM-KVQ's `dequantize`, and of `shrink`."""

    kind: ClassVar[str] = "pm_kvq_codes"

    def quantized(self, x: Tensor) -> Any:
        return pm_kvq.quantize(
            x, bits=self.bits, group=self.size, least_scale=self.least_scale, dtype=self.minimum_dtype
        )

    @property
    def inputs(self) -> dict[str, Any]:
        return self.parts

    @property
    def shrink_inputs(self) -> dict[str, Any]:
        self.used()
        return {"codes": self.tensor("codes"), "scale": self.tensor("scale"), "bits": self.bits}


# Strategies ----------------------------------------------------------------------------------------------------------


def _fits(content: str, bits: int, dtype: torch.dtype) -> bool:
    """True if a type can hold the halves between codes of so many bits."""
    return content not in TIED or bits < DIGITS[dtype]


@st.composite
def _cases(
    draw: st.DrawFn, made: type[GroupCase], forms: Callable[[], Sequence[tuple[int, int, int, int]]], *,
    content: Sequence[str], layout: tuple[str, ...], tokens: tuple[int, int] | None = None,
    device: torch.device | str | None = None,
) -> GroupCase:
    """forms: all (bits, axis, size, head_dim). tokens: the least and the most T."""
    supported.layouts((*layout, "contiguous") if "far" in layout else layout)  # or there is no case; see _layouts
    where = torch.device(device) if device is not None else default_device()
    dtypes = tuple(draws.plain_among(supported.dtypes(DTYPES), PLAIN_DTYPES))
    leasts = supported.values("least_scale", (0.0, 0.0, 1e-5, 0.01) if issubclass(made, PMKVQCase) else (0.0,))
    every = st.sampled_from(forms())
    chosen = draw(contents_of([one for one in content if one != "single" or supported.option("group", 1)],
                              ("ordinary", *TIED)))  # fmt: skip
    bits, axis, size, head_dim = draw(every)
    dtype = draw(st.sampled_from([one for one in dtypes if _fits(chosen, bits, one)] or dtypes))
    rows = draw(st.integers(1, supported.rows(3)))
    heads = draw(st.sampled_from(supported.sizes("kv_heads", (1, 2, 3)[:max(1, 4 // rows)])))
    sizes: dict[str, Any] = {
        "device": str(where), "batch": rows, "key_value_heads": heads, "group": 1, "head_dim": head_dim,
    }
    least, most = tokens or (1, 5 if axis == -1 else 4 * size)
    names = {str(one).removeprefix("torch.") for one in dtypes}
    kinds = [one for one in STORED if not one or one in names]
    stored = ["float16"] if chosen == "wide" and "float16" in names else kinds
    return made(
        **sizes, dtype=dtype, content=chosen, layout=draw(_layouts(dtype, layout)),
        seed=draw(st.integers(0, 2**31 - 1)), bits=bits, axis=axis, size=size,
        tokens=draw(_counts(sizes, most, least=least)),
        stored=draw(st.sampled_from(stored)), output=draw(st.sampled_from(kinds)),
        least_scale=draw(st.sampled_from(leasts)),
    )


def _kivi_forms() -> list[tuple[int, int, int, int]]:
    """(bits, axis, group, head_dim) that KIVI allows, among those that the implementation supports."""
    if default_device().type != "cpu":
        usual = [
            one for one in KIVI_FORMS if supported.size("head_dims", one[3])
            and all(map(supported.option, ("bits", "axis", "group"), one[:3]))
        ]
        if usual:
            return draws.third_of_run(usual)
    sizes = supported.sizes("head_dims", (16, 32, 48, 64, 80, 96, 128, 24))
    return supported.among([
        (bits, axis, group, head_dim) for bits in supported.values("bits", (4, 2))
        for axis in supported.values("axis", (-1, -2)) for group in supported.values("group", (4, 2, 8, 16, 32))
        for head_dim in sizes
    ], lambda form: form[1] == -2 or form[3] % form[2] == form[3] % (WORD // form[0]) == 0, "head_dims")


def _pm_kvq_forms(widths: Sequence[int]) -> list[tuple[int, int, int, int]]:
    among = [one for one in PM_KVQ_GROUPS if supported.size("head_dims", one[0]) and supported.option("group", one[1])]
    among = among or [(one, group) for one in supported.sizes("head_dims", (16,))
                      for group in supported.values("group", (128,))]  # fmt: skip
    return [
        (bits, -1, group, head_dim) for bits in supported.values("bits", widths)
        for head_dim, group in draws.third_of_run(among)
    ]


def kivi_cases(
    *, made: type[KIVICase] = KIVICase, content: Sequence[str] = (*ORDINARY, *TIED, *EXTREME),
    layout: tuple[str, ...] = LAYOUTS, **more: Any,
) -> st.SearchStrategy[Any]:
    """Arguments of KIVI's functions: up to four groups of tokens, or 64 of channels. more: those of `_cases`."""
    return _cases(made, _kivi_forms, content=content, layout=layout, **more)


def pm_kvq_cases(
    *, made: type[PMKVQCase] = PMKVQCase, widths: Sequence[int] = (4, 16, 8, 2),
    content: Sequence[str] = (*ORDINARY, *TIED, *PM_KVQ_EXTREME), layout: tuple[str, ...] = LAYOUTS, **more: Any,
) -> st.SearchStrategy[Any]:
    """Arguments of PM-KVQ's functions. widths: the bits of codes. more: those of `_cases`."""
    return _cases(made, partial(_pm_kvq_forms, widths), content=content, layout=layout, **more)
