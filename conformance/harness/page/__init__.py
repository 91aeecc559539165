"""The page of a report: HTML without scripts or further files, made of the report's plain values alone.

It opens with the verdict. What is wrong follows, each cause with its smallest case; then what the run covers, plots,
and everything else in folds. page.html is the frame, page.css the style.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import resources
from string import Template
from typing import Any

from ... import discovery
from ...judge.properties import ALL, EXPECTED, PAGES, PROPERTIES
from .. import power
from ..results import FAILED
from ..verdict import NOT_COVERED, RIGHT, WRONG
from ..wording import counted, first_line, without
from . import details, plots
from .markup import badge, bullets, code, fold, listing, name, of_bound, pre, table, text

Values = Mapping[str, Any]

#: With more methods than these, the tables of right methods are folded.
MOST_TABLES = 2
#: The verdicts on a method, the worst first.
SEVERITY = (WRONG, NOT_COVERED, RIGHT)
#: What explains the verdicts.
ABOUT = "docs/how-to/test-your-kernel.md#the-verdict"


def page(report: Values) -> str:
    """The HTML page."""
    title = f"kvtwin: {report['implementation']} against float64"
    parts = [*_head(report, title), *_verdicts(report), *_causes(report), *_coverage(report),
             *details.accuracy(report.get("accuracy", ()))]
    drawn = plots.figures(report)
    parts += ["<h2>Plots</h2>", *drawn] if drawn else []
    parts += ["<h2>Details</h2>", *details.kinds(report["methods"]), *details.claims(report["claims"])]
    parts += details.stored_results() if _is_own(report) else []
    parts += [*details.tests(report["tests"]), _environment(report)]
    frame = Template(_asset("page.html"))
    return frame.substitute(title=text(title), style=_asset("page.css"), body="\n".join(parts))


def _asset(file: str) -> str:
    return resources.files(__package__).joinpath(file).read_text(encoding="utf-8")


def _is_own(report: Values) -> bool:
    """True for a run on kvtwin's own implementation."""
    return bool(report["implementation"] == discovery.OPTIMIZED)


def _head(report: Values, title: str) -> Iterator[str]:
    totals = ", ".join(f"{count:,} {name(outcome)}" for outcome, count in report["totals"].items() if count)
    place = report["environment"]
    yield f"<h1>{text(title)}</h1>"
    yield f'<p class="headline">{_headline(report)}</p>'
    yield (
        f'<p class="facts">Tests: {totals or "none"}. {text(place["device"])} ({text(place["backend"])}), '
        f"{text(report['created'])}.</p>"
    )


def _headline(report: Values) -> str:
    found = report["overall"]
    if not found:
        return badge("not covered") + (": no method was tested" if _is_own(report) else ": no test called it")
    if len(found) == 1:
        ((method, one),) = found.items()
        return f"{text(method)}: {_overall(one)}"
    ordered = sorted(found.values(), key=lambda one: (SEVERITY.index(one["verdict"]), one["expected"]))
    counts = Counter(map(_overall, ordered))
    return f"{len(found)} methods: " + ", ".join(f"{count} {shown}" for shown, count in counts.items())


def _overall(one: Values) -> str:
    return badge(one["verdict"], ", as expected" if one["verdict"] == WRONG and one["expected"] else "")


def _verdicts(report: Values) -> Iterator[str]:
    found = report["verdicts"]
    yield "<h2>Verdict</h2>"
    if not found:
        yield "<p>There is no verdict: no test judged a method.</p>"
    if len(found) > 1:
        yield _overview(report)
    for method, properties in found.items():
        overall = report["overall"][method]
        shown = _properties(method, properties)
        if len(found) == 1:
            yield shown
        else:
            unfolded = overall["verdict"] == WRONG or len(found) <= MOST_TABLES
            yield fold(f"{text(method)}: {_overall(overall)}", shown, shown=unfolded)
    if found:
        yield f'<p class="soft">{text(power.ABOUT)} All verdicts: {code(ABOUT)}, in kvtwin\'s documentation.</p>'
    if found and report["environment"]["device"].startswith("cpu"):
        yield f'<p class="soft">{text(f"O{power.ON_A_CPU[1:]}")}.</p>'


def _overview(report: Values) -> str:
    """A row per method, a column per property."""
    rows = (
        (
            text(method), _overall(report["overall"][method]),
            *(badge(properties[judged]["verdict"]) for judged in PROPERTIES),
        )
        for method, properties in report["verdicts"].items()
    )
    heads = ("method", "all", *(judged.replace("_", " ") for judged in PROPERTIES))
    return table(heads, rows, label="Verdicts by method and property", matrix=True)


def _properties(method: str, properties: Mapping[str, Values]) -> str:
    rows = ((name(judged), *_property(one), _says(judged, one)) for judged, one in properties.items())
    numbers = ("judged", "wrong (95 %)", "of bound")
    heads = ("property", "verdict", *numbers, "what it says")
    return table(heads, rows, label=f"Verdict on {method} by property", numbers=numbers, long=("what it says",))


