"""The report: its JSON Schema, its verdicts, and the page, for runs that did not take place."""

from __future__ import annotations

import html.parser
import json
import math
import re
import sys
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from kvtwin.conformance import ledger
from kvtwin.conformance.harness import page as pages
from kvtwin.conformance.harness import report as reports
from kvtwin.conformance.harness import results, verdict
from kvtwin.conformance.harness.page import page, plots
from kvtwin.conformance.judge.mismatch import UNBOUNDED
from kvtwin.conformance.judge.properties import ALL, EXPECTED, PAGES, PROPERTIES
from kvtwin.conformance.lab.docs_source import DOCS
from kvtwin.conformance.lab.report_sample import HOSTILE, LONG, failed, other, passed, sample
from kvtwin.fixtures import plotting

Validator = jsonschema.Draft202012Validator
needs_plots = pytest.mark.skipif(not plotting.available(), reason="needs the extra plots")


def strict(schema: Any) -> Any:
    """The schema, for which every key that it does not name is an error."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(one) for key, one in schema.items()}
    return made | {"additionalProperties": False} if isinstance(made.get("properties"), dict) else made


def check(report: Any) -> None:
    Validator(strict(reports.schema()), format_checker=Validator.FORMAT_CHECKER).validate(report)


class Page(html.parser.HTMLParser):
    """Collects the text of a page, its tags and attributes; checks that elements nest and nothing is loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        assert tag not in ("script", "img", "link", "iframe", "object")
        assert not {name for name, _ in attributes if name in ("src", "href", "style") or name.startswith("on")}
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


# --- JSON ---


def test_the_schema_is_valid_and_has_the_version():
    Validator.check_schema(reports.schema())
    assert reports.schema()["properties"]["schema_version"]["const"] == reports.SCHEMA_VERSION


@pytest.mark.parametrize("implementation", ["json", None], ids=["theirs", "ours"])
@pytest.mark.parametrize("found", [
    [], passed(44), [*passed(44), *failed("x"), *other("x")],
], ids=["no tests", "right", "all outcomes"])  # fmt: skip
def test_reports_follow_the_schema(found, implementation):
    report = sample(found, implementation=implementation)
    check(json.loads(json.dumps(report, allow_nan=False)))
    assert set(report["verdicts"]) == set(report["overall"]) == set(report["coverage"])


@pytest.mark.parametrize("change", [
    lambda report: report.pop("verdicts"),
    lambda report: report["verdicts"]["longflow"].pop("accuracy"),
    lambda report: report["verdicts"]["longflow"]["accuracy"].update(verdict="maybe"),
    lambda report: report["coverage"]["longflow"].update(calls=-1),
    lambda report: report["tests"][0].update(outcome="unknown"),
    lambda report: report.update(schema_version=1),
])  # fmt: skip
def test_the_schema_rejects_other_reports(change):
    report = sample(passed(44))
    check(report)
    change(report)
    with pytest.raises(jsonschema.ValidationError):
        Validator(reports.schema()).validate(report)


def test_the_schema_has_the_names_of_the_suite():
    schema = reports.schema()
    found = schema["$defs"]
    assert found["property"]["enum"] == list(ALL)
    assert list(schema["properties"]["verdicts"]["additionalProperties"]["properties"]) == list(PROPERTIES)
    assert found["outcome"]["enum"] == list(results.OUTCOMES)
    assert found["claim"]["properties"]["outcome"]["enum"] == [*results.OUTCOMES, "not run"]
    assert found["claim"]["properties"]["verdict"]["enum"] == list(ledger.VERDICTS)
    assert found["test"]["properties"]["kind"]["enum"] == [*results.KINDS, None]
    assert list(schema["properties"]["methods"]["additionalProperties"]["properties"]) == [*results.KINDS, "all"]
    assert set(found["verdict"]["enum"]) == {
        verdict.RIGHT, verdict.WRONG, verdict.NOT_COVERED, verdict.CONVENTION, verdict.ENVIRONMENT,
    }  # fmt: skip


def test_the_documentation_has_every_key_of_the_schema():
    path = DOCS / "reference" / "report.md"
    if not path.is_file():
        pytest.skip("docs/ is not in the wheel: the page that describes the report is tested here")
    described = set(re.findall(r"`([^`\n]+)`", path.read_text(encoding="utf-8")))
    schema = reports.schema()
    keys = set(schema["properties"]) | {
        key for one in schema["$defs"].values() for key in one.get("properties", {})
    }
    assert keys - described == set()
    assert set(schema["$defs"]["verdict"]["enum"]) - described == set()


