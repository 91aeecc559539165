"""Cases with FP8 keys and values: their codes, scales and poison, and the strategy that draws them.

Keys and values are first made as for other cases (contents.py), then divided by a scale and rounded to FP8. The rounded
numbers times the scale are the inputs, so neither rounding is part of any bound.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...reference.contract import Pages
from . import contents, draws, supported
from .block_cases import AttendCase, attend_cases
from .case import Case, DecodeCase
from .layouts import LAYOUTS, MIXED, REPEATED
from .oracle import Attention, attend
from .strategies import decode_cases

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
#: Shapes of the two scales: one per KV head ("powers": powers of two), one per tensor, or none.
SCALES = ("heads", "tensor", "powers", "heads_and_tensor", "tensor_and_none", "none_and_heads", "none")
#: Besides the contents of other cases: any finite codes; subnormal numbers and zeros; the largest numbers.
OWN_CONTENTS = ("codes", "subnormal", "largest")
CONTENTS = (*contents.CONTENTS, *OWN_CONTENTS)
#: The largest finite code without its sign, the smallest normal one, and those of each poison.
LARGEST = {"e4m3": 0x7E, "e5m2": 0x7B}
NORMAL = {"e4m3": 0x08, "e5m2": 0x04}
POISONS = {
    "e4m3": {"zero": 0, "nan": 0x7F, "inf": 0xFF, "largest": 0x7E}, "e5m2": {"zero": 0, "nan": 0x7F, "inf": 0xFC,
                                                                           "largest": 0x7B},
}
#: Powers of two between the largest FP8 number and the largest number before rounding: with many, most codes are
#: subnormal or zero.
SPREAD = {"e4m3": 9, "e5m2": 22}


if TYPE_CHECKING:
    class _Plain(Case):
        """What `Coded` needs of the class of cases that it is combined with."""

        per_head: bool
        key: Tensor
        value: Tensor

        @property
        def inputs(self) -> dict[str, Any]: ...
else:
    _Plain = object


class Coded(_Plain):
    """Makes FP8 cases of a class of cases. dtype: of the query. fp8: one of FORMATS. scales: one of SCALES. causal:
    whether the attention is."""

    causal: ClassVar[bool] = False

    fp8: str
    scales: str

    key_scale = property(lambda self: self.tensors["key_scale"])
    value_scale = property(lambda self: self.tensors["value_scale"])
    dtype_name = property(lambda self: str(FORMATS[self.fp8]).removeprefix("torch."))

    def make(self) -> dict[str, Tensor | None]:
        content = {"near_ties": "duplicates"}.get(self.content, self.content)
        plain = dataclasses.replace(
            self, content="ordinary" if content in OWN_CONTENTS else content, poison="stale"
        )
        made = super(Coded, plain).make()
        query, key, value, occupied = (made[name] for name in ("query", "key", "value", "occupied"))
        assert query is not None and key is not None and value is not None and occupied is not None
        generator = torch.Generator(self.device).manual_seed(self.seed ^ 0x5EED)
        kinds = self.scales.split("_and_")
        codes, scales = [], []
        for number, tensor in enumerate((key.float(), value.float())):
            kind = kinds[-1] if number else kinds[0]
            if kind != "none":
                # Large and small numbers. The scaled query keeps the logits.
                power = int(torch.randint(-1, 2, (), generator=generator, device=self.device)) * (6 if number else 4)
                tensor = tensor * 2.0**power
                query = query if number else query * 2.0**-power
            one, scale = self._coded(tensor, kind, generator)
            if number and scale is not None and self.dtype == torch.float16:
                scale = scale * self._into_range(one, scale)
            codes.append(one)
            scales.append(scale)
        if self.content == "near_ties":
            _part(codes[0], codes[1], LARGEST[self.fp8])
        if self.layout not in REPEATED and self.poison in POISONS[self.fp8]:
            free = ~(occupied if self.per_head else occupied[:, None])[..., None]
            codes = [one.masked_fill(free, POISONS[self.fp8][self.poison]) for one in codes]
        key, value = (one.view(FORMATS[self.fp8]) for one in codes)
        return {**made, "query": query, "key": key, "value": value, "key_scale": scales[0], "value_scale": scales[1]}

    def _coded(self, tensor: Tensor, kind: str, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Codes, uint8, of numbers [B, Hkv, S, D] and their scale."""
        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, device=generator.device)

        largest = torch.finfo(FORMATS[self.fp8]).max
        most = tensor.abs().amax((0, 2, 3)).clamp_min(2.0**-40)                               # [Hkv]
        most = most.max() if kind == "tensor" else most
        spread = torch.exp2(SPREAD[self.fp8] * uniform(*most.shape))
        if self.content in OWN_CONTENTS:
            spread = torch.ones_like(spread)
        scale = most * spread / largest
        if kind == "powers":
            scale = torch.exp2(scale.log2().ceil())
        if self.content in OWN_CONTENTS:
            low, high = {
                "codes": (0, LARGEST[self.fp8] + 1), "subnormal": (0, NORMAL[self.fp8]),
                "largest": (LARGEST[self.fp8] - 2, LARGEST[self.fp8] + 1),
            }[self.content]
            sign = torch.randint(2, tensor.shape, generator=generator, device=generator.device) << 7
            codes = sign + torch.randint(low, high, tensor.shape, generator=generator, device=generator.device)
            codes = codes.to(torch.uint8)
        else:
            if kind != "none":
                tensor = tensor / (scale if scale.dim() == 0 else scale[:, None, None])
            codes = tensor.clamp(-largest, largest).to(FORMATS[self.fp8]).view(torch.uint8)
        return codes, None if kind == "none" else scale

    def _into_range(self, code: Tensor, scale: Tensor) -> Tensor:
        """A power of two, at most 1, that keeps values in the range of float16, the type of the output."""
        largest = exact(code.view(FORMATS[self.fp8]), scale).abs().amax()
        return torch.exp2(-(largest / 2**15).log2().ceil().clamp_min(0)).float()

    def place(self, name: str, tensor: Tensor) -> Tensor:
        if not name.endswith("_scale"):
            return super().place(name, tensor)
        if self.layout == "contiguous":
            return tensor
        # A column of a larger tensor, with another stride for values than for keys.
        columns = (tensor, *[-tensor] * (2 if name == "value_scale" else 1))
        return torch.stack(columns, -1)[..., 0]

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the function, the scales only if there are any."""
        scales = {"key_scale": self.key_scale, "value_scale": self.value_scale}
        return super().inputs | {name: scale for name, scale in scales.items() if scale is not None}

    @property
    def exact_inputs(self) -> dict[str, Any]:
        """The inputs for the oracle: keys and values in float64, without scales, so that no code of the implementation
        under test or of the reference converts them."""
        key, value = exact(self.key, self.key_scale), exact(self.value, self.value_scale)
        return super().inputs | {"key": key, "value": value}

    @cached_property
    def attention(self) -> Attention:
        """The exact attention, for the bounds."""
        numbers = [self.exact_inputs[name] for name in ("query", "key", "value", "occupied")]
        most = [1.0 if one is None else float(one.max()) for one in (self.key_scale, self.value_scale)]
        found = attend(*numbers, scale=self.scale, causal=self.causal)
        return dataclasses.replace(found, scales=(most[0], most[1]))


@dataclass(frozen=True, repr=False)
class Fp8Case(Coded, DecodeCase):
    """Arguments of a `decode_attention` with FP8 keys and values."""

    kind: ClassVar[str] = "decode_fp8"

    fp8: str = "e4m3"
    scales: str = "heads"

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None, *,
           protected: Tensor | None = None, scale: float | None = None, per_head: bool = False,
           key_scale: Tensor | None = None, value_scale: Tensor | None = None) -> Fp8Case:
        """Make a case from given tensors."""
        plain = DecodeCase.of(query, key, value, occupied, protected=protected, scale=scale, per_head=per_head)
        fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
        fp8 = next(name for name, dtype in FORMATS.items() if dtype == key.dtype)
        case = cls(**fields | {"dtype": query.dtype, "fp8": fp8})
        case._adopt({**plain.tensors, "key_scale": key_scale, "value_scale": value_scale})
        return case


@dataclass(frozen=True, repr=False)
class Fp8AttendCase(Coded, AttendCase):
    """Arguments of an `attend` with FP8 keys and values."""

    kind: ClassVar[str] = "attend_fp8"
    causal: ClassVar[bool] = True

    fp8: str = "e4m3"
    scales: str = "heads"

    def make(self) -> dict[str, Tensor | None]:
        made = super().make()
        query, occupied = made["query"], made["occupied"]
        assert query is not None and occupied is not None
        held = (occupied.any(1) if self.per_head else occupied)[:, self.slots - self.queries:]
        return {**made, "query": contents.poison(self.poison, query, held)}

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None, *, method: str,
           scale: float | None = None, key_scale: Tensor | None = None, value_scale: Tensor | None = None
           ) -> Fp8AttendCase:
        """Make a case from given tensors."""
        batch, heads, slots, head_dim = key.shape
        if occupied is None:
            occupied = torch.ones(batch, slots, dtype=torch.bool, device=key.device)
        case = cls(
            batch=batch, key_value_heads=heads, group=query.shape[1] // heads, head_dim=head_dim, dtype=query.dtype,
            content="given", scale=scale, device=str(key.device), method=method, slots=slots, queries=query.shape[2],
            per_head=occupied.dim() == 3, fp8=next(name for name, dtype in FORMATS.items() if dtype == key.dtype),
        )
        case._adopt({
            "query": query, "key": key, "value": value, "occupied": occupied, "key_scale": key_scale,
            "value_scale": value_scale,
        })
        return case


def exact(codes: Tensor, scale: Tensor | None) -> Tensor:
    """FP8 codes [B, Hkv, S, D] times their scale in float64, which is exact."""
    number = codes.double()
    return number if scale is None else number * scale.double().view(1, -1, 1, 1)


def _part(key: Tensor, value: Tensor, largest: int) -> None:
    """Change one code of each copy of an earlier token, uint8 [B, Hkv, S, D], to a neighbour, in key or value."""
    bits = torch.cat((key, value), -1)[0, 0].tolist()
    copies = [slot for slot, one in enumerate(bits) if one in bits[:slot]]
    for place, slot in enumerate(copies):
        tensor, channel = (value, key)[place % 2], place % key.shape[-1]
        code = tensor[:, :, slot, channel]
        tensor[:, :, slot, channel] = torch.where((code & 0x7F) < largest, code + 1, code - 1)


def fp8_variants(given: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments of a function with FP8 keys and values instead of its own, with scales and without."""
    found = []
    for dtype, scales in (
        (torch.float8_e4m3fn, {"key_scale": (0.5, 0.7), "value_scale": (3.0, 0.1)}),
        (torch.float8_e4m3fn, {"key_scale": 0.3}), (torch.float8_e5m2, {"value_scale": 0.3}),
    ):
        made = given | {key: torch.tensor(value, device=given["query"].device) for key, value in scales.items()}
        if "pages" in given:
            key, value, table = given["pages"]
            made["pages"] = Pages(key.to(dtype), value.to(dtype), table)
        else:
            made |= {part: given[part].to(dtype) for part in ("key", "value")}
        found.append(made)
    return found


