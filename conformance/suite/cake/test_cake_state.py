"""CAKE's state and its cascade: what prompts and steps evict, several layers, short prompts, slots, order, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.kind("equivalence")

BATCH, QUERY_HEADS, HEADS, HEAD_DIM = 2, 4, 2, 16
both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])
SMALL: dict[str, Any] = {"budget": 6, "window": 2, "kernel_size": 1}


def new_states(side: Any, device: torch.device, layers: int = 1, *, batch: int = BATCH, **options: Any) -> list[Any]:
    """The states of several layers, which share a cascade if there are more than one."""
    cake, config = side.baselines.cake, side.baselines.cake.CAKEConfig(**{**SMALL, **options})
    sizes = {
        "batch": batch, "query_heads": QUERY_HEADS, "key_value_heads": HEADS, "head_dim": HEAD_DIM,
        "dtype": torch.float32, "device": device,
    }
    if layers == 1:
        return [cake.CAKEState(config, **sizes)]
    cascade = cake.CAKECascade(config, layers=layers, batch=batch, device=device)
    return [cake.CAKEState(config, **sizes, cascade=cascade, layer=layer) for layer in range(layers)]


def tokens(device: torch.device, count: int, *, seed: int = 1, batch: int = BATCH, size: float = 1.0) -> list[Tensor]:
    """query [B, Hq, T, D]; key, value [B, Hkv, T, D]. size: a factor on the queries."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(batch, heads, count, HEAD_DIM, generator=generator) for heads in (QUERY_HEADS, HEADS, HEADS)
    )
    return [each.to(device) for each in (size * query, key, value)]


def token(device: torch.device, **options: Any) -> list[Tensor]:
    return [tensor[:, :, 0] for tensor in tokens(device, 1, **options)]


def held(state: Any, row: int = 0, head: int = 0) -> list[int]:
    """The tokens of a KV head, in order."""
    return sorted(position for position in state.positions[row, head].tolist() if position >= 0)


# Several layers ------------------------------------------------------------------------------------------------------


@pytest.mark.property("state")
@both_sides
def test_layer_0_begins_a_new_prompt(side, twins, device):
    """Also after a prompt that did not reach all layers."""
    states = new_states(getattr(twins, side), device, 2)
    states[0].prefill(*tokens(device, 20))
    found = []
    for _ in range(2):
        for layer, state in enumerate(states):
            state.reset()
            try:
                state.prefill(*tokens(device, 30, seed=layer, size=1 - 0.7 * layer))
            except ValueError as error:
                pytest.fail(f"layer {layer}: {error}")
            for _ in range(2 * layer):
                state.step(*token(device))
        found.append([states[0].cascade.budgets.tolist(), *(held(state) for state in states)])
    assert found[0] == found[1]


# Refused -------------------------------------------------------------------------------------------------------------


@pytest.mark.kind("bad_input")
@pytest.mark.parametrize(("options", "error", "says"), [
    ({"budget": 2}, ValueError, "budget must be above window = 2, got 2"),
    ({"window": 0}, ValueError, "window must be at least 1, got 0"),
    ({"window": 2.0}, TypeError, "window must be an int, got float"),
    ({"kernel_size": 2}, ValueError, "kernel_size must be odd, got 2"),
    ({"gamma": -1.0}, ValueError, "gamma must be finite and at least 0, got -1.0"),
    ({"tau1": 0}, ValueError, "tau1 must be finite and at least 1e-06, got 0"),
    ({"tau2": float("inf")}, ValueError, "tau2 must be finite and at least 1e-06, got inf"),
    ({"whole_batch": 1}, TypeError, "whole_batch must be a bool, got int"),
    ({"scale": "1"}, TypeError, "scale must be a float or None, got str"),
], ids=str)
def test_wrong_configs(options, error, says, twins):
    with pytest.raises(error, match=f"^{says}"):
        twins.reference.baselines.cake.CAKEConfig(**{**SMALL, **options})


@pytest.mark.kind("bad_input")
@both_sides
def test_layers_must_come_in_order_with_one_prompt(side, twins, device):
    first, second, third = new_states(getattr(twins, side), device, 3)
    with pytest.raises(ValueError, match="^layer 1 gets its prompt after layer 0, but 0 have it"):
        second.prefill(*tokens(device, 20))
    try:
        second.reorder(torch.tensor([0, 1], device=device))
    except RuntimeError as error:
        pytest.fail(f"after a refused prompt: {error}")
    first.prefill(*tokens(device, 20))
    with pytest.raises(ValueError, match="^layer 2 gets its prompt after layer 1, but 1 have it"):
        third.prefill(*tokens(device, 20))
    with pytest.raises(ValueError, match="^layer 1 must get the 20 tokens of layer 0's prompt, got 19"):
        second.prefill(*tokens(device, 19))
    kept = held(first)
    second.prefill(*tokens(device, 20, seed=2))          # nothing was changed by the errors
    assert set(held(first)) <= set(kept)
    first.step(*token(device))
    with pytest.raises(RuntimeError, match="^layer 0 changed before layer 2 had the prompt"):
        third.prefill(*tokens(device, 20))
    with pytest.raises(RuntimeError, match="^prefill needs an empty state"):
        second.prefill(*tokens(device, 20))
    assert (first.tokens_seen, second.tokens_seen, third.tokens_seen) == (21, 20, 0)


@pytest.mark.kind("bad_input")
@both_sides
def test_a_cascade_must_be_of_the_states_kind(side, twins, device):
    cake = getattr(twins, side).baselines.cake
    config = cake.CAKEConfig(**SMALL)
    sizes = {
        "query_heads": QUERY_HEADS, "key_value_heads": HEADS, "head_dim": HEAD_DIM, "dtype": torch.float32,
        "device": device,
    }
    cascade = cake.CAKECascade(config, layers=2, batch=2, device=device)
    for more, error, says in (
        ({"cascade": 3, "batch": 2}, TypeError, "cascade must be a CAKECascade, got int"),
        ({"cascade": cascade, "batch": 3}, ValueError, "cascade must have the state's batch, 3, got 2"),
        ({"cascade": cascade, "batch": 2, "layer": 2}, ValueError, "layer must be below the cascade's 2 layers, got 2"),
        ({"cascade": cascade, "batch": 2, "layer": -1}, ValueError, "layer must be at least 0"),
        ({"batch": 2, "layer": 1}, ValueError, "layer must be below the cascade's 1 layers, got 1"),
    ):
        with pytest.raises(error, match=f"^{says}"):
            cake.CAKEState(config, **sizes, **more)
    other = cake.CAKEConfig(**{**SMALL, "gamma": 1.0})
    with pytest.raises(ValueError, match="^cascade must have the state's config"):
        cake.CAKEState(other, **sizes, batch=2, cascade=cascade)
    scaled = cake.CAKEConfig(**SMALL, scale=0.5)
    assert cake.CAKEState(scaled, **sizes, batch=2, cascade=cascade).cascade is cascade
    with pytest.raises(ValueError, match="^layers must be at least 1, got 0"):
        cake.CAKECascade(config, layers=0, batch=2, device=device)
    with pytest.raises(TypeError, match="^config must be a CAKEConfig, got int"):
        cake.CAKECascade(3, layers=1, batch=2, device=device)
