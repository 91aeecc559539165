"""Bad input to ThinKV's thoughts and eviction: errors have the right type, and say what was expected and passed."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
import torch

from kvtwin.conformance.cases.bad_input import refused

pytestmark = [
    pytest.mark.kind("bad_input"),
    pytest.mark.parametrize("side", ["reference", "optimized"]),
    pytest.mark.main,
]

B, HQ, HKV, S, D, M, L = 2, 4, 2, 6, 16, 3, 2


def good(function: str, device: torch.device) -> dict[str, Any]:
    """Valid arguments."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    def integers(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.int64, device=device)

    modes = torch.tensor([0.1, 0.5, 0.9]).repeat(2, 30).to(device)
    return {
        "attention_sparsity": lambda: {
            "query": random(B, HQ, D), "key": random(B, HKV, S, D),
            "occupied": torch.ones(B, S, dtype=torch.bool, device=device),
        },
        "classify": lambda: {"sparsity": random(B), "edges": (0.2, 0.6)},
        "calibrate": lambda: {"traces": [modes, modes[:, :60]], "layers": 2},
        "anneal": lambda: {
            "size": integers(B, M), "level": integers(B, M), "thought": integers(B, M), "current": integers(B),
            "trajectory_change": torch.ones(B, dtype=torch.bool, device=device), "live": integers(B), "budget": 4,
            "retention": (8, 4),
        },
        "select_representatives": lambda: {"key_segment": random(HKV, S, D), "keep": 2},
        "segment_representatives": lambda: {
            "key": random(B, HKV, S, D), "slots": integers(B, M, L), "keep": integers(B, M),
        },
    }[function]()


FUNCTIONS = (
    "attention_sparsity", "classify", "calibrate", "anneal", "select_representatives", "segment_representatives",
)
INTEGERS = {
    "anneal": ("size", "level", "thought", "current", "live"), "segment_representatives": ("slots", "keep"),
}
FLOATS = {
    "attention_sparsity": ("query", "key"), "classify": ("sparsity",), "select_representatives": ("key_segment",),
    "segment_representatives": ("key",),
}
MASKS = {"attention_sparsity": ("occupied",), "anneal": ("trajectory_change",)}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_accepts_valid_arguments(function, side, twins, device):
    getattr(getattr(twins, side).thinkv, function)(**good(function, device))


def tensors() -> list[Any]:
    spoilers = {
        "list": (lambda x: x.tolist(), TypeError, r"torch\.Tensor.*list"),
        "none": (lambda x: None, TypeError, r"torch\.Tensor.*NoneType"),
        "more": (lambda x: x[None, None], ValueError, r"\["),
        "empty": (lambda x: x[..., :0], ValueError, r"0"),
        "sparse": (lambda x: x.to_sparse(), TypeError, "strided.*[Ss]parse"),
    }
    found = []
    for table in (INTEGERS, FLOATS, MASKS):
        for function, names in table.items():
            for name in names:
                for label, wrong in spoilers.items():
                    if not (label == "more" and name == "sparsity"):
                        found.append(pytest.param(function, name, *wrong, id=f"{function}-{name}-{label}"))
    return found


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_tensor_of_another_dtype(function, side, twins, device):
    call = getattr(getattr(twins, side).thinkv, function)
    for table, dtypes in (
        (INTEGERS, (torch.int32, torch.float32, torch.bool)), (FLOATS, (torch.int64, torch.bool, torch.complex64)),
        (MASKS, (torch.float32, torch.uint8)),
    ):
        for name, dtype in itertools.product(table.get(function, ()), dtypes):
            arguments = good(function, device)
            arguments[name] = arguments[name].to(dtype)
            refused(call, TypeError, rf"\b{name}\b", "must", "got", f"{dtype}", **arguments)


@pytest.mark.parametrize(("function", "name", "spoil", "error", "says"), tensors())
def test_a_wrong_tensor(function, name, spoil, error, says, side, twins, device):
    arguments = good(function, device)
    arguments[name] = spoil(arguments[name])
    refused(getattr(getattr(twins, side).thinkv, function), error, rf"\b{name}\b", "must", "got", says, **arguments)


@pytest.mark.parametrize(("function", "name", "cut", "says"), [
    ("attention_sparsity", "query", lambda x: x[:1], r"B = 2.*\(1, 4, 16\)"),
    ("attention_sparsity", "query", lambda x: x[:, :3], "Hq = 3 and Hkv = 2"),
    ("attention_sparsity", "query", lambda x: x[..., :8], "D = 16"),
    ("attention_sparsity", "occupied", lambda x: x[:, :-1], r"\(2, 6\), got \(2, 5\)"),
    ("anneal", "level", lambda x: x[:, 1:], r"\(2, 3\), got \(2, 2\)"),
    ("anneal", "thought", lambda x: x[:1], r"\(2, 3\), got \(1, 3\)"),
    ("anneal", "current", lambda x: x[:1], r"\(2,\), got \(1,\)"),
    ("anneal", "live", lambda x: x[:1], r"\(2,\), got \(1,\)"),
    ("anneal", "trajectory_change", lambda x: x[:1], r"\(2,\), got \(1,\)"),
    ("segment_representatives", "slots", lambda x: x[:1], r"\(2, 3, 2\), got \(1, 3, 2\)"),
    ("segment_representatives", "keep", lambda x: x[:, 1:], r"\(2, 3\), got \(2, 2\)"),
    ("select_representatives", "key_segment", lambda x: x[0, 0], "1 dimensions"),
])
def test_a_tensor_of_another_shape(function, name, cut, says, side, twins, device):
    arguments = good(function, device)
    arguments[name] = cut(arguments[name])
    who = "heads" if says.startswith("Hq") else name
    refused(getattr(getattr(twins, side).thinkv, function), ValueError, rf"\b{who}\b", "must", says, **arguments)


