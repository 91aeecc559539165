"""Cases of SyncKV's selections: decode steps of representative heads, with a budget and a static set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...reference.synckv import split_budget
from . import contents, draws, supported
from .case import Case, DecodeCase
from .strategies import DTYPES, PLAIN_DTYPES, decode_cases, default_device

#: Of weights and similarities of heads.
HEAD_LAYOUTS = ("contiguous", "sliced", "spread", "channels_first")
RATIOS = (0.5, 0.0, 1.0, 0.9, 0.3)


@dataclass(frozen=True, repr=False)
class SetsCase(DecodeCase):
    """Arguments of `initial_sets`, and of `anticipate` with `taken` tokens per R-head in `static` [B, N_r, taken]."""

    kind: ClassVar[str] = "sets"

    k: int = 1
    rho: float = 0.5
    taken: int = 0
    exclude_static: bool = True

    static = property(lambda self: self.tensor("static"))

    def make(self) -> dict[str, Tensor | None]:
        order = torch.rand(
            self.batch, self.key_value_heads, self.slots, generator=self.generator(), device=self.device
        ).argsort(-1)[..., :self.taken]
        # Some rows have fewer static tokens.
        return {**super().make(), "static": order.masked_fill(order % 7 == 3, -1)}

    def place(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if name == "static" else super().place(name, tensor)

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of `initial_sets`."""
        self.used()
        static, dynamic = split_budget(self.k, self.rho)
        return {
            "query": self.query, "key": self.key, "occupied": self.occupied, "k_static": static, "k_dynamic": dynamic,
            "scale": self.scale,
        }

    @property
    def step_inputs(self) -> dict[str, Any]:
        """Keyword arguments of `anticipate`."""
        self.used()
        return {
            "query": self.query, "key": self.key, "occupied": self.occupied, "static": self.static,
            "k_dynamic": self.k, "exclude_static": self.exclude_static, "scale": self.scale,
        }


