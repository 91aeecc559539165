"""Bad input to SyncKV's functions: errors have the right type, and say what was expected and what was passed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from kvtwin.conformance.cases.bad_input import refused
from kvtwin.reference.contract.synckv.types import HeadClusters, SyncKVConfig

pytestmark = [pytest.mark.kind("bad_input"), pytest.mark.main]

SIDES = pytest.mark.parametrize("side", ["reference", "optimized"])
B, HQ, HKV, S, D = 2, 4, 2, 6, 16


def good(function: str, device: torch.device) -> dict[str, Any]:
    """Valid arguments."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    step = {
        "query": random(B, HQ, D), "key": random(B, HKV, S, D),
        "occupied": torch.ones(B, S, dtype=torch.bool, device=device),
    }
    return {
        "initial_sets": {**step, "k_static": 2, "k_dynamic": 1},
        "anticipate": {**step, "static": torch.zeros(B, HKV, 1, dtype=torch.int64, device=device), "k_dynamic": 1},
        "overlap": {
            "first": torch.tensor([[0, 1]], device=device), "second": torch.tensor([[2, 1, -1]], device=device),
        },
        "head_similarity": {
            "attention": random(2, HKV, S), "k": 2, "occupied": torch.ones(2, S, dtype=torch.bool, device=device),
        },
        "cluster_heads": {"similarity": torch.eye(3, device=device), "clusters": 2},
        "split_budget": {"k": 5, "rho": 0.5},
    }[function]


INTEGERS = {"anticipate": ("static",), "overlap": ("first", "second")}
FLOATS = {
    "initial_sets": ("query", "key"), "anticipate": ("query", "key"), "head_similarity": ("attention",),
    "cluster_heads": ("similarity",),
}
MASKS = {"initial_sets": ("occupied",), "anticipate": ("occupied",), "head_similarity": ("occupied",)}


def tensors() -> list[Any]:
    spoilers = {
        "list": (lambda x: x.tolist(), TypeError, r"torch\.Tensor.*list"),
        "more": (lambda x: x[None, None], ValueError, r"\["),
        "sparse": (lambda x: x.to_sparse(), TypeError, "strided.*[Ss]parse"),
    }
    kinds = {
        "integer": [torch.int32, torch.float32], "float": [torch.int64, torch.bool], "mask": [torch.float32],
    }
    found = []
    for kind, table in (("integer", INTEGERS), ("float", FLOATS), ("mask", MASKS)):
        for function, names in table.items():
            for name in names:
                found += [pytest.param(function, name, *wrong, id=f"{function}-{name}-{label}")
                          for label, wrong in spoilers.items() if (function, label) != ("overlap", "more")]
                for dtype in kinds[kind]:
                    wrong = (lambda x, dtype=dtype: x.to(dtype), TypeError, f"{dtype}")
                    found.append(pytest.param(function, name, *wrong, id=f"{function}-{name}-{dtype}"))
    return found


@SIDES
@pytest.mark.parametrize("function", ["initial_sets", "anticipate", "overlap", "head_similarity", "cluster_heads"])
def test_accepts_valid_arguments(function, side, twins, device):
    getattr(getattr(twins, side).synckv, function)(**good(function, device))


@SIDES
@pytest.mark.parametrize(("function", "name", "spoil", "error", "says"), tensors())
def test_a_wrong_tensor(function, name, spoil, error, says, side, twins, device):
    arguments = good(function, device)
    arguments[name] = spoil(arguments[name])
    refused(
        getattr(getattr(twins, side).synckv, function), error, rf"\b({name}|second)\b", "must", "got", says, **arguments
    )


