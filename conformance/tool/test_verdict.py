"""The verdict, from the results of tests: what is right, wrong or not covered, exit codes, and the table."""

from __future__ import annotations

from typing import Any

import pytest

from kvtwin.conformance import Capabilities
from kvtwin.conformance.harness import verdict, verdict_table
from kvtwin.conformance.harness.results import Result
from kvtwin.conformance.judge.properties import CORE, PROPERTIES
from kvtwin.conformance.lab.implementations import run
from kvtwin.conformance.stats import JudgedCase


def result(judges: str | None, outcome: str = "passed", **changes: Any) -> Result:
    """The result of a test that called the implementation and judged enough."""
    return Result(**{
        "nodeid": f"test_{judges}", "method": "longflow", "judges": judges, "outcome": outcome, "touched": True,
        "cases": 8, "decisions": 40, "decisive": 32, "answered": 8, **changes,
    })  # fmt: skip


def judged(*results: Result, device: str = "cpu", required: tuple[str, ...] = (), **declared: Any) -> Any:
    return verdict.judge(results, {"longflow": Capabilities(**declared)}, device=device, required=required)


def judgement_of(name: str, *results: Result, **options: Any) -> verdict.Judgement:
    found: verdict.Judgement = judged(*results, **options)["longflow"].properties[name]
    return found


RIGHT = [result(name) for name in PROPERTIES]
JUDGED = {dtype: JudgedCase(dtype, "contiguous", 2, 40, 4) for dtype in ("float32", "float16", "bfloat16")}


def test_all_is_right():
    found = judged(*RIGHT)
    assert {one.verdict for one in found["longflow"].properties.values()} == {verdict.RIGHT}
    assert found["longflow"].verdict == verdict.RIGHT and verdict.exit_status(found) == 0


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_wrong_property_makes_a_wrong_method(name):
    others = [one for one in RIGHT if one.judges != name]
    found = judged(*others, result(name, "failed", message="3 is not 4"))
    assert found["longflow"].properties[name].verdict == verdict.WRONG
    assert found["longflow"].verdict == verdict.WRONG and verdict.exit_status(found) == verdict.EXIT_WRONG


def test_the_traces_row_counts_decisions_that_differ():
    found = judged(*RIGHT[:-2], result("traces", adjudicated=3), result("traces", adjudicated=2))
    assert found["longflow"].properties["traces"].adjudicated == 5
    assert any("none wrong, 5 different but legal" in text for text, _ in verdict_table.lines(found["longflow"], "x"))


@pytest.mark.parametrize("name", PROPERTIES)
def test_only_core_properties_must_be_covered(name):
    found = judged(*(one for one in RIGHT if one.judges != name))
    assert found["longflow"].properties[name].verdict == verdict.NOT_COVERED
    assert found["longflow"].verdict == (verdict.NOT_COVERED if name in CORE else verdict.RIGHT)
    assert verdict.exit_status(found) == (verdict.EXIT_NOT_COVERED if name in CORE else 0)


def test_a_test_that_did_not_call_the_implementation_does_not_count():
    found = judged(*(result(name, touched=False) for name in PROPERTIES))
    assert found == {} and verdict.exit_status(found) == verdict.EXIT_NOT_COVERED
    assert judged(result("ties", touched=False), required=("longflow",))["longflow"].verdict == verdict.NOT_COVERED


def test_what_fails_before_it_calls_the_implementation_is_not_wrong():
    """A fixture that raises, or a module of theirs that cannot be imported."""
    failed = result("accuracy", "error", touched=False, cases=None, message="ImportError: no kernels here")
    found = judged(*RIGHT, failed)["longflow"]
    assert found.verdict == verdict.RIGHT and found.properties["accuracy"].cases == 8
    found = judged(*(one for one in RIGHT if one.judges != "accuracy"), failed)["longflow"]
    assert found.properties["accuracy"].verdict == verdict.NOT_COVERED
    assert found.properties["accuracy"].why == (
        "no test called it (a test failed before: ImportError: no kernels here)"
    )
    own = verdict.judge([failed], {"longflow": Capabilities()}, device="cpu", own=True)["longflow"]
    assert own.properties["accuracy"].verdict == verdict.WRONG, "every test calls kvtwin's own"


