"""The verdict on an implementation: per method, one of five verdicts on each property (judge/properties.py).

- *right*: enough cases and decisions were judged, and none was wrong.
- *wrong*: a case is wrong. The smallest one is shown.
- *convention*: not judged, since the implementation declares that it follows another convention than kvtwin's, takes no
  masks, or does not validate arguments.
- *environment*: Triton's interpreter, or this machine, cannot run it.
- *not covered*: too few cases or decisions were judged, or, of a core property, none in a declared dtype.

Only tests that called the implementation count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..capabilities import FP8, Capabilities
from ..judge.properties import CORE, OF_CALLS, PROPERTIES
from ..refusals import ENVIRONMENT as OF_ENVIRONMENT
from ..stats import JudgedCase
from . import power, wording
from .results import Result

RIGHT, WRONG, NOT_COVERED, CONVENTION, ENVIRONMENT = "right", "wrong", "not covered", "convention", "environment"

#: The least number of judged cases for "right".
LEAST_CASES = {"traces": 1}
LEAST_CASES_OF_OTHERS = 4
#: The least number of decisive decisions for "right". Chosen at random between two tokens each time, 16 decisions are
#: right with probability 1 in 65,536.
LEAST_DECISIONS = {"decisions": 16, "ties": 8}


def least(name: str) -> tuple[int, int]:
    """The least number of cases and of decisive decisions for "right"."""
    return LEAST_CASES.get(name, LEAST_CASES_OF_OTHERS), LEAST_DECISIONS.get(name, 0)


#: What may be wrong only because a property is wrong: an inaccurate score makes wrong decisions.
CONSEQUENCES = {
    "repeatability": tuple(name for name in PROPERTIES if name not in ("repeatability", "bad_input")),
    "accuracy": ("decisions", "ties", "state", "traces"),
    "decisions": ("ties", "state", "traces"),
    "free_slots": ("state", "traces"),
    "extreme_numbers": ("state", "traces"),
    "layouts": ("state", "traces"),
    "independence": ("state", "traces"),
    "state": ("traces",),
}
#: What may explain a failure in an unusual case that cannot be made simpler.
EXPLAIN_UNUSUAL = ("accuracy", "decisions", "free_slots", "extreme_numbers", "layouts")

#: Core properties of which some functions have no cases, and what these functions lack.
WITHOUT = {"accuracy": "returns numbers", "free_slots": "has free slots"}

#: Exit codes of a run with --kv-impl. 2 to 5 are pytest's: interrupted, internal error, wrong usage, no tests.
EXIT_WRONG, EXIT_NOT_COVERED = 1, 6


@dataclass
class Judgement:
    """The verdict on one property of one method."""

    verdict: str = NOT_COVERED
    cases: int = 0
    decisions: int = 0
    decisive: int = 0
    adjudicated: int = 0  # decisions that differ from float64's and are right within the bounds
    wrong: int = 0  # wrong decisions on the recorded traces, and in the cases of the findings
    elements: int = 0  # numbers that were compared within a finite bound
    launches: int = 0  # calls that were compared bit by bit with earlier ones
    described: dict[str, Any] = field(default_factory=lambda: power.described_cases(()))  # of its cases
    lacking: dict[str, str] = field(default_factory=dict)  # of a core property: dtypes in which it is not judged -> why
    unit: str = power.CASES  # what `limit` counts: power.UNITS
    limit: float | None = None  # with 95 % confidence, fewer than this share is wrong; None: unknown
    worst: dict[str, float] = field(default_factory=dict)  # dtype -> the largest error as a fraction of its bound
    why: str = ""  # why it is not covered
    findings: list[dict[str, Any]] = field(default_factory=list)  # the shortest case first
    expected: bool = False  # every finding is one that --kv-xfails expects
    applies: bool = True  # False: nothing that the implementation provides has what it judges
    follows: str | None = None  # the wrong property of which this may be a consequence

    @property
    def blames_us(self) -> bool:
        """True if the reference fails in a case in which the implementation does."""
        return any(one.get("checker") for one in self.findings)

    @property
    def unbounded(self) -> str | None:
        """Why an error is no finite multiple of its bound (judge.mismatch); None if each is one."""
        return next((one["unbounded"] for one in self.findings if one.get("unbounded")), None)

    @property
    def counts(self) -> dict[str, int]:
        """What was judged, by unit (power.UNITS)."""
        return {
            "elements": self.elements, "decisive": self.decisive, "launches": self.launches, power.CASES: self.cases,
        }


@dataclass
class MethodVerdict:
    """The verdict on one method."""

    method: str
    properties: dict[str, Judgement]
    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    judged: list[str] = field(default_factory=list)  # functions and states of which a property was judged
    not_provided: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    conventions: list[str] = field(default_factory=list)  # those that differ from kvtwin's: "slot_order = any"
    others: Counter[str] = field(default_factory=Counter)  # outcomes of tests that judge no property

    @property
    def verdict(self) -> str:
        """"wrong" if a property is, "not covered" if a core property is not judged, else "right"."""
        found = {name: one.verdict for name, one in self.properties.items()}
        if WRONG in found.values() or self.others["failed"]:
            return WRONG
        return NOT_COVERED if any(self._lacks(name) for name in CORE) else RIGHT

    @property
    def open(self) -> list[str]:
        """The properties that are wrong; if none is, the core properties that are not judged."""
        wrong = [name for name, one in self.properties.items() if one.verdict == WRONG]
        return [name.replace("_", " ") for name in wrong or CORE if name in wrong or self._lacks(name)]

    def _lacks(self, name: str) -> bool:
        """True if a core property is neither right nor settled by a convention."""
        judged = self.properties[name]
        return judged.applies and judged.verdict not in (RIGHT, CONVENTION)

    @property
    def expected(self) -> bool:
        """True if everything that is wrong was expected (--kv-xfails)."""
        wrong = [one for one in self.properties.values() if one.verdict == WRONG]
        return not self.others["failed"] and all(one.expected for one in wrong)

    @property
    def causes(self) -> list[tuple[str, Judgement, list[str]]]:
        """Each wrong property that is no consequence of another, with its consequences."""
        wrong = {name: one for name, one in self.properties.items() if one.verdict == WRONG}
        in_order = [name for name in dict.fromkeys([*OF_CALLS, *CONSEQUENCES, *PROPERTIES]) if name in wrong]
        return [
            (name, wrong[name], [other for other, one in wrong.items() if one.follows == name])
            for name in in_order if wrong[name].follows is None
        ]


def judge(
    found: Iterable[Result], supported: Mapping[str, Capabilities], *, device: str, own: bool = False,
    required: Collection[str] = (),
) -> dict[str, MethodVerdict]:
    """The verdict on every method that a test called, and on those that are `required`.

    supported: the capabilities per method; device: "cpu" or "cuda"; own: the run is on kvtwin's own implementation,
    which every test calls.
    """
    found = [result for result in found if result.method]
    verdicts = {}
    for method in dict.fromkeys([*(str(result.method) for result in found), *required]):
        results = [result for result in found if result.method == method]
        if own or method in required or any(result.touched for result in results):
            verdicts[method] = _of_method(method, results, supported[method], device, own)
    return verdicts


def exit_status(verdicts: Mapping[str, MethodVerdict]) -> int:
    """0 if every method is right, or wrong as expected."""
    found = [one for one in verdicts.values() if not (one.verdict == WRONG and one.expected)]
    if any(one.verdict == WRONG for one in found):
        return EXIT_WRONG
    if not verdicts or any(one.verdict == NOT_COVERED for one in found):
        return EXIT_NOT_COVERED
    return 0


def _of_method(
    method: str, found: Sequence[Result], supported: Capabilities, device: str, own: bool
) -> MethodVerdict:
    made = MethodVerdict(method, {}, outside=supported.outside())
    for name in supported.conventions():
        shown = f"{name} = {getattr(supported, name)}"
        if name != "slot_order" or _has_slot_order(method):
            made.conventions.append(shown)
        else:
            made.outside.append(f"{shown} (does not apply to {method}, whose slots are compared as they are)")
    for result in found:
        made.answered += result.answered
        made.refused.update({what: count for what, count in result.refused.items() if "declared" not in what})
        made.missing.update(result.missing)
        made.notes.update(result.notes)
        if result.judges is None and (own or result.touched):
            made.others["failed" if result.failed else result.outcome] += 1
    made.judged = sorted({
        result.subject.removeprefix(f"{method}.") for result in found
        if result.subject and result.judges and result.cases and (own or result.touched)
    })
    made.not_provided = sorted({result.message for result in found if is_lacking(result)})
    for name in PROPERTIES:
        made.properties[name] = one = _of_property(name, found, supported, device, own)
        if name in ("decisions", "ties") and one.why.startswith("no test") and not _decides(method):
            one.applies, one.why = False, f"{method} chooses nothing"
    for name in reversed(OF_CALLS):
        wrong = [result for result in found if result.finding.get("property") == name and _wrong(result)]
        if wrong:
            findings = sorted((_finding(result) for result in wrong), key=_least_helpful_last)
            one = Judgement(WRONG, findings=findings, wrong=len(wrong))
            made.properties = {name: one, **made.properties}
    _attribute_errors(made.properties)
    for cause in CONSEQUENCES:
        judged = made.properties[cause]
        if judged.verdict == WRONG and judged.follows is None:
            for name, other in made.properties.items():
                if other.verdict == WRONG and other.follows is None and _follows(name, other, cause):
                    other.follows = cause
    return made


def _attribute_errors(properties: Mapping[str, Judgement]) -> None:
    """Of the properties in whose cases the implementation raises the same error, at the same place, keep one as the
    cause: one that simpler cases have shown to be the error's, else the one with the plainest case."""
    raised: dict[tuple[str, str], list[str]] = {}
    for name, judged in properties.items():
        said = {wording.error_and_place(str(one.get("message"))) for one in judged.findings}
        error = said.pop() if len(said) == 1 and judged.verdict == WRONG and name not in OF_CALLS else None
        if error is not None:
            raised.setdefault(error, []).append(name)

    def plainness(name: str) -> tuple[Any, ...]:
        found = properties[name].findings
        sought = any(one.get("field") and "choice" in one for one in found)        # see findings.of
        return not sought, CORE.index(name) if name in CORE else len(CORE), *_least_helpful_last(found[0])

    for names in raised.values():
        cause, *others = sorted(names, key=plainness)
        for name in others:
            properties[name].follows = cause


