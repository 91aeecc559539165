"""The results of a run by test, collected from pytest's reports, and their sums for the summary and the report."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .. import discovery, stats
from ..judge.properties import PROPERTIES
from ..refusals import EnvironmentLimit, NotProvided
from . import power

KINDS = ("equivalence", "laws", "claims", "golden", "bad_input")
OUTCOMES = ("passed", "failed", "error", "not provided", "environment", "skipped", "xfailed")
FAILED = ("failed", "error")
#: The property that tests of a kind judge, if no marker says otherwise.
PROPERTY_OF_KIND = {"golden": "traces", "bad_input": "bad_input"}
#: In the stash of a test: what `classify` says of it.
FACTS = pytest.StashKey[dict[str, Any]]()
ATTRIBUTE = "kvtwin"  # the attribute of a test report with our data; pytest-xdist transfers it


@dataclass
class Result:
    """One test. ``method`` and ``kind`` are None for tests of the suite itself.

    judges: the property that it judges (judge/properties.py), None if none. subject: the function or state that it
    judges (judge/subjects.py), None if it judges no single one. judged_field: the only field of the results that it
    judges, None if it judges more. cases: how many it judged, None if it does not count them; judged: those of them
    that are described, by what tells them apart. elements, launches, lacking, shapes, drift, wrong: as in
    stats.py. finding: of a failed test, the property that is wrong, the subject, the field, the case and the
    command that replays it.
    """

    nodeid: str
    method: str | None = None
    kind: str | None = None
    claims: tuple[str, ...] = ()
    outcome: str = "passed"
    duration: float = 0.0
    decisions: int = 0
    decisive: int = 0
    utilisation: float | None = None
    adjudicated: int = 0
    touched: bool = False
    answered: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    judges: str | None = None
    subject: str | None = None
    judged_field: str | None = None
    cases: int | None = None
    judged: dict[str, stats.JudgedCase] = field(default_factory=dict)
    elements: int = 0
    launches: int = 0
    lacking: dict[str, str] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    shapes: dict[str, float] = field(default_factory=dict)
    drift: dict[str, float] = field(default_factory=dict)
    wrong: int = 0
    finding: dict[str, Any] = field(default_factory=dict)
    message: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome in FAILED

    def as_dict(self) -> dict[str, Any]:
        plain = asdict(self) | {"claims": list(self.claims), "cases": self.cases or 0}
        del plain["judged"]
        return plain | power.described_cases(self.judged.values())


@dataclass
class Sum:
    """The results of one method, or of one kind of its tests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    decisions: int = 0
    decisive: int = 0
    utilisation: float | None = None
    adjudicated: int = 0

    @property
    def decisive_share(self) -> float | None:
        return self.decisive / self.decisions if self.decisions else None

    @property
    def failed(self) -> int:
        return sum(self.outcomes[outcome] for outcome in FAILED)

    def add(self, result: Result) -> None:
        self.outcomes[result.outcome] += 1
        self.decisions += result.decisions
        self.decisive += result.decisive
        self.adjudicated += result.adjudicated
        if result.utilisation is not None:
            self.utilisation = max(result.utilisation, self.utilisation or 0.0)


def total(results: Iterable[Result]) -> Sum:
    """The sum of ``results``."""
    summed = Sum()
    for result in results:
        summed.add(result)
    return summed


#: The folder of all tests, and the rooms in it whose folders have the names of methods.
HERE = Path(__file__).resolve().parents[1]
SUITE, ROOMS = "suite", ("suite", "methods", "papers")


def classify(item: pytest.Item) -> dict[str, Any]:
    """The method, the kind and the claims of a test, from its markers, its parameters and its folder."""
    claims = tuple(str(mark.args[0]) for mark in item.iter_markers("claim") if mark.args)
    kind_mark = item.get_closest_marker("kind")
    if kind_mark is not None:
        kind = kind_mark.args[0] if kind_mark.args else None
        if kind not in KINDS:
            raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.kind({kind!r}): the kinds are {', '.join(KINDS)}")
    elif claims:
        kind = "claims"
    else:
        kind = "equivalence"
    method = _method_of(item)
    property_mark = item.get_closest_marker("property")
    judged = property_mark.args[0] if property_mark is not None else PROPERTY_OF_KIND.get(kind)
    if judged not in (None, *PROPERTIES):
        raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.property({judged!r}): there are {', '.join(PROPERTIES)}")
    if getattr(getattr(item, "callspec", None), "params", {}).get("side") == "reference":
        judged = None  # it does not call the implementation under test
    return {
        "method": method, "kind": kind if method else None, "claims": list(claims),
        "judges": judged if method else None, "subject": _subject_of(item),
        "judged_field": _field_of(item) if judged and method else None,
    }


