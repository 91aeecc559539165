"""Bad input to ThinKV's config and state, on both sides: a clear error and an unchanged state."""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.cases.bad_input import WRONG_TOKENS
from kvtwin.conformance.cases.tiny import attributes
from kvtwin.conformance.judge.checkers.thinkv_paging import TABLES
from kvtwin.reference.contract.thinkv.config import ThinKVConfig

pytestmark = [pytest.mark.kind("bad_input"), pytest.mark.main]

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
SMALL = {"budget": 4, "tau": 2, "group": 2, "block": 2, "retention": (1,), "max_tokens": 8}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": 0}, ValueError, "budget must be at least 1, got 0"),
        ({"budget": 2.0}, TypeError, "budget must be an int, got float"),
        ({"tau": 0}, ValueError, "tau must be at least 1"),
        ({"group": True}, TypeError, "group must be an int, got bool"),
        ({"block": -1}, ValueError, "block must be at least 1"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1"),
        ({"retention": ()}, TypeError, "retention must be a tuple of ints"),
        ({"retention": (4, 8)}, ValueError, r"retention must not increase, got \(4, 8\)"),
        ({"retention": (4, -1)}, ValueError, r"retention\[1\] must be at least 0"),
        ({"formats": "nvfp4"}, TypeError, "formats must be a mapping"),
        ({"formats": {"R": "nvfp4"}}, ValueError, "formats must name R, E and T"),
        ({"formats": {"R": "nvfp4", "E": "nvfp4", "T": "int3"}}, ValueError, r"formats\['T'\] must be one of fp8"),
        ({"edges": (0.5,)}, TypeError, r"edges must be \(theta_1, theta_2\)"),
        ({"edges": (0.5, 0.2)}, ValueError, "edges must ascend"),
        ({"edges": (0.5, None)}, TypeError, r"edges\[1\] must be a float"),
        ({"edges": (0, 10**400)}, ValueError, r"edges\[1\] must be finite as a float, got an int of 1329 bits"),
        ({"retention": (10**30, 4)}, ValueError, r"retention\[0\] must fit in int64, got an int of 100 bits"),
        ({"sparsity_threshold": 1.0}, ValueError, "sparsity_threshold must lie between 0 and 1"),
        ({"sparsity_of": "groups"}, ValueError, "sparsity_of must be one of heads, mean, got 'groups'"),
        ({"sparsity_of": None}, TypeError, "sparsity_of must be a str"),
        ({"scale": float("inf")}, ValueError, "scale must be finite"),
    ],
)
def test_a_wrong_config(options, error, message):
    with pytest.raises(error, match=message):
        ThinKVConfig(**options)


def test_configs_compare_by_value():
    """Configs with equal fields are equal and have equal hashes, although formats is a mapping. The caller cannot
    modify that mapping."""
    formats = {"R": "fp8", "E": "nvfp4", "T": "ternary"}
    one = ThinKVConfig(8, formats=formats)
    formats["R"] = "int2"
    assert one.formats["R"] == "fp8"
    assert one == ThinKVConfig(8, formats={**formats, "R": "fp8"})
    assert hash(one) == hash(ThinKVConfig(8))
    assert one != ThinKVConfig(8)


def new_state(twins, side, device, **options):
    return getattr(twins, side).thinkv.ThinKVState(
        ThinKVConfig(**{**SMALL, **options}), batch=2, query_heads=2, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )


def token(device, *time):
    return [torch.ones(2, heads, *time, 16, device=device) for heads in (2, 1, 1)]


@SIDES
def test_a_wrong_state(side, twins, device):
    sizes = {"batch": 2, "query_heads": 2, "key_value_heads": 1, "head_dim": 16}
    sizes |= {"dtype": torch.float32, "device": device}
    make = getattr(twins, side).thinkv.ThinKVState
    for config, changed, error, message in (
        ({"budget": 4}, {}, TypeError, "config must be a ThinKVConfig, got dict"),
        (ThinKVConfig(4), {"batch": 0}, ValueError, "batch must be at least 1"),
        (ThinKVConfig(4), {"batch": 10**30}, ValueError, "batch must fit in int64, got an int of 100 bits"),
        (ThinKVConfig(4), {"batch": 2**40}, ValueError, r"batch \* key_value_heads \* slots \* head_dim must be"),
        (ThinKVConfig(4), {"query_heads": 3, "key_value_heads": 2}, ValueError, "query heads must be a multiple"),
        (ThinKVConfig(4), {"dtype": torch.int8}, TypeError, "dtype must be one of"),
    ):
        with pytest.raises(error, match=message):
            make(config, **{**sizes, **changed})


@SIDES
@pytest.mark.parametrize("steps", [1, 2], ids=["within a window", "where one begins"])
@pytest.mark.parametrize(("spoil", "error", "message"), WRONG_TOKENS)
def test_a_wrong_token_changes_nothing(side, spoil, error, message, steps, twins, device):
    state = new_state(twins, side, device)
    for _ in range(steps):
        state.step(*token(device))
    before = everything(state)
    with pytest.raises(error, match=message):
        state.step(*spoil(*token(device)))
    assert_unchanged(state, before)


@SIDES
def test_no_more_tokens_than_there_is_room_for(side, twins, device):
    state = new_state(twins, side, device, max_tokens=4)
    with pytest.raises(ValueError, match="max_tokens=4 is too small for 5 tokens"):
        state.prefill(*token(device, 5))
    assert state.tokens_seen == 0
    state.prefill(*token(device, 3))
    state.step(*token(device))
    before = everything(state)
    with pytest.raises(ValueError, match="max_tokens=4 is too small for 5 tokens"):
        state.step(*token(device))
    assert_unchanged(state, before)
    with pytest.raises(RuntimeError, match=r"prefill needs an empty state: call reset\(\) first"):
        state.prefill(*token(device, 1))
    state.reset()
    state.prefill(*token(device, 4))


@SIDES
@pytest.mark.parametrize(
    ("thought", "error", "message"),
    [
        ([0, 3], ValueError, "thought must be from 0 to 2, got values from 0 to 3"),
        ([-1, 0], ValueError, "thought must be from 0 to 2, got values from -1 to 0"),
        ([0], ValueError, r"thought must be \[B\] = \(2,\), got \(1,\)"),
        ([0.0, 1.0], TypeError, "thought must have the state's dtype torch.int64"),
        (None, TypeError, "thought must be a torch.Tensor"),
    ],
)
def test_a_wrong_thought(side, thought, error, message, twins, device):
    state = new_state(twins, side, device)
    value = None if thought is None else torch.tensor(thought, device=device)
    with pytest.raises(error, match=message):
        state.thought = value
    assert state.thought.tolist() == [2, 2]


def everything(state):
    """Copies of a state's public attributes, its internal counters and the contents of its cache."""
    own = {name: value for name, value in vars(state).items() if isinstance(value, (torch.Tensor, int))}
    tables = {f"cache.{name}": getattr(state.cache, name) for name in TABLES}
    seen = {**attributes(state), **own, **tables, "numbers": torch.stack(state.cache.dequantized())}
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in seen.items()}


def assert_unchanged(state, before):
    for name, value in everything(state).items():
        assert torch.equal(value, before[name]) if isinstance(value, torch.Tensor) else value == before[name], name
