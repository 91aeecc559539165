"""Checker of StreamingLLM: positions alone decide, so only the attention output has an error bound."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from . import blocks

SMALL = {**blocks.SMALL, "sinks": 1}


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
