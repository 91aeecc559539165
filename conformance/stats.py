"""Statistics of the running test: decisions compared, bound utilisation, adjudicated ties.

The comparators record them. The plugin collects them for each test and reads them when the test has passed; outside of
`collect` the functions that record do nothing. Hypothesis calls a test many times: counts are summed over all examples,
and for the utilisation the maximum is kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# A test accepts wrong choices if the bounds leave most of its decisions open. So either this share must be decisive,
LEAST_DECISIVE_SHARE = 0.5
# or this many decisions of plain cases, most of which are decisive by construction (cases/draws.py). An
# implementation that chooses wrongly half of the time passes 16 decisive decisions with probability 1 in 65,536.
LEAST_PLAIN_DECISIONS = 16


class JudgedCase(NamedTuple):
    """What a verdict says of a case that was judged.

    dtype: of its keys and values, "float16" or "float8_e5m2"; "" if it has no numbers. layout: of its tensors, "" if it
    names none. rows: batch rows. slots: slots or tokens. decisive: decisions of it that had one right answer.
    """

    dtype: str
    layout: str
    rows: int
    slots: int
    decisive: int = 0


@dataclass
class Stats:
    """The statistics of one test. ``bound_utilisation`` is the largest error as a fraction of its bound."""

    total: int = 0
    decisive: int = 0
    # The part of both counts that comes from plain cases (cases/draws.py).
    plain_total: int = 0
    plain_decisive: int = 0
    asked: bool = False  # a comparator of decisions was called, even if masks settled every decision
    bound_utilisation: float | None = None
    ties: int = 0
    # Recorded with --kv-impl only: whether the test accessed the implementation under test, how many calls of its
    # functions returned, and which calls it refused, by function and argument.
    touched: bool = False
    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)  # fields that were not returned
    notes: Counter[str] = field(default_factory=Counter)  # what calls did beside their results (harness/manners.py)
    exact: bool = False  # a comparator of exact copies was called
    cases: int | None = None  # cases that a property's test judged; None: it does not count them
    judged: dict[str, JudgedCase] = field(default_factory=dict)  # those of `judged_case`, by what tells them apart
    elements: int = 0  # numbers that were compared within a finite bound
    lacking: dict[str, str] = field(default_factory=dict)  # a dtype that no case has, though `draws` tried -> why
    launches: int = 0  # calls whose result was compared bit by bit with that of an earlier call
    worst: dict[str, float] = field(default_factory=dict)  # "dtype" -> the largest error as a fraction of its bound
    shapes: dict[str, float] = field(default_factory=dict)  # a size of `sizes_of` -> the same
    drift: dict[int, float] = field(default_factory=dict)  # step of a recorded trace -> the same (`following`)
    wrong: int = 0  # choices that no scores within their bounds lead to (mismatch.counting)

    def judged_in(self, dtype: str) -> int:
        """How many cases of this dtype were judged; if the test judges decisions, of those with a decisive one."""
        return sum(one.dtype == dtype and (one.decisive > 0 or not self.asked) for one in self.judged.values())

    @property
    def enough(self) -> bool:
        """True if decisions were compared and enough of them were decisive."""
        if self.total and self.decisive >= LEAST_DECISIVE_SHARE * self.total:
            return True
        return self.plain_decisive >= max(LEAST_PLAIN_DECISIONS, LEAST_DECISIVE_SHARE * self.plain_total)

    def add(self, other: Stats) -> None:
        """Add the statistics of another part of the same comparison."""
        used = [one.bound_utilisation for one in (self, other) if one.bound_utilisation is not None]
        self.bound_utilisation = max(used, default=None)
        for name in (
            "total", "decisive", "plain_total", "plain_decisive", "ties", "answered", "refused", "missing", "notes",
            "wrong", "elements", "launches",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        largest(self.drift, other.drift)
        for name in ("asked", "touched", "exact"):
            setattr(self, name, getattr(self, name) or getattr(other, name))

    @property
    def vacuous(self) -> bool:
        """True if decisions were compared and too few of them were decisive."""
        return self.total > 0 and not self.enough


def largest(into: dict[Any, float], other: Mapping[Any, float]) -> None:
    """Keep the larger value of each key."""
    for key, value in other.items():
        into[key] = max(value, into.get(key, 0.0))


def sizes_of(case: Any) -> list[str]:
    """The sizes of a case on which its errors may depend: "D 64", "G 4", and the number of slots or tokens, rounded up
    to a power of 4: "S 64"."""
    tokens = slots_of(case)
    found = [f"{letter} {getattr(case, name)}" for letter, name in (("D", "head_dim"), ("G", "group"))]
    return found if tokens is None else [*found, f"S {4 ** math.ceil(math.log(max(tokens, 1), 4) - 1e-9)}"]


def slots_of(case: Any) -> int | None:
    """The number of slots or tokens of a case, of a trace with its steps; None if it has none."""
    if hasattr(case, "steps"):  # of a trace
        return int(case.prompt + case.steps)
    found: int | None = getattr(case, "slots", getattr(case, "tokens", None))
    return found


def dtype_of(case: Any) -> str:
    """The dtype of a case's keys and values; "" if it has no numbers."""
    named: str | None = getattr(case, "dtype_name", None)
    return str(getattr(case, "dtype", "")).removeprefix("torch.") if named is None else named


