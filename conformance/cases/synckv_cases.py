"""Cases of SyncKV's selections: decode steps of representative heads, with a budget and a static set."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...reference.synckv import split_budget
from .case import DecodeCase
from .strategies import decode_cases

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