@st.composite
def fp8_cases(draw: st.DrawFn, **more: Any) -> Fp8Case:
    """Inputs of a `decode_attention` with FP8 keys and values. more: arguments of `decode_cases`."""
    return Fp8Case(**draw(_coded(decode_cases(**{"content": CONTENTS, "layout": (*LAYOUTS, MIXED), **more}))))


@st.composite
def fp8_attend_cases(draw: st.DrawFn, method: str, **more: Any) -> Fp8AttendCase:
    """Inputs of a method's `attend` with FP8 keys and values. more: arguments of `attend_cases`."""
    return Fp8AttendCase(**draw(_coded(attend_cases(method, **{"content": CONTENTS, **more}))))


@st.composite
def _coded(draw: st.DrawFn, cases: st.SearchStrategy[Any]) -> dict[str, Any]:
    """The fields of a case, and those of `Coded`. Formats, and scales that are None, have their own kernels."""
    formats = [name for name in sorted(FORMATS) if FORMATS[name] in supported.fp8(FORMATS.values())]
    plain = draw(cases)
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    scales = draws.plain_among(SCALES, ("heads",))
    fp8, scale = draw(st.sampled_from(draws.third_of_run(list(itertools.product(formats, scales)))))
    return {**fields, "fp8": fp8, "scales": scale}
