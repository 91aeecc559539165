"""The terminal summary, the report, and the method and kind of each test."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import settings

from kvtwin.conformance import ledger
from kvtwin.conformance.harness import results, summary
from kvtwin.conformance.tool.test_report import Page, check

pytest_plugins = ["pytester"]

# One test of every outcome. Their claim ids are in the ledger, but they do not test these claims.
EVERY_OUTCOME = """
import pytest
from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance import stats
from kvtwin.conformance.refusals import NotProvided

pytestmark = pytest.mark.method("longflow")

@pytest.mark.kind("equivalence")
def test_passes(twins):
    stats.decisions(30, 30)
    stats.decisions(10, 9)
    stats.utilisation(0.0625)
    stats.utilisation(0.03125)
    stats.adjudicate(2)
    for _ in range(2):
        stats.judged_case(DecodeCase(slots=9, batch=2), "decode_attention")
    stats.elements(12)
    stats.launches()

@pytest.mark.kind("equivalence")
def test_fails(twins):
    stats.utilisation(float("inf"))
    assert "<b>" == "a & b"

@pytest.mark.kind("laws")
def test_not_provided(twins):
    raise NotProvided("theirs.longflow.decode_attention")

@pytest.mark.kind("golden")
def test_skips(twins):
    pytest.skip("for a reason")

@pytest.mark.kind("golden")
@pytest.mark.xfail(reason="known")
def test_xfails(twins):
    assert False

@pytest.mark.claim("LF-3")
def test_claim(twins):
    pass

@pytest.fixture
def broken():
    raise RuntimeError("broken")

@pytest.mark.kind("bad_input")
def test_error(broken):
    pass

@pytest.mark.method("snapkv")
@pytest.mark.kind("laws")
def test_other_method(twins):
    pass
