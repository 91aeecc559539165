"""What a state refuses is counted and never wrong, and what it declares is all that it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtwin.conformance import Capabilities, capabilities, discovery, stats
from kvtwin.conformance.cases.strategies import state_traces
from kvtwin.conformance.harness import impl, verdict
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.lab.implementations import run, thinkv
from kvtwin.conformance.lab.implementations.longflow_states import LongFlow

TESTS = "laws or keeps_step or (LongFlowState and (numbers_are or choices or free_slots))"
CORE = ("accuracy", "decisions", "free_slots", "repeatability", "state")


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def judge(state: type, keyword: str = TESTS, **declared: Any) -> verdict.MethodVerdict:
        return run.verdict_of("longflow", {"LongFlowState": state}, declared, keyword, tmp_path, monkeypatch)

    return judge


def verdicts(found: verdict.MethodVerdict) -> dict[str, str]:
    return {name: found.properties[name].verdict for name in CORE}


# Refusals at call time -----------------------------------------------------------------------------------------------


class RefusesConfigs(LongFlow):
    def __init__(self, config: Any, **sizes: Any) -> None:
        if config.per_head or sizes["dtype"] == torch.bfloat16:
            raise NotImplementedError("per_head, and bfloat16")
        super().__init__(config, **sizes)


class RefusesPadding(LongFlow):
    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        if occupied is not None and not bool(occupied.all()):
            raise NotImplementedError("padding")
        return super().prefill(query, key, value, occupied)


class RefusesToStep(LongFlow):
    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise NotImplementedError("one token at a time")


class RefusesAll(LongFlow):
    def __init__(self, config: Any, **sizes: Any) -> None:
        raise NotImplementedError("any config")


@pytest.mark.slow
def test_a_constructor_may_refuse(judged):
    """A dtype that is refused although it is declared is not covered."""
    found = judged(RefusesConfigs)
    expected = {name: verdict.RIGHT if name == "state" else verdict.NOT_COVERED for name in CORE}
    assert verdicts(found) == expected, run.summary_of(found)
    assert {one.why for one in found.properties.values() if one.lacking} == {"not covered: bfloat16 (refused)"}
    assert found.verdict == verdict.NOT_COVERED
    assert found.refused["theirs.longflow.LongFlowState: per_head, and bfloat16"] > 0


@pytest.mark.slow
def test_a_prompt_may_be_refused(judged):
    found = judged(RefusesPadding)
    assert verdicts(found) == dict.fromkeys(CORE, verdict.RIGHT), run.summary_of(found)
    assert found.refused["theirs.longflow.LongFlowState.prefill: padding"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("state", "what", "keyword"), [
    (RefusesToStep, ".step: one token at a time", "keeps_step"), (RefusesAll, ": any config", "a_reset or padding_of"),
])
def test_what_is_refused_everywhere_is_not_covered(state, what, keyword, judged):
    found = judged(state, keyword, ties="any")  # a matrix product of prompts may round equal keys apart
    assert not run.wrong(found) and not found.others["failed"], run.summary_of(found)
    assert found.verdict == verdict.NOT_COVERED
    assert found.refused[f"theirs.longflow.LongFlowState{what}"] > 0
    assert found.properties["state"].verdict == verdict.NOT_COVERED
    assert f"not provided: theirs.longflow.LongFlowState{what}" in found.properties["state"].why


@pytest.mark.slow
def test_a_class_that_is_no_state_may_refuse(tmp_path, monkeypatch):
    """Of what it declares, every call is answered; outside of it, none is made."""
    found = run.verdict_of(
        "thinkv", thinkv.provided(PagedCache=thinkv.OnlyFloat16), {"dtypes": ("float16",)},
        "decode_attention or thinkv_paging or thinkv_formats", tmp_path, monkeypatch,
    )
    assert not run.wrong(found) and not found.others["failed"], run.summary_of(found)
    names = ("accuracy", "decisions", "free_slots", "repeatability", "independence")
    assert {name: found.properties[name].verdict for name in names} == dict.fromkeys(names, verdict.RIGHT), (
        run.summary_of(found)
    )
    assert not found.refused


@pytest.mark.slow
def test_what_a_class_refuses_is_counted(tmp_path, monkeypatch):
    found = run.verdict_of(
        "thinkv", thinkv.provided(PagedCache=thinkv.OnlyFloat16), {}, "decode_attention and (numbers_are or layouts)",
        tmp_path, monkeypatch,
    )
    assert not run.wrong(found), run.summary_of(found)
    assert found.properties["layouts"].verdict == verdict.RIGHT
    assert found.properties["accuracy"].why == "not covered: float32 (refused), bfloat16 (refused)"
    assert found.refused["theirs.thinkv.PagedCache: dtype torch.float32"] > 0


# What the interpreter cannot run --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_limits_of_the_interpreter_are_not_wrong_and_hide_nothing(tmp_path):
    """Real kernels with two limits in one test, one of them in all bfloat16 cases: the other dtypes are judged, and
    bfloat16 is left to a GPU."""
    name = "kvtwin.conformance.lab.implementations.uninterpreted"
    ran = subprocess.run([
        sys.executable, "-m", "kvtwin.conformance", "longflow", "--impl", name, "--device=cpu", "--jobs=1",
        "--hypothesis-profile=default", "--report=report.json",
        "-k", "decode_attention and (numbers or choices or calls_do_not or free_slots or rows_and)",
    ], cwd=tmp_path, capture_output=True, text=True, check=False)  # fmt: skip
    assert ran.returncode == verdict.EXIT_NOT_COVERED, ran.stdout + ran.stderr
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    found = report["verdicts"]["longflow"]
    judged = ("accuracy", "decisions", "repeatability", "independence", "free_slots")
    assert {one: found[one]["verdict"] for one in judged} == {
        one: verdict.RIGHT if one == "independence" else verdict.ENVIRONMENT for one in judged
    }
    assert all(found[one]["why"].startswith("bfloat16: ") for one in judged if one != "independence")
    for one in ("accuracy", "independence", "free_slots"):
        assert {"float32", "float16"} >= set(found[one]["worst"]), one
    assert set(found["accuracy"]["worst"]) == {"float32", "float16"}
    refused = report["coverage"]["longflow"]["refused"]
    assert all(what.startswith(f"environment: {name}.longflow.decode_attention: Triton's") for what in refused)
    assert all(any(limit in what for what in refused) for limit in ("Unsupported data type", "inline_asm"))
    assert report["totals"]["failed"] == 0


def limited(message: str) -> Exception:
    """What Triton's interpreter raises, in a class of the same name."""
    return type("InterpreterError", (Exception,), {"__module__": "triton.runtime.errors"})(message)


