"""Quest's state: what a step selects and attends to, bounds of pages, padding, full states, and options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.kind("equivalence")

BATCH, QUERY_HEADS, HEADS, HEAD_DIM = 2, 2, 1, 16
both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])
SMALL: dict[str, Any] = {"budget": 4, "page_size": 2, "max_tokens": 24}


def new_state(side: Any, device: torch.device, *, batch: int = BATCH, **options: Any) -> Any:
    quest, dtype = side.baselines.quest, options.pop("dtype", torch.float32)
    query_heads = options.pop("query_heads", QUERY_HEADS)
    return quest.QuestState(
        quest.QuestConfig(**{**SMALL, **options}), batch=batch, query_heads=query_heads, key_value_heads=HEADS,
        head_dim=HEAD_DIM, dtype=dtype, device=device,
    )


def tokens(device: torch.device, count: int, *, seed: int = 1, batch: int = BATCH) -> list[Tensor]:
    """query [B, Hq, T, D]; key, value [B, Hkv, T, D]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, heads, count, HEAD_DIM, generator=generator).to(device)
        for heads in (QUERY_HEADS, HEADS, HEADS)
    ]


def token(device: torch.device, **options: Any) -> list[Tensor]:
    return [tensor[:, :, 0] for tensor in tokens(device, 1, **options)]


# Refused -------------------------------------------------------------------------------------------------------------


@pytest.mark.kind("bad_input")
@pytest.mark.parametrize(("options", "error", "says"), [
    ({"budget": 0}, ValueError, "budget must be at least 1, got 0"),
    ({"page_size": 0}, ValueError, "page_size must be at least 1, got 0"),
    ({"page_size": "16"}, TypeError, "page_size must be an int, got str"),
    ({"keep_last": 1}, TypeError, "keep_last must be a bool, got int"),
    ({"least_pages": 0}, ValueError, "least_pages must be at least 1, got 0"),
    ({"round_scores": None}, TypeError, "round_scores must be a bool, got NoneType"),
    ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
    ({"scale": "1"}, TypeError, "scale must be a float or None, got str"),
], ids=str)
def test_wrong_configs(options, error, says, twins):
    with pytest.raises(error, match=f"^{says}"):
        twins.reference.baselines.quest.QuestConfig(**{**SMALL, **options})


@pytest.mark.kind("bad_input")
@both_sides
def test_a_state_stays_usable_after_a_call_that_is_refused(side, twins, device):
    state, full = (new_state(getattr(twins, side), device, max_tokens=6) for _ in range(2))
    full.prefill(*tokens(device, 6))
    for one, seen, call, given, named in (
        (state, 0, "prefill", tokens(device, 7), "max_tokens"), (full, 6, "step", token(device), "max_tokens"),
        (full, 6, "reorder", [torch.tensor([0, 0, 0], device=device)], "index"),
    ):
        with pytest.raises(ValueError, match=named):
            getattr(one, call)(*given)
        try:
            one.reorder(torch.tensor([0, 1], device=device))
        except RuntimeError as error:
            pytest.fail(f"after a refused {call}: {error}")
        assert one.tokens_seen == seen