def test_a_wrong_property_has_its_smallest_case_and_its_consequences():
    report = sample([*passed(440), *failed("the_output_of_the_longest", 2), *failed("output")])
    found = report["verdicts"]["longflow"]
    assert report["overall"]["longflow"] == {
        "verdict": "wrong", "expected": False, "failed_others": 0,
        "causes": [{"property": "accuracy", "consequences": ["decisions"]},
                   {"property": "extreme_numbers", "consequences": []}],
    }  # fmt: skip
    accuracy = found["accuracy"]
    assert (accuracy["verdict"], accuracy["findings"], accuracy["follows"]) == ("wrong", 3, None)
    assert accuracy["case"] == "DecodeCase('output')"
    assert accuracy["message"].startswith("output: 16 of 16 elements")
    assert accuracy["replay"] == "kvtwin replay output.safetensors --impl theirs --device cpu"
    assert accuracy["worst"]["float16"] is None  # infinite
    assert found["decisions"]["follows"] == "accuracy"
    assert (found["layouts"]["verdict"], found["layouts"]["case"]) == ("right", None)
    assert found["ties"]["verdict"] == "convention"
    assert report["overall"]["keydiff"]["verdict"] == "right"


def test_coverage_counts_calls_and_names_what_is_missing():
    report = sample([*passed(44), *failed("output"), *other("LongFlowState")])
    assert report["coverage"]["longflow"] == {
        "calls": 42, "answered": 36, "refused": {"decode_attention: output": 6},
        "missing": {"decode_attention.output": 3}, "notes": {}, "judged": ["decode_attention"],
        "not_provided": ["theirs.LongFlowState"],
        "outside": ["dtypes = float16", "shape = shape"], "conventions": ["ties = any"],
    }  # fmt: skip


# --- the page ---


def test_the_page_opens_with_the_verdict_and_then_names_the_cause():
    text = Page(page(sample([*passed(44), *failed("output"), *other("LongFlowState")]))).text
    order = (
        "4 methods", "1 ✗ wrong", "Verdict", "What is wrong", "longflow, accuracy", "DecodeCase('output')",
        "1e+08 times the bound", "kvtwin replay output.safetensors --impl theirs", "may explain", "Coverage",
        "36 answered, 6 refused", "dtypes = float16", "ties = any", "decode_attention.output", "theirs.LongFlowState",
        "Plots", "Details", "Claims of the papers: 2 checked", "LF-3a", "All 53 tests", "Environment",
    )  # fmt: skip
    after = 0
    for part in order:
        assert part in text[after:], part
        after = text.index(part, after)
    assert "LF-5a" not in text, "claims that were not run are not listed"


def test_a_cause_says_what_was_expected_and_where_to_read_about_it():
    report = sample([*passed(44), *failed("output")])
    text = Page(page(report)).text
    assert "Expected: right results for logits beyond the range of exp" in text
    assert f"about it{PAGES['accuracy']}" in text.replace("\n", "")
    assert "output: output:" not in text and "longflow.output.output: 16 of 16 elements" in text
    assert "the reference fails in such a case" not in text
    report["verdicts"]["longflow"]["accuracy"]["checker"] = True
    assert "the reference fails in such a case" in Page(page(report)).text


def test_the_pages_about_properties_exist():
    assert set(PAGES) == set(ALL) and set(EXPECTED) < set(ALL)
    if not DOCS.is_dir():
        pytest.skip("docs/ is not in the wheel")
    for place in (*PAGES.values(), pages.ABOUT):
        file, _, section = place.removeprefix("docs/").partition("#")
        heads = re.findall(r"^#+ (.*)$", (DOCS / file).read_text(encoding="utf-8"), re.MULTILINE)
        assert section in {re.sub(r"[^a-z0-9-]", "", head.lower().replace(" ", "-")) for head in heads}, place


def test_a_page_of_one_method_has_its_verdict_in_its_first_lines():
    found = [one for one in passed(440) if one.method == "tova"]
    text = Page(page(sample(found))).text
    assert "tova: ✓ right" in text[:600]
    assert "No property is wrong." in text


def test_the_page_says_what_a_verdict_rests_on():
    text = Page(page(sample([one for one in passed(440) if one.method == "tova"]))).text
    for part in ("10,000 elements", "fewer than 1 in 3,330", "190 decisive", "up to 48 slots", "float16 ", "layouts: "):
        assert part in text, part
    assert "with a probability of at least 95 %" in text and "On a CPU, sizes are the interpreter's" in text


