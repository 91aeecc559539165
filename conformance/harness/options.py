"""The plugin's command-line options, and the files of ``--kv-skips`` and ``--kv-xfails``.

This module does not import torch, triton or hypothesis, since pytest loads it in every run of its environment.
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
# dest of every option -> its default
DEFAULTS = {
    "kv_impl": None,
    "kv_device": None,
    "kv_report": None,
    "kv_skips": None,
    "kv_xfails": None,
    "kv_update_golden": False,
    "kv_methods": None,
    "kv_properties": False,
    "kv_required": None,
}


class UnmatchedEntryWarning(pytest.PytestWarning):
    """An entry of a ``--kv-skips`` or ``--kv-xfails`` file matches no collected test."""


def add(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvtwin", "kvtwin: KV-cache methods compared with float64")
    group.addoption(
        "--kv-impl",
        metavar="MODULE",
        help="test this module instead of kvtwin.optimized; its submodules or attributes have our methods' names",
    )
    group.addoption(
        "--kv-device",
        choices=DEVICES,
        help="device of the implementation: auto (default) uses CUDA if it is available; cpu uses Triton's "
        "interpreter; cuda is an error without a CUDA device",
    )
    group.addoption(
        "--kv-report",
        metavar="PATH",
        help="write a report: PATH.json writes JSON; PATH.html writes one self-contained page, and JSON beside it",
    )
    group.addoption(
        "--kv-skips",
        metavar="FILE",
        help="skip tests whose id contains a line of this file (# starts a comment)",
    )
    group.addoption(
        "--kv-xfails",
        metavar="FILE",
        help="expect tests whose id contains a line of this file to fail; a test that passes is a failure",
    )
    group.addoption(
        "--kv-update-golden",
        action="store_true",
        help="record the golden traces again (python -m kvtwin.fixtures.record) before running the tests",
    )
    # Set by python -m kvtwin.conformance --impl: run only the tests that judge a property.
    group.addoption("--kv-properties", action="store_true", help=argparse.SUPPRESS)
    # Set by python -m kvtwin.conformance --impl: the methods that must be covered, comma-separated.
    group.addoption("--kv-required", metavar="NAMES", help=argparse.SUPPRESS)
    # Set by python -m kvtwin.conformance: names, comma-separated.
    group.addoption("--kv-methods", metavar="NAMES", help=argparse.SUPPRESS)


def any_given(config: pytest.Config) -> bool:
    """True if the command line has one of our options."""
    return any(config.getoption(dest) != default for dest, default in DEFAULTS.items())


def check(config: pytest.Config) -> None:
    """Check options that are used only at the end of a run."""
    path = report_path(config)
    if path is not None and path.suffix not in (".html", ".json"):
        raise pytest.UsageError(f"--kv-report {path.name}: expected a name that ends in .html or .json")
    if path is not None and not path.parent.is_dir():
        raise pytest.UsageError(f"--kv-report {path}: the folder does not exist")


def report_path(config: pytest.Config) -> Path | None:
    """The path of ``--kv-report``, relative to the folder in which pytest was started."""
    return _path(config, "kv_report")


def _path(config: pytest.Config, dest: str) -> Path | None:
    given: str | None = config.getoption(dest)
    return None if given is None else config.invocation_params.dir / given


@dataclass(frozen=True)
class Entry:
    """One line of a skips or xfails file. It matches the tests whose ids contain ``text``."""

    text: str
    where: str

    def matches(self, nodeid: str) -> bool:
        return self.text in nodeid


def read_entries(config: pytest.Config, dest: str) -> list[Entry]:
    """The entries of option ``dest``'s file; none if the option is not given."""
    path = _path(config, dest)
    if path is None:
        return []
    option = "--" + dest.replace("_", "-")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise pytest.UsageError(f"{option}: cannot read {path}: {error}") from error
    # A comment starts at the beginning of a line or after a space; a "#" inside a test id is part of the id.
    lines = ((number, f" {line}".split(" #")[0].strip()) for number, line in enumerate(text.splitlines(), start=1))
    return [Entry(text=line, where=f"{option} {path.name}:{number}") for number, line in lines if line]


def methods(config: pytest.Config) -> frozenset[str] | None:
    """The methods whose tests run; None for all tests, including those of the suite itself."""
    names: str | None = config.getoption("kv_methods")
    return None if names is None else frozenset(names.split(","))


def required(config: pytest.Config) -> list[str]:
    """The methods that a verdict must cover."""
    names: str | None = config.getoption("kv_required")
    return [] if names is None else names.split(",")


def apply_entries(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Add skip and xfail markers to the tests that match an entry; warn about entries without a match."""
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
    except UnmatchedEntryWarning as error:  # if the user's filters turn warnings into errors
        raise pytest.UsageError(str(error)) from None
