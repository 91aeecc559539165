"""How messages call options: as the user has typed them."""

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


def option(name: str) -> str:
    """An option of pytest, such as "--kv-report": "--report" inside of a command."""
    return name if len(_impl) == 1 else name.replace("--kv-", "--")


def hint() -> str:
    """" (a module of this folder needs ...)", where that helps: a command looks into the current folder by itself."""
    return " (a module of this folder needs 'python -m pytest')" if len(_impl) == 1 else ""