def _has_slot_order(method: str) -> bool:
    """False for the methods whose states are compared slot by slot whatever an implementation declares."""
    from ..judge import checkers, lockstep  # these import torch

    return bool(checkers.ask(method, "Adapter", lockstep.Adapter).any_slot_order)


def _decides(method: str) -> bool:
    """False for the methods whose states choose nothing."""
    from ..judge import checkers  # imports torch

    return bool(checkers.ask(method, "DECIDES", True))


def _follows(name: str, judged: Judgement, cause: str) -> bool:
    """True if a wrong property may be a consequence of `cause`."""
    if cause == "accuracy" and name != cause and all(one.get("choice") for one in judged.findings):
        return True  # inaccurate scores make wrong choices in cases of any property
    if cause in EXPLAIN_UNUSUAL and name != cause and all(one.get("unusual") for one in judged.findings):
        return True
    return name in CONSEQUENCES[cause]


def _of_property(name: str, found: Sequence[Result], supported: Capabilities, device: str, own: bool) -> Judgement:
    tests = [result for result in found if result.judges == name]
    called = [result for result in tests if own or result.touched]
    made = Judgement()
    wrong = [
        result for result in found if _wrong(result) and (own or result.touched)
        and result.finding.get("property", result.judges) == name
    ]
    elsewhere = [result for result in called if _wrong(result) and result not in wrong]
    counting = [
        result for result in called
        if result not in elsewhere and result.outcome in ("passed", "failed", "error", "xfailed")
    ]
    judged = _judged(counting)
    made.cases, made.described = len(judged), power.described_cases(judged.values())
    for result in counting:
        made.cases += 1 if result.cases is None else result.cases - len(result.judged)
        made.elements, made.launches = made.elements + result.elements, made.launches + result.launches
        made.decisions, made.decisive = made.decisions + result.decisions, made.decisive + result.decisive
        made.adjudicated, made.wrong = made.adjudicated + result.adjudicated, made.wrong + result.wrong
        for dtype, used in result.worst.items():
            made.worst[dtype] = max(used, made.worst.get(dtype, 0.0))
    made.findings = sorted((_finding(result) for result in wrong), key=_least_helpful_last)
    for one in made.findings:
        made.wrong += one.get("wrong", 0)
        if "of_bound" in one:
            made.worst[one["dtype"]] = max(one["of_bound"], made.worst.get(one["dtype"], 0.0))
    made.expected = bool(wrong) and all(result.outcome == "xfailed" for result in wrong)
    made.lacking = {} if own or name not in CORE else _lacking(name, counting, supported)
    made.unit = power.unit_of(name, made.counts)
    made.limit = None if wrong else power.limit_of(name, made.unit, made.counts)
    made.verdict, made.why = _verdict(name, made, tests, called, supported, device)
    if made.verdict == NOT_COVERED and elsewhere:
        causes = sorted({str(result.finding.get("property")).replace("_", " ") for result in elsewhere})
        made.why = f"{wording.counted_noun(made.cases, 'case')}: its tests failed because of {', '.join(causes)}"
    if name in WITHOUT and made.verdict == NOT_COVERED and not called and tests:
        made.applies = not all(is_lacking(result) for result in tests)
        made.why = made.why if made.applies else f"nothing that it provides {WITHOUT[name]}"
    return made