def test_a_group_of_errors_is_a_limit_if_all_of_them_are():
    first, second = limited("Unsupported data type"), limited("inline_asm not supported in interpreter mode")
    assert impl.environment_limit(ExceptionGroup("two", [first, second])) == (
        "Triton's interpreter: Unsupported data type; "
        "Triton's interpreter: inline_asm not supported in interpreter mode"
    )
    assert impl.environment_limit(ExceptionGroup("two", [first, AssertionError("2 is not 3")])) is None
    assert impl.environment_limit(ExceptionGroup("one in a group", [ExceptionGroup("one", [first])])) is not None


def test_a_call_that_the_interpreter_cannot_run_is_a_refusal(monkeypatch):
    def decode_attention(count: int) -> tuple[int, int, int]:
        if count > 1:
            raise limited("Unsupported data type") if count < 4 else limited("a fault of the kernel")
        return 1, 2, 3

    module = types.SimpleNamespace(longflow=types.SimpleNamespace(decode_attention=decode_attention))
    call = impl.Facade("theirs", module).longflow.decode_attention
    answered = []

    @given(count=st.integers(1, 3))
    @settings(derandomize=True, database=None, max_examples=20)
    def law(count: int) -> None:
        answered.append(call(count).slot)

    with stats.collect() as counted:
        law()
        with pytest.raises(impl.EnvironmentLimit, match="Unsupported data type"):  # a test that Hypothesis does not run
            call(2)
        with pytest.raises(Exception, match="a fault of the kernel"):
            call(4)
    assert answered and counted.answered == len(answered)
    (what,) = counted.refused
    assert what == "environment: theirs.longflow.decode_attention: Triton's interpreter: Unsupported data type"
    assert isinstance(impl.not_run(counted.refused), impl.EnvironmentLimit)
    assert not isinstance(impl.not_run(Counter({"theirs.decode: 64": 1})), impl.EnvironmentLimit)


# Declarations --------------------------------------------------------------------------------------------------------

DECLARED: dict[str, Any] = {
    "dtypes": ("float16",), "head_dims": (48,), "groups": (2,), "per_head": (True,), "masks": False, "scale": False,
    "slots_multiple_of": 4, "contiguous_only": True, "max_batch": 2,
    "options": {"kernel_size": (5,), "window": (32,), "check_finite": (False,)},
}


class OnlyDeclared(LongFlow):
    """Anything outside of DECLARED is an error."""

    def __init__(self, config: Any, *, batch: int, query_heads: int, key_value_heads: int, **sizes: Any) -> None:
        assert config.per_head and config.kernel_size == 5 and config.window == 32 and config.scale is None
        assert batch <= 2 and query_heads == 2 * key_value_heads
        assert sizes["head_dim"] == 48 and sizes["dtype"] == torch.float16
        super().__init__(config, batch=batch, query_heads=query_heads, key_value_heads=key_value_heads, **sizes)

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        assert key.shape[2] % 4 == 0 and key.is_contiguous() and (occupied is None or bool(occupied.all()))
        return super().prefill(query, key, value, occupied)


@pytest.mark.slow
def test_lockstep_draws_what_is_declared(judged):
    found = judged(OnlyDeclared, TESTS, **DECLARED)
    names = ("accuracy", "decisions", "state")
    assert {name: found.properties[name].verdict for name in names} == dict.fromkeys(names, verdict.RIGHT), (
        run.summary_of(found)
    )
    # The laws' fixed scenario, and those of every option, are outside of it.
    assert not any(".prefill" in what or ".step" in what for what in found.refused), found.refused


@pytest.mark.parametrize("pair", discovery.methods(), ids=str)
@given(data=st.data())
@settings(max_examples=max(3, settings().max_examples // 6))
def test_every_methods_traces_have_declared_options(pair, data):
    budgets = dict.fromkeys(checkers.with_budget(pair.name, 3), (3, 7))
    with capabilities.use(Capabilities(options={**budgets, "block_size": (5,), "sinks": (1,)}, per_head=(False,))):
        trace = data.draw(state_traces(pair.name, device="cpu"))
    options = vars(pair.config(**trace.options))
    assert all(options[name] in values for name, values in budgets.items())
    assert options.get("block_size", 5) == 5 and options.get("sinks", 1) == 1
    assert not options.get("per_head", False)
