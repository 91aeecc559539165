"""Repeating a drawn test until it has compared enough decisive decisions.

A drawn case may leave every choice open: scores within their bounds, equal scores, rows that masks settle. A test that
drew only such cases would accept any choice. So a drawn test with too few decisive decisions is called again, and then
the strategies draw *plain* cases: float32, few slots, and, of the contents that the test allows, only those whose
scores lie apart. The strategies call `plain_only()` to find out. Nearly all decisions of a plain case are decisive, so
a few rounds suffice whatever the seed. A test that still has too few fails as vacuous: its author must change it.

A test of a core property is called again for each declared dtype of which it has drawn no case, in that dtype alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from .. import stats
from . import supported

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

MOST_ROUNDS = 16
#: After this many rounds without another case, a test has no more; after as many plain rounds without any decision,
#: masks are assumed to settle every case that it draws.
IDLE_ROUNDS = 3
#: The most slots of a plain case.
PLAIN_SLOTS = 48

_round: ContextVar[int] = ContextVar("kvtwin_round", default=0)
_usual: ContextVar[bool] = ContextVar("kvtwin_usual", default=False)


def is_quick() -> bool:
    """True with the profile quick, whose run has to end in a few minutes. Tests that take long draw fewer cases then,
    or leave out combinations of parameters that each occur otherwise."""
    return _profile() == "quick"


def golden_steps() -> int:
    """How many steps of a golden trace the CPU replays. Tests ask, not their modules on import: a run inside of a test
    has another profile than the one around it."""
    return 24 if is_quick() else 48


def _profile() -> str:
    from hypothesis import settings

    return settings.get_current_profile_name()


def shares_kernels() -> bool:
    """True with the profile gpu, whose run has to end in eight minutes, although it compiles all its kernels. Then few
    options that have kernels of their own are drawn, and tests use sizes for which others compile the kernels too."""
    return _profile() == "gpu"


@contextmanager
def usual_shape() -> Iterator[None]:
    """With the profile gpu, what is drawn in this context has strategies.USUAL, if the implementation supports it."""
    token = _usual.set(True)
    try:
        yield
    finally:
        _usual.reset(token)


def in_usual_shape() -> bool:
    """True inside `usual_shape`."""
    return _usual.get()


def third_of_run(options: Sequence[Any]) -> list[Any]:
    """The options to draw from: with the profile gpu, a third of them (see `of_run`)."""
    return of_run(options, -(-len(options) // 3))


def of_run(options: Sequence[Any], count: int) -> list[Any]:
    """The options to draw from. With the profile gpu, `count` of them: others in a run with another seed, and the same
    ones in all tests and processes of a run, so that they share the kernels that are compiled for an option.

    A run without --hypothesis-seed goes by its id of pytest-xdist, and without either by its process.
    """
    if not shares_kernels():
        return list(options)
    chosen = sorted(options, key=_of_run)[:count]
    return [option for option in options if option in chosen]


def _of_run(what: Any) -> bytes:
    """A random number for this run and `what`."""
    from hypothesis import core

    seed = core.global_force_seed
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid()) if seed is None else seed
    return hashlib.sha256(f"{run} {what}".encode()).digest()


def at_least(examples: int) -> int:
    """The least number of examples of a test that draws only a share of the profile's number: `examples`, with the
    profile quick no more than the profile's."""
    from hypothesis import settings

    return min(examples, settings().max_examples) if is_quick() else examples


def plain_only() -> bool:
    """True in a plain round. The answer never changes while Hypothesis runs a test."""
    return stats.in_plain_round()


def plain_among(options: Sequence[Any], plain: Sequence[Any]) -> Sequence[Any]:
    """The options to draw from: all of them, or, in a plain round, those that are in `plain`, if there are any."""
    if not plain_only():
        return options
    return [option for option in options if option in plain] or options


def budgets(most: int) -> SearchStrategy[int]:
    """Budgets up to `most`; in a plain round large enough that `protected` leaves tokens to choose from."""
    from hypothesis import strategies as st

    return st.integers(min(4, most) if plain_only() else 1, most)