@SIDES
@pytest.mark.parametrize(("function", "name", "cut", "says"), [
    ("initial_sets", "query", lambda x: x[:1], r"B = 2.*\(1, 4, 16\)"),
    ("initial_sets", "query", lambda x: x[..., :8], "D = 16"),
    ("initial_sets", "occupied", lambda x: x[:, :-1], r"\(2, 6\), got \(2, 5\)"),
    ("anticipate", "static", lambda x: x[:, :1], r"\(2, 2\), got \(2, 1, 1\)"),
    ("anticipate", "static", lambda x: x[0], r"\[B, N_r, k_static\].*\(2, 1\)"),
    ("overlap", "second", lambda x: x[0], r"\(1,\), got \(3,\)"),
    ("overlap", "first", lambda x: x[:, :0], "without empty dimensions"),
    ("head_similarity", "occupied", lambda x: x[:1], r"\(2, 6\), got \(1, 6\)"),
    ("cluster_heads", "similarity", lambda x: x[:2], r"\[Hkv, Hkv\], got \(2, 3\)"),
])
def test_a_tensor_of_another_shape(function, name, cut, says, side, twins, device):
    arguments = good(function, device)
    arguments[name] = cut(arguments[name])
    refused(getattr(getattr(twins, side).synckv, function), ValueError, rf"\b{name}\b", "must", says, **arguments)


@SIDES
@pytest.mark.parametrize(("function", "name", "value", "says"), [
    ("overlap", "first", [[-1, -1]], "at least one token in each set.*undefined"),
    ("overlap", "first", [[3, 3]], "distinct tokens"),
    ("overlap", "second", [[0, -2]], "or -1 for none, got -2"),
    ("anticipate", "static", [[[0], [S]], [[1], [1]]], "from 0 to 5, or -1 for none, got values from 0 to 6"),
    ("anticipate", "static", [[[0], [1000]], [[1], [1]]], "from 0 to 5, or -1 for none, got values from 0 to 1000"),
    ("anticipate", "static", [[[0], [1]], [[-2], [1]]], "from 0 to 5, or -1 for none, got values from -2 to 1"),
    ("head_similarity", "occupied", [[True] * S, [False] * S], "at least one token at each step.*undefined"),
    ("cluster_heads", "similarity", [[1, math.nan], [math.nan, 1]], "finite"),
    ("cluster_heads", "similarity", [[1, 0.5, 0.2], [0.25, 1, 0.3], [0.2, 0.3, 1]], "symmetric"),
])
def test_rejects_invalid_values(function, name, value, says, side, twins, device):
    arguments = good(function, device) | {name: torch.tensor(value, device=device)}
    refused(getattr(getattr(twins, side).synckv, function), ValueError, rf"^{name}\b", "must", says, **arguments)


NUMBERS: list[tuple[str, str, list[Any], type[Exception], str]] = [
    ("initial_sets", "k_static", ["2", True, 2.0, None], TypeError, "must be an int"),
    ("initial_sets", "k_static", [-1], ValueError, "must be at least 0"),
    ("initial_sets", "k_dynamic", ["2", True, 2.0, None], TypeError, "must be an int"),
    ("initial_sets", "k_static", [10**30], ValueError, "must fit in int64"),
    ("initial_sets", "k_dynamic", [-1], ValueError, "must be at least 0"),
    ("initial_sets", "scale", ["1", True], TypeError, "must be a float or None"),
    ("initial_sets", "scale", [math.inf], ValueError, "must be finite"),
    ("anticipate", "k_dynamic", ["2", True, 2.0], TypeError, "must be an int"),
    ("anticipate", "k_dynamic", [-1], ValueError, "must be at least 0"),
    ("anticipate", "exclude_static", [1, None], TypeError, "must be a bool"),
    ("head_similarity", "k", ["2", True, 2.0], TypeError, "must be an int"),
    ("head_similarity", "k", [0], ValueError, "must be at least 1"),
    ("cluster_heads", "clusters", ["2", True, 2.0], TypeError, "must be an int"),
    ("cluster_heads", "clusters", [0], ValueError, "must be at least 1"),
    ("cluster_heads", "clusters", [4], ValueError, "must be at most the 3 heads"),
    ("split_budget", "k", [0, -1], ValueError, "must be at least 1"),
    ("split_budget", "k", ["2", True, 2.0], TypeError, "must be an int"),
    ("split_budget", "rho", [-0.1, 1.01, math.nan], ValueError, "must be from 0 to 1"),
    ("split_budget", "rho", ["0.5", True], TypeError, "must be a float"),
]


