"""Following a recorded trace to its end: the decisions of a state on the tokens of a trained model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .. import stats
from ..cases import case as cases
from . import fields, mismatch
from .fields import MissingField


@contextmanager
def follow() -> Iterator[list[str]]:
    """Judge a state in lockstep over a recorded trace inside the ``with`` block, and go on after wrong choices.

    The reference adopts a wrong choice, as it adopts a legal one, so that the following choices can be judged, and the
    wrong ones counted (`mismatch.counting`). Errors of outputs and scores do not end the trace either, and are recorded
    by step (`stats.following`). At the end of the block the first error is raised: that of a choice, if there is one.
    Yields the messages of wrong choices.
    """
    with mismatch.counting() as wrong, fields.apart() as found, stats.following():
        try:
            yield wrong
        finally:
            counted = stats.current()
            for one in found.counted.values() if counted is not None else ():
                counted.add(one)  # type: ignore[union-attr]
    if wrong or found.errors:
        cases.forget()  # a case that the checks of the prompt made is not what is wrong
    if wrong:
        mismatch.fail(f"{len(wrong)} choices are wrong; the first: {wrong[0]}")
    for error in found.errors.values():
        if not isinstance(error, MissingField):
            raise error
        stats.missing(str(error))