"""


@pytest.fixture
def run(pytester: pytest.Pytester):
    def run(text: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(text)
        profile = ("--hypothesis-profile", settings.get_current_profile_name())
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "--kv-device", "auto", *profile, *arguments)

    return run


def test_summary_has_a_row_per_method_and_a_column_per_kind(run):
    result = run(EVERY_OUTCOME, "-rs")
    outcomes = {"failed": 1, "passed": 3, "skipped": 1, "xfailed": 1, "not": 1, "errors": 1}
    assert result.parseoutcomes() | outcomes == result.parseoutcomes()
    result.stdout.fnmatch_lines(
        [
            "*= kvtwin: kvtwin.optimized against float64 =*",
            "method * equivalence * laws * claims * golden * bad input * decisive * of bound * ties",
            "longflow  1, 1 failed  0, 1 n/p  1 * 0, 1 skipped, 1 xfailed  0, 1 error  97.5 % * inf % * 2",
            "snapkv    -            1         - * - * - * - * - * -",
            "n/p = not provided: theirs.longflow.decode_attention (1 test)",
        ]
    )


def test_a_run_without_tests_of_a_method_has_no_summary(run):
    run("def test_it(twins): pass").stdout.no_fnmatch_line("*against float64*")


def test_json_report(run, pytester):
    result = run(EVERY_OUTCOME, "--kv-report", "out.json")
    report = json.loads(pytester.path.joinpath("out.json").read_text())
    result.stdout.fnmatch_lines(["kvtwin report: *out.json"])
    assert not pytester.path.joinpath("out.html").exists()
    assert set(report) == {
        "schema_version", "created", "arguments", "seed", "exit_status", "environment", "implementation", "totals",
        "methods", "claims", "tests", "overall", "verdicts", "coverage",
    }  # fmt: skip
    check(report)
    assert report["schema_version"] == 2  # a change of this number breaks readers: say so in docs/reference/report.md
    assert report["exit_status"] == 1
    assert report["implementation"] == "kvtwin.optimized"
    assert set(report["environment"]) == {"device", "backend", "interpreter", "platform", "versions"}
    assert set(report["environment"]["versions"]) >= {"kvtwin", "python", "torch", "triton", "hypothesis"}
    assert report["totals"] == {
        "passed": 3, "failed": 1, "error": 1, "not_provided": 1, "environment": 0, "skipped": 1, "xfailed": 1,
    }  # fmt: skip
    assert set(report["verdicts"]) == {"longflow", "snapkv"}
    assert report["overall"]["longflow"]["verdict"] == "wrong"
    assert set(report["methods"]) == {"longflow", "snapkv"}
    assert set(report["methods"]["longflow"]) == {*results.KINDS, "all"}
    assert report["methods"]["longflow"]["all"]["decisive_share"] == 39 / 40


def test_json_report_of_each_test(run, pytester):
    run(EVERY_OUTCOME, "--kv-report", "out.json")
    tests = json.loads(pytester.path.joinpath("out.json").read_text())["tests"]
    by_name = {test["nodeid"].split("::")[1]: test for test in tests}
    passed = by_name["test_passes"]
    assert passed.pop("duration") >= 0
    assert passed.pop("nodeid").endswith(".py::test_passes")
    assert passed == {
        "method": "longflow", "kind": "equivalence", "claims": [], "outcome": "passed", "decisions": 40, "decisive": 39,
        "utilisation": 0.0625, "adjudicated": 2, "touched": False, "answered": 0, "refused": {}, "missing": {},
        "notes": {},
        "judges": None, "subject": None, "judged_field": None, "cases": 1, "worst": {}, "shapes": {}, "drift": {},
        "wrong": 0, "finding": {}, "message": "", "elements": 12, "launches": 1, "dtypes": {"float32": 1},
        "layouts": {"contiguous": 1}, "rows": 2, "slots": 9, "lacking": {},
    }  # fmt: skip
    outcomes = {name: test["outcome"] for name, test in by_name.items()}
    assert outcomes == {
        "test_passes": "passed", "test_fails": "failed", "test_not_provided": "not provided", "test_skips": "skipped",
        "test_xfails": "xfailed", "test_claim": "passed", "test_error": "error", "test_other_method": "passed",
    }  # fmt: skip
    assert by_name["test_claim"]["claims"] == ["LF-3"]
    assert by_name["test_claim"]["kind"] == "claims"
    assert by_name["test_fails"]["utilisation"] is None  # JSON has no infinity
    assert "a & b" in by_name["test_fails"]["message"]
    assert by_name["test_error"]["message"].endswith("broken")
    assert by_name["test_not_provided"]["message"] == "not provided: theirs.longflow.decode_attention"


@pytest.mark.slow
def test_results_come_from_other_processes(pytester):
    """pytest-xdist runs tests in separate processes, which can send only plain values."""
    pytest.importorskip("xdist", reason="needs pytest-xdist")
    pytester.makepyfile(EVERY_OUTCOME)
    arguments = ("-n", "1", "-p", "no:cacheprovider", "-p", "no:benchmark", "--kv-device=cpu", "--kv-report=out.json")
    result = pytester.runpytest_subprocess(*arguments, "-k", "passes or provided or fails")
    result.stdout.fnmatch_lines(["longflow  1, 1 failed  0, 1 n/p * 97.5 % * inf % * 2", "*1 not provided in *"])
    report = json.loads(pytester.path.joinpath("out.json").read_text())
    assert (report["totals"]["passed"], report["totals"]["failed"], report["totals"]["not_provided"]) == (1, 1, 1)
    assert report["tests"][0]["decisions"] == 40 and report["tests"][0]["dtypes"] == {"float32": 1}


def test_html_report_has_json_beside_it(run, pytester):
    run(EVERY_OUTCOME, "--kv-report", "out.html").stdout.fnmatch_lines(["kvtwin report: *out.html, *out.json"])
    check(json.loads(pytester.path.joinpath("out.json").read_text()))
    page = Page(pytester.path.joinpath("out.html").read_text())
    assert "b" not in {tag for tag, _ in page.tags}, "messages must be escaped"
    for text in ("3 passed", "test_fails", "a & b", "97.5 %", "not provided", "kvtwin.optimized"):
        assert text in page.text


JUDGED = """
import pytest

@pytest.mark.method("longflow")
@pytest.mark.property("ties")
def test_ties(twins): pass

@pytest.mark.method("longflow")
@pytest.mark.kind("golden")
def test_traces(twins): assert False

@pytest.mark.method("longflow")
def test_nothing(twins): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("-n1", "-p", "no:benchmark")], ids=["here", "xdist"])
def test_junit_has_the_property_of_each_test(pytester, arguments):
    if arguments:
        pytest.importorskip("xdist", reason="needs pytest-xdist")
    pytester.makepyfile(JUDGED)
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "--kv-device=cpu", "--junitxml=out.xml", *arguments)
    found = {
        test.get("name"): [(one.get("name"), one.get("value")) for one in test.iter("property")]
        for test in ElementTree.parse(pytester.path / "out.xml").iter("testcase")
    }
    assert found == {
        "test_ties": [("kvtwin_property", "ties")], "test_traces": [("kvtwin_property", "traces")], "test_nothing": [],
    }  # fmt: skip


@pytest.mark.parametrize(("path", "complaint"), [
    ("out.txt", "that ends in .html or .json"), ("no/out.json", "does not exist"),
])
def test_a_report_that_cannot_be_written_stops_the_run_at_its_start(run, path, complaint):
    result = run("def test_it(): pass", "--kv-report", path)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--kv-report *{path}: *{complaint}*"])