@st.composite
def sets_cases(draw: st.DrawFn, **narrowed: Any) -> SetsCase:
    """Decode steps; arguments as for `decode_cases`. k goes from 1 to beyond S."""
    case = draw(decode_cases(per_head=False, protect=("none",), **narrowed))
    fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(DecodeCase)}
    return SetsCase(
        **fields, k=draw(st.integers(1, max(1, case.slots // 2)) | st.integers(1, case.slots + 3)),
        rho=draw(st.sampled_from(RATIOS)), taken=draw(st.integers(0, case.slots // 2)),
        exclude_static=draw(st.sampled_from((True, True, False))),
    )


# Heads ---------------------------------------------------------------------------------------------------------------

#: Weights of which few are equal; a few different ones; NaN and infinity among them.
WEIGHTS, TIED_WEIGHTS, EXTREME_WEIGHTS = ("ordinary",), ("few",), ("special",)
#: Similarities: any; heads of which several, all, or two are alike in all respects.
SIMILARITIES, TIED_SIMILARITIES = ("ordinary",), ("groups", "alike", "pair")
HEADS = (4, 8, 5, 8, 2)


@dataclass(frozen=True, repr=False)
class WeightsCase(Case):
    """Arguments of `head_similarity`: attention [steps, Hkv, n], steps = batch, Hkv = heads, n = slots, and k = keep.
    occupancy: "full", without a mask, or "random"; what is not occupied holds `poison`."""

    kind: ClassVar[str] = "head_weights"

    heads: int = 2
    slots: int = 2
    keep: int = 1
    occupancy: str = "full"

    def make(self) -> dict[str, Tensor | None]:
        generator, shape = self.generator(), (self.batch, self.heads, self.slots)
        weight = torch.rand(shape, generator=generator, device=self.device)
        if self.content == "few":
            weight = (4 * weight).round()
        if self.content == "special":
            other = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0], device=self.device)
            chosen = other[torch.randint(len(other), shape, generator=generator, device=self.device)]
            weight = chosen.where(torch.rand(shape, generator=generator, device=self.device) < 0.3, weight)
        if self.occupancy == "full":
            return {"attention": weight.to(self.dtype), "occupied": None}
        occupied = torch.rand(self.batch, self.slots, generator=generator, device=self.device) < 0.6
        occupied[:, 0] = True
        weight = contents.poison(self.poison, weight.to(self.dtype)[..., None], occupied)[..., 0]
        return {"attention": weight, "occupied": occupied}

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of `head_similarity`."""
        self.used()
        return {"attention": self.tensor("attention"), "k": self.keep, "occupied": self.tensors["occupied"]}


@dataclass(frozen=True, repr=False)
class SimilarityCase(Case):
    """Arguments of `cluster_heads`: similarity [Hkv, Hkv], Hkv = heads, and the number of clusters."""

    kind: ClassVar[str] = "similarity"

    heads: int = 2
    clusters: int = 1

    def make(self) -> dict[str, Tensor | None]:
        heads, generator = self.heads, self.generator()
        made = torch.rand(heads, heads, generator=generator, device=self.device, dtype=torch.float64)
        made = ((made + made.T) / 2).fill_diagonal_(1)
        if self.content != "ordinary":
            if self.content == "pair":
                which = torch.arange(heads, device=self.device).clamp(max=max(1, heads - 2))
            else:
                kinds = 1 if self.content == "alike" else max(2, heads // 2)
                which = torch.randint(kinds, (heads,), generator=generator, device=self.device)
            made = made[which][:, which]  # heads of a kind have equal rows, and a similarity of 1
        return {"similarity": made.to(self.dtype)}

    @property
    def inputs(self) -> dict[str, Any]:
        self.used()
        return {"similarity": self.tensor("similarity"), "clusters": self.clusters}


def _drawn(
    draw: st.DrawFn, made: Callable[..., Any], content: Sequence[str], layout: tuple[str, ...],
    heads_among: Sequence[int] = HEADS, **more: Any,
) -> Any:
    dtypes, layouts = draws.plain_among(supported.dtypes(DTYPES), PLAIN_DTYPES), supported.layouts(layout)
    heads = draw(st.sampled_from(supported.sizes("kv_heads", heads_among)))
    return made(
        heads=heads, dtype=draw(st.sampled_from(dtypes)),
        content=draw(st.sampled_from(content)), layout=draw(st.sampled_from(layouts)),
        seed=draw(st.integers(0, 2**31 - 1)), device=str(default_device()),
        **{name: draw(strategy) for name, strategy in more.items()},
    )


@st.composite
def weights_cases(
    draw: st.DrawFn, *, content: Sequence[str] = (*WEIGHTS, *TIED_WEIGHTS, *EXTREME_WEIGHTS),
    layout: tuple[str, ...] = HEAD_LAYOUTS, occupancy: Sequence[str] = ("full", "random"),
    slots: tuple[int, int] = (2, 40),
) -> WeightsCase:
    """k goes from 1 to beyond n."""
    case: WeightsCase = _drawn(
        draw, WeightsCase, content, layout, batch=st.integers(1, supported.rows(3)), slots=st.integers(*slots),
        occupancy=st.sampled_from(supported.occupancies(occupancy)), poison=st.sampled_from(contents.POISONS),
    )
    return dataclasses.replace(case, keep=draw(st.integers(1, case.slots // 2) | st.integers(1, case.slots + 2)))


@st.composite
def similarity_cases(
    draw: st.DrawFn, *, content: Sequence[str] = (*SIMILARITIES, *TIED_SIMILARITIES),
    layout: tuple[str, ...] = HEAD_LAYOUTS,
) -> SimilarityCase:
    """Two to four clusters, or as many as there are heads. In a plain round two, and eight heads, few of them alike:
    otherwise rounding decides in many places."""
    case: SimilarityCase = _drawn(
        draw, SimilarityCase, draws.plain_among(content, ("ordinary", "pair")), layout, draws.plain_among(HEADS, (8,))
    )
    most = min(2 if draws.plain_only() else 4, case.heads)
    return dataclasses.replace(case, clusters=draw(st.integers(min(2, case.heads), most)))
