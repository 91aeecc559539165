"""Bad input to SyncKV's config and state, on both sides: a clear error and an unchanged state."""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.cases import fuzz
from kvtwin.conformance.cases.bad_input import WRONG_TOKENS
from kvtwin.conformance.cases.tiny import attributes
from kvtwin.reference.contract.synckv.types import HeadClusters, SyncKVConfig

pytestmark = [pytest.mark.kind("bad_input"), pytest.mark.main]

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
SIZES = {"batch": 2, "query_heads": 2, "key_value_heads": 2, "head_dim": 16}


def new_state(twins, side, device, clusters=None, **options):
    return getattr(twins, side).synckv.SyncKVState(
        SyncKVConfig(**{"k": 2, "clusters": 1, "stride": 2, "max_tokens": 5, **options}), clusters, **SIZES,
        dtype=torch.float32, device=device,
    )


def token(device, *time):
    return [torch.ones(2, 2, *time, 16, device=device) for _ in range(3)]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 8.0}, TypeError, "max_tokens must be an int, got float"),
        ({"phase": -1}, ValueError, "phase must be at least 0, got -1"),
        ({"phase": 0.0}, TypeError, "phase must be an int, got float"),
        ({"stride": 3, "phase": 3}, ValueError, "phase must be below the stride of 3, got 3"),
    ],
)
def test_a_wrong_config(options, error, message):
    with pytest.raises(error, match=message):
        SyncKVConfig(4, **options)


@SIDES
@pytest.mark.parametrize(
    ("config", "clusters", "sizes", "error", "message"),
    [
        ({"k": 4}, None, {}, TypeError, "config must be a SyncKVConfig, got dict"),
        (SyncKVConfig(4, clusters=3), None, {}, ValueError, "clusters must be at most the 2 KV heads, got 3"),
        (SyncKVConfig(4), [0, 1], {}, TypeError, "head_clusters must be HeadClusters or None, got list"),
        (SyncKVConfig(4), HeadClusters((0, 1, 1), (0, 1)), {}, ValueError, "one label per KV head: expected 2, got 3"),
        (SyncKVConfig(4), HeadClusters((0, 0), (0,)), {}, ValueError, "the config's 2 clusters, got 1"),
        (SyncKVConfig(4), None, {"batch": 0}, ValueError, "batch must be at least 1"),
        (SyncKVConfig(4), None, {"query_heads": 3}, ValueError, "query heads must be a multiple"),
    ],
)
def test_a_wrong_state(side, config, clusters, sizes, error, message, twins, device):
    with pytest.raises(error, match=message):
        getattr(twins, side).synckv.SyncKVState(
            config, clusters, **{**SIZES, **sizes}, dtype=torch.float32, device=device
        )


@SIDES
def test_clusters_by_default_are_runs_of_heads(side, twins, device):
    make = getattr(twins, side).synckv.SyncKVState
    sizes = {**SIZES, "query_heads": 5, "key_value_heads": 5}
    state = make(SyncKVConfig(2, max_tokens=2), **sizes, dtype=torch.float32, device=device)
    assert state.head_clusters == HeadClusters((0, 0, 0, 1, 1), (0, 3))


@SIDES
@pytest.mark.parametrize("steps", [0, 1], ids=["between anticipations", "at one"])
@pytest.mark.parametrize(("spoil", "error", "message"), WRONG_TOKENS)
def test_a_wrong_token_changes_nothing(side, spoil, error, message, steps, twins, device):
    state = new_state(twins, side, device)
    for _ in range(steps):
        state.step(*token(device))
    before = attributes(state)
    with pytest.raises(error, match=message):
        state.step(*spoil(*token(device)))
    assert_unchanged(state, before)


@SIDES
def test_no_more_tokens_than_there_is_room_for(side, twins, device):
    state = new_state(twins, side, device)
    with pytest.raises(ValueError, match="max_tokens=5 is too small for 6 tokens"):
        state.prefill(*token(device, 6))
    assert state.tokens_seen == 0
    state.prefill(*token(device, 4))
    state.step(*token(device))
    before = attributes(state)
    with pytest.raises(ValueError, match="max_tokens=5 is too small for 6 tokens"):
        state.step(*token(device))
    with pytest.raises(RuntimeError, match=r"prefill needs an empty state: call reset\(\) first"):
        state.prefill(*token(device, 1))
    assert_unchanged(state, before)
    state.reset()
    state.prefill(*token(device, 5))


@SIDES
@pytest.mark.parametrize(
    ("index", "error", "message"),
    [([0, 2], ValueError, "index must name rows 0 to 1"), ([0], ValueError, r"index must be \[B\]")],
)
def test_a_wrong_reorder(side, index, error, message, twins, device):
    state = new_state(twins, side, device)
    state.step(*token(device))
    before = attributes(state)
    with pytest.raises(error, match=message):
        state.reorder(torch.tensor(index, device=device))
    assert_unchanged(state, before)


def assert_unchanged(state, before):
    after = attributes(state)
    assert before.keys() == after.keys()
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name]
        assert same, f"{name} was changed"


@pytest.mark.limits
@SIDES
def test_more_heads_than_fit_into_memory_are_refused_at_once(side, twins, device):
    """Before the default clusters are made, a list of as many numbers."""
    state = getattr(twins, side).synckv.SyncKVState
    sizes = {"query_heads": 2**40, "key_value_heads": 2**40, "head_dim": 16, "dtype": torch.float32}
    with fuzz.within(5), pytest.raises(ValueError, match="must be less than"):
        state(SyncKVConfig(4, 0.5, 2, 1, max_tokens=24), batch=1, **sizes, device=device)
