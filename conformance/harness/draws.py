"""How often a test draws: until it has decided enough.

A drawn case may leave every choice open: scores that lie within their bounds, equal scores, rows that masks decide. A
test that drew only such cases would accept any choice. So a test of drawn cases that has decided too little draws
again, and what it draws then are *plain* cases: float32, few slots, and of the contents that the test allows only those
that keep scores apart. The strategies ask `plain_only()` for that. A plain case decides nearly all of its choices, so a
few rounds are enough, whatever the seed. A test that has still not decided enough cannot decide: that is a fault of
its author, and it fails as vacuous.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from . import tally

MOST_ROUNDS = 16
#: Rounds without any decision after which masks are taken to decide all that the test draws.
IDLE_ROUNDS = 3
#: The most slots of a plain case.
PLAIN_SLOTS = 48

_round: ContextVar[int] = ContextVar("kvtwin_round", default=0)


def plain_only() -> bool:
    """True while a test that has decided too little draws again. It never changes while Hypothesis runs a test."""
    return tally.in_plain_round()


def plain_among(options: Sequence[Any], plain: Sequence[Any]) -> Sequence[Any]:
    """What to draw from: `options`, or, in a round of plain cases, those of them that are in `plain`, if any are."""
    if not plain_only():
        return options
    return [option for option in options if option in plain] or options


def draws(test: Any) -> bool:
    """True if Hypothesis draws the test's cases: ``@given``, or a state machine that the test runs."""
    from hypothesis import is_hypothesis_test

    return is_hypothesis_test(test) or run_machine.__name__ in getattr(getattr(test, "__code__", None), "co_names", ())


def run_machine(machine: type, /, settings: Any) -> None:
    """Run a Hypothesis state machine as a test does that lets `until_decided` call it again.

    A round of plain cases runs it longer, so that more tokens arrive than there is room for.
    """
    from hypothesis import seed
    from hypothesis import settings as settings_of
    from hypothesis.stateful import run_state_machine_as_test

    if plain_only():
        machine = seed(_round.get())(type(machine.__name__, (machine,), {}))
        settings = settings_of(settings, stateful_step_count=2 * settings.stateful_step_count)
    run_state_machine_as_test(machine, settings=settings)


def until_decided(test: Callable[..., Any], name: str, /, **arguments: Any) -> None:
    """Call a test, and call it again with plain cases for as long as it has decided too little.

    name: what the seeds of the further rounds depend on.
    """
    __tracebackhide__ = True
    from hypothesis.errors import Unsatisfiable

    test(**arguments)
    counted = tally.running()
    if counted is None or not counted.asked or not draws(test):
        return
    for number in range(MOST_ROUNDS):
        if counted.enough or (number >= IDLE_ROUNDS and not counted.plain_total):
            return
        try:
            with tally.plain_round(), _seeded(test, f"{name} {number}"):
                test(**arguments)
        except Unsatisfiable:
            return  # the implementation under test refuses every plain case


@contextmanager
def _seeded(test: Any, name: str) -> Iterator[None]:
    """Give Hypothesis a seed that depends on `name`, and on the seed of the run if there is one.

    Without it, a derandomized profile draws the same cases in every round.
    """
    from hypothesis import core

    attribute = "_hypothesis_internal_use_seed"  # what @hypothesis.seed sets
    original = getattr(test, attribute, None)
    digest = hashlib.sha256(f"{core.global_force_seed} {original} {name}".encode()).digest()
    number = int.from_bytes(digest[:8], "big")
    token = _round.set(number)
    if hasattr(test, attribute):
        setattr(test, attribute, number)
    try:
        yield
    finally:
        _round.reset(token)
        if hasattr(test, attribute):
            setattr(test, attribute, original)
