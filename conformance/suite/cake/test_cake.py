"""CAKE's functions: what a window observes, preferences and budgets, against loops over Python's numbers. The bounds of
`observe` are judged with the properties of every method."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvtwin.reference.baselines import cake_prompt as rules

pytestmark = pytest.mark.kind("equivalence")

INF = math.inf
both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])


def cake_of(twins: Any, side: str) -> Any:
    return getattr(twins, side).baselines.cake


def drawn(seed, *, batch=2, group=2, heads=2, tokens=14, window=4, head_dim=16, dtype=torch.float64):
    """Random queries of a window and keys."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads * group, window, head_dim, generator=generator, dtype=torch.float64)
    key = torch.randn(batch, heads, tokens, head_dim, generator=generator, dtype=torch.float64)
    return query.to(dtype), key.to(dtype)


@pytest.mark.kind("bad_input")
@both_sides
@pytest.mark.parametrize(("call", "error", "match"), [
    (lambda cake, q, k: cake.observe(q, k[:, :, :3]), ValueError, "query_window must be .* with W <= T = 3"),
    (lambda cake, q, k: cake.observe(q, k, gamma=INF), ValueError, "gamma must be finite"),
    (lambda cake, q, k: cake.observe(q, k, gamma="1"), TypeError, "gamma must be a float"),
    (lambda cake, q, k: cake.observe(q, k, kernel_size=4), ValueError, "kernel_size must be odd, got 4"),
    (lambda cake, q, k: cake.observe(q, k, k[:, 0, :, 0]), TypeError, "occupied must have dtype torch.bool"),
    (lambda cake, q, k: cake.log_preference(k[:, 0, 0, 0], k[:, 0, 0, 0], tau1=0), ValueError, "tau1 must be .* got 0"),
    (lambda cake, q, k: cake.log_preference(k[:, 0, 0, 0], k[:, 0, 0, 0], tau2=1e-9), ValueError, "tau2 must be"),
    (lambda cake, q, k: cake.log_preference(*[k[:, 0, 0, 0]] * 2, whole_batch=1), TypeError, "whole_batch must be"),
    (lambda cake, q, k: cake.log_preference(k[:, 0, 0, 0], k[:1, 0, 0, 0]), ValueError, "shift must be"),
    (lambda cake, q, k: cake.budgets(k[:, 0, 0], four(k), 0), ValueError, "total must be at least 1"),
    (lambda cake, q, k: cake.budgets(k[:, 0, 0], four(k).float(), 3), TypeError, "prefix must have dtype"),
    (lambda cake, q, k: cake.budgets(k[0, 0, 0], four(k), 3), ValueError, "log_preferences must be"),
], ids=lambda value: getattr(value, "__name__", value))
def test_wrong_arguments(call, error, match, side, twins, device):
    query, key = (each.to(device) for each in drawn(5, dtype=torch.float32))
    with pytest.raises(error, match=f"^{match}"):
        call(cake_of(twins, side), query, key)


def four(like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([4, 4], device=like.device)


@pytest.mark.kind("bad_input")
def test_wrong_arguments_of_the_rules_of_eviction():
    score = torch.zeros(2, 2, 4)
    with pytest.raises(ValueError, match="^budget must be"):
        rules.kept(score, torch.tensor([4]))
    with pytest.raises(ValueError, match="^scores must .* got 1"):
        rules.cascade([score], score[:, 0], torch.tensor([4, 4]), 3)