_current: ContextVar[Stats | None] = ContextVar("kvtwin_stats", default=None)
_plain: ContextVar[bool] = ContextVar("kvtwin_plain", default=False)
_work: ContextVar[list[int] | None] = ContextVar("kvtwin_work", default=None)
_step: ContextVar[int | None] = ContextVar("kvtwin_step", default=None)


@contextmanager
def collect(stats: Stats | None = None) -> Iterator[Stats]:
    """Collect what is recorded inside the ``with`` block, in `stats` if it is given."""
    stats = Stats() if stats is None else stats
    token = _current.set(stats)
    try:
        yield stats
    finally:
        _current.reset(token)


def current() -> Stats | None:
    """The statistics of the running test; None outside of `collect`."""
    return _current.get()


@contextmanager
def plain_round() -> Iterator[None]:
    """Draw plain cases only (cases/draws.py) inside the ``with`` block, and count their decisions separately too."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def in_plain_round() -> bool:
    """True inside `plain_round`."""
    return _plain.get()


def decisions(total: int, decisive: int) -> None:
    """Record that ``total`` kept/evicted decisions were compared and that ``decisive`` of them had one right answer."""
    if not 0 <= decisive <= total:
        raise ValueError(f"decisive must be in 0..total: expected at most {total}, got {decisive}")
    stats = _current.get()
    if stats is not None:
        stats.asked = True
        stats.total += int(total)
        stats.decisive += int(decisive)
        if _plain.get():
            stats.plain_total += int(total)
            stats.plain_decisive += int(decisive)


def utilisation(fraction: float) -> None:
    """Record an error as a fraction of its bound; the largest of a test is kept."""
    stats = _current.get()
    if stats is not None:
        # max() ignores NaN, since NaN compares false; infinity is not ignored.
        fraction = math.inf if math.isnan(fraction) else float(fraction)
        stats.bound_utilisation = max(fraction, stats.bound_utilisation or 0.0)
        record_drift(fraction)


@contextmanager
def following() -> Iterator[None]:
    """Inside the ``with`` block errors are recorded by the step of a recorded trace too, which `at_step` sets. Those of
    the prompt are not."""
    token = _step.set(-1)
    try:
        yield
    finally:
        _step.reset(token)


def is_following() -> bool:
    """True inside `following`."""
    return _step.get() is not None


def at_step(number: int) -> None:
    """Inside `following`, the errors that are recorded next are those of this step."""
    if _step.get() is not None:
        _step.set(number)


def record_drift(fraction: float) -> None:
    """Inside `following`, record an error of this step as a fraction of its bound, also one beyond it."""
    stats, step = _current.get(), _step.get()
    if stats is not None and step is not None and step >= 0:
        largest(stats.drift, {step: math.inf if math.isnan(fraction) else float(fraction)})


def exact() -> None:
    """Record that numbers without an error bound were compared."""
    stats = _current.get()
    if stats is not None:
        stats.exact = True


def adjudicate(count: int) -> None:
    """Record ``count`` choices that differed within the bounds and that the reference adopted."""
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    stats = _current.get()
    if stats is not None:
        stats.ties += int(count)


def wrong(count: int) -> None:
    """Record ``count`` choices that no scores within their bounds lead to."""
    stats = _current.get()
    if stats is not None:
        stats.wrong += int(count)


@contextmanager
def counting_work() -> Iterator[list[int]]:
    """Inside the ``with`` block, the list gets how many functions each call of the implementation under test calls. It
    stays empty for kvtwin's own side."""
    counts: list[int] = []
    token = _work.set(counts)
    try:
        yield counts
    finally:
        _work.reset(token)


