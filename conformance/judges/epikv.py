"""What the judge must know of EpiKV."""

from __future__ import annotations

from typing import Any

import torch

from .. import tiny

__all__ = ["arguments"]


def arguments(device: torch.device) -> dict[str, Any]:
    """See the package."""
    hidden = torch.randn(2, tiny.BATCH, tiny.SLOTS, 24, generator=torch.Generator().manual_seed(7)).to(device)
    series = hidden[0, ..., 0].abs().contiguous()
    occupied = torch.ones(tiny.BATCH, tiny.SLOTS, dtype=torch.bool, device=device)
    occupied[0, :2] = False
    return {
        "hidden": hidden[0], "previous": hidden[1], "g": series, "change_a": series, "change_b": series.flip(0),
        "key_or_value": tiny.prompt(device, seed=0)[1], "lag_kv.chunk": 2, "window": 3, "select.score": series,
        "score.policy": "hs_variance", "select.prompt": 1, "select.recent": 1, "select.budget": 3,
    }
