"""KIVI at the edges: prompts about as long as the residual, groups of half a word, rooms that the residual does not
divide, numbers that a narrow type cannot hold, and calls that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.kind("equivalence")

both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])
SMALL: dict[str, Any] = {"key_bits": 2, "value_bits": 2, "group": 8, "residual": 16, "max_tokens": 20}


def new_state(
    side: Any, device: torch.device, *, batch: int = 1, dtype: torch.dtype = torch.float32, **more: Any
) -> Any:
    kivi = side.baselines.kivi
    return kivi.KIVIState(
        kivi.KIVIConfig(**{**SMALL, **more}), batch=batch, query_heads=2, key_value_heads=1, head_dim=16, dtype=dtype,
        device=device,
    )


def tokens(device: torch.device, count: int, batch: int = 1) -> list[Tensor]:
    """query [B, Hq, T, D]; key, value [B, Hkv, T, D]."""
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(batch, heads, count, 16, generator=generator).to(device) for heads in (2, 1, 1)]


def token(device: torch.device, batch: int = 1) -> list[Tensor]:
    return [tensor[:, :, 0] for tensor in tokens(device, 1, batch)]


@pytest.mark.kind("bad_input")
@both_sides
def test_a_state_stays_usable_after_a_call_that_is_refused(side, twins, device):
    state = new_state(getattr(twins, side), device)
    full = new_state(getattr(twins, side), device)
    full.prefill(*tokens(device, 20))
    for one, seen, call, given, named in (
        (state, 0, "prefill", tokens(device, 21), "max_tokens"), (full, 20, "step", token(device), "max_tokens"),
        (full, 20, "reorder", [torch.tensor([1], device=device)], "index"),
    ):
        with pytest.raises(ValueError, match=named):
            getattr(one, call)(*given)
        try:
            one.reorder(torch.tensor([0], device=device))
        except RuntimeError as error:
            pytest.fail(f"after a refused {call}: {error}")
        assert one.tokens_seen == seen
