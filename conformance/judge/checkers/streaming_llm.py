"""Checker of StreamingLLM: positions alone decide, so only the attention output has an error bound."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...cases.block_cases import LAYOUTS, ORDERS, PositionsCase, positions_cases
from ...cases.contents import OCCUPANCIES
from .. import block_model, stats
from ..compare import assert_dtype, assert_same
from ..fields import field
from ..subjects import Subject, aspects
from . import blocks

SMALL = {**blocks.SMALL, "sinks": 1}
#: See the package.
CACHES: dict[str, dict[str, Any]] = {
    "a sink": {"budget": 6, "block_size": 4, "sinks": 1},
    "sinks": {"budget": 5, "block_size": 3, "sinks": 4},
    "no sinks": {"budget": 4, "block_size": 7, "sinks": 0},
}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"budget": 4, "sinks": 4}, ValueError, "sinks must be less than budget = 4"),
]
NUMBERS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("sinks", blocks.NOT_INTEGERS, TypeError, "sinks must be an int"),
    ("sinks", (-1,), ValueError, "sinks must be at least 0"),
    ("sinks", (4, 5), ValueError, "sinks must be less than budget = 4, got"),
]


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package."""
    config = draw(blocks.block_configs(most))
    return {**config, "sinks": draw(st.integers(0, min(4, config["budget"] - 1)))}


def arguments(device: torch.device) -> dict[str, Any]:
    """See the package."""
    # A budget that the default sinks allow.
    positions = torch.tensor([[0, 5, 2, 6, 1, 3], [7, 2, -1, -1, 9, 4]], device=device)
    return {"positions": positions, "budget": 5, "sinks": 1}


def assert_keep_right(actual: Tensor, case: PositionsCase) -> None:
    """actual: `keep(**case.inputs)`. Every token is a decision: the positions settle it."""
    with field("kept"):
        assert_dtype(actual, torch.bool, what="kept")
        expected = [[_stays(row, case.budget, case.sinks) for row in rows] for rows in case.positions.tolist()]
        assert_same(actual, torch.tensor(expected, device=actual.device), what="kept")
        tokens = int((case.positions >= 0).sum())
        stats.decisions(tokens, tokens)


def _stays(row: list[int], budget: int, sinks: int) -> list[bool]:
    """Whether each slot's token is among the first `sinks` or the newest budget - sinks."""
    ordered = sorted(position for position in row if position >= 0)
    kept = {*ordered[:sinks], *ordered[max(sinks, len(ordered) - (budget - sinks)):]}
    return [position in kept for position in row]


SUBJECTS = (
    Subject(
        "keep", positions_cases, assert_keep_right, choices=("kept",),
        aspects=aspects(ordinary=ORDERS, masked=OCCUPANCIES[1:], layout=LAYOUTS),
    ),
)


class Model(block_model.Head):
    """The oldest token that is no sink is evicted."""

    def rank(self, token: block_model.Token) -> float:
        return token.position

    def protected(self, positions: list[int]) -> set[int]:
        return set(sorted(positions)[:self.config.sinks])


class Adapter(blocks.Adapter):
    """Ranks are positions; scores are 0."""