def test_a_test_that_judged_no_case_does_not_count():
    """A test that does not count its cases judges one."""
    for cases, counted in ((0, 0), (None, 4), (2, 8)):
        found = judgement_of("accuracy", *(result("accuracy", cases=cases) for _ in range(4)))
        assert found.cases == counted
        assert found.verdict == (verdict.RIGHT if counted else verdict.NOT_COVERED)
    assert result("accuracy", cases=None).as_dict()["cases"] == 0


@pytest.mark.parametrize("order", [1, -1])
def test_the_finding_that_can_be_replayed_comes_first(order):
    """Then those with a case, the shortest first."""
    findings = [
        {"case": "DecodeCase(slots=2)", "replay": "kvtwin replay a"}, {"case": "DecodeCase(slots=30)", "replay": "b"},
        {"replay": "python -m pytest"}, {"case": "DecodeCase()", "replay": None}, {},
    ]
    failed = [result("ties", "failed", finding={"property": "ties", **one}) for one in findings]
    shown = judgement_of("ties", *RIGHT, *failed[::order]).findings
    assert [(one.get("case"), one.get("replay")) for one in shown] == [
        (one.get("case"), one.get("replay")) for one in findings
    ]


@pytest.mark.parametrize(("name", "changes", "why"), [
    ("accuracy", {"cases": 3}, "3 of at least 4 cases"),
    ("decisions", {"decisive": 15}, "15 of at least 16 decisive decisions"),
    ("ties", {"decisive": 7}, "7 of at least 8 decisive decisions"),
    ("traces", {"touched": False, "outcome": "not provided", "message": "not provided: theirs.longflow"},
     "no test called it (not provided: theirs.longflow)"),
])  # fmt: skip
def test_too_little_is_not_covered(name, changes, why):
    found = judgement_of(name, result(name, **changes), result(None))
    assert (found.verdict, found.why) == (verdict.NOT_COVERED, why)


@pytest.mark.parametrize(("name", "declared"), [
    ("ties", {"ties": "any"}), ("bad_input", {"validates_arguments": False}), ("free_slots", {"masks": False}),
])
def test_another_convention_is_not_judged(name, declared):
    others = [one for one in RIGHT if one.judges != name]
    found = judged(*others, **declared)["longflow"]
    assert found.properties[name].verdict == verdict.CONVENTION and "declares" in found.properties[name].why
    assert found.verdict == verdict.RIGHT


def test_what_the_interpreter_cannot_run_is_not_wrong():
    limit = result("accuracy", "environment", cases=0, message="Triton's interpreter: Unsupported data type")
    found = judgement_of("accuracy", limit, result("ties"))
    assert found.verdict == verdict.ENVIRONMENT and "Unsupported data type" in found.why
    assert judgement_of("accuracy", *RIGHT, devices=("cuda",)).verdict == verdict.ENVIRONMENT
    assert judgement_of("accuracy", *RIGHT, devices=("cuda",), device="cuda").verdict == verdict.RIGHT


def test_a_failure_belongs_to_the_property_that_causes_it():
    """A test of strided tensors fails because of the free slots in them: `attribution` says so."""
    failed = result("layouts", "failed", finding={"property": "free_slots", "case": "DecodeCase()"})
    found = judged(*RIGHT, failed)["longflow"].properties
    assert found["free_slots"].verdict == verdict.WRONG and found["layouts"].verdict == verdict.RIGHT
    assert found["layouts"].cases == 8, "the failed test judged nothing of its own property"
    found = judged(*(one for one in RIGHT if one.judges != "layouts"), failed)["longflow"].properties["layouts"]
    assert (found.verdict, found.why) == (verdict.NOT_COVERED, "0 cases: its tests failed because of free slots")


def test_consequences_are_listed_under_their_cause():
    wrong = ("repeatability", "accuracy", "decisions", "bad_input")
    found = judged(*RIGHT, *(result(name, "failed") for name in wrong))["longflow"]
    assert [(name, consequences) for name, _, consequences in found.causes] == [
        ("repeatability", ["accuracy", "decisions"]), ("bad_input", []),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "choice", "follows"), [
    ("layouts", True, "accuracy"), ("layouts", False, None), ("bad_input", None, None),
])  # fmt: skip
def test_a_wrong_choice_may_follow_from_inaccurate_scores(name, choice, follows):
    """In a case of any property."""
    finding = {"property": name} | ({} if choice is None else {"choice": choice})
    found = judged(*RIGHT, result("accuracy", "failed"), result(name, "failed", finding=finding))["longflow"]
    assert found.properties[name].follows == follows


