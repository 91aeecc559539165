"""The plugin's command line, and the files that ``--kv-skips`` and ``--kv-xfails`` name.

Nothing here imports torch, triton or hypothesis: an installed plugin is loaded by every pytest run of its environment.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

SUITE = "kvtwin-suite"  # the name under which plugin.py registers suite.Suite
DEVICES = ("auto", "cpu", "cuda")
# dest of every option and the value that it has when nobody gave it
DEFAULTS = {
    "kv_impl": None,
    "kv_device": None,
    "kv_report": None,
    "kv_skips": None,
    "kv_xfails": None,
    "kv_update_golden": False,
    "kv_methods": None,
}


class UnmatchedEntryWarning(pytest.PytestWarning):
    """An entry of a ``--kv-skips`` or ``--kv-xfails`` file that matches no collected test."""


def add(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvtwin", "kvtwin: KV-cache methods against float64 arithmetic")
    group.addoption(
        "--kv-impl",
        metavar="MODULE",
        help="test this module instead of kvtwin.optimized; it has modules, or attributes, with our methods' names",
    )
    group.addoption(
        "--kv-device",
        choices=DEVICES,
        help="where the implementation runs: auto (the default) takes CUDA if there is one; cpu runs Triton's "
        "interpreter; cuda without CUDA is an error",
    )
    group.addoption(
        "--kv-report",
        metavar="PATH",
        help="write the results: PATH.json gets JSON; PATH.html gets one self-contained page, with JSON beside it",
    )
    group.addoption(
        "--kv-skips",
        metavar="FILE",
        help="skip the tests whose id contains one of this file's lines (# starts a comment)",
    )
    group.addoption(
        "--kv-xfails",
        metavar="FILE",
        help="expect the tests whose id contains one of this file's lines to fail; one that passes is a failure",
    )
    group.addoption(
        "--kv-update-golden",
        action="store_true",
        help="record the golden traces again (python -m kvtwin.fixtures.record) before the tests run",
    )
    group.addoption("--kv-methods", metavar="NAMES", help=argparse.SUPPRESS)  # the main job's: names, comma-separated


def any_given(config: pytest.Config) -> bool:
    """True if the command line holds one of our options."""
    return any(config.getoption(dest) != default for dest, default in DEFAULTS.items())


def check(config: pytest.Config) -> None:
    """Refuse, before anything runs, what could only fail at the end."""
    path = report_path(config)
    if path is not None and path.suffix not in (".html", ".json"):
        raise pytest.UsageError(f"--kv-report {path.name}: the name must end in .html or .json")
    if path is not None and not path.parent.is_dir():
        raise pytest.UsageError(f"--kv-report {path}: there is no such folder")


def report_path(config: pytest.Config) -> Path | None:
    """Where ``--kv-report`` goes; relative to where pytest was started, whatever has changed the folder since."""
    return _path(config, "kv_report")


def _path(config: pytest.Config, dest: str) -> Path | None:
    given: str | None = config.getoption(dest)
    return None if given is None else config.invocation_params.dir / given


@dataclass(frozen=True)
class Entry:
    """One line of a skips or xfails file: ``text`` is looked for in the ids of the tests."""

    text: str
    where: str

    def matches(self, nodeid: str) -> bool:
        return self.text in nodeid


def read_entries(config: pytest.Config, dest: str) -> list[Entry]:
    """The entries of the file that option ``dest`` names, none if it is not given."""
    path = _path(config, dest)
    if path is None:
        return []
    option = "--" + dest.replace("_", "-")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise pytest.UsageError(f"{option}: cannot read {path}: {error}") from error
    # A comment starts a line or follows a space: a "#" inside a test id belongs to it.
    lines = ((number, f" {line}".split(" #")[0].strip()) for number, line in enumerate(text.splitlines(), start=1))
    return [Entry(text=line, where=f"{option} {path.name}:{number}") for number, line in lines if line]


def methods(config: pytest.Config) -> frozenset[str] | None:
    """The methods whose tests are wanted, None for all tests, those of the suite itself too."""
    names: str | None = config.getoption("kv_methods")
    return None if names is None else frozenset(names.split(","))


def apply_entries(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Mark the tests that the two files name; warn of entries that name none."""
    items = list(items)
    skips, xfails = read_entries(config, "kv_skips"), read_entries(config, "kv_xfails")
    used: set[Entry] = set()
    for item in items:
        for entry in skips:
            if entry.matches(item.nodeid):
                used.add(entry)
                item.add_marker(pytest.mark.skip(reason=entry.where))
        for entry in xfails:
            if entry.matches(item.nodeid):
                used.add(entry)
                item.add_marker(pytest.mark.xfail(reason=entry.where, strict=True))
    for entry in skips + xfails:
        if entry not in used:
            _warn(f"{entry.where}: {entry.text!r} matches no test")


def _warn(message: str) -> None:
    try:
        warnings.warn(UnmatchedEntryWarning(message), stacklevel=2)
    except UnmatchedEntryWarning as error:  # the user's filters turn warnings into errors
        raise pytest.UsageError(str(error)) from None