def is_counting_work() -> bool:
    """True inside `counting_work`."""
    return _work.get() is not None


def record_work(calls: int) -> None:
    """Record how many functions a call of the implementation under test has called."""
    counts = _work.get()
    if counts is not None:
        counts.append(calls)


def missing(name: str) -> None:
    """Record that a function under test does not return this field."""
    stats = _current.get()
    if stats is not None:
        stats.missing[name] += 1


def record_note(what: str) -> None:
    """Record what a call of the implementation under test did beside its result."""
    stats = _current.get()
    if stats is not None:
        stats.notes[what] += 1


def include(inner: Stats, *, judged: bool, choice: bool, decides: bool, case: Any, subject: str) -> None:
    """Record what was recorded for one field of the result of `subject` for this case.

    judged: the field was compared. choice: it is a choice, so that its decisions count if the test's purpose is to
    judge decisions (`decides`); otherwise its bound utilisation and its elements count. Nothing counts twice.
    """
    stats = _current.get()
    if stats is None:
        return
    stats.answered += inner.answered
    stats.refused += inner.refused
    stats.missing += inner.missing
    stats.notes += inner.notes
    stats.touched |= inner.touched
    counts = choice and decides
    stats.asked |= counts and inner.asked
    if judged and not judged_case(case, subject, decisive=inner.decisive if counts else 0):
        return
    if counts:
        stats.total, stats.decisive = stats.total + inner.total, stats.decisive + inner.decisive
        stats.plain_total += inner.plain_total
        stats.plain_decisive += inner.plain_decisive
        stats.ties += inner.ties
        stats.wrong += inner.wrong
    elif not choice and inner.bound_utilisation is not None:
        used = inner.bound_utilisation
        stats.bound_utilisation = max(used, stats.bound_utilisation or 0.0)
        largest(stats.worst, {str(case.dtype).removeprefix("torch."): used})
        largest(stats.shapes, dict.fromkeys(sizes_of(case), used))
    stats.elements += 0 if choice else inner.elements


def judged_case(case: Any, subject: str = "", *, decisive: int = 0) -> bool:
    """Record that a property's test judged the result of `subject` for a case, with the case's dtype, layout and sizes.

    Rounds of a test may draw a case again. It counts once, and the answer is False then. Cases that are made from given
    tensors, which their descriptions do not tell apart, are told apart by their order.
    """
    stats = _current.get()
    if stats is None:
        return True
    given = getattr(case, "content", "") == "given"
    key = f"{subject} {case!r}" + (f" {len(stats.judged)}" if given else "")
    if key in stats.judged:
        return False
    stats.judged[key] = JudgedCase(
        dtype_of(case), getattr(case, "layout", ""), getattr(case, "batch", 1), slots_of(case) or 0, decisive
    )
    stats.cases = (stats.cases or 0) + 1
    return True


def elements(count: int) -> None:
    """Record that ``count`` numbers were compared within a finite bound."""
    stats = _current.get()
    if stats is not None:
        stats.elements += int(count)


def launches(count: int = 1) -> None:
    """Record ``count`` calls whose results were compared bit by bit with those of earlier calls."""
    stats = _current.get()
    if stats is not None:
        stats.launches += int(count)


def case() -> None:
    """Record that a property's test judged a result of which `judged_case` does not know."""
    stats = _current.get()
    if stats is not None:
        stats.cases = (stats.cases or 0) + 1


def record_access() -> None:
    """Record that the running test accesses the implementation under test."""
    stats = _current.get()
    if stats is not None:
        stats.touched = True


def record_answer() -> None:
    """Record that a function under test returned."""
    stats = _current.get()
    if stats is not None:
        stats.answered += 1


def record_refusal(what: str) -> None:
    """Record that a function under test does not support an argument; ``what`` names both."""
    stats = _current.get()
    if stats is not None:
        stats.refused[what] += 1
