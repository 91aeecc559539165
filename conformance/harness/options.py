"""The plugin's command-line options, and the files of ``--kv-skips`` and ``--kv-xfails``.

This module does not import torch, triton or hypothesis, since pytest loads it in every run of its environment.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from . import naming

SUITE = "kvtwin-suite"  # the name under which plugin.py registers suite.Suite
DEVICES = ("auto", "cpu", "cuda")
# dest of every option -> its default
DEFAULTS = {
    "kv_impl": None,
    "kv_device": None,
    "kv_report": None,
    "kv_sarif": None,
    "kv_skips": None,
    "kv_xfails": None,
    "kv_update_golden": False,
    "kv_methods": None,
    "kv_properties": False,
    "kv_required": None,
}


#: How many entries that match no test are named, and how many characters of each.
MOST_WARNINGS, MOST_TEXT = 5, 200


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
        "--kv-sarif", metavar="FILE",
        help="write what is wrong, and where, as SARIF 2.1.0, which code scanners read; FILE ends in .sarif",
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
    """Check options that are used only when tests are collected, or at the end of a run. Raises pytest.UsageError."""
    for dest in ("kv_skips", "kv_xfails"):
        read_entries(config, dest)
    for dest, suffixes in (("kv_report", (".html", ".json")), ("kv_sarif", (".sarif",))):
        given, path, option = config.getoption(dest), _path(config, dest), naming.option("--" + dest.replace("_", "-"))
        if path is None:
            continue
        if path.suffix not in suffixes:
            raise pytest.UsageError(
                f"{option} {given or repr(given)}: expected a name that ends in {' or '.join(suffixes)}"
            )
        if not path.parent.is_dir():
            raise pytest.UsageError(f"{option} {given}: the folder {path.parent} does not exist")
        for file in {path, path.with_suffix(suffixes[-1])}:
            _check_writable(file, f"{option} {given}")


def _check_writable(file: Path, said: str) -> None:
    """UsageError if a file cannot be written. An existing file stays as it is."""
    existed = file.exists()
    try:
        with file.open("ab"):
            pass
    except OSError as error:
        raise pytest.UsageError(f"{said}: cannot write {file}: {error.strerror}") from None
    if not existed:
        file.unlink()


def report_path(config: pytest.Config) -> Path | None:
    """The path of ``--kv-report``, relative to the folder in which pytest was started."""
    return _path(config, "kv_report")


def sarif_path(config: pytest.Config) -> Path | None:
    """The path of ``--kv-sarif``, likewise."""
    return _path(config, "kv_sarif")


def _path(config: pytest.Config, dest: str) -> Path | None:
    given: str | None = config.getoption(dest)
    return None if given is None else config.invocation_params.dir / given


@dataclass(frozen=True)
class Entry:
    """One line of a skips or xfails file. It matches the tests whose ids contain ``text``."""

    text: str
    where: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text if len(self.text) <= MOST_TEXT else self.text[:MOST_TEXT] + '...'!r}"


class Entries:
    """Entries, to be found by the ids of tests that contain their texts. A file may have millions."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._by_length: dict[int, dict[str, list[Entry]]] = {}
        for entry in entries:
            self._by_length.setdefault(len(entry.text), {}).setdefault(entry.text, []).append(entry)

    def matching(self, nodeid: str) -> Iterator[Entry]:
        for length, entries in self._by_length.items():
            parts: Iterable[str] = (nodeid[start:start + length] for start in range(len(nodeid) - length + 1))
            if len(entries) < len(nodeid):
                parts = (text for text in entries if text in nodeid)
            for part in dict.fromkeys(parts):
                yield from entries.get(part, ())


def read_entries(config: pytest.Config, dest: str) -> list[Entry]:
    """The entries of option ``dest``'s file; none if the option is not given."""
    path = _path(config, dest)
    if path is None:
        return []
    option = naming.option("--" + dest.replace("_", "-"))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise pytest.UsageError(f"{option}: cannot read {config.getoption(dest) or path}: {why}") from error
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
    skips, xfails = read_entries(config, "kv_skips"), read_entries(config, "kv_xfails")
    to_skip, to_fail = Entries(skips), Entries(xfails)
    used: set[Entry] = set()
    for item in items:
        for entry in to_skip.matching(item.nodeid):
            used.add(entry)
            item.add_marker(pytest.mark.skip(reason=entry.where))
        for entry in to_fail.matching(item.nodeid):
            used.add(entry)
            item.add_marker(pytest.mark.xfail(reason=entry.where, strict=True))
    unmatched = [entry for entry in skips + xfails if entry not in used]
    for entry in unmatched[:MOST_WARNINGS]:
        _warn(f"{entry} matches no test")
    if len(unmatched) > MOST_WARNINGS:
        _warn(f"{len(unmatched) - MOST_WARNINGS:,} more entries match no test, the last is {unmatched[-1]}")


def _warn(message: str) -> None:
    try:
        warnings.warn(UnmatchedEntryWarning(message), stacklevel=2)
    except UnmatchedEntryWarning as error:  # if the user's filters turn warnings into errors
        raise pytest.UsageError(str(error)) from None