@SIDES
@pytest.mark.parametrize(("function", "name", "values", "error", "says"), NUMBERS)
def test_a_wrong_number(function, name, values, error, says, side, twins, device):
    for value in values:
        arguments = good(function, device) | {name: value}
        refused(getattr(getattr(twins, side).synckv, function), error, rf"^{name}\b", says, "got", **arguments)


@SIDES
@pytest.mark.parametrize(("function", "name"), [
    ("initial_sets", "k_static"), ("initial_sets", "k_dynamic"), ("anticipate", "k_dynamic"),
])
def test_sets_larger_than_any_memory(function, name, side, twins, device):
    call = getattr(getattr(twins, side).synckv, function)
    refused(call, ValueError, rf"batch \* heads \* {name} must be", **(good(function, device) | {name: 2**63 - 1}))


@pytest.mark.limits
@SIDES
@pytest.mark.parametrize("function", ["initial_sets", "anticipate", "head_similarity"])
def test_what_kernels_cannot_take(function, side, twins, device):
    """Inputs that require grad, and float64, which the reference accepts."""
    call = getattr(getattr(twins, side).synckv, function)
    for name in FLOATS[function]:
        arguments = good(function, device)
        arguments[name].requires_grad_()
        double = {
            other: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for other, value in good(function, device).items()
        }
        if side == "reference":
            call(**arguments)
            call(**double)
            continue
        refused(call, ValueError, rf"\b{name}\b.*grad.*no_grad", **arguments)
        refused(call, TypeError, "float64", **double)


@pytest.mark.parametrize(("options", "error", "says"), [
    ({"k": 0}, ValueError, "k must be at least 1"), ({"k": 1.0}, TypeError, "k must be an int"),
    ({"rho": 2.0}, ValueError, "rho must be from 0 to 1"), ({"rho": "x"}, TypeError, "rho must be a float"),
    ({"stride": 0}, ValueError, "stride must be at least 1"), ({"clusters": 0}, ValueError, "clusters must be"),
    ({"exclude_static": 1}, TypeError, "exclude_static must be a bool"), ({"scale": math.nan}, ValueError, "scale"),
])
def test_a_wrong_config(options, error, says):
    refused(SyncKVConfig, error, says, **{"k": 8, **options})


@pytest.mark.parametrize(("labels", "representatives", "error", "says"), [
    ((0, 2), (0, 1), ValueError, "labels must name each of 2 clusters"),
    ((0, 0), (0, 1), ValueError, "labels must name each of 2 clusters"),
    ((0, 1), (1, 0), ValueError, r"representatives\[0\] must be a head of cluster 0"),
    ((0, 1), (0, 7), ValueError, r"representatives\[1\] must be a head of cluster 1"),
    ((), (), TypeError, "labels must be a tuple"), ((0, True), (0, 1), TypeError, r"labels\[1\] must be an int"),
    ((0, -1), (0, 1), ValueError, r"labels\[1\] must be at least 0"),
])
def test_wrong_clusters(labels, representatives, error, says):
    refused(HeadClusters, error, says, labels=labels, representatives=representatives)


@pytest.mark.parametrize("content", [
    "{", "[]", "{}", "[" * 100_000, '{"a":' * 100_000,
    json.dumps({"format": "kvtwin head clusters", "version": 2, "layers": []}),
    json.dumps({"format": "kvtwin head clusters", "version": 1, "layers": []}),
    json.dumps({"format": "kvtwin head clusters", "version": 1, "layers": [{"labels": [0]}]}),
    json.dumps({"format": "kvtwin head clusters", "version": 1, "layers": [{"labels": [1], "representatives": [0]}]}),
], ids=lambda content: content[:8] if len(content) > 1000 else None)
def test_a_wrong_file_of_clusters(content, tmp_path):
    path = tmp_path / "clusters.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"clusters\.json must hold head clusters, got"):
        HeadClusters.load(path)


def test_what_is_stored_must_be_clusters(tmp_path):
    path = tmp_path / "clusters.json"
    with pytest.raises(TypeError, match="layers must be a sequence of HeadClusters"):
        HeadClusters.save(path, [(0, 1)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="layers must be at least one HeadClusters, got none"):
        HeadClusters.save(path, [])
    assert not path.exists()
