"""Checker of random eviction: scores are exact, so only the attention output has an error bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...cases.block_cases import LAYOUTS, ORDERS, PositionsCase, positions_cases
from ...cases.contents import OCCUPANCIES
from .. import block_model
from ..compare import assert_dtype, assert_same
from ..fields import field
from ..subjects import Subject, properties
from ..variants import BLOCKS, ONE, variant
from . import blocks
from .blocks import SMALL as SMALL

VARIANTS = (
    *BLOCKS, variant("another-seed", {"seed": 7}, long=False),
    variant("blocks-of-many-tokens", {"block_size": 150}, **ONE, prompt=145, steps=3, budget=20),
)

DEFAULTS = {"seed": 0, "block_size": 128, "softcap": None, "scale": None}
#: See the package.
CACHES: dict[str, dict[str, Any]] = {
    "small": {"budget": 6, "block_size": 4},
    "another seed": {"budget": 5, "block_size": 3, "seed": 7},
    "budget 1": {"budget": 1, "block_size": 4},
}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"budget": 4, "seed": 2**32}, ValueError, "seed must be at most"),
]
NUMBERS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("seed", blocks.NOT_INTEGERS, TypeError, "seed must be an int"),
    ("seed", (-1,), ValueError, "seed must be at least 0"),
    ("seed", (2**32,), ValueError, r"seed must be at most 2\^32 - 1, got 4294967296"),
]
TRACE = {"seed": 1}


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package."""
    return {**draw(blocks.block_configs(most)), "seed": draw(st.integers(0, 2**32 - 1))}


def arguments(device: torch.device) -> dict[str, Any]:
    """See the package."""
    return {"positions": torch.tensor([[0, 5, 2, -1, 1, 3], [7, 2, -1, -1, 9, 4]], device=device), "seed": 3}


@dataclass(frozen=True, repr=False)
class ScoredPositionsCase(PositionsCase):
    """Arguments of `score`: positions, and a seed that depends on their number."""

    kind: ClassVar[str] = "scored_positions"

    @property
    def inputs(self) -> dict[str, Any]:
        return {"positions": super().inputs["positions"], "seed": self.slots * 2654435761 % 2**32}


def scored_positions_cases(**arguments: Any) -> st.SearchStrategy[ScoredPositionsCase]:
    return positions_cases(**arguments).map(lambda case: ScoredPositionsCase(**{
        one.name: getattr(case, one.name) for one in fields(case)
    }))


def assert_score_right(actual: Tensor, case: ScoredPositionsCase) -> None:
    """actual: `score(**case.inputs)`. Whole numbers below 2^24, without an error."""
    with field("score"):
        assert_dtype(actual, torch.float32, what="score")
        positions, seed = case.inputs.values()
        expected = [
            float(block_model.splitmix64((seed << 32) + position) >> 40) if position >= 0 else -torch.inf
            for position in positions.flatten().tolist()
        ]
        assert_same(actual, torch.tensor(expected, device=actual.device).view(positions.shape), what="score")


CASES = (ScoredPositionsCase,)
SUBJECTS = (
    Subject(
        "score", scored_positions_cases, assert_score_right, numbers=("score",),
        properties=properties(ordinary=ORDERS, masked=OCCUPANCIES[1:], layout=LAYOUTS),
    ),
)


def replay(case: ScoredPositionsCase, module: Any) -> Iterator[str]:
    """See the package."""
    assert_score_right(module.score(**case.inputs), case)
    yield "score: right"


class Model(block_model.Head):
    """A token's score is a hash of its position."""

    def finish(self, over_budget: bool, arrived: range) -> None:
        for token in self.tokens:
            token.score = float(block_model.splitmix64((self.config.seed << 32) + token.position) >> 40)


class Adapter(blocks.Adapter):
    """Ranks are the scores, 24 bits of a hash of the position. The slot decides between equal ranks."""
