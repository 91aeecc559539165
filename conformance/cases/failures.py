"""Saving the case of a failing test as a safetensors file, for ``kvtwin replay FILE``.

Files go to the folder that KVTWIN_FAILURES names (default: `kvtwin-failures` in the current folder), one per test:
while Hypothesis shrinks, each failing example overwrites the last one, so the smallest remains.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from . import case as cases

FOLDER = "KVTWIN_FAILURES"

#: What the command adds to name the implementation under test and the device, and the last command of each test.
_options: list[str] = []
_commands: dict[str, str] = {}


_saving: ContextVar[bool] = ContextVar("kvtwin_saving", default=True)
_judging: ContextVar[str | None] = ContextVar("kvtwin_judging", default=None)


@contextmanager
def judging(subject: str | None) -> Iterator[None]:
    """Name the judged function or state in the cases that are saved inside the ``with`` block."""
    token = _judging.set(subject)
    try:
        yield
    finally:
        _judging.reset(token)


@contextmanager
def not_saved() -> Iterator[None]:
    """Save no case inside the ``with`` block: the saved case of the running test stays."""
    token = _saving.set(False)
    try:
        yield
    finally:
        _saving.reset(token)


def replay_with(implementation: str, device: str) -> None:
    """Name the implementation under test in saved cases, and it and its device in the commands that replay them."""
    _options[:] = ["--impl", implementation, "--device", device]


def options() -> list[str]:
    """The options that name the implementation under test and its device."""
    return [*_options]


def last_command() -> str | None:
    """The command that replays the saved case of the running test; None if none was saved."""
    test = cases.running_test()
    return None if test is None else _commands.get(test)


def save_latest() -> str | None:
    """Save the case that the running test used last; returns the command that replays it, None if there is no case.

    Outside of a test nothing is saved: the caller of a script has the case itself.
    """
    case, test = cases.latest(), cases.running_test()
    if case is None or test is None or not _saving.get():
        return None
    return save(case, test, _judging.get())


def folder() -> Path:
    """Where cases are saved."""
    return Path(os.environ.get(FOLDER, "kvtwin-failures"))


def save(case: cases.Case, test: str, subject: str | None) -> str:
    """Save a case of a test. Returns the command that replays it, or why it was not saved."""
    name = re.sub(r"[^\w.=-]+", "_", test.rsplit("/", 1)[-1])
    try:
        folder().mkdir(parents=True, exist_ok=True)
        path, implementation = folder() / f"{name[:150]}.safetensors", _options[1] if _options else None
        command = " ".join([case.save(path, subject, implementation), *_options])
        _commands.clear()
        _commands[test] = command
        return command
    # A read-only folder must not hide the failure itself, nor a GPU that no longer answers, nor a case without tensors.
    except Exception as error:
        return f"(not saved: {error})"