NUMBERS: dict[str, list[tuple[str, list[Any], type[Exception], str]]] = {
    "attention_sparsity": [
        ("threshold", ["0.1", True, None], TypeError, "must be a float"),
        ("threshold", [0, 1, -0.1, 1.5, math.nan], ValueError, "must lie between 0 and 1"),
        ("scale", ["1", True], TypeError, "must be a float or None"),
        ("scale", [math.inf], ValueError, "must be finite"),
        ("sparsity_of", ["head", ""], ValueError, "must be one of heads, mean"),
        ("sparsity_of", [None, True], TypeError, "must be a str"),
    ],
    "classify": [
        ("edges", [0.3, (0.3,), (0.1, 0.2, 0.3), None], TypeError, "must be"),
        ("edges", [("a", 0.3), (True, 0.3)], TypeError, "must be a float"),
        ("edges", [(0.5, 0.3), (math.nan, 0.3)], ValueError, "must ascend"),
    ],
    "calibrate": [
        ("traces", [None, torch.zeros(2, 3), []], TypeError, "must be a sequence"),
        ("traces", [[[0.1, 0.2]]], TypeError, r"traces\[0\] must be a torch.Tensor"),
        ("traces", [[torch.zeros(3)]], ValueError, r"traces\[0\] must be \[all layers, steps\]"),
        ("traces", [[torch.zeros(2, 3, dtype=torch.int64)]], TypeError, r"traces\[0\].dtype must be"),
        ("traces", [[torch.zeros(2, 3), torch.zeros(3, 3)]], ValueError, r"traces\[1\] must be .*2 layers"),
        ("traces", [[torch.zeros(2, 1)]], ValueError, r"traces\[0\] must be .*at least 2 steps"),
        ("traces", [[torch.full((2, 3), bad)] for bad in (-0.1, 1.1, math.nan, math.inf)], ValueError,
         r"traces\[0\] must hold shares from 0 to 1"),
        ("layers", ["2", True, 2.0], TypeError, "must be an int"),
        ("layers", [0], ValueError, "must be at least 1"),
        ("layers", [3], ValueError, "must be at most the traces' 2 layers"),
        ("grid", [2], ValueError, "must be at least 3"),
        ("grid", [2.0, None], TypeError, "must be an int"),
        ("bandwidth", ["0.1", True], TypeError, "must be a float or None"),
        ("bandwidth", [0, -1.0, math.inf, math.nan], ValueError, "must be positive and finite"),
    ],
    "anneal": [
        ("budget", ["4", True, 4.0, None], TypeError, "must be an int"),
        ("budget", [0, -1], ValueError, "must be at least 1"),
        ("retention", [None, 4, ()], TypeError, "must be a tuple of ints"),
        ("retention", [(4, 2.0)], TypeError, r"retention\[1\] must be an int"),
        ("retention", [(4, -1)], ValueError, r"retention\[1\] must be at least 0"),
        ("retention", [(4, 8)], ValueError, "must not increase"),
    ],
    "select_representatives": [
        ("keep", ["2", True, 2.0, None], TypeError, "must be an int"), ("keep", [0, -1], ValueError, "at least 1"),
    ],
    "segment_representatives": [
        ("most", ["2", True, 2.0], TypeError, "must be an int"), ("most", [0, -1], ValueError, "at least 1"),
    ],
}
NUMBER_CASES = [
    pytest.param(function, *row, id=f"{function}-{row[0]}-{number}")
    for function, rows in NUMBERS.items() for number, row in enumerate(rows)
]


@pytest.mark.parametrize(("function", "name", "values", "error", "says"), NUMBER_CASES)
def test_a_wrong_number(function, name, values, error, says, side, twins, device):
    arguments = good(function, device)
    for value in values:
        changed = arguments | {name: value}
        refused(getattr(getattr(twins, side).thinkv, function), error, rf"^{name}\b", says, "got", **changed)


def test_calibrate_rejects_layers_without_three_modes(side, twins, device):
    with pytest.raises(ValueError, match="layers = 2 layers with 3 modes.*layer 0: 1; layer 1: 1"):
        getattr(twins, side).thinkv.calibrate([torch.full((2, 9), 0.3, device=device)], layers=2)


# Elements of tensors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("numbers", "says"), [
    ([0, 6], "slots must be from 0 to 5, or -1 for none, got values from -1 to 6"),
    ([0, 2**40], f"slots must be from 0 to 5, or -1 for none, got values from -1 to {2**40}"),
    ([0, -2], "slots must be from 0 to 5, or -1 for none, got values from -2 to 1"),
    ([-1, 3], "slots must have -1 only after a segment's last token, got -1 before a token"),
])
def test_slots_beyond_the_cache_are_not_read(numbers, says, side, twins, device):
    """Slot 2**40 would end the process if a kernel read it."""
    arguments = good("segment_representatives", device)
    arguments["slots"][0, 0] = -1
    arguments["slots"][1, 2] = torch.tensor(numbers, device=device)
    refused(getattr(twins, side).thinkv.segment_representatives, ValueError, re.escape(says), **arguments)


# Input that only the kernels refuse ----------------------------------------------------------------------------------


def test_arguments_on_several_devices(side, twins, device):
    """The error names each argument and the device that it should be on."""
    for function, table in (("anneal", INTEGERS), ("segment_representatives", INTEGERS), ("attention_sparsity", MASKS)):
        for name in table[function][1:] or table[function]:
            arguments = good(function, device)
            arguments[name] = arguments[name].to("meta")
            call, where = getattr(getattr(twins, side).thinkv, function), re.escape(str(device))
            refused(call, ValueError, rf"{name} must be on {where}", "got meta", **arguments)