def _property(one: Values) -> tuple[str, ...]:
    counts = power.counts(one["unit"], one[one["unit"]])
    if one["wrong"]:
        of = f", {one['decisive']:,} of {one['decisions']:,} decisive" if one["decisions"] else ""
        counts = f"{one['wrong']:,} wrong{of}"
    fewer = power.fewer_than(one["limit"])
    worst = max(one["worst"].items(), key=lambda pair: (pair[1] is None, pair[1] or 0.0), default=None)
    used = "-" if worst is None else f"{of_bound(worst[1], one['unbounded'])} ({text(worst[0])})"
    verdict = badge(one["verdict"], ", as expected" if one["expected"] else "")
    return verdict, counts, f"fewer than {fewer}" if fewer else "-", used


def _says(judged: str, one: Values) -> str:
    """What the property is, and why the verdict is not "right"."""
    sizes = power.sizes(one)
    about = f'<span class="soft">{text(ALL[judged])}{text(f"; {sizes}" if sizes else "")}</span>'
    if one["verdict"] == RIGHT:
        different = f"none wrong, {one['adjudicated']:,} different but legal<br>" if judged == "traces" else ""
        return different + about
    legal = f"{one['adjudicated']:,} different but legal<br>" if judged == "traces" and one["wrong"] else ""
    if one["follows"]:
        return f"{legal}{_where(one)}may follow from {name(one['follows'])}<br>{about}"
    return f"{legal}{text(one['why']) or _first_line(one)}<br>{about}"


def _first_line(one: Values) -> str:
    """Where a wrong property fails, and the first line of the message."""
    return _where(one) + text(without(first_line(one["message"]), one["field"]))


def _where(one: Values) -> str:
    found = ".".join(filter(None, (one["subject"], one["field"])))
    return f"{code(found)}: " if found else ""


def _causes(report: Values) -> Iterator[str]:
    """What is wrong: each cause, the properties that may follow from it, and failed tests that judge no property."""
    if not report["verdicts"] and not any(test["outcome"] in FAILED for test in report["tests"]):
        return
    yield "<h2>What is wrong</h2>"
    shown = False
    for method, overall in report["overall"].items():
        for cause in overall["causes"]:
            shown = True
            yield _cause(method, cause, report["verdicts"][method])
    others = [test for test in report["tests"] if test["outcome"] in FAILED and test["judges"] is None]
    if others:
        yield "<h3>Failed tests that judge no single property</h3>"
        yield from details.failed(others)
    elif not shown:
        yield "<p>No property is wrong.</p>"


def _cause(method: str, cause: Values, properties: Mapping[str, Values]) -> str:
    judged, one = cause["property"], properties[cause["property"]]
    also = bullets(
        f"{name(other)}: {_first_line(properties[other])}" for other in cause["consequences"]
    )
    more = f" and {counted(one['findings'] - 1, 'other test')}" if one["findings"] > 1 else ""
    inside = listing((
        ("where", code(".".join(filter(None, (one["subject"], one["field"])))) if one["subject"] else ""),
        ("smallest case", code(one["case"]) if one["case"] else ""),
        ("found", pre(one["message"]) if one["message"] else ""),
        ("note", text(power.BLAMES_US) if one["checker"] else ""),
        ("replay", pre(one["replay"]) if one["replay"] else ""),
        ("test", code(one["test"]) + more),
        ("may explain", also),
        ("about it", f"{code(PAGES[judged])}, in kvtwin's documentation"),
    ))
    expected = ", as expected" if one["expected"] else ""
    return (
        f'<section class="cause"><h3>{text(method)}, {name(judged)}: {badge(WRONG, expected)}</h3>\n'
        f'<p class="soft">Expected: {text({**ALL, **EXPECTED}[judged])}.</p>\n{inside}</section>'
    )


def _coverage(report: Values) -> Iterator[str]:
    """Calls, refusals, and what the implementation declares or lacks."""
    if _is_own(report) or not report["coverage"]:
        return
    yield "<h2>Coverage</h2>"
    found = report["coverage"]
    for method, one in found.items():
        shown = _of_method(one)
        heading = f"{text(method)}: {counted(one['calls'], 'call')}, {one['answered']:,} answered"
        yield shown if len(found) == 1 else fold(heading, shown, shown=len(found) <= MOST_TABLES)


def _of_method(one: Values) -> str:
    refused = sorted(one["refused"].items(), key=lambda pair: -pair[1])
    missing = (f"{code(field)} ({counted(count, 'time')})" for field, count in one["missing"].items())
    notes = (f"{code(what)} ({counted(count, 'call')})" for what, count in one["notes"].items())
    count = sum(one["refused"].values())
    return listing((
        ("calls", f"{one['calls']:,}: {one['answered']:,} answered, {count:,} refused"),
        ("refused", bullets(f"{times:,} x {text(what)}" for what, times in refused)),
        ("declared limits", bullets(map(text, one["outside"])) or "none"),
        ("declared conventions", bullets(map(text, one["conventions"])) or "kvtwin's"),
        ("missing fields", bullets(missing) or "none"),
        ("notes", bullets(notes) or "none"),
        ("judged", bullets(map(code, one["judged"])) or "none"),
        ("not provided", bullets(map(code, one["not_provided"])) or "none"),
    ))


def _environment(report: Values) -> str:
    place = report["environment"]
    versions = ", ".join(f"{package} {found}" for package, found in place["versions"].items() if found)
    return fold("Environment", listing((
        ("command line", code(" ".join(report["arguments"]))), ("exit status", str(report["exit_status"])),
        ("seed", str(report.get("seed", "none"))),
        ("platform", text(place["platform"])), ("versions", text(versions)),
        ("schema", f"version {report['schema_version']}"),
    )))