# --- method and kind ---


PARAMETRIZED = """
import pytest
from kvtwin.conformance import discovery
@pytest.mark.parametrize("method", [one for one in discovery.methods() if one.name == "longflow"], ids=str)
def test_it(method): pass
"""
MARKED = "import pytest\n@pytest.mark.kind({!r})\ndef test_it(): pass"
#: The name and the text of a file with one test, its method, and its kind.
FILES = [
    ("test_longflow", "def test_it(): pass", "longflow", "equivalence"),
    ("test_longflow_state", "def test_it(): pass", "longflow", "equivalence"),
    ("test_longflow_input", MARKED.format("bad_input"), "longflow", "bad_input"),
    ("test_longflow_golden", MARKED.format("golden"), "longflow", "golden"),
    ("test_longflow_claims_more", "def test_it(): pass", "longflow", "equivalence"),
    ("test_longflow", MARKED.format("laws"), "longflow", "laws"),
    ("test_longflow", "import pytest\n@pytest.mark.claim('LF-3')\ndef test_it(): pass", "longflow", "claims"),
    ("test_laws", PARAMETRIZED, "longflow", "equivalence"),
    ("test_twins", PARAMETRIZED.replace("method", "pair").replace("pairs", "methods"), "longflow", "equivalence"),
    ("test_any", "import pytest\n@pytest.mark.method('longflow')\ndef test_it(): pass", "longflow", "equivalence"),
    ("test_longflowers", "def test_it(): pass", None, None),
    ("test_plugin", "def test_it(): pass", None, None),
]


def test_method_and_kind(pytester):
    paths = []
    for number, (file, text, _, _) in enumerate(FILES):
        paths.append(pytester.mkdir(str(number)) / f"{file}.py")
        paths[-1].write_text(text, encoding="utf-8")
    profile = ("--hypothesis-profile", settings.get_current_profile_name())
    items, _ = pytester.inline_genitems("--import-mode=importlib", "--kv-device", "auto", *profile, *paths)
    for item, (_, text, expected, kind) in zip(items, FILES, strict=True):
        assert results.classify(item) == {
            "method": expected,
            "kind": kind,
            "claims": ["LF-3"] if "claim('LF-3')" in text else [],
            "judges": {"bad_input": "bad_input", "golden": "traces"}.get(kind),
            "subject": None,
            "judged_field": None,
        }, item.nodeid


def test_the_property_and_the_field_of_a_test_come_from_its_marker_and_parameter(pytester):
    path = pytester.makepyfile(test_longflow="""
import pytest
@pytest.mark.property("accuracy")
@pytest.mark.parametrize("field", ["output"])
def test_it(field): pass
""")
    profile = ("--hypothesis-profile", settings.get_current_profile_name())
    config = pytester.parseconfigure(path, "--kv-device", "auto", *profile)
    (item,) = pytester.genitems([pytester.getnode(config, path)])
    found = results.classify(item)
    assert (found["judges"], found["judged_field"]) == ("accuracy", "output")


def test_an_unknown_kind_is_a_usage_error(run):
    result = run(MARKED.format("law"))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*mark.kind('law'): the kinds are equivalence, laws, claims, golden, bad_input"])


def test_a_claim_with_a_skipped_variant_is_checked_and_one_with_a_failed_variant_failed():
    def outcome_of(*outcomes: str) -> str:
        found = [results.Result(str(number), claims=("LF-3",), outcome=one) for number, one in enumerate(outcomes)]
        return summary.claim_outcomes(found)["LF-3"]

    assert outcome_of("passed", "skipped") == outcome_of("skipped", "passed") == "passed"
    assert outcome_of("passed", "failed", "passed") == outcome_of("error", "passed") == "failed"
    assert outcome_of("skipped") == "skipped"


def test_the_summary_counts_our_statements_and_misprints_apart(monkeypatch):
    def claim(name: str, verdict: str) -> ledger.Claim:
        return ledger.Claim(name, "longflow", "eq. 1", (), "", "", "", verdict, "", "", "", ())

    claims = (claim("LF-1", "holds"), claim("LF-2", "false"), claim("LF-3", "ours"), claim("LF-4", "ours"))
    claims += (claim("LF-5", "misprint"),)
    monkeypatch.setattr(ledger, "load", lambda: claims)
    found = [results.Result(name, claims=(name,), outcome="passed") for name in ("LF-1", "LF-3", "LF-4", "LF-5")]
    assert summary.claim_lines(found) == [
        "claims of longflow: 1 of 2 checked: 1 hold; 1 misprint; 2 statements of ours hold",
    ]
