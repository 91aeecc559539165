"""The page of a report: HTML without scripts or further files, made of the report's plain values alone.

It opens with the verdict. What is wrong follows, each cause with its smallest case; then what the run covers, plots,
and everything else in folds. page.html is the page, with macros of parts.html and details.html; page.css is its style.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from markupsafe import Markup

from ....fixtures import plotting
from ... import discovery
from ...judge.properties import ALL, EXPECTED, PAGES, PROPERTIES
from .. import power
from ..results import FAILED
from ..verdict import NOT_COVERED, RIGHT, WRONG
from ..wording import first_line, of_bound, without
from . import details, plots
from .markup import environment, part

Values = Mapping[str, Any]

#: With more methods than these, the tables of right methods are folded.
MOST_TABLES = 2
#: The verdicts on a method, the worst first.
SEVERITY = (WRONG, NOT_COVERED, RIGHT)
#: What explains the verdicts.
ABOUT = "docs/how-to/test-your-kernel.md#the-verdict"
#: The columns of numbers of a verdict's table.
NUMBERS = ("judged", "wrong (95 %)", "of bound")


def page(report: Values) -> str:
    """The HTML page."""
    own = report["implementation"] == discovery.OPTIMIZED
    place, overalls = report["environment"], report["overall"]
    drawable = plotting.available()
    return environment().get_template("page.html").render(
        report=report, own=own, place=place, overalls=overalls, counts=_counts(overalls), about=ABOUT,
        title=f"kvtwin: {report['implementation']} against float64",
        style=Markup(resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")),
        totals=[(outcome, count) for outcome, count in report["totals"].items() if count],
        overview_heads=["method", "all", *(judged.replace("_", " ") for judged in PROPERTIES)],
        overview=_overview(report), verdict_heads=["property", "verdict", *NUMBERS, "what it says"],
        NUMBERS=NUMBERS, MOST_TABLES=MOST_TABLES,
        verdicts={method: list(_rows(properties)) for method, properties in report["verdicts"].items()},
        limits=power.ABOUT, on_a_cpu=f"O{power.ON_A_CPU[1:]}", blames_us=power.BLAMES_US,
        causes=list(_causes(report)), others=_others(report["tests"]),
        coverage={} if own else {method: _covered(one) for method, one in report["coverage"].items()},
        accuracy=details.accuracy(report.get("accuracy", ())),
        plots=plots.figures(report) if drawable else {},
        no_plots=plotting.MISSING if report["verdicts"] and not drawable else "",
        folds=[*details.kinds(report["methods"]), *details.claims(report["claims"]),
               *(details.stored_results() if own else ())],
        tests=details.tests(report["tests"]),
        versions=", ".join(f"{package} {found}" for package, found in place["versions"].items() if found),
    )  # fmt: skip


def _counts(overalls: Values) -> list[tuple[Values, int]]:
    """How many methods have each verdict, the worst first."""
    ordered = sorted(overalls.values(), key=lambda one: (SEVERITY.index(one["verdict"]), one["expected"]))
    counts = Counter((one["verdict"], one["verdict"] == WRONG and one["expected"]) for one in ordered)
    return [({"verdict": verdict, "expected": expected}, count) for (verdict, expected), count in counts.items()]


def _overview(report: Values) -> list[list[Any]]:
    """A row per method, a column per property."""
    return [
        [method, part("overall", report["overall"][method]),
         *(part("badge", properties[judged]["verdict"]) for judged in PROPERTIES)]
        for method, properties in report["verdicts"].items()
    ]  # fmt: skip


def _rows(properties: Mapping[str, Values]) -> Iterator[list[Any]]:
    """The table of a verdict: a row per property."""
    for judged, one in properties.items():
        counts = power.counts(one["unit"], one[one["unit"]])
        if one["wrong"]:
            of = f", {one['decisive']:,} of {one['decisions']:,} decisive" if one["decisions"] else ""
            counts = f"{one['wrong']:,} wrong{of}"
        fewer = power.fewer_than(one["limit"])
        worst = max(one["worst"].items(), key=lambda pair: (pair[1] is None, pair[1] or 0.0), default=None)
        used = "-" if worst is None else f"{of_bound(worst[1], one['unbounded'])} ({worst[0]})"
        verdict = part("badge", one["verdict"], ", as expected" if one["expected"] else "")
        says = part("says", {**_placed(one), "different": _different(judged, one), "about": _about(judged, one)})
        yield [judged.replace("_", " "), verdict, counts, f"fewer than {fewer}" if fewer else "-", used, says]


def _different(judged: str, one: Values) -> str:
    """On traces: how many choices were different but legal."""
    if judged != "traces" or not (one["verdict"] == RIGHT or one["wrong"]):
        return ""
    return f"{'none wrong, ' if one['verdict'] == RIGHT else ''}{one['adjudicated']:,} different but legal"


def _about(judged: str, one: Values) -> str:
    return "; ".join(filter(None, (ALL[judged], power.sizes(one))))


def _placed(one: Values) -> dict[str, Any]:
    """A property with the place where it fails, and the first line of its message."""
    return {
        **one, "place": ".".join(filter(None, (one["subject"], one["field"]))),
        "first_line": without(first_line(one["message"]), one["field"]),
    }


def _causes(report: Values) -> Iterator[dict[str, Any]]:
    """What is wrong, each with the properties that may follow from it."""
    for method, overall in report["overall"].items():
        properties = report["verdicts"][method] if overall["causes"] else {}
        for cause in overall["causes"]:
            judged = cause["property"]
            yield {
                **_placed(properties[judged]), "method": method, "property": judged,
                "promise": {**ALL, **EXPECTED}[judged], "page": PAGES[judged],
                "consequences": {other: _placed(properties[other]) for other in cause["consequences"]},
            }


def _others(tests: list[Values]) -> dict[str, Any]:
    """Failed tests that judge no property; `any`: some test failed."""
    found = [test for test in tests if test["outcome"] in FAILED]
    return {**details.failed_tests(test for test in found if test["judges"] is None), "any": bool(found)}


def _covered(one: Values) -> dict[str, Any]:
    refused = sorted(one["refused"].items(), key=lambda pair: -pair[1])
    return {**one, "refusals": [f"{times:,} x {what}" for what, times in refused]}