@pytest.mark.parametrize(("implementation", "says"), [("json", "no test called it"), (None, "no method was tested")])
def test_a_page_without_verdict_says_so(implementation, says):
    text = Page(page(sample([], implementation=implementation))).text
    assert f"? not covered: {says}" in text[:600]
    assert "Plots" not in text, "a plot without data is left out"


@needs_plots
def test_a_report_without_matplotlib_says_how_to_have_plots(monkeypatch):
    report = sample([*passed(44), *failed("output")])
    with_plots = Page(page(report))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    without = Page(page(report))
    assert without.text.count(plotting.MISSING) == 1 and plotting.MISSING not in with_plots.text
    tables = [[tag for tag, _ in one.tags].count("table") for one in (with_plots, without)]
    assert tables[0] == tables[1] > 4
    assert "svg" not in {tag for tag, _ in without.tags}
    assert plotting.MISSING not in page(sample([])), "nothing would be drawn"


def test_stored_results_are_on_the_page_of_our_own_implementation_alone():
    ours, theirs = (Page(page(sample(passed(44), implementation=one))).text for one in (None, "json"))
    for title in ("Accuracy over budget, as stored", "One pair in a context", "headline experiments, as stored"):
        assert title in ours
        assert title not in theirs
    assert "tova: " in ours


def test_accuracy_is_on_the_page_if_it_was_measured():
    measured = Page(page(sample(passed(44)))).text
    assert "Accuracy of a small model" in measured
    for shown in ("75.0", "75.0 ± 12.5", "shape, reference", "shape, tested"):
        assert shown in measured
    assert "Accuracy of a small model" not in Page(page(sample(passed(44), implementation=None))).text


def test_every_verdict_has_words_and_a_sign():
    tags = Page(page(sample([*passed(44), *failed("output"), *other("x")])))
    for word in ("✓ right", "✗ wrong", "? not covered", "≈ convention", "! environment"):
        assert word in tags.text


@pytest.mark.parametrize("implementation", ["json", None], ids=["theirs", "ours"])
def test_hostile_texts_are_escaped(implementation):
    found = [*passed(44), *failed(HOSTILE), *other(HOSTILE)]
    made = Page(page(sample(found, implementation=implementation, text=HOSTILE)))  # which refuses scripts and handlers
    assert HOSTILE in made.text
    assert "b" not in {tag for tag, _ in made.tags}
    assert "\x00" not in made.text