def test_an_unusual_case_may_follow_from_what_is_wrong_in_ordinary_ones():
    unusual = result("independence", "failed", finding={"property": "independence", "unusual": True})
    for cause in ("accuracy", "free_slots", "layouts"):
        found = judged(*RIGHT, result(cause, "failed", finding={"property": cause}), unusual)["longflow"]
        assert [(name, also) for name, _, also in found.causes] == [(cause, ["independence"])]
    assert judged(*RIGHT, unusual)["longflow"].properties["independence"].follows is None
    other = result("independence", "failed", finding={"property": "independence"})
    assert judgement_of("independence", *RIGHT, result("accuracy", "failed"), unusual, other).follows is None


def raising(name: str, says: str = "RuntimeError: 5 is odd\n  raised in theirs.py, line 7", **finding: Any) -> Result:
    return result(name, "failed", finding={"property": name, "message": says, "case": "Case()", **finding})


#: Of a finding whose property simpler cases have shown.
SOUGHT = {"field": "output", "choice": False}


@pytest.mark.parametrize(("wrong", "causes"), [
    # One error: it is about what simpler cases have shown, else about the plainest case.
    ([raising("accuracy", choice=False), raising("layouts", **SOUGHT), raising("independence")],
     [("layouts", ["accuracy", "independence"])]),
    ([raising("extreme_numbers", **SOUGHT), raising("decisions", **SOUGHT)],
     [("decisions", ["extreme_numbers"])]),
    ([raising("independence", case="Case(content='given')"), raising("layouts")], [("layouts", ["independence"])]),
    ([raising("layouts"), raising("independence", "RuntimeError: 12 is odd\n  raised in theirs.py, line 7",
             case="Case(slots=12)")],
     [("layouts", ["independence"])]),
    # Two errors, or two places of one.
    ([raising("layouts"), raising("independence", "ValueError: 5 is odd\n  raised in theirs.py, line 7")],
     [("layouts", []), ("independence", [])]),
    ([raising("layouts"), raising("independence", "RuntimeError: 5 is odd\n  raised in theirs.py, line 8")],
     [("layouts", []), ("independence", [])]),
    # Not only the error.
    ([raising("layouts"), raising("independence"), raising("independence", "output: expected 1, got 2")],
     [("layouts", []), ("independence", [])]),
    ([raising("layouts", "output: expected 1, got 2"), raising("independence", "output: expected 1, got 2")],
     [("layouts", []), ("independence", [])]),
])  # fmt: skip
def test_an_error_that_is_raised_in_cases_of_several_properties_is_one_cause(wrong, causes):
    found = judged(*RIGHT, *wrong)["longflow"]
    assert sorted((name, sorted(also)) for name, _, also in found.causes) == sorted(causes)


def test_wrong_decisions_are_counted():
    finding = {"property": "decisions", "choice": True, "wrong": 3}
    failed = [result("decisions", "failed", finding=finding), result("decisions", "failed", finding=finding)]
    found = judged(*RIGHT, *failed)["longflow"]
    assert found.properties["decisions"].wrong == 6
    assert any("6 wrong, 96 of 120" in text for text, _ in verdict_table.lines(found, "theirs"))


@pytest.mark.parametrize(("name", "lacks"), [
    ("accuracy", "returns numbers"),     # StreamingLLM's `keep` returns a mask
    ("free_slots", "has free slots"),    # KIVI's `quantize` has none
])
def test_a_core_property_is_not_needed_where_only_the_missing_state_has_it(name, lacks):
    others = [one for one in RIGHT if one.judges != name]
    lacking = result(name, "not provided", touched=False, message="not provided: theirs.StreamingLLMState")
    found = judged(*others, lacking)["longflow"]
    assert found.properties[name].verdict == verdict.NOT_COVERED
    assert found.properties[name].why == f"nothing that it provides {lacks}"
    assert found.verdict == verdict.RIGHT
    refuses = result(name, "not provided", touched=False, message="not provided: theirs.attend: head_dim 64")
    found = judged(*others, lacking, refuses)["longflow"]
    assert found.verdict == verdict.NOT_COVERED and found.open == [name.replace("_", " ")]
    lacking.judges = "decisions"
    found = judged(*(one for one in RIGHT if one.judges != "decisions"), lacking)["longflow"]
    assert found.verdict == verdict.NOT_COVERED


