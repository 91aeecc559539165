"""What a call of the implementation under test must not do to look right: the property `fair_play`.

A call computes its result from its arguments. It is *wrong* if it

- calls functions or states of kvtwin.reference, or of kvtwin's judge (what it calls of kvtwin.optimized is noted);
- replaces functions that judge (replaced.py), or does so when it is imported;
- looks at the call stack, at other objects, or at the variables and the command line of a test (process_watch.py), or
  writes to kvtwin's files;
- raises what pytest, Hypothesis or kvtwin raise to skip a test or to drop an example;
- returns tensors whose operations are code of its own (returned.py).

Of the calls with a case, the first CLOSELY and then one in SELDOM are watched closely, so that launches still follow
each other fast. kvtwin's own modules may use kvtwin. This is no sandbox: code that is made to deceive can undo it.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from .. import stats
from ..judge.properties import FAIR_PLAY
from . import survival
from .process_watch import Watch, root_of
from .replaced import Places

#: The packages whose modules may use kvtwin.
OWN: tuple[str, ...] = ("kvtwin",)
FOLDER = str(Path(__file__).resolve().parents[1])
SIDES = ("reference", "optimized")
#: Of the repository or of the installed package: the folders of its parts, as pyproject.toml maps them.
PARTS = {
    part: os.path.join(os.path.dirname(FOLDER), part) + os.sep for part in SIDES
} | {
    "judge": os.path.join(FOLDER, "judge") + os.sep,
    "oracle": os.path.join(FOLDER, "cases", "oracle.py"),
    "format oracle": os.path.join(FOLDER, "cases", "format_oracle.py"),
}
HARNESS = os.path.join(FOLDER, "harness") + os.sep
#: Parts of the reference that everybody may use: types, checks of arguments, results.
FOR_ALL = (PARTS["reference"] + "contract" + os.sep, PARTS["reference"] + "pages.py")
CLOSELY, SELDOM = 8, 16
#: What decides about a test instead of an answer, and the packages of other errors that do.
OUTCOMES: Any = (pytest.skip.Exception, pytest.fail.Exception, pytest.exit.Exception, pytest.xfail.Exception)
FOREIGN = ("hypothesis", "unittest")
FOREIGN_OF_OURS = ("kvtwin.conformance.harness", "kvtwin.conformance.judge", "kvtwin.conformance.cases")


class Unfair(Exception):
    """A call of the implementation under test does what it must not do to look right."""

    shows = FAIR_PLAY


class Guard:
    """Watches the calls of one implementation."""

    def __init__(self, name: str) -> None:
        """name: that of the module. Nothing is known of its files before it is imported."""
        self.name = name
        self.ours = name.partition(".")[0] in OWN
        self.faults: list[str] = []  # of its import, and of what it left behind after a test
        self._places: Places | None = None
        self._case: Any = None
        self._calls: Counter[str] = Counter()
        self._root: str | None = None
        self.calling = False

    @property
    def root(self) -> str:
        """What the paths of its files begin with: see `root_of`."""
        if self._root is None:
            self._root = "" if self.ours else root_of(sys.modules.get(self.name.partition(".")[0]))
        return self._root

    @property
    def places(self) -> Places:
        """The functions that judge."""
        if self._places is None:
            _import_judges()
            self._places = Places()
        return self._places

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Around the import of one of its modules."""
        before = self.places.values()  # a test may have replaced some of them
        try:
            yield
        finally:
            self.faults += [f"replaces {what} when it is imported" for what in self.places.changed(before)]

    def after_test(self) -> None:
        """Between tests nothing is replaced: what is, was by a thread or a call that was not watched closely."""
        if self._places is not None:
            self.faults += [f"replaces {what}" for what in self._places.changed(self._places.original)]

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Around a call, and what makes its result ours. Raises Unfair."""
        if self.faults:
            raise Unfair(f"{self.name} {self.faults[0]}")
        watched, self.calling = Call(self, name, closely=self._closely(name)), True
        try:
            with watched.watching():
                yield
        except BaseException as error:
            if isinstance(error, Unfair):  # of what it returns
                watched.found.append(str(error))
            elif _is_foreign(error):
                watched.found.append(f"raises {_name_of(error)}")
            watched.raise_found(error)
            raise
        finally:
            self.calling = False
        watched.raise_found()

    def reading(self, name: str, get: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The getter `get` of a state's property, whose code is watched as that of a call is."""
        def watched(state: Any) -> Any:
            if self.calling:
                return get(state)
            with self.call(name):
                return get(state)

        return watched

    def _closely(self, name: str) -> bool:
        cases = sys.modules.get("kvtwin.conformance.cases.case")
        case = None if cases is None else cases.latest()
        if case is not self._case:
            self._case = case
            self._calls.clear()
        self._calls[name] += 1
        count = self._calls[name]
        return stats.is_counting_work() or count <= CLOSELY or count % SELDOM == 0


