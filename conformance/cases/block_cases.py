"""Cases of the baselines' `attend`: queries of the newest Q tokens over S slots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from . import contents, supported
from .case import Case
from .oracle import Attention, attend
from .state_trace import StateTrace
from .strategies import GROUPS, TRIPLES, _common, _counts, _scales, contents_of

LAYOUTS = ("contiguous", "transposed", "sliced", "apart", "spread", "channels_first")


@dataclass(frozen=True, repr=False)
class AttendCase(Case):
    """query [B, Hq, Q, D] of the tokens in the last Q of S slots; key, value [B, Hkv, S, D]; occupied [B, S], or
    [B, Hkv, S] with per_head. method: the method whose `attend` is tested."""

    kind: ClassVar[str] = "attend"

    method: str = "h2o"
    slots: int = 1
    queries: int = 1
    occupancy: str = "full"
    per_head: bool = False

    query = property(lambda self: self.tensor("query"))
    key = property(lambda self: self.tensor("key"))
    value = property(lambda self: self.tensor("value"))
    occupied = property(lambda self: self.tensor("occupied"))

    def make(self) -> dict[str, Tensor | None]:
        generator = self.generator()
        query, key, value = contents.fill(
            self.content, generator, batch=self.batch, key_value_heads=self.key_value_heads, group=self.group,
            queries=self.queries, slots=self.slots, head_dim=self.head_dim, dtype=self.dtype, scale=self.factor,
        )
        heads = (self.key_value_heads,) if self.per_head else ()
        occupied = contents.occupancy(self.occupancy, generator, (self.batch, *heads, self.slots))
        key, value = (contents.poison(self.poison, tensor, occupied) for tensor in (key, value))
        # A query that is padding in every head may hold anything.
        padding = ~(occupied if occupied.dim() == 2 else occupied.any(1))[:, self.slots - self.queries:]
        return {
            "query": contents.poison(self.poison, query, ~padding), "key": key, "value": value, "occupied": occupied,
        }

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of `attend`."""
        self.used()
        return {
            "query": self.query, "key": self.key, "value": self.value, "occupied": self.occupied, "scale": self.scale,
        }

    @cached_property
    def attention(self) -> Attention:
        """The exact attention, for the bounds."""
        return attend(self.query, self.key, self.value, self.occupied, scale=self.scale, causal=True)

    @cached_property
    def valid(self) -> Tensor:
        """The queries, of the last Q slots, whose slot holds a token, [B, Hkv, Q] bool."""
        occupied = self.occupied if self.per_head else self.occupied[:, None]
        return occupied[..., self.slots - self.queries:].expand(-1, self.key_value_heads, -1)


