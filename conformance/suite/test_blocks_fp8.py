"""`attend` over FP8 keys and values with scales: as over the numbers that they stand for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtwin.conformance import discovery
from kvtwin.conformance.cases.fp8_cases import Fp8AttendCase
from kvtwin.conformance.cases.fp8_errors import BAD_CALLS, BAD_ELEMENTS, changed
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.refusals import NotProvided

ATTENDS = [pair for pair in discovery.methods() if Fp8AttendCase in checkers.ask(pair.name, "CASES", ())]
#: Without methods whose `attend` is that of an earlier one.
DIFFERENT = list({pair.reference.attend: pair for pair in reversed(ATTENDS)}.values())[::-1]
each_function = pytest.mark.parametrize("pair", DIFFERENT, ids=str)
each_side = pytest.mark.parametrize("side", ("optimized", "reference"))


def attend_of(pair: discovery.Pair, twins: Any, side: str) -> Callable[..., Any]:
    found: Callable[..., Any] = checkers.module(getattr(twins, side), pair).attend
    if "key_scale" not in inspect.signature(found).parameters:
        raise NotProvided(f"{pair.name}.attend: key_scale")
    return found


def block(pair: discovery.Pair, fp8: str, device: torch.device, **more: Any) -> Fp8AttendCase:
    """Two rows, two KV heads, three queries, two tiles, free slots, and scales that differ per head. head_dim is a
    power of two in one of the formats."""
    sizes: dict[str, Any] = {"batch": 2, "key_value_heads": 2, "group": 3, "queries": 3, "slots": 24}
    sizes |= {"head_dim": {"e4m3": 24, "e5m2": 32}[fp8], "occupancy": "random", "seed": 308}
    return Fp8AttendCase(**{**sizes, "fp8": fp8, "device": str(device), "method": pair.name, **more})


# Wrong arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.kind("bad_input")
@each_function
@each_side
@pytest.mark.parametrize("names", [BAD_CALLS, BAD_ELEMENTS], ids=["arguments", "elements"])
def test_attend_refuses_wrong_fp8(pair, side, names, twins, device):
    """Elements of scales are checked on the CPU alone: `attend` does not synchronize with a GPU."""
    attend = attend_of(pair, twins, side)
    inputs = block(pair, "e4m3", device, occupancy="full", content="largest", queries=1).inputs
    for name, (changes, error, says) in names.items():
        wrong = changed(inputs, changes)
        if names is BAD_ELEMENTS and device.type != "cpu":
            assert attend(**wrong).output.shape == inputs["query"].shape, name
            continue
        with pytest.raises(error, match=says):
            attend(**wrong)
