"""Checker of random eviction: scores are exact, so only the attention output has an error bound."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from .. import block_model
from ..variants import BLOCKS, variant
from . import blocks
from .blocks import SMALL as SMALL

VARIANTS = (*BLOCKS, variant("another-seed", {"seed": 7}, long=False))

DEFAULTS = {"seed": 0, "block_size": 128, "scale": None}
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


class Model(block_model.Head):
    """A token's score is a hash of its position."""

    def finish(self, over_budget: bool, arrived: range) -> None:
        for token in self.tokens:
            token.score = float(block_model.splitmix64((self.config.seed << 32) + token.position) >> 40)


class Adapter(blocks.Adapter):
    """Ranks are the scores, 24 bits of a hash of the position. The slot decides between equal ranks."""