@st.composite
def attend_cases(
    draw: st.DrawFn, method: str, *, device: torch.device | str | None = None,
    content: tuple[str, ...] = contents.CONTENTS, occupancy: tuple[str, ...] = contents.OCCUPANCIES,
    layout: tuple[str, ...] = LAYOUTS, slots: tuple[int, int | None] = (1, None),
) -> AttendCase:
    """Blocks of one token up to all S tokens. slots: the least and the most S."""
    layouts, masks, scales = supported.layouts(layout), supported.occupancies(occupancy), _scales()
    sizes = draw(_common(device, TRIPLES, rows=2))
    cpu = sizes["device"].startswith("cpu")
    if cpu:
        # Every 16 queries of a query head are a program instance.
        sizes["group"] = draw(st.sampled_from(supported.sizes("groups", GROUPS[:5])))
    least, most = slots
    total = draw(_counts(sizes, most or (40 if cpu else None), gpu=2048, least=least))
    # The oracle holds several [B, Hq, Q, S] in float64.
    room = max(1, 2**24 // (sizes["batch"] * sizes["key_value_heads"] * sizes["group"] * total))
    largest = min(total, room, 20 if cpu else 256)
    return AttendCase(
        **sizes,
        content=draw(contents_of(content)),
        layout=draw(st.sampled_from(layouts)),
        poison=draw(st.sampled_from(contents.POISONS)),
        scale=draw(scales),
        seed=draw(st.integers(0, 2**31 - 1)),
        method=method,
        slots=total,
        queries=draw(st.integers(1, largest) | st.sampled_from((1, largest))),
        occupancy=draw(st.sampled_from(masks)),
        per_head=draw(supported.mask_per_head()),
    )


#: How the positions of a PositionsCase lie in the slots.
ORDERS = ("ordinary", "shuffled", "gaps")


@dataclass(frozen=True, repr=False)
class PositionsCase(Case):
    """Arguments of StreamingLLM's `keep`: positions [B, Hkv, S] int64, -1 in free slots; a budget and sinks.

    content: positions ascend, lie in any order, or have gaps.
    """

    kind: ClassVar[str] = "positions"

    slots: int = 1
    budget: int = 1
    sinks: int = 0
    occupancy: str = "full"

    positions = property(lambda self: self.tensor("positions"))
    dtype_name = ""

    def make(self) -> dict[str, Tensor | None]:
        generator = self.generator()
        shape = (self.batch, self.key_value_heads, self.slots)
        positions = torch.arange(self.slots, device=generator.device).expand(shape)
        if self.content == "gaps":
            step = torch.randint(1, 4, shape, generator=generator, device=generator.device)
            positions = step.cumsum(-1)
        elif self.content == "shuffled":
            order = torch.rand(shape, generator=generator, device=generator.device).argsort(-1)
            positions = positions.gather(-1, order)
        occupied = contents.occupancy(self.occupancy, generator, shape)
        return {"positions": positions.masked_fill(~occupied, -1)}

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of `keep`."""
        self.used()
        return {"positions": self.positions, "budget": self.budget, "sinks": self.sinks}

    @classmethod
    def given(cls, positions: Tensor, *, budget: int, sinks: int) -> PositionsCase:
        """Make a case from given positions."""
        batch, heads, slots = positions.shape
        case = cls(
            batch=batch, key_value_heads=heads, content="given", slots=slots, budget=budget, sinks=sinks,
            device=str(positions.device),
        )
        case._adopt({"positions": positions})
        return case


@st.composite
def positions_cases(
    draw: st.DrawFn, *, device: torch.device | str | None = None, content: tuple[str, ...] = ORDERS,
    occupancy: tuple[str, ...] = contents.OCCUPANCIES, layout: tuple[str, ...] = LAYOUTS,
    slots: tuple[int, int | None] = (1, None),
) -> PositionsCase:
    """Caches of one to 48 slots, whose tokens exceed the budget in most cases."""
    layouts, masks = supported.layouts(layout), supported.occupancies(occupancy)
    sizes = draw(_common(device, TRIPLES))
    least, most = slots
    total = draw(_counts(sizes, most or 48, least=least))
    budget = draw(st.integers(1, max(1, total - 1)) | st.integers(1, total + 2))
    return PositionsCase(
        **sizes,
        content=draw(contents_of(content)),
        layout=draw(st.sampled_from(layouts)),
        seed=draw(st.integers(0, 2**31 - 1)),
        slots=total,
        budget=budget,
        sinks=draw(st.integers(0, min(4, budget - 1))),
        occupancy=draw(st.sampled_from(masks)),
    )


def with_spiked_values(trace: StateTrace) -> StateTrace:
    """The trace with values whose norms decide: alternately constant values and single spikes (which ||v||_1 and
    ||v||_2 order differently), times powers of two that outweigh attention. The first token's value is 0."""
    made = dict(trace.tensors)
    for name in ("prompt_value", "value"):
        value = made.get(name)
        if value is None:
            continue
        start = trace.prompt if name == "value" else 0
        number = torch.arange(start, start + value.shape[2], device=value.device)
        size = torch.exp2((number * 5 % 7 - 3).float()) * (number > 0)
        spike = torch.zeros(value.shape[-1], device=value.device)
        spike[0] = 2
        shape = torch.where(number[:, None] % 2 == 0, spike, torch.full_like(spike, 4 / value.shape[-1]))
        made[name] = trace.place(name, (size[:, None] * shape).to(value.dtype).expand(value.shape).contiguous())
    changed = replace(trace)
    changed._adopt(made)
    return changed