def _method_of(item: pytest.Item) -> str | None:
    mark = item.get_closest_marker("method")
    if mark is not None and mark.args:
        return str(mark.args[0])
    inside = HERE in item.path.parents
    rooms = item.path.relative_to(HERE).parts if inside else ()
    if inside and rooms[0] not in ROOMS:  # it tests the tool
        return None
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    names = {pair.name for pair in discovery.pairs()}
    for parameter in ("method", "pair", "subject"):
        name = str(getattr(parameters.get(parameter), "method", parameters.get(parameter, "")))
        if name in names:
            return name
    if inside:
        return rooms[1] if rooms[1] in names else None
    # Of other packages, files are named after their methods: a folder may have the tests of several.
    stem = item.path.stem
    fitting = [name for name in names if stem == f"test_{name}" or stem.startswith(f"test_{name}_")]
    return max(fitting, key=len, default=None)


def _subject_of(item: pytest.Item) -> str | None:
    found = getattr(getattr(item, "callspec", None), "params", {}).get("subject")
    return str(found) if hasattr(found, "method") else None


def _field_of(item: pytest.Item) -> str | None:
    found = getattr(getattr(item, "callspec", None), "params", {}).get("field")
    return found if isinstance(found, str) else None


def annotate(report: pytest.TestReport, error: object, facts: dict[str, Any], counted: stats.Stats) -> None:
    """Add the data of a test to its report, as plain values, for the controlling process.

    ``error`` is the exception of the phase, None if there is none.
    """
    facts = facts | {
        "decisions": counted.total,
        "decisive": counted.decisive,
        "utilisation": counted.bound_utilisation,
        "adjudicated": counted.ties,
        "touched": counted.touched,
        "answered": counted.answered,
        "refused": dict(counted.refused),
        "missing": dict(counted.missing),
        "notes": dict(counted.notes),
        "cases": counted.cases,
        "judged": {_short(what): tuple(one) for what, one in counted.judged.items()},
        "elements": counted.elements,
        "launches": counted.launches,
        "lacking": dict(counted.lacking),
        "worst": dict(counted.worst),
        "shapes": dict(counted.shapes),
        "drift": {str(step): used for step, used in sorted(counted.drift.items())},
        "wrong": counted.wrong,
    }
    if isinstance(error, NotProvided) and isinstance(report.longrepr, tuple):
        facts["outcome"] = "environment" if isinstance(error, EnvironmentLimit) else "not provided"
        report.longrepr = (*report.longrepr[:2], f"Skipped: {error}")  # without the exception's qualified name
    setattr(report, ATTRIBUTE, facts)


def _short(text: str) -> str:
    """What stands for a text between processes."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_not_provided(report: pytest.TestReport | pytest.CollectReport) -> bool:
    """True for a test skipped because the implementation under test does not provide its subject."""
    return getattr(report, ATTRIBUTE, {}).get("outcome") == "not provided"


class Collector:
    """Turns the reports of a test's phases into one Result."""

    def __init__(self) -> None:
        self._results: dict[str, Result] = {}

    @property
    def results(self) -> list[Result]:
        return list(self._results.values())

    def add(self, report: pytest.TestReport) -> None:
        """Add the report of one phase (setup, call, teardown) of a test."""
        result = self._results.setdefault(report.nodeid, Result(report.nodeid))
        result.duration += report.duration
        facts = dict(getattr(report, ATTRIBUTE, {}))
        provided = facts.pop("outcome", "skipped")
        for name, value in facts.items():
            if name == "judged":
                value = {what: stats.JudgedCase(*one) for what, one in value.items()}
            setattr(result, name, tuple(value) if name == "claims" else value)
        if report.failed:
            result.outcome = "failed" if report.when == "call" else "error"
            result.message = _failure(report)
        elif report.skipped and not result.failed:
            xfailed: str | None = getattr(report, "wasxfail", None)
            result.outcome = provided if xfailed is None else "xfailed"
            result.message = _reason(report) if xfailed is None else xfailed

    def add_collection_error(self, report: pytest.CollectReport) -> None:
        """Add the report of a file that could not be collected."""
        self._results[report.nodeid] = Result(report.nodeid, outcome="error", message=_failure(report))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""


def _failure(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr)
