"""The errors of the judge, and the functions that raise them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn

from torch import Tensor

from .. import stats
from ..cases import failures

#: Raises the error for wrong choices: `fail` for the side under test, `fail_oracle` for the oracle.
Fail = Callable[..., NoReturn]


#: Why an error is no finite multiple of its bound: the result is no number, it is infinite, or its bound is 0.
UNBOUNDED = ("NaN", "infinity", "not exact")


class Mismatch(AssertionError):
    """The implementation under test is wrong. The message says where, by how much, and how to replay it.

    field: the name of the wrong field of a result (`fields.field`), None if the error is not about one. of_bound: the
    largest error as a fraction of its bound, None if the error is not about a number; unbounded: if it is infinite, the
    reason (UNBOUNDED). wrong: the number of wrong choices, if it is about choices. of_state: a state holds something
    else than it should, although its choices were right.
    """

    field: str | None = None
    of_bound: float | None = None
    unbounded: str | None = None
    wrong: int = 1
    of_state: bool = False


class WrongTie(Mismatch):
    """The implementation breaks the rule for equal tokens, and nothing else."""


class JudgeError(Exception):
    """The judge contradicts itself: the truth is wrong by its own bounds, or a bound is not a number."""


_place: ContextVar[str | None] = ContextVar("kvtwin_place", default=None)


@contextmanager
def in_place(place: str) -> Iterator[None]:
    """Name the part of a result that is judged in the messages of errors inside the ``with`` block."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def fail(
    message: str, kind: type[Mismatch] = Mismatch, *, of_bound: float | None = None, unbounded: str | None = None,
    wrong: int = 1,
) -> NoReturn:
    """Raise a Mismatch; save the case that the test used last, and add the command that replays it."""
    command, place = failures.save_latest(), _place.get()
    message = message if place is None else f"{message}\n  in {place}"
    error = kind(message if command is None else f"{message}\n  replay: {command}")
    error.of_bound, error.unbounded, error.wrong = of_bound, unbounded, wrong
    raise error


_counted: ContextVar[list[str] | None] = ContextVar("kvtwin_counted", default=None)


@contextmanager
def counting() -> Iterator[list[str]]:
    """Inside the ``with`` block, a choice that no scores within their bounds lead to raises nothing, if it is one of
    the tokens that were there, and as many as must be chosen. `stats.wrong` counts it, and the list gets its message,
    once for each choice. So the rest of a trace can be judged, from what the implementation under test chose."""
    messages: list[str] = []
    token = _counted.set(messages)
    try:
        yield messages
    finally:
        _counted.reset(token)


def is_counting(raises: Fail) -> bool:
    """True inside `counting`, of choices of the side under test."""
    return raises is fail and _counted.get() is not None


def fail_choice(message: str, raises: Fail, count: int = 1) -> None:
    """Raise the error for wrong choices, or count them."""
    messages = _counted.get()
    if messages is None or raises is not fail:
        raises(message, wrong=count)
    if not messages and not stats.is_following():
        failures.save_latest()
    messages += [message] * count
    stats.wrong(count)


def message_of(explain: Callable[[Fail], NoReturn]) -> str:
    """What `explain` says, which raises its error with the function that it gets."""
    def say(message: str, **_: int) -> NoReturn:
        raise Mismatch(message)

    try:
        explain(say)
    except Mismatch as error:
        return str(error)


def fail_tie(message: str, raises: Fail, *, wrong: int = 1) -> NoReturn:
    """Raise WrongTie in place of what `fail` raises; what `fail_oracle` raises for the oracle."""
    if raises is fail:
        fail(message, WrongTie, wrong=wrong)
    raises(message)


def fail_oracle(message: str, *, wrong: int = 1) -> NoReturn:
    """Raise JudgeError: the oracle's own choice is wrong by the judge's bounds."""
    raise JudgeError(f"the judge contradicts itself: {message}")


def first(mask: Tensor) -> tuple[int, ...]:
    """The index of the first True."""
    return tuple(mask.nonzero()[0].tolist())


def unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index in `shape` of an element by its number."""
    place = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        place.append(at)
    return tuple(reversed(place))
