"""Checker of StreamingLLM: positions alone decide, so only the attention output has an error bound."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

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


class Adapter(blocks.Adapter):
    """Ranks are positions; scores are 0."""
