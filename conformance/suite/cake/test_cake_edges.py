"""CAKE at the edges of its rules: the longest short prompt, padding in the window, what happens between the prompts of
two layers, and lists of tokens that fill a tile exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.kind("equivalence")

BATCH, QUERY_HEADS, HEADS, HEAD_DIM, BUDGET, WINDOW = 2, 4, 2, 16, 6, 2
both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])


def new_states(side: Any, device: torch.device, layers: int) -> list[Any]:
    """The states of layers that share a cascade."""
    cake = side.baselines.cake
    config = cake.CAKEConfig(budget=BUDGET, window=WINDOW, kernel_size=1)
    cascade = cake.CAKECascade(config, layers=layers, batch=BATCH, device=device)
    return [
        cake.CAKEState(
            config, batch=BATCH, query_heads=QUERY_HEADS, key_value_heads=HEADS, head_dim=HEAD_DIM,
            dtype=torch.float32, device=device, cascade=cascade, layer=layer,
        ) for layer in range(layers)
    ]


def prompt(device: torch.device, count: int, layer: int) -> list[Tensor]:
    """query [B, Hq, T, D]; key, value [B, Hkv, T, D]. The attention of layer 0 is much sharper than that of others."""
    generator = torch.Generator().manual_seed(layer)
    query, key, value = (
        torch.randn(BATCH, heads, count, HEAD_DIM, generator=generator) for heads in (QUERY_HEADS, HEADS, HEADS)
    )
    return [each.to(device) for each in (query * (0.05 if layer else 1.5), key, value)]


@pytest.mark.kind("bad_input")
@both_sides
def test_after_a_reset_of_the_cascade_layer_0_comes_first(side, twins, device):
    first, second = new_states(getattr(twins, side), device, 2)
    first.prefill(*prompt(device, 20, 0))
    first.cascade.reset()
    with pytest.raises(ValueError, match="^layer 1 gets its prompt after layer 0, but 0 have it"):
        second.prefill(*prompt(device, 20, 1))