class Call:
    """One call."""

    def __init__(self, guard: Guard, name: str, *, closely: bool) -> None:
        self.guard, self.name, self.closely = guard, name, closely
        self.found: list[str] = []
        self.work, self.noted = 0, False

    @contextmanager
    def watching(self) -> Iterator[None]:
        with Watch(self.guard.root, _files(), self.found.append):
            before = sys.getprofile(), threading.getprofile()
            if not self.closely or not all(one is None or callable(one) for one in before):  # a profiler in C runs
                yield
                return
            places = self.guard.places
            originals = places.values()
            threading.setprofile(self._profile)
            sys.setprofile(self._profile)
            try:
                yield
            finally:
                sys.setprofile(before[0])
                threading.setprofile(before[1])
                stats.record_work(self.work)
                self.found += [f"replaces {what}" for what in places.changed(originals)]

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Python calls it at each call of a function."""
        if event == "call":
            self.work += 1
            part = part_of(frame.f_code.co_filename)
            if part is not None and not self.guard.ours and (
                frame.f_back is None or part_of(frame.f_back.f_code.co_filename) is None
            ):
                self._uses(part, frame)
        elif event == "c_call":
            self.work += 1

    def _uses(self, part: str, frame: FrameType) -> None:
        """The call, or what it calls, calls a function of a part of kvtwin."""
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        owner = function.rpartition(".")[0].split(".")[0]
        by_harness = frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(HARNESS)
        if function == "<module>" or owner.endswith(("Config", "Result")) or (by_harness and part not in SIDES):
            return
        says = f"{'is' if by_harness else 'calls'} {module}.{function}"
        if part == "optimized":
            if not self.noted:
                stats.record_note(f"{self.name} {says}")
            self.noted = True
        else:
            self.found.append(says)

    def raise_found(self, error: BaseException | None = None) -> None:
        if self.found and not isinstance(error, KeyboardInterrupt):
            raise Unfair(f"{self.name} {self.found[0]}") from error


def part_of(file: str, known: dict[str, str | None] = {}) -> str | None:  # noqa: B006
    """The part of kvtwin that a file belongs to, if an implementation must not use it, or if its use is noted."""
    if file not in known:
        found = next((part for part, folder in PARTS.items() if file.startswith(folder)), None)
        known[file] = None if file.startswith(FOR_ALL) else found
    return known[file]


def _files() -> tuple[str, ...]:
    """What a call must not write to: reports, saved cases, what survival.py notes."""
    from ..cases import failures

    folder = survival.folder()
    return (*reports, os.path.abspath(failures.folder()), *([str(folder)] if folder else []))


#: The paths of the reports of this run.
reports: list[str] = []


def _is_foreign(error: BaseException) -> bool:
    module = type(error).__module__
    return isinstance(error, OUTCOMES) or module.partition(".")[0] in FOREIGN or module.startswith(FOREIGN_OF_OURS)


def _name_of(error: BaseException) -> str:
    kind = type(error)
    names = {"Skipped": "pytest.skip", "Failed": "pytest.fail", "Exit": "pytest.exit", "XFailed": "pytest.xfail",
             "UnsatisfiedAssumption": "hypothesis.reject"}
    return names.get(kind.__name__, f"{kind.__module__}.{kind.__qualname__}")


def _import_judges() -> None:
    """Import what judges and the references, so that a later import of them is one of a copy."""
    from .. import discovery

    for name in ("attribution", "calls", "checkers", "lockstep", "repeats", "subjects"):
        importlib.import_module(f"kvtwin.conformance.judge.{name}")
    for pair in discovery.pairs():
        assert isinstance(pair.reference, ModuleType)
