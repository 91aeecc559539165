"""Judging one field of a result at a time, so that a wrong score does not hide a wrong choice, nor the other way round.

A comparator wraps the check of each field in `field`. Usually the first wrong field raises. Inside `only(name)` the
others are compared but neither raise nor count. A field that the implementation does not return is `Missing`; its check
is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

from . import stats

_only: ContextVar[str | None] = ContextVar("kvtwin_only", default=None)


class MissingField(Exception):
    """A test uses a field that the implementation under test does not return."""


class Missing:
    """In place of a field that the implementation under test does not return. Any use raises MissingField."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _raise(self) -> NoReturn:
        raise MissingField(self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._raise()

    def __getitem__(self, index: Any) -> Any:
        self._raise()

    def __iter__(self) -> Iterator[Any]:
        self._raise()

    def __repr__(self) -> str:
        return f"<missing: {self._name}>"


@contextmanager
def only(name: str) -> Iterator[None]:
    """Judge this field alone inside the ``with`` block."""
    token = _only.set(name)
    try:
        yield
    finally:
        _only.reset(token)


def wanted() -> str | None:
    """The field of `only`; None outside of it: all."""
    return _only.get()


@contextmanager
def field(name: str) -> Iterator[None]:
    """Wraps the check of one field of a result. An error gets the attribute `field`, the name."""
    judged = _only.get()
    if judged not in (None, name):
        with stats.collect():  # what another field records does not count
            try:
                yield
            except (AssertionError, MissingField):
                return
        return
    try:
        yield
    except MissingField as error:
        if judged is not None:
            raise
        stats.missing(str(error))
    except AssertionError as error:
        if getattr(error, "field", name) is None:  # a compare.Mismatch
            error.field = name  # type: ignore[attr-defined]
        raise