def is_lacking(result: Result) -> bool:
    """True if a test did not run because the implementation lacks the function or the state."""
    return result.outcome == "not provided" and result.message.count(": ") == 1


def _wrong(result: Result) -> bool:
    return result.judges is not None and (result.failed or result.outcome == "xfailed")


def _finding(result: Result) -> dict[str, Any]:
    return {"test": result.nodeid, "message": wording.first_line(result.message), **result.finding}


def _least_helpful_last(finding: Mapping[str, Any]) -> tuple[bool, bool, int]:
    """Orders findings: those that can be replayed come first, then those with a case, the shortest first."""
    case = finding.get("case") or ""
    return not finding.get("replay"), not case, len(case)


def _verdict(
    name: str, made: Judgement, tests: Sequence[Result], called: Sequence[Result], supported: Capabilities, device: str
) -> tuple[str, str]:
    if made.findings:
        return WRONG, ""
    if device not in supported.devices:
        return ENVIRONMENT, f"it declares {', '.join(supported.devices)}, and this run is on {device}"
    if name == "ties" and supported.ties != "lowest":
        return CONVENTION, f"it declares ties = {supported.ties}"
    if name == "ties" and supported.slot_order != "fixed" and not called:
        return CONVENTION, f"it declares slot_order = {supported.slot_order}"
    if name == "bad_input" and not supported.validates_arguments:
        return CONVENTION, "it declares that it does not validate arguments"
    if name == "free_slots" and not supported.masks and not made.cases:
        return CONVENTION, "it declares that it takes no masks"
    limits = [result.message for result in tests if result.outcome == "environment"]
    cases, decisions = least(name)
    if made.cases >= cases and made.decisive >= decisions:
        return _in_each_dtype(made)
    if limits:
        return ENVIRONMENT, limits[0]
    if not called:
        return NOT_COVERED, _why(tests)
    if made.cases < cases:
        return NOT_COVERED, f"{made.cases} of at least {cases} cases" + _because(tests)
    return NOT_COVERED, f"{made.decisive} of at least {decisions} decisive decisions"


