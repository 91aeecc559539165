"""The verdict that small right and wrong states get: the wrong property, and no other."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from kvtwin.conformance import discovery
from kvtwin.conformance.harness import results, verdict, verdict_table
from kvtwin.conformance.lab.implementations import appending, longflow_states, run, thinkv

pytestmark = [pytest.mark.slow, pytest.mark.first]


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that runs tests of a method in this process, and returns the verdict."""

    def judge(method: str, provided: dict[str, Any], keyword: str, **declared: Any) -> verdict.MethodVerdict:
        return run.verdict_of(method, provided, declared, keyword, tmp_path, monkeypatch)

    return judge


# LongFlow ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state", [longflow_states.CountsOnAfterReset, longflow_states.IgnoresReorder, longflow_states.ScalesTheQuery],
    ids=lambda state: state.__name__,
)
def test_the_fault_of_a_state_is_named(state, judged):
    found = judged("longflow", {"LongFlowState": state}, "laws or keeps_step or keep_step")
    assert run.wrong(found) == {"state"}, run.summary_of(found)
    assert not run.not_right(found), run.summary_of(found)


def test_a_right_state_is_right(judged):
    found = judged("longflow", {"LongFlowState": longflow_states.LongFlow}, "laws or lockstep or LongFlowState")
    names = ("accuracy", "decisions", "free_slots", "repeatability", "state")
    assert {name: found.properties[name].verdict for name in names} == dict.fromkeys(names, verdict.RIGHT), (
        run.summary_of(found)
    )
    assert found.verdict == verdict.RIGHT


def test_a_state_is_judged_on_what_it_has(judged):
    keyword = "laws or lockstep or LongFlowState or test_longflow_exact"
    found = judged("longflow", {"LongFlowState": longflow_states.NoneForScores}, keyword)
    names = ("accuracy", "decisions", "free_slots", "repeatability", "state")
    assert {name: found.properties[name].verdict for name in names} == dict.fromkeys(names, verdict.RIGHT), (
        run.summary_of(found)
    )
    assert not run.wrong(found) and list(found.missing) == ["NoneForScores: score"]
    found = judged("longflow", {"LongFlowState": longflow_states.WithoutScores}, keyword)
    assert not run.wrong(found) and found.properties["state"].verdict == verdict.RIGHT, run.summary_of(found)
    assert found.properties["decisions"].verdict == verdict.NOT_COVERED
    found = judged("longflow", {"LongFlowState": longflow_states.WithoutPositions}, keyword)
    assert found.verdict == verdict.WRONG
    assert "no attribute 'positions', which every state needs" in str(run.summary_of(found))


def test_a_right_state_of_one_row_is_right(judged):
    found = judged("longflow", {"LongFlowState": longflow_states.OneRow}, "laws or lockstep or LongFlowState",
                   max_batch=1)  # fmt: skip
    names = ("accuracy", "decisions", "free_slots", "repeatability", "state")
    assert {name: found.properties[name].verdict for name in names} == dict.fromkeys(names, verdict.RIGHT), (
        run.summary_of(found)
    )
    assert found.verdict == verdict.RIGHT


def test_a_state_of_one_row_that_counts_on_after_a_reset_is_wrong(judged):
    state = {"LongFlowState": longflow_states.CountsOnAfterReset}
    found = judged("longflow", state, "a_reset_state or order-and-reset", max_batch=1)
    assert run.wrong(found) == {"state"}, run.summary_of(found)
    assert not run.not_right(found), run.summary_of(found)
    assert len(found.properties["state"].findings) >= 2, "the law, and lockstep"


@pytest.mark.parametrize("method", ["keydiff", "epikv"])
def test_the_reference_is_right_about_wrong_arguments(method, judged):
    """What kvtwin's kernels do not take, it may take."""
    module = next(pair.reference for pair in discovery.methods() if pair.name == method)
    found = judged(method, {name: getattr(module, name) for name in module.__all__}, "input", validates_arguments=True)
    assert found.properties["bad_input"].verdict == verdict.RIGHT, run.summary_of(found)
    assert not found.others["failed"]


# Slots in any order --------------------------------------------------------------------------------------------------

APPENDING = {"TOVAState": appending.AppendingTOVA}
with_tova = pytest.mark.parametrize("method", [pair.name for pair in discovery.methods() if pair.name == "tova"])
EVERY_STEP = {"interval": (1,), "per_head": (True,)}  # they have no other


@with_tova
def test_a_right_state_that_appends_is_right(method, judged):
    keyword = "laws or keeps_step or room_for_all or TOVAState"
    found = judged(method, APPENDING, keyword, slot_order="any", options=EVERY_STEP)
    names = ("accuracy", "decisions", "free_slots", "repeatability", "independence", "state")
    assert {name: found.properties[name].verdict for name in names} == dict.fromkeys(names, verdict.RIGHT), (
        run.summary_of(found)
    )
    assert found.properties["ties"].verdict == verdict.CONVENTION
    assert found.verdict == verdict.RIGHT
    assert "conventions: slot_order = any" in [text.strip() for text, _ in verdict_table.lines(found, "theirs")]


