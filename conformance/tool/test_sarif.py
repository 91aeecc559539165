"""The verdict as SARIF: it follows OASIS's schema (beside this file, as published), and points at what is wrong."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import triton

from kvtwin.conformance.harness import sarif
from kvtwin.conformance.judge.properties import ALL
from kvtwin.conformance.lab.docs_source import DOCS
from kvtwin.conformance.lab.report_sample import HOSTILE, LONG, WRONG, failed, other, passed, verdicts
from kvtwin.conformance.tool.test_plugin_impl import JUDGED, SPOILED, make_their_kernels, run

pytest_plugins = ["pytester"]

SCHEMA = json.loads((Path(__file__).parent / "sarif-schema-2.1.0.json").read_text(encoding="utf-8"))
LINE = "def decode_attention("
MARKS = """
import pytest
pytestmark = [pytest.mark.property("accuracy"), pytest.mark.parametrize("subject", ["longflow.decode_attention[x]"])]
"""


def check(log: Any) -> list[dict[str, Any]]:
    """Validate a log against the schema. Returns its results."""
    jsonschema.Draft4Validator(SCHEMA, format_checker=jsonschema.Draft4Validator.FORMAT_CHECKER).validate(log)
    (run,) = log["runs"]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    results: list[dict[str, Any]] = run["results"]
    return results


def results_of(found: Any, **named: Any) -> list[dict[str, Any]]:
    made = sarif.build_sarif(verdicts(found), modules=lambda method: (), folder=Path.cwd(), exit_status=1, **named)
    return check(json.loads(json.dumps(made, allow_nan=False)))


@pytest.mark.parametrize(("found", "rules"), [
    ([], set()),
    (passed(440), set()),
    (passed(4), {"not_covered"}),
    ([*passed(44), *failed("x"), *other("x")], {*WRONG, "traces", "other_tests", "not_covered"}),
    (failed(LONG), {*WRONG}),
    (failed(HOSTILE), {*WRONG}),
], ids=["no tests", "right", "not covered", "all outcomes", "long", "hostile"])  # fmt: skip
def test_logs_follow_the_schema_and_have_what_is_wrong(found, rules):
    assert {one["ruleId"] for one in results_of(found)} == rules


def test_the_schema_rejects_other_logs():
    made = sarif.build_sarif(verdicts(failed("x")), modules=lambda method: (), folder=Path.cwd(), exit_status=1)
    made["runs"][0]["results"][0]["level"] = "wrong"
    with pytest.raises(jsonschema.ValidationError, match="'wrong' is not one of"):
        check(made)


def test_consequences_are_warnings_and_what_is_expected_is_suppressed():
    found = {one["ruleId"]: one for one in results_of(failed("output"))}
    assert {name: one["level"] for name, one in found.items()} == {
        "accuracy": "error", "decisions": "warning", "extreme_numbers": "error",
    }
    assert "It may follow from accuracy." in found["decisions"]["message"]["text"]
    assert found["accuracy"]["properties"]["replay"] in found["accuracy"]["message"]["text"]
    expected = [one for result in failed("output") for one in [result] if setattr(one, "outcome", "xfailed") is None]
    assert all(one["suppressions"] for one in results_of(expected))


def test_each_property_is_a_rule_and_links_to_its_page():
    (run,) = sarif.build_sarif({}, modules=lambda method: (), folder=Path.cwd(), exit_status=0)["runs"]
    rules = {one["id"]: one for one in run["tool"]["driver"]["rules"]}
    assert set(rules) >= set(ALL)
    for rule in rules.values():
        assert rule["help"]["text"].startswith("kvtwin's documentation: docs/")
        if DOCS.is_dir():
            assert rule["helpUri"].startswith((DOCS.parent / "docs").as_uri())


def plain(function: Any) -> Any:
    def inner(*given: Any) -> Any:
        return function(*given)

    return functools.wraps(function)(inner)


def test_a_place_is_that_of_the_innermost_function():
    def here() -> None: ...

    line = here.__code__.co_firstlineno
    shapes = [here, plain(plain(here)), functools.partial(here), triton.jit(here), SimpleNamespace(_init_fn=here)]
    assert {sarif.place_of(one) for one in shapes} == {(Path(__file__).resolve(), line)}
    assert sarif.place_of(triton) == (Path(triton.__file__).resolve(), 1)
    assert [sarif.place_of(one) for one in (len, None, object(), SimpleNamespace(fn=3))] == [None] * 4


def test_a_log_points_at_the_line_of_their_function(pytester):
    spoil, _ = SPOILED["score"]
    judged = JUDGED.replace("(twins, case)", "(twins, subject, case)")
    pytester.makepyfile(test_longflow=f"{MARKS}{judged}")
    make_their_kernels(pytester, spoil)
    pytester.syspathinsert()
    ran = run(pytester, "--kv-impl=their_kernels", "--kv-sarif=out.sarif")
    ran.stdout.fnmatch_lines(["kvtwin report: *out.sarif"])
    found, *_ = check(json.loads((pytester.path / "out.sarif").read_text()))
    assert found["ruleId"] == "accuracy"
    (place,) = (one["physicalLocation"] for one in found["locations"])
    assert place["artifactLocation"] == {"uri": "their_kernels/longflow.py", "uriBaseId": "%SRCROOT%"}
    lines = (pytester.path / "their_kernels" / "longflow.py").read_text().splitlines()
    assert lines[place["region"]["startLine"] - 1].startswith(LINE)
