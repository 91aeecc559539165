"""Cases of functions that divide a budget among layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from . import draws, supported
from .case import Case
from .strategies import _layouts, contents_of, default_device

#: Preferences of one size, and of sizes so different that one layer gets nearly all. Failing examples shrink to the
#: first.
ORDINARY = ("sharp", "ordinary", "equal")
#: Layers without a preference: NaN and -inf.
EXTREME = ("special",)
LAYOUTS = ("contiguous", "transposed", "sliced")


@dataclass(frozen=True, repr=False)
class LayerBudgetsCase(Case):
    """Arguments of CAKE's `budgets`: log_preferences [B, layers] float64, prefix [B] int64 around total / layers."""

    kind: ClassVar[str] = "layer_budgets"

    layers: int = 1
    total: int = 1
    dtype_name = ""

    def make(self) -> dict[str, Tensor | None]:
        generator = self.generator()
        shape = (self.batch, self.layers)
        x = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float64)
        if self.content == "equal":
            x = x[:, :1].expand(shape).contiguous()
        elif self.content == "sharp":
            x = 2 * x
        elif self.content == "special":
            other = torch.tensor([torch.nan, -torch.inf], dtype=torch.float64, device=x.device)
            chosen = other[torch.randint(2, shape, generator=generator, device=x.device)]
            x = torch.where(torch.rand(shape, generator=generator, device=x.device) < 0.4, chosen, x)
        most = 2 * self.total // self.layers + 2
        prefix = torch.randint(0, most, (self.batch,), generator=generator, device=x.device)
        return {"log_preferences": x, "prefix": prefix}

    def place(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if name == "prefix" else super().place(name, tensor[..., None])[..., 0]

    @property
    def inputs(self) -> dict[str, Any]:
        self.used()
        return {**{name: self.tensor(name) for name in ("log_preferences", "prefix")}, "total": self.total}


@st.composite
def layer_budgets_cases(
    draw: st.DrawFn, *, content: tuple[str, ...] = (*ORDINARY, *EXTREME), layout: tuple[str, ...] = LAYOUTS,
) -> LayerBudgetsCase:
    """One to eight layers, whose shares often exceed the prefix."""
    layouts = _layouts(torch.float64, layout)
    layers = draw(st.integers(2, 8) if draws.plain_only() else st.integers(2, 8) | st.just(1))
    return LayerBudgetsCase(
        batch=draw(st.integers(1, supported.rows(8))), layers=layers, total=draw(st.integers(layers, 100)),
        content=draw(contents_of(content)), layout=draw(layouts),
        seed=draw(st.integers(0, 2**31 - 1)), device=str(default_device()),
    )
