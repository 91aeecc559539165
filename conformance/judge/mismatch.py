"""The errors of the judge, and the functions that raise them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ..cases import failures

#: Raises the error for wrong choices: `fail` for the side under test, `fail_oracle` for the oracle.
Fail = Callable[..., NoReturn]


class Mismatch(AssertionError):
    """The implementation under test is wrong. The message says where, by how much, and how to replay it.

    field: the name of the wrong field of a result (`fields.field`), None if the error is not about one. of_bound: the
    largest error as a fraction of its bound, None if the error is not about a number. wrong: the number of wrong
    choices, if it is about choices. of_state: a state holds something
    else than it should, although its choices were right.
    """

    field: str | None = None
    of_bound: float | None = None
    wrong: int = 1
    of_state: bool = False


class WrongTie(Mismatch):
    """The implementation breaks the rule for equal tokens, and nothing else."""


class JudgeError(Exception):
    """The judge contradicts itself: the truth is wrong by its own bounds, or a bound is not a number."""


def fail(
    message: str, kind: type[Mismatch] = Mismatch, *, of_bound: float | None = None, wrong: int = 1
) -> NoReturn:
    """Raise a Mismatch; save the case that the test used last, and add the command that replays it."""
    command = failures.save_latest()
    error = kind(message if command is None else f"{message}\n  replay: {command}")
    error.of_bound, error.wrong = of_bound, wrong
    raise error


def fail_tie(message: str, raises: Fail, *, wrong: int = 1) -> NoReturn:
    """Raise WrongTie in place of what `fail` raises; what `fail_oracle` raises for the oracle."""
    if raises is fail:
        fail(message, WrongTie, wrong=wrong)
    raises(message)


def fail_oracle(message: str, *, wrong: int = 1) -> NoReturn:
    """Raise JudgeError: the oracle's own choice is wrong by the judge's bounds."""
    raise JudgeError(f"the judge contradicts itself: {message}")
