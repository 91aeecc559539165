"""Wrong arguments of every public function, config and state, see `cases.fuzz`. The profile sets how many."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases import fuzz
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.discovery import Pair

pytestmark = pytest.mark.kind("bad_input")

#: 20 with each seed of the soak: 104,000 calls with 200 seeds.
CALLS = 20 if settings.get_current_profile_name() == "soak" else max(at_least(4), settings().max_examples // 2)


@pytest.mark.limits
@pytest.mark.parametrize(("twin", "side"), fuzz.pairs(), ids=str)
@given(data=st.data())
@settings(max_examples=CALLS)
def test_wrong_arguments_are_refused_or_harmless(twin: Pair, side: str, device: torch.device, data: st.DataObject):
    target = data.draw(st.sampled_from(fuzz.targets(twin, side, device)))
    fuzz.check(target, fuzz.wrong(target, data, device), device)


def grows(window: Any) -> None:
    torch.zeros(2**27)


def loops(window: Any) -> None:
    while True:
        pass


def mutates(window: Any) -> None:
    window.append(1)
    raise ValueError("window must be an int")


def parses(window: Any) -> None:
    json.loads(window)


def raises(error: Exception) -> Any:
    def function(window: Any) -> None:
        raise error
    return function


@pytest.mark.parametrize(("function", "says"), [
    (grows, "allocated 536870912 bytes"), (loops, "takes more than"), (mutates, "changed its arguments"),
    (parses, "not our own error"), (raises(ValueError("something is wrong")), "names no argument"),
    (raises(RuntimeError("window")), "not an error of arguments"),
])
def test_a_call_that_misbehaves_is_noticed(function: Any, says: str, monkeypatch: pytest.MonkeyPatch):
    if function is loops:
        monkeypatch.setattr(fuzz, "SECONDS", 0.1)
    monkeypatch.setitem(fuzz.PLAIN, "list", [])         # which one function changes
    target = fuzz.Target("function", lambda device: (function, None, {"window": 1}))
    with pytest.raises(AssertionError, match=says):
        fuzz.check(target, {"window": "list"}, torch.device("cpu"))


def test_a_clear_error_is_right():
    target = fuzz.Target("function", lambda device: (raises(TypeError("window must be an int")), None, {"window": 1}))
    assert fuzz.check(target, {"window": "text"}, torch.device("cpu")) == "window must be an int"


def test_contents_of_one_element_with_any_stride_are_read():
    assert fuzz.contents(torch.ones(2)[::2]) == fuzz.contents(torch.ones(1))