def test_texts_that_are_not_unicode_can_be_written(tmp_path):
    report = sample([*passed(44), *other("x")])
    assert reports.write_report(report, tmp_path / "out.html") == [
        str(tmp_path / "out.html"), str(tmp_path / "out.json"),
    ]  # fmt: skip
    assert "\\ud800" in (tmp_path / "out.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == report


def every_claim() -> tuple[str, ...]:
    return tuple(claim.id for claim in ledger.load())


@pytest.mark.slow
@pytest.mark.parametrize(("found", "implementation"), [
    (lambda: [*passed(8000), results.Result("test_c.py::test_c", claims=every_claim())], None),
    (lambda: [*passed(7400), *failed(LONG, 200)], "json"),
    (lambda: [*passed(400), *failed("output", 2500)], "json"),
], ids=["right", "wrong", "all wrong"])  # fmt: skip
def test_a_page_of_8000_tests_is_below_a_megabyte(found, implementation):
    made = page(sample(found(), implementation=implementation))
    assert len(made.encode()) < 1_000_000
    Page(made)


# --- plots ---


def points(made, kind):
    """The corners of the first path of a kind."""
    (group,) = (one for one in ElementTree.fromstring(made).iter("g") if one.get("class") == kind)
    numbers = [float(one) for one in re.findall(r"-?[0-9.]+", group.find("path").get("d"))]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


@needs_plots
def test_plots_have_a_text_alternative_that_says_the_numbers():
    made = Page(page(sample([one for one in [*passed(440), *failed("output")] if one.method == "longflow"])))
    drawn = [attributes for tag, attributes in made.tags if tag == "svg"]
    assert [one["role"] for one in drawn] == ["img"] * 4
    errors, shapes, drift, decisive = (str(one["aria-label"]) for one in drawn)
    assert "accuracy output: " in errors
    assert "extreme numbers output: " in errors
    assert "float16 NaN" in errors
    assert "head dimension 16: NaN" in shapes and "group of 4: 1 %" in shapes
    assert "step 0: 0.1 %; step 2: 0.3 %; the largest, at step 2: 0.3 %" in drift
    assert "decisions: 190 of 200, 95 %" in decisive


def test_a_plot_takes_the_largest_error_and_that_of_a_failed_test():
    tests = sample([*passed(440), *failed("output")])["tests"]
    found = plots.errors(tests, "longflow")
    assert found["accuracy", "output"]["float16"] == (float("inf"), "NaN")
    assert found["decisions", "output"]["float16"] == (1e8, "")
    assert max(found["layouts", "output"].values()) <= (1, "")
    assert plots.errors(tests, "synckv") == {}
    assert plots.shapes(tests, "longflow")["D 16"] == (float("inf"), "NaN")
    assert list(plots.shapes(tests, "keydiff")) == [f"{one} {4**power}" for one in "DGS" for power in range(5)]
    assert plots.drift(tests, "longflow") == {0: 0.001, 1: 0.002, 2: 0.003}


@needs_plots
def test_a_step_beyond_the_bound_is_in_the_marked_area():
    """The area ends where the bound is, half-way between 1e-1 and 1e1."""
    made = plots.drift_plot("longflow", {0: 0.5, 1: 2.0, 2: float("inf")}).drawn
    assert "step 0: 50 %; step 2: unbounded; the largest, at step 2: unbounded" in made
    made = plots.drift_plot("longflow", {0: 0.5, 1: 2.0}).drawn
    ((_, right), (_, wrong)), area, (bound, _) = (points(made, kind) for kind in ("drift", "beyond", "bound"))
    assert wrong < bound[1] < right
    assert {y for _, y in area} == {26, bound[1]} and {x for x, _ in area} == {76, 492}
    assert bound[1] == 26 + 65
    assert plots.drift_plot("longflow", {0: 0.5}) is None, "one step is no trace"


@needs_plots
@pytest.mark.parametrize("unbounded", UNBOUNDED)
def test_an_error_without_a_finite_share_is_named_beside_the_scale(unbounded):
    """The scale ends with the finite errors, and its labels are inside of the plot."""
    made = plots.errors_plot("longflow", {("accuracy", "output"): {
        "float32": (0.5, ""), "float16": (math.inf, unbounded), "bfloat16": (math.inf, unbounded),
    }}).drawn
    assert f">{unbounded}</text>" in made and f"float16 {unbounded}, bfloat16 {unbounded}" in made
    ticks = re.findall(r'<text x="([0-9.]+)" [^>]*text-anchor="middle"[^>]*>([^<]*)<', made)
    assert [label for _, label in ticks] == ["1e-6", "1e-4", "1e-2", "bound", "1e2"]
    (end, _), _ = points(made, "end")
    assert all(plots.LEFT - 20 < float(x) < end for x, _ in ticks)
    beside = [float(x) for x in re.findall(r'translate\(([0-9.]+) ', made) if float(x) > end]
    assert len(set(beside)) == 2, "one mark for each dtype"
    assert made.count(f"16: {unbounded}</title>") == 2, "a mark has a name"
    plot = plots.drift_plot("longflow", {0: 0.5, 1: 0.5, 2: math.inf})
    assert "steps with NaN" in plot.caption and plot.drawn.count('class="mark"') == 1
    plot = plots.drift_plot("longflow", {0: math.inf, 1: math.inf})
    assert plot.drawn.count('class="mark"') == 2 and 'class="drift"' not in plot.drawn


def test_a_plot_without_data_is_left_out():
    assert plots.errors_plot("longflow", {}) is None
    assert plots.shapes_plot("longflow", {}) is None
    assert plots.drift_plot("longflow", {}) is None
    nothing = sample([one for one in passed(11) if one.method == "longflow"])["verdicts"]["longflow"]
    assert plots.decisive_plot("longflow", {name: one | {"decisions": 0} for name, one in nothing.items()}) is None


@needs_plots
def test_a_plot_is_the_same_whenever_it_is_drawn_and_stands_for_itself():
    """No dates, no ids, nothing to load; fonts are the reader's, and colours follow the page."""
    found = {("ties", "<$x$> \u4e2d\x00\ud800"): {"float16": (0.5, "")}}
    made = plots.errors_plot("longflow", found).drawn
    assert plots.errors_plot("longflow", found).drawn == made
    assert not re.search(r" id=|href|url\(|style=|<script|<image|20[0-9]{2}-", made)
    root = ElementTree.fromstring(made)
    assert "ties <$x$> \u4e2d\\x00\\ud800" in {text.text for text in root.iter("text")}
    assert {one.get("fill") for one in root.iter("text")} == {"currentColor", "var(--wrong, #d55e00)"}
