"""What the comparators tell about the running test: decisions, bound utilisation, adjudicated ties.

The plugin opens a tally around each test and reads it when the test has passed; outside of a pytest run the calls do
nothing. Hypothesis calls a test many times, so everything adds up over all its examples (the maximum, for utilisation).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

# A test whose decisions are mostly left open by the bounds would accept wrong ones: it has tested nothing.
LEAST_DECISIVE_SHARE = 0.5
# Or it has seen this many that were not open, among cases drawn so that most are not (draws.py). A wrong choice that is
# right by chance every second time passes so many decisions once in 65,536 runs.
LEAST_PLAIN_DECISIONS = 16


@dataclass
class Tally:
    """The sums of one test. ``bound_utilisation`` is the largest error seen, as a fraction of its bound."""

    total: int = 0
    decisive: int = 0
    # The part of both that came from plain cases (draws.py).
    plain_total: int = 0
    plain_decisive: int = 0
    asked: bool = False  # a comparator of decisions was called, even if masks decided everything
    bound_utilisation: float | None = None
    ties: int = 0
    # With --kv-impl only: the test took something from the implementation under test; calls of its functions that
    # returned; and those that it refused, by function and argument.
    touched: bool = False
    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def enough(self) -> bool:
        """True if decisions were compared and enough of them had one right answer only."""
        if self.total and self.decisive >= LEAST_DECISIVE_SHARE * self.total:
            return True
        return self.plain_decisive >= max(LEAST_PLAIN_DECISIONS, LEAST_DECISIVE_SHARE * self.plain_total)

    @property
    def vacuous(self) -> bool:
        """True if decisions were compared and too few of them could have been wrong."""
        return self.total > 0 and not self.enough


_running: ContextVar[Tally | None] = ContextVar("kvtwin_tally", default=None)
_plain: ContextVar[bool] = ContextVar("kvtwin_plain", default=False)


@contextmanager
def opened() -> Iterator[Tally]:
    """Collect what is reported inside the ``with`` block."""
    tally = Tally()
    token = _running.set(tally)
    try:
        yield tally
    finally:
        _running.reset(token)


def running() -> Tally | None:
    """The tally of the running test."""
    return _running.get()


@contextmanager
def plain_round() -> Iterator[None]:
    """Inside of the ``with`` block only plain cases are drawn (draws.py); their decisions are also counted apart."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def in_plain_round() -> bool:
    """True inside of `plain_round`."""
    return _plain.get()


def decisions(total: int, decisive: int) -> None:
    """Report ``total`` kept/evicted decisions compared, of which ``decisive`` had one right answer only."""
    if not 0 <= decisive <= total:
        raise ValueError(f"decisive must lie in 0..total, got {decisive} of {total}")
    tally = _running.get()
    if tally is not None:
        tally.asked = True
        tally.total += int(total)
        tally.decisive += int(decisive)
        if _plain.get():
            tally.plain_total += int(total)
            tally.plain_decisive += int(decisive)


def utilisation(fraction: float) -> None:
    """Report an error as a fraction of its bound; the largest of a test is kept."""
    tally = _running.get()
    if tally is not None:
        # NaN compares false with everything: as infinity it cannot hide.
        fraction = math.inf if math.isnan(fraction) else float(fraction)
        tally.bound_utilisation = max(fraction, tally.bound_utilisation or 0.0)


def adjudicated(count: int) -> None:
    """Report ``count`` choices that differed within the bounds and that the reference adopted."""
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    tally = _running.get()
    if tally is not None:
        tally.ties += int(count)


def touched() -> None:
    """Report that the running test takes something from the implementation under test."""
    tally = _running.get()
    if tally is not None:
        tally.touched = True


def answered() -> None:
    """Report that a function under test returned."""
    tally = _running.get()
    if tally is not None:
        tally.answered += 1


def refused(what: str) -> None:
    """Report that a function under test does not take an argument; ``what`` names both."""
    tally = _running.get()
    if tally is not None:
        tally.refused[what] += 1
