"""Judging one field of a result at a time, so that a wrong score does not hide a wrong choice, nor the other way round.

A comparator wraps the check of each field in `field`. Usually the first wrong field raises. Inside `only(name)` the
others are compared but neither raise nor count. Inside `apart()` none raises, and each counts for itself. A field that
the implementation does not return is `Missing`; its check is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, NoReturn

from .. import stats


@dataclass
class Apart:
    """What `apart` found, by field: the first error, and what was recorded."""

    errors: dict[str, AssertionError | MissingField] = dataclass_field(default_factory=dict)
    counted: dict[str, stats.Stats] = dataclass_field(default_factory=dict)


_only: ContextVar[str | None] = ContextVar("kvtwin_only", default=None)
_apart: ContextVar[Apart | None] = ContextVar("kvtwin_apart", default=None)


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


@contextmanager
def apart() -> Iterator[Apart]:
    """Judge every field inside the ``with`` block, as `only` would judge each of them."""
    found = Apart()
    token = _apart.set(found)
    try:
        yield found
    finally:
        _apart.reset(token)


@contextmanager
def field(name: str) -> Iterator[None]:
    """Wraps the check of one field of a result. An error gets the attribute `field`, the name."""
    found, judged = _apart.get(), _only.get()
    if found is not None:
        with stats.collect(found.counted.setdefault(name, stats.Stats())):
            try:
                yield
            except (AssertionError, MissingField) as error:
                _set_name(error, name)
                found.errors.setdefault(name, error)
        return
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
        _set_name(error, name)
        raise


def _set_name(error: BaseException, name: str) -> None:
    if getattr(error, "field", name) is None:  # a compare.Mismatch
        error.field = name  # type: ignore[attr-defined]
