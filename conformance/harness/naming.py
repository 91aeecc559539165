"""How messages call the option that names the implementation under test: as the user has typed it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

#: The option that names the implementation, as the user has typed it: set by commands.
_impl = ["--kv-impl"]


@contextmanager
def typed(option: str) -> Iterator[None]:
    """Inside the ``with`` block messages call the option for the implementation so."""
    _impl.append(option)
    try:
        yield
    finally:
        _impl.pop()


def impl() -> str:
    """The option that names the implementation under test."""
    return _impl[-1]


def hint() -> str:
    """" (a module of this folder needs ...)", where that helps: a command looks into the current folder by itself."""
    return " (a module of this folder needs 'python -m pytest')" if len(_impl) == 1 else ""
