"""Input that EpiKV refuses: the type and message of the error, and that the state is unchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from kvtwin.conformance.cases.bad_input import contents, refused
from kvtwin.reference.contract.epikv.config import EpiKVConfig, band_layers

pytestmark = [pytest.mark.kind("bad_input"), pytest.mark.main]

B, HQ, HKV, D, C = 2, 4, 2, 16, 24


@pytest.mark.parametrize(
    ("error", "says", "options"),
    [
        (TypeError, "budget must be an int", {"budget": 4.0}),
        (ValueError, "budget must be at least 1", {"budget": 0}),
        (ValueError, "policy must be one of epikv, hs_variance", {"policy": "attention"}),
        (TypeError, "policy must be a str", {"policy": 3}),
        (ValueError, "recent must be at least 1", {"recent": 0}),
        (ValueError, "recent must be at most the budget 8, got 9", {"recent": 9}),
        (TypeError, "recent must be an int", {"recent": True}),
        (ValueError, "window must be at least 1", {"window": 0}),
        (ValueError, "chunk must be at least 1", {"chunk": 0}),
        (TypeError, "keep_prompt must be a bool", {"keep_prompt": 1}),
        (ValueError, "max_prompt must be 0 unless", {"max_prompt": 4}),
        (ValueError, "count_prompt must be True where", {"keep_prompt": False, "count_prompt": False}),
        (ValueError, "bands must be None", {"policy": "kv_key", "bands": (1, 1)}),
        (ValueError, r"bands must be \(1, 1\)", {"bands": (1, 2)}),
        (TypeError, "bands must be two", {"policy": "band_adaptive", "bands": 3}),
        (ValueError, r"bands\[1\] must be at least 1", {"policy": "band_adaptive", "bands": (2, 0)}),
        (ValueError, "hidden_size must be at least 1", {"hidden_size": 0}),
        (ValueError, r"bands must be \(1, 0\)", {"policy": "attn_x_hs", "bands": (1, 1)}),
        (ValueError, "edges must be given for policy 'segment_hs'", {"policy": "segment_hs"}),
        (ValueError, "edges must ascend", {"policy": "segment_hs", "edges": (0.6, 0.3)}),
        (TypeError, "edges must be", {"policy": "segment_hs", "edges": 0.5}),
        (ValueError, "edges must be None for policy 'attn_x_hs'", {"policy": "attn_x_hs", "edges": (0.3, 0.6)}),
        (ValueError, "tau must be at least 1", {"tau": 0}),
        (TypeError, "segments_by must be a str", {"segments_by": True}),
        (ValueError, "segments_by must be one of sparsity, entropy", {"segments_by": "attention"}),
        (ValueError, "segments_by must be left out for policy 'epikv'", {"segments_by": "entropy"}),
        (TypeError, "spread must be a str", {"policy": "lag_kv", "spread": None}),
        (ValueError, "spread must be one of deviation, variance", {"policy": "lag_kv", "spread": "range"}),
        (ValueError, "spread must be left out for policy 'kv_key'", {"policy": "kv_key", "spread": "variance"}),
        (ValueError, "sparsity_threshold must lie between", {"sparsity_threshold": 1.0}),
        (ValueError, "scale must be finite", {"scale": float("inf")}),
    ],
)
def test_a_config_refuses(error, says, options):
    refused(EpiKVConfig, error, says, **{"budget": 8, **options})


def test_config_derives_its_properties():
    assert EpiKVConfig(4096).newest == 128
    assert (EpiKVConfig(100).newest, EpiKVConfig(3).newest, EpiKVConfig(9, recent=5).newest) == (25, 1, 5)
    assert EpiKVConfig(8, count_prompt=False, max_prompt=5).slots == 13
    assert EpiKVConfig(8, policy="band_adaptive").layers == (7, 8)
    assert EpiKVConfig(8, policy="band_adaptive", bands=[2, 3]).layers == (2, 3)
    assert EpiKVConfig(8, policy="lag_kv").layers == (0, 0)
    assert EpiKVConfig(8, policy="attn_x_hs", bands=(1, 0)).layers == (1, 0)
    assert EpiKVConfig(8, policy="segment_hs", edges=[0.3, 0.6]).edges == (0.3, 0.6)
    assert [EpiKVConfig(8, policy=policy).reads_attention for policy in ("attn_x_hs", "epikv", "kv_key")] == [
        True, False, False
    ]
    refused(band_layers, ValueError, "policy must be one that reads hidden states", policy="kv_key", layers=8)


@pytest.fixture(params=("reference", "optimized"))
def side(request, twins):
    return getattr(twins, request.param).epikv


FUNCTIONS: dict[str, dict[str, Any]] = {
    "hidden_change": {"hidden": torch.ones(2, 5), "previous": torch.ones(2, 5)},
    "rolling_mean": {"g": torch.ones(2, 5)},
    "rolling_zscore": {"g": torch.ones(2, 3, 5), "occupied": torch.ones(2, 5, dtype=torch.bool)},
    "score": {"change_a": torch.ones(2, 5), "change_b": torch.ones(2, 5)},
    "kv_variance": {"key_or_value": torch.ones(2, 1, 5, 16)},
    "lag_kv": {"key": torch.ones(2, 1, 5, 16), "value": torch.ones(2, 1, 5, 16)},
    "select": {"score": torch.ones(2, 5), "budget": 3, "prompt": 1, "recent": 1},
}


@pytest.mark.parametrize(
    ("name", "error", "says", "options"),
    [
        ("hidden_change", TypeError, "hidden must be a torch.Tensor", {"hidden": 1.0}),
        ("hidden_change", ValueError, r"previous must be hidden's \[..., C\] = \(2, 5\), got \(2, 4\)",
         {"previous": torch.ones(2, 4)}),
        ("hidden_change", TypeError, "previous must have hidden's dtype", {"previous": torch.ones(2, 5).half()}),
        ("hidden_change", TypeError, "hidden.dtype must be one of", {"hidden": torch.ones(2, 5, dtype=torch.int64)}),
        ("rolling_mean", ValueError, r"g must be \[B, T\] or \[B, L, T\]", {"g": torch.ones(5)}),
        ("rolling_mean", ValueError, "window must be at least 1", {"window": 0}),
        ("rolling_mean", TypeError, "occupied must have dtype torch.bool", {"occupied": torch.ones(2, 5)}),
        ("rolling_zscore", ValueError, r"occupied must be \[B, T\]", {"occupied": torch.ones(2, 3, dtype=torch.bool)}),
        ("rolling_zscore", TypeError, "window must be an int", {"window": 4.0}),
        ("score", ValueError, "policy must be one of epikv, hs_variance, band_adaptive", {"policy": "kv_key"}),
        ("score", ValueError, "change_b", {"change_b": torch.ones(5)}),
        ("kv_variance", ValueError, r"\[B, Hkv, T, D\]", {"key_or_value": torch.ones(2, 5, 16)}),
        ("lag_kv", ValueError, r"value must be key's \[B, Hkv, T, D\] = \(2, 1, 5, 16\), got \(2, 1, 4, 16\)",
         {"value": torch.ones(2, 1, 4, 16)}),
        ("lag_kv", ValueError, r"value must be key's \[B, Hkv, T, D\] = \(2, 1, 5, 16\), got \(2, 1, 5, 17\)",
         {"value": torch.ones(2, 1, 5, 17)}),
        ("lag_kv", TypeError, "value must have key's dtype torch.float32, got torch.float16",
         {"value": torch.ones(2, 1, 5, 16).half()}),
        ("lag_kv", ValueError, "chunk must fit in int64, got an int of 100 bits", {"chunk": 10**30}),
        ("rolling_mean", ValueError, "window must fit in int64, got an int of 100 bits", {"window": 10**30}),
        ("lag_kv", ValueError, "chunk must be at least 1", {"chunk": 0}),
        ("lag_kv", ValueError, "spread must be one of deviation, variance, got 'range'", {"spread": "range"}),
        ("select", ValueError, r"prompt \+ recent must be at most the budget 3, got 2 \+ 2",
         {"prompt": 2, "recent": 2}),
        ("select", ValueError, "prompt must be at most T = 5", {"prompt": 6, "budget": 9}),
        ("select", ValueError, "score must be", {"score": torch.ones(5)}),
        ("select", TypeError, "score.dtype must be one of", {"score": torch.ones(2, 5, dtype=torch.int64)}),
    ],
)
def test_functions_refuse(name, error, says, options, side, device):
    arguments = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in {**FUNCTIONS[name], **options}.items()
    }
    refused(getattr(side, name), error, says, **arguments)


def state(side: Any, device: torch.device, used: bool = True, **options: Any) -> Any:
    config = EpiKVConfig(**{"budget": 6, "window": 3, "hidden_size": C, **options})
    made = side.EpiKVState(
        config, batch=B, query_heads=HQ, key_value_heads=HKV, head_dim=D, dtype=torch.float32, device=device
    )
    if used:
        made.step(**step(device))
    return made


def step(device: torch.device) -> dict[str, Any]:
    shapes = {"query": (B, HQ, D), "key": (B, HKV, D), "value": (B, HKV, D), "hidden_a": (B, C), "hidden_b": (B, 1, C)}
    return {name: torch.ones(shape, device=device) for name, shape in shapes.items()}


def prompt(device: torch.device, total: int = 4) -> dict[str, Any]:
    shapes = {
        "query": (B, HQ, total, D), "key": (B, HKV, total, D), "value": (B, HKV, total, D), "hidden_a": (B, total, C),
        "hidden_b": (B, 1, total, C),
    }
    return {name: torch.ones(shape, device=device) for name, shape in shapes.items()}


def refuses(made: Any, call: str, error: type[Exception], says: str, arguments: dict[str, Any]) -> None:
    """The call raises this error, and neither the state nor its scorer has changed."""
    def held() -> Any:
        scorer = contents(made.scorer)
        attention = scorer.pop("attention")
        return scorer, attention and contents(attention), made.key.tolist()

    before = copy.deepcopy(held())
    refused(getattr(made, call), error, says, **arguments)
    assert held() == before


@pytest.mark.parametrize(
    ("error", "says", "options"),
    [
        (TypeError, r"hidden_a must be a torch.Tensor \[B, 1, C\] or \[B, C\] for policy 'epikv', got NoneType",
         {"hidden_a": None}),
        (TypeError, "hidden_b must be a torch.Tensor", {"hidden_b": None}),
        (ValueError, r"hidden_a must be \[B, 1, C\] or \[B, C\] = \(2, 1, 24\), got \(2, 1, 23\)",
         {"hidden_a": torch.ones(B, 23)}),
        (ValueError, "hidden_a must be", {"hidden_a": torch.ones(B, 2, C)}),
        (TypeError, "hidden_b must have the state's dtype", {"hidden_b": torch.ones(B, C, dtype=torch.float16)}),
        (ValueError, "hidden_b must be on the state's device", {"hidden_b": torch.ones(B, C, device="meta")}),
        (ValueError, "key must be", {"key": torch.ones(B, HKV, D + 1)}),
        (TypeError, "value must have the state's dtype", {"value": torch.ones(B, HKV, D).half()}),
    ],
)
def test_a_step_refuses(error, says, options, side, device):
    moved = {
        name: value.to(device) if isinstance(value, torch.Tensor) and value.device.type != "meta" else value
        for name, value in options.items()
    }
    refuses(state(side, device), "step", error, says, {**step(device), **moved})


def test_a_policy_without_hidden_states_refuses_them(side, device):
    refuses(state(side, device, used=False, policy="kv_key"), "step", ValueError, "reads none", step(device))


def test_rejects_a_second_band_where_the_policy_reads_one(side, device):
    made = state(side, device, used=False, policy="attn_x_hs")
    given = step(device)
    refuses(made, "step", ValueError, "hidden_b must be left out: policy 'attn_x_hs' reads one band alone", given)
    made.step(**{**given, "hidden_b": None})
    assert made.tokens_seen == 1


def test_a_prompt_refuses(side, device):
    made = state(side, device)
    refuses(made, "prefill", RuntimeError, "needs an empty state", prompt(device))
    made.reset()
    refuses(made, "prefill", ValueError, r"budget must be at least prompt \+ recent = 6 \+ 1, got 6", prompt(device, 6))
    whole = prompt(device)
    refuses(made, "prefill", ValueError, "hidden_b must be", {**whole, "hidden_b": whole["hidden_b"][:, :, 1:]})
    refuses(made, "prefill", TypeError, "hidden_a must be", {**whole, "hidden_a": None})
    other = state(side, device, used=False, count_prompt=False, max_prompt=3)
    refuses(other, "prefill", ValueError, "max_prompt must be at least the prompt's 4 tokens, got 3", whole)
    occupied = torch.ones(B, 4, dtype=torch.bool, device=device)
    occupied[:, 0] = False
    other.prefill(**whole, occupied=occupied)


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (torch.tensor([0, 6]), ValueError, "next_slot must be from 0 to 5"),
        (torch.tensor([0]), ValueError, r"next_slot must be \[B\]"),
        (torch.tensor([0.0, 1.0]), TypeError, "next_slot must have"),
    ],
)
def test_a_next_slot_refuses(value, error, says, side, device):
    made = state(side, device)
    with pytest.raises(error, match=says):
        made.next_slot = value.to(device)


def test_a_state_refuses(side, device):
    sizes = {"batch": B, "query_heads": HQ, "key_value_heads": HKV, "head_dim": D, "dtype": torch.float32}
    refused(side.EpiKVState, TypeError, "config must be an EpiKVConfig", config=8, **sizes, device=device)
    config = EpiKVConfig(8)
    refused(side.EpiKVState, ValueError, "batch must be", config=config, **{**sizes, "batch": 0}, device=device)
    scorer = {"hidden_size": 8, **{name: size for name, size in sizes.items() if name != "query_heads"}}
    for error, says, options in (
        (TypeError, "config must be an EpiKVConfig, got int", {"config": 8}),
        (TypeError, "key_value_heads must be an int, got str", {"key_value_heads": "2"}),
        (ValueError, "head_dim must be at least 1, got 0", {"head_dim": 0}),
        (ValueError, "batch must fit in int64, got an int of 100 bits", {"batch": 10**30}),
        (ValueError, r"batch \* slots must be less than \d+, got 2 \* 2305843009213693952",
         {"config": EpiKVConfig(2**61)}),
        (ValueError, r"batch \* layers \* window must be less than", {"config": EpiKVConfig(8, window=2**61)}),
    ):
        refused(side.EpiKVScorer, error, says, **{"config": config, **scorer, **options}, device=device)
    refuses(state(side, device), "reorder", ValueError, "index must name rows", {
        "index": torch.tensor([0, 2], device=device),
    })
    refuses(state(side, device), "reorder", TypeError, "index must have dtype", {
        "index": torch.tensor([0, 1], device=device, dtype=torch.int32),
    })


@pytest.mark.limits
def test_hidden_states_that_require_grad_are_refused(side, device):
    made = state(side, device)
    for name in ("query", "hidden_a", "hidden_b"):
        given = step(device)
        given[name].requires_grad_()
        refuses(made, "step", ValueError, f"{name} requires grad.*no_grad", given)
    made.reset()
    for name in ("value", "hidden_a", "hidden_b"):
        given = prompt(device)
        given[name].requires_grad_()
        refuses(made, "prefill", ValueError, f"{name} requires grad.*no_grad", given)


@pytest.mark.limits
def test_the_kernels_take_no_float64(twins, device):
    side = twins.optimized.epikv
    one, other = torch.ones(2, 5, device=device), torch.ones(2, 5, dtype=torch.float64, device=device)
    refused(side.score, TypeError, "change_a.dtype must be one of torch.float32", change_a=other, change_b=one)
    refused(side.score, TypeError, "change_b.dtype must be one of torch.float32", change_a=one, change_b=other)
    refused(
        side.hidden_change, TypeError, "hidden.dtype must be one of torch.float32",
        hidden=torch.ones(2, 5, dtype=torch.float64, device=device),
        previous=torch.ones(2, 5, dtype=torch.float64, device=device),
    )