@with_tova
def test_a_state_that_appends_and_evicts_wrongly_is_wrong(method, judged):
    state = {"TOVAState": appending.DropsTheOldest}
    found = judged(method, state, "TOVAState and tokens", slot_order="any", options=EVERY_STEP)
    assert run.wrong(found) == {"decisions"}, run.summary_of(found)
    # Each of their tests is about tokens, and fails because it evicts by age.
    lacking = ("free_slots", "independence", "extreme_numbers", "layouts")
    assert run.not_right(found) == dict.fromkeys(lacking, verdict.NOT_COVERED), run.summary_of(found)


@with_tova
def test_a_state_that_appends_must_declare_it(method, judged):
    found = judged(method, APPENDING, "laws or keeps_step", options=EVERY_STEP)
    assert run.wrong(found) == {"state"}, run.summary_of(found)
    assert not run.not_right(found), run.summary_of(found)


def test_a_right_state_with_its_slots_in_reverse_order_is_right(judged):
    state = {"LongFlowState": longflow_states.LastSlotFirst}
    found = judged("longflow", state, "golden or laws or keeps_step or LongFlowState", slot_order="any")
    names = ("accuracy", "decisions", "free_slots", "repeatability", "state", "traces")
    assert {name: found.properties[name].verdict for name in names} == dict.fromkeys(names, verdict.RIGHT), (
        run.summary_of(found)
    )
    assert found.verdict == verdict.RIGHT


# Recorded traces -----------------------------------------------------------------------------------------------------


TRACES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    # One in four of 64 decode steps, from the one that fills the last slot on; all but a few of 56 steps and 3 blocks.
    "longflow": ({"LongFlowState": longflow_states.SecondBestAtTimes}, 16, {}),
    "tova": ({"TOVAState": appending.DropsTheOldest}, 40, {"slot_order": "any", "options": EVERY_STEP}),
}


@pytest.mark.parametrize("method", [pair.name for pair in discovery.methods() if pair.name in TRACES])
def test_every_wrong_decision_on_a_recorded_trace_is_counted(method, judged):
    provided, least, declared = TRACES[method]
    found = judged(method, provided, "golden", **declared)
    traces = found.properties["traces"]
    assert traces.verdict == verdict.WRONG and traces.wrong >= least, run.summary_of(found)
    assert traces.decisions > traces.wrong
    assert "choices are wrong; the first: " in traces.findings[0]["message"]
    assert traces.findings[0]["case"] is None, "the case of a check of the prompt is right"
    shown = next(text for text, _ in verdict_table.lines(found, "theirs") if text.lstrip().startswith("traces"))
    assert f"{traces.adjudicated} different but legal; " in shown


# ThinKV --------------------------------------------------------------------------------------------------------------


def test_a_stale_block_table_is_named(judged):
    stale = thinkv.provided(ThinKVState=thinkv.StaleState, PagedCache=thinkv.StaleBlockTable)
    found = judged("thinkv", stale, "keeps_step or test_thinkv_paging_state")
    assert run.wrong(found) == {"state"}, run.summary_of(found)
    assert not run.not_right(found), run.summary_of(found)


def test_paged_attention_of_another_scale_is_inaccurate(judged):
    found = judged("thinkv", thinkv.provided(decode_attention=thinkv.too_sharp), "decode_attention or thinkv_paging")
    assert run.wrong(found) == {"accuracy"}, run.summary_of(found)
    first = found.properties["accuracy"].findings[0]
    assert first["subject"] == "thinkv.decode_attention" and "PagedCase(" in first["case"]
    assert "kvtwin replay" in first["replay"] and "--impl theirs" in first["replay"]


def test_a_right_paged_cache_is_right(judged):
    found = judged("thinkv", thinkv.provided(), "decode_attention")
    names = ("accuracy", "decisions", "repeatability", "independence", "free_slots", "extreme_numbers", "layouts")
    assert {name: found.properties[name].verdict for name in names} == dict.fromkeys(names, verdict.RIGHT), (
        run.summary_of(found)
    )
    assert not found.others["failed"]


FORMATS = "test_thinkv_formats"


def test_a_quantizer_that_truncates_is_named(judged):
    found = judged("thinkv", thinkv.provided(quantize=thinkv.Truncates()), FORMATS)
    # It truncates in the cases of extreme numbers, too.
    assert run.wrong(found) == {"accuracy", "extreme_numbers"}, run.summary_of(found)
    assert not run.not_right(found), run.summary_of(found)


def test_a_right_quantizer_is_right(judged):
    found = judged("thinkv", thinkv.provided(quantize=thinkv.Quantize()), FORMATS)
    names = ("accuracy", "layouts", "independence")
    assert {name: found.properties[name].verdict for name in names} == dict.fromkeys(names, verdict.RIGHT), (
        run.summary_of(found)
    )
    assert not found.others["failed"]


@pytest.mark.parametrize(("side", "judges"), [("optimized", "accuracy"), ("reference", None)])
def test_tests_of_the_reference_judge_nothing(side, judges):
    markers = {"property": types.SimpleNamespace(args=("accuracy",))}
    item = types.SimpleNamespace(
        nodeid="test", path=Path("test_thinkv_formats.py"), callspec=types.SimpleNamespace(params={"side": side}),
        iter_markers=lambda name: [], get_closest_marker=markers.get,
    )
    assert results.classify(item)["judges"] == judges
