"""The judge's public API. docs/how-to/own-tests.md has examples, which test_docs.py runs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import kvtwin.reference
from kvtwin.conformance import api

TRACE = api.StateTrace(method="longflow", config=(("budget", 4),), prompt=6, steps=3)


def test_every_name_is_explained():
    for name in api.__all__:
        value = getattr(api, name)
        assert value.__module__.startswith("kvtwin."), name
        assert inspect.getdoc(value), name


def test_a_right_case_passes_every_check():
    case = api.DecodeCase(batch=2, key_value_heads=2, slots=9)
    assert api.judge(case, kvtwin.reference) == ["decode_attention: right"]
    assert api.judge(TRACE, kvtwin.reference) == ["lockstep of longflow: right, 3 steps, 3 decisive choices, 0 "
                                                  "adjudicated ties"]


def test_a_wrong_case_raises_mismatch():
    def decode_attention(**given):
        output, score, slot = kvtwin.reference.longflow.decode_attention(**given)
        return output * 1.01, score, slot

    wrong = SimpleNamespace(longflow=SimpleNamespace(decode_attention=decode_attention))
    with pytest.raises(api.Mismatch, match="output"):
        api.judge(api.DecodeCase(slots=9), wrong)


def test_a_wrong_state_raises_mismatch():
    class LongFlowState(kvtwin.reference.longflow.LongFlowState):
        def step(self, query, key, value):
            return super().step(query, value, key)

    with pytest.raises(api.Mismatch):
        api.lockstep(TRACE, SimpleNamespace(LongFlowState=LongFlowState))


def test_a_case_without_a_checker_is_not_right():
    class OtherCase(api.Case):
        kind = "of test_api.py"

    try:
        with pytest.raises(ValueError, match="kind that a method's checker judges, got OtherCase"):
            api.judge(OtherCase(), kvtwin.reference)
    finally:
        from kvtwin.conformance.cases import case

        del case.KINDS[OtherCase.kind]


def test_a_function_that_is_missing_is_not_provided():
    with pytest.raises(api.NotProvided):
        api.judge(api.DecodeCase(slots=9), SimpleNamespace(keydiff=SimpleNamespace()))


@pytest.mark.parametrize(("call", "says"), [
    (lambda: api.judge({"slots": 3}, kvtwin.reference), "case must be a Case, got dict"),
    (lambda: api.lockstep(api.DecodeCase(), kvtwin.reference.longflow), "trace must be a StateTrace, got DecodeCase"),
])
def test_wrong_arguments(call, says):
    with pytest.raises(TypeError, match=says):
        call()


def test_the_interpreter_is_on_where_this_suite_uses_it(device: torch.device):
    if device.type == "cpu":
        assert api.use_interpreter()
    else:
        with pytest.raises(RuntimeError, match="cannot be interpreted"):
            api.use_interpreter()


@pytest.mark.slow
def test_the_interpreter_in_another_process():
    script = (
        "from kvtwin.conformance import api\nprint(api.use_interpreter())\n"
        "import kvtwin.optimized\napi.judge(api.DecodeCase(slots=5), kvtwin.optimized)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