def test_the_largest_error_is_shown_if_it_is_wrong_too():
    failed = result("accuracy", "failed", finding={"property": "accuracy", "of_bound": 12.5, "dtype": "float16"})
    found = judged(*RIGHT, result("accuracy", worst={"float16": 0.25, "float32": 0.5}), failed)["longflow"]
    assert found.properties["accuracy"].worst == {"float16": 12.5, "float32": 0.5}
    assert any("12.5 times (float16)" in text for text, _ in verdict_table.lines(found, "theirs"))


def test_expected_failures_do_not_change_the_exit_code():
    found = judged(*RIGHT, result("ties", "xfailed"))
    assert found["longflow"].properties["ties"].verdict == verdict.WRONG and verdict.exit_status(found) == 0
    found = judged(*RIGHT, result("ties", "xfailed"), result("layouts", "failed"))
    assert verdict.exit_status(found) == verdict.EXIT_WRONG


def test_a_failed_test_without_a_property_makes_a_wrong_method():
    found = judged(*RIGHT, result(None, "failed"))
    assert found["longflow"].verdict == verdict.WRONG and verdict.exit_status(found) == verdict.EXIT_WRONG


def test_refused_calls_are_counted_and_declared_limits_are_not():
    refused = {"theirs.decode: sinks": 3, "not declared: masks": 7, "theirs.decode: scale (declared)": 2}
    found = judged(*RIGHT, result("ties", refused=refused), head_dims=(64, 128))["longflow"]
    assert dict(found.refused) == {"theirs.decode: sinks": 3}
    text = [line for line, _ in verdict_table.lines(found, "theirs")]
    assert "  calls: 96 answered, 3 refused: 3 x theirs.decode: sinks" in text
    assert any("head_dims = 64, 128" in line for line in text)


def test_the_smallest_case_is_shown_with_its_command():
    found = judged(*RIGHT, *(
        result("ties", "failed", finding={"property": "ties", "message": f"wrong in {case}", "case": case,
                                          "replay": f"kvtwin replay {case}.safetensors --impl theirs"})
        for case in ("DecodeCase(batch=3, slots=40)", "DecodeCase(slots=2)")
    ))["longflow"]  # fmt: skip
    text = "\n".join(line for line, _ in verdict_table.lines(found, "theirs"))
    assert "ties: wrong in DecodeCase(slots=2), in 2 tests" in text
    assert "replay: kvtwin replay DecodeCase(slots=2).safetensors --impl theirs" in text
    assert "batch=3" not in text


def test_the_table_has_at_most_31_lines():
    message, case = "x" * 500, "DecodeCase(" + "y" * 300 + ")"
    refused = {f"theirs: {number}": 2 for number in range(9)}
    wrong = [
        result(name, "failed", message=message, missing={"score": 3}, refused=refused, judged=JUDGED,
               finding={"property": name, "case": case, "replay": "kvtwin replay " + "z" * 200})
        for name in PROPERTIES
    ]  # fmt: skip
    missing = [
        result(None, "not provided", touched=False, message=f"not provided: theirs.{number}") for number in range(40)
    ]
    found = judged(*wrong, *missing, result(None, "failed"), head_dims=(64,), ties="any")["longflow"]
    lines = list(verdict_table.lines(found, "theirs"))
    assert len(lines) <= 31
    shown = "  cases: float32 11, float16 11, bfloat16 11; up to 40 slots; 66 rows; 1 layout"
    assert shown in [text for text, _ in lines]
    names = ["theirs.39" in "\n".join(text for text, _ in verdict_table.lines(found, "theirs", verbose=verbose))
             for verbose in (False, True)]
    assert names == [False, True]


@pytest.mark.parametrize(("text", "foreign"), [
    ("Inconsistent data generation! Data generation behaved differently", True), ("UnsatisfiedAssumption", True),
    ("assert 3 == 4\n +  where 3 = len([])", True), ("worker 'gw1' crashed", True), ("DID NOT RAISE ValueError", True),
    ("slot: row (0,) picks slot 2, which is protected", False), ("expected ValueError, and nothing was raised", False),
])  # fmt: skip
def test_texts_of_other_tools_are_seen(text, foreign):
    failed = result("accuracy", "failed", finding={"property": "accuracy", "message": text})
    assert bool(run.foreign_texts(judged(failed)["longflow"])) == foreign