def protected(budget: int, most: int | None = None, least: int = 1) -> SearchStrategy[int]:
    """Numbers of the budget's tokens that a config protects, such as a window, from `least` to `most`: by default all
    of them, in a plain round at most half."""
    from hypothesis import strategies as st

    half = st.integers(least, max(least, min(budget // 2, budget if most is None else most)))
    return half if plain_only() else half | st.integers(least, budget if most is None else most)


def is_drawn(test: Any) -> bool:
    """True if Hypothesis draws the test's cases: the test has ``@given``, or calls `run_machine`."""
    from hypothesis import is_hypothesis_test

    return is_hypothesis_test(test) or run_machine.__name__ in getattr(getattr(test, "__code__", None), "co_names", ())


def run_machine(machine: type, /, settings: Any) -> None:
    """Run a Hypothesis state machine inside a test that `until_decided` may call again.

    In a plain round it takes twice as many steps, so that more tokens arrive than the budget allows.
    """
    from hypothesis import seed
    from hypothesis import settings as settings_of
    from hypothesis.stateful import run_state_machine_as_test

    if plain_only():
        machine = seed(_round.get())(type(machine.__name__, (machine,), {}))
        settings = settings_of(settings, stateful_step_count=2 * settings.stateful_step_count)
    run_state_machine_as_test(machine, settings=settings)


def until_decided(
    test: Callable[..., Any], name: str, least_cases: int = 0, least_decisions: int = 0, dtypes: Sequence[str] = (), /,
    **arguments: Any,
) -> None:
    """Call a test, then call it again until it has judged enough cases, in plain rounds until enough of its decisions
    were decisive, and until it has judged cases of each dtype.

    name: seeds the further rounds. least_cases, least_decisions, dtypes: what a verdict needs of a property's test, 0
    or none of other tests.
    """
    __tracebackhide__ = True
    from hypothesis.errors import Unsatisfiable

    counted = stats.current()
    if counted is None or not is_drawn(test):
        test(**arguments)
        return
    refusal = None
    try:
        test(**arguments)
    except Unsatisfiable as error:
        refusal = error  # of every case; those of the rarer dtypes may not have been among them
    with suppress(Unsatisfiable):  # the implementation under test refuses every further case
        if refusal is None:
            _draw_enough(test, name, least_cases, least_decisions, arguments)
    before = len(counted.judged)
    if before or refusal is not None:  # otherwise the test does not say which cases it judged
        _draw_each_dtype(test, name, dtypes, arguments)
    if refusal is not None and len(counted.judged) == before:
        raise refusal


def _draw_enough(
    test: Callable[..., Any], name: str, least_cases: int, least_decisions: int, arguments: dict[str, Any]
) -> None:
    """The rounds until enough cases are judged, and enough decisions decided."""
    __tracebackhide__ = True
    counted = stats.current()
    assert counted is not None
    idle = 0  # rounds without another case: a test may have a single one
    for number in range(MOST_ROUNDS):
        before = counted.cases or 0
        if not 0 < before < least_cases or idle == IDLE_ROUNDS:
            break
        with _seeded(test, f"{name} again {number}"), _examples(test, lambda usual: max(2, usual)):
            test(**arguments)
        idle = 0 if (counted.cases or 0) > before else idle + 1
    for number in range(MOST_ROUNDS if counted.asked else 0):
        decided = counted.enough and counted.decisive >= least_decisions
        if decided or (number >= IDLE_ROUNDS and not counted.plain_total):
            return
        with stats.plain_round(), _seeded(test, f"{name} {number}"):
            test(**arguments)


def _draw_each_dtype(
    test: Callable[..., Any], name: str, dtypes: Sequence[str], arguments: dict[str, Any]
) -> None:
    """The rounds in which only one of the `dtypes` is drawn, for each in which too few cases were judged. One in which
    none can be is recorded with the refusal, or with "" if the test's cases do not have it.

    All fields of a function are judged in the same cases: their rounds have the same seed.
    """
    __tracebackhide__ = True
    import pytest
    from hypothesis.errors import Unsatisfiable

    counted = stats.current()
    assert counted is not None
    for dtype in dtypes if hasattr(test, SETTINGS) else ():
        before = counted.refused.copy()
        for number in range(MOST_ROUNDS):
            drawn = any(one.dtype == dtype for one in counted.judged.values())
            if counted.judged_in(dtype) >= least_of_dtype() or (number and not drawn):
                break
            plain = stats.plain_round() if counted.asked and number else nullcontext()
            seed = f"{name.split('[')[0]} {dtype} {number}"
            try:
                with supported.only_dtype(dtype), plain, _seeded(test, seed), _examples(
                    test, lambda usual: max(least_of_dtype(), usual // 3)  # since there are three dtypes
                ):
                    test(**arguments)
            except (Unsatisfiable, pytest.skip.Exception):
                break
        if not counted.judged_in(dtype):
            refused = counted.refused - before
            counted.lacking[dtype] = refused.most_common(1)[0][0] if refused else ""


#: The attribute of a drawn test that holds Hypothesis's settings of it.
SETTINGS = "_hypothesis_internal_use_settings"


def least_of_dtype() -> int:
    """The least number of cases that a test judges in each dtype. The first one that is drawn is always the simplest,
    which says little."""
    return 1 if is_quick() else 2


@contextmanager
def _examples(test: Any, count: Callable[[int], int]) -> Iterator[None]:
    """Let a test draw another number of examples, a function of the usual one. A single example is the simplest one."""
    from hypothesis import settings

    original = getattr(test, SETTINGS, None)
    if original is None:
        yield
        return
    setattr(test, SETTINGS, settings(original, max_examples=count(original.max_examples)))
    try:
        yield
    finally:
        setattr(test, SETTINGS, original)


@contextmanager
def _seeded(test: Any, name: str) -> Iterator[None]:
    """Set Hypothesis's seed from `name`, and from the seed of the run if there is one.

    Without this, a derandomized profile draws the same cases in every round.
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