def _judged(found: Iterable[Result]) -> dict[str, JudgedCase]:
    """The cases that tests judged, each once, although there is a test for each field of a result."""
    judged: dict[str, JudgedCase] = {}
    for result in found:
        for what, one in result.judged.items():
            if what not in judged or one.decisive > judged[what].decisive:
                judged[what] = one
    return judged


def _lacking(name: str, found: Sequence[Result], supported: Capabilities) -> dict[str, str]:
    """The declared dtypes in which a core property is not judged, though a function or state that it judges has
    numbers, and why: "" if it is not known."""
    lacking: dict[str, str] = {}
    for subject in dict.fromkeys(result.subject for result in found):
        own = [result for result in found if result.subject == subject]
        cases = _judged(own).values()
        judged = {case.dtype for case in cases if case.dtype and (case.decisive or name != "decisions")}
        if not {case.dtype for case in cases if case.dtype} - {*FP8}:
            continue
        for dtype in supported.dtypes:
            reasons = [result.lacking[dtype] for result in own if dtype in result.lacking]
            if dtype not in judged and (not reasons or any(reasons)):  # otherwise its cases do not have this dtype
                lacking[dtype] = max(reasons, default="") or lacking.get(dtype, "")
    return lacking


def _in_each_dtype(made: Judgement) -> tuple[str, str]:
    """The verdict if enough was judged: right, if that is so in each dtype."""
    if not made.lacking:
        return RIGHT, ""
    limits = [f"{dtype}: {why.removeprefix(OF_ENVIRONMENT)}" for dtype, why in made.lacking.items()
              if why.startswith(OF_ENVIRONMENT)]
    if limits:
        return ENVIRONMENT, "; ".join(limits)
    shown = (dtype + (" (refused)" if why else "") for dtype, why in made.lacking.items())
    return NOT_COVERED, f"not covered: {', '.join(shown)}"


def _why(tests: Sequence[Result]) -> str:
    if not tests:
        return "no test of it ran"
    return "no test called it" + _because(tests)


def _because(tests: Sequence[Result]) -> str:
    """The most frequent reason why tests were not provided, or failed before they called the implementation."""
    reasons = Counter(result.message for result in tests if result.outcome == "not provided") or Counter(
        f"a test failed before: {wording.first_line(_finding(result)['message'])}"
        for result in tests if result.failed and not result.touched and result.message
    )
    return f" ({reasons.most_common(1)[0][0]})" if reasons else ""
