"""Bad numbers and flags: every other argument of LongFlow and its SnapKV, and input that only the kernels refuse.

See test_longflow_input.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.bad_input import (
    MASKS,
    STATE,
    SUBJECTS,
    Call,
    W,
    good,
    module_of,
    refused,
)
from kvtwin.conformance.harness.impl import Twins
from kvtwin.reference.contract import MethodConfig

pytestmark = [pytest.mark.kind("bad_input"), pytest.mark.main]
both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])

FLOATING = [
    (subject, argument) for subject, arguments in SUBJECTS.items() for argument in arguments
    if argument not in MASKS and argument != "index"
]

NOT_INTEGERS = [True, 2.0, "3", None, torch.tensor(3)]
NOT_FLAGS = [0, 1, None, "yes", torch.tensor(True)]
NOT_SCALES = ["0.1", True, 1j, torch.tensor(0.5)]
NOT_FINITE = [float("nan"), float("inf"), float("-inf"), 1e39, 10**400]

SCALARS: dict[str, list[tuple[list[Any], type[Exception], str]]] = {
    "budget": [(NOT_INTEGERS, TypeError, "must be an int"), ([-1], ValueError, "must be at least [01]")],
    "window": [(NOT_INTEGERS, TypeError, "must be an int"), ([0, -1], ValueError, "must be at least 1")],
    "kernel_size": [
        (NOT_INTEGERS, TypeError, "must be an int"), ([0, -1], ValueError, "must be at least 1"),
        ([2, 4], ValueError, "must be odd"),
    ],
    "sinks": [(NOT_INTEGERS, TypeError, "must be an int"), ([-1], ValueError, "must be at least 0")],
    "scale": [(NOT_SCALES, TypeError, "must be a float or None"), (NOT_FINITE, ValueError, "must be finite")],
    "softcap": [
        (NOT_SCALES, TypeError, "must be a float or None"),
        ([0, 0.99, -2.0, float("nan"), float("inf"), 2**20 + 1], ValueError, "must be from 1 to"),
    ],
    **{
        flag: [(NOT_FLAGS, TypeError, "must be a bool")]
        for flag in ("per_head", "protect_newest", "prefix_alone", "check_finite", "shared_heads")
    },
    **{
        count: [(NOT_INTEGERS, TypeError, "must be an int"), ([0, -2], ValueError, "must be at least 1")]
        for count in ("batch", "query_heads", "key_value_heads", "head_dim")
    },
    "dtype": [([torch.int64, "float32", None, float, torch.float8_e5m2], TypeError, "must be one of .*torch.float16")],
    "device": [
        ([None, 0, True, b"cpu"], TypeError, "must be a torch.device or a str"),
        (["", "gpu", "cpu:x", "cuda:99", torch.device("cuda", 99)], ValueError, "must be"),
    ],
    "config": [([None, 4, {"budget": 4}, MethodConfig(4)], TypeError, "must be a LongFlowConfig")],
}
OPTIONS = {
    "decode_attention": ["scale", "per_head", "check_finite"],
    "compress_prefill": ["budget", "window", "kernel_size", "prefix_alone", "scale"],
    "window_score": ["kernel_size", "shared_heads", "scale"],
    "compress": ["budget", "kernel_size", "shared_heads", "scale"],
    "LongFlowConfig": [
        "budget", "per_head", "protect_newest", "sinks", "window", "kernel_size", "prefix_alone", "check_finite",
        "scale", "softcap",
    ],
    "LongFlowState": ["config", *STATE, "device"],
}


def shown(value: Any) -> str:
    """How a message shows a wrong argument: by its value, or by its type if the type is wrong."""
    return "(" + "|".join(re.escape(text) for text in (f"{value}", f"{value!r}", type(value).__name__)) + ")"


SCALAR_CASES = [
    pytest.param(subject, option, value, error, says, id=f"{subject}-{option}-{value!r:.40}")
    for subject, options in OPTIONS.items() for option in options
    for values, error, says in SCALARS[option] for value in values
]


@both_sides
@pytest.mark.parametrize(("subject", "option", "value", "error", "says"), SCALAR_CASES)
def test_a_wrong_number_or_flag(
    subject: str, option: str, value: Any, error: type[Exception], says: str, side: str, twins: Twins,
    device: torch.device,
) -> None:
    module = module_of(twins, side, subject)
    if subject == "LongFlowConfig":
        arguments: dict[str, Any] = {"budget": 8}
    elif subject == "LongFlowState":
        arguments = STATE | {"config": module.LongFlowConfig(4), "device": device}
    else:
        arguments = good(subject, device)
    arguments[option] = value
    refused(getattr(module, subject), error, rf"^{option}\b.*{says}.*got.*{shown(value)}", **arguments)


@both_sides
@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (torch.Tensor.tolist, TypeError, r"must be a torch.Tensor \[Hq\], got list"),
        (lambda x: x, ValueError, r"must be \[Hq\] = \(4,\), got \(8,\)"),
        (lambda x: x[::2], ValueError, "must be contiguous, got a stride of 2"),
        (lambda x: x[:4].long(), TypeError, "dtype must be one of .*int64"),
        (lambda x: x[:4].to("meta"), ValueError, "must be on .*, got meta"),
    ],
    ids=["list", "shape", "stride", "dtype", "device"],
)
def test_wrong_sinks(
    spoil: Callable[[Tensor], Any], error: type[Exception], says: str, side: str, twins: Twins, device: torch.device
) -> None:
    module = getattr(twins, side).longflow
    sinks = spoil(torch.zeros(8, device=device))
    arguments = STATE | {"config": module.LongFlowConfig(4), "device": device, "sink_logits": sinks}
    refused(module.LongFlowState, error, rf"^sink_logits\b.*{says}", **arguments)


@both_sides
@pytest.mark.parametrize(
    ("options", "held"),
    [
        ({"budget": 4, "sinks": 3}, 4), ({"budget": 4, "sinks": 4, "protect_newest": False}, 4),
        ({"budget": 2, "sinks": 1}, 2), ({"budget": 1, "sinks": 1}, 1), ({"budget": 4, "sinks": 9}, 10),
    ],
    ids=str,
)
def test_protected_tokens_must_leave_room(options: dict[str, Any], held: int, side: str, twins: Twins) -> None:
    config = getattr(twins, side).longflow.LongFlowConfig
    refused(config, ValueError, rf"budget must exceed .*sinks.*{held}.*got {options['budget']}", **options)


@both_sides
@pytest.mark.parametrize(
    "options",
    [{"budget": 1}, {"budget": 2}, {"budget": 4, "sinks": 2}, {"budget": 4, "sinks": 3, "protect_newest": False}],
    ids=str,
)
def test_protected_tokens_that_leave_room(options: dict[str, Any], side: str, twins: Twins) -> None:
    config = getattr(twins, side).longflow.LongFlowConfig(**options)
    assert {name: getattr(config, name) for name in options} == options


@both_sides
def test_a_config_cannot_be_changed(side: str, twins: Twins) -> None:
    """Otherwise it could be changed to a config that the constructor refuses."""
    config = getattr(twins, side).longflow.LongFlowConfig(4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.budget = 0
    refused(partial(dataclasses.replace, config), ValueError, "budget must be at least 1, got 0", budget=0)


@both_sides
def test_more_observers_than_the_window(side: str, twins: Twins, device: torch.device) -> None:
    call = Call(twins, side, "compress_prefill", device)
    call.arguments["window"] = W - 1
    with call.refused(ValueError, rf"query_window must .*window = {W - 1}, got \(2, 4, 3, 16\)"):
        call()
    call.arguments["window"] = W
    call()


# check_finite --------------------------------------------------------------------------------------------------------


@both_sides
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize(
    ("subject", "argument"),
    [case for case in FLOATING if case[0] in ("decode_attention", "decode_per_head", "prefill", "step")],
)
def test_check_finite(
    subject: str, argument: str, number: float, side: str, twins: Twins, device: torch.device
) -> None:
    call = Call(twins, side, subject, device, check_finite=True)
    call.arguments[argument][0, 1, 2] = number
    with call.refused(ValueError, rf"^{argument} holds NaN or infinity, which check_finite=True forbids"):
        call()


@both_sides
@pytest.mark.parametrize("subject", ["decode_attention", "decode_per_head", "prefill"])
def test_check_finite_looks_at_occupied_slots_only(
    subject: str, side: str, twins: Twins, device: torch.device
) -> None:
    call = Call(twins, side, subject, device, check_finite=True)
    call.arguments["occupied"][0, ..., 2] = False
    for name in ("key", "value", *(["query"] if subject == "prefill" else [])):
        call.arguments[name][0, :, 2] = float("nan")
    output = call()
    finite = (output if isinstance(output, Tensor) else output.output).isfinite()
    wrong = int((~finite).sum())
    assert not wrong, f"output: {wrong} of {finite.numel()} elements are NaN or infinite, of inputs that are finite"
