"""Finds a change of the code that makes a test of a claim fail, for the tables of claim_lane.py.

``python -m kvtwin.conformance.mutation.claim_search METHOD... --results FILE`` looks at each test of a claim that no
table has, and appends a line of JSON per test: the change that it detects, or the number of changes that it let pass.
A plugin of pytest collects the tests once. For each test it forks a process that records the lines that the test runs,
and one process per change, which replaces the code of the function in place: this takes a fraction of a second.

Changes of the two sides come first, then those of shared helpers, of helpers in the test's file, and of its data.
Changes that detected something before come first among these. What is inside of a test or a fixture is not changed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import io
import json
import os
import random
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from . import claim_candidates as candidates
from . import claim_mutants
from .claim_candidates import Edit
from .mutants import HERE, MutantError
from .mutate_probe import is_wrong

ROOT = HERE.parent
SECONDS = 20  # of one process
MOST, MOST_OF_TIER = 150, 70  # changes that are tried on a test
ITEMS = 6  # parameter sets of a test that are run
SHARED = 8  # tests that one change may stand for
#: Parts of the suite that are not about claims.
NOT_CHANGED = (
    "harness", "cases", "interpreter", "meta", "mutation", "plugin.py", "conftest.py", "discovery.py",
    "capabilities.py", "judge/stats.py",
)
Change = tuple[str, Edit, bool]  # file relative to ROOT, edit, whether it is in a module's data


def in_fork(work: Callable[[], Any], seconds: int = SECONDS) -> Any:
    """What `work` returns in a forked process, or None if it takes too long or dies."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            with os.fdopen(write, "w") as answer, contextlib.redirect_stdout(io.StringIO()):
                json.dump(work(), answer)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(said)
    return None


class Search:
    """The plugin: it tries changes instead of running tests."""

    def __init__(self, results: Path, skip: set[str]) -> None:
        self.results, self.skip = results, skip
        self.detected: Counter[Change] = Counter()
        self.outcome = ""
        self.random = random.Random(0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        made = yield
        if call.excinfo is not None and made.failed:
            self.outcome = "wrong" if is_wrong(call.excinfo.value) else "error"
        return made

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        groups: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            test = f"{item.path.relative_to(HERE).as_posix()}::{item.nodeid.partition('::')[2].partition('[')[0]}"
            if any(item.iter_markers("claim")) and test not in self.skip:
                groups[test].append(item)
        self.functions: dict[str, list[FunctionType]] = defaultdict(list)
        gc.unfreeze()  # frozen objects are not listed
        for one in gc.get_objects():
            if type(one) is FunctionType and one.__code__.co_filename.startswith(str(ROOT)):
                self.functions[one.__code__.co_filename].append(one)
        gc.freeze()
        for number, (test, items) in enumerate(groups.items(), start=1):
            found = self.search(test, items)
            with self.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"test": test, **found}) + "\n")
            print(f"{number}/{len(groups)} {test}: {found}", flush=True)
        return True

    def run(self, items: Sequence[pytest.Item]) -> str:
        """passed, wrong or error: of the first item that does not pass."""
        for item in items:
            self.outcome = "passed"
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self.outcome != "passed":
                break
        return self.outcome

    def search(self, test: str, items: list[pytest.Item]) -> dict[str, Any]:
        sides = {
            side: [one for one in items if side not in one.name][:ITEMS] or items for side in ("optimized", "reference")
        }
        lines: dict[str, list[int]] | None = in_fork(lambda: self.traced(items[:2] + items[-1:]), 3 * SECONDS)
        if lines is None:
            return {"error": "took too long, or fails as it is"}
        tried, errors = 0, 0
        for change in self.changes(items[0], lines):
            tried += 1
            chosen = sides["reference" if change[0].startswith("optimized") else "optimized"]
            outcome = in_fork(lambda: self.run(chosen) if self.install(change, items[0]) else "passed")  # noqa: B023
            errors += outcome in ("error", None)
            if outcome == "wrong":
                self.detected[change] += 1
                file, edit, data = change
                old, new = edit.replacement((ROOT / file).read_text(encoding="utf-8"))
                return {"file": file, "old": old, "new": new, "data": data, "tried": tried}
        return {"tried": tried, "errors": errors}

    def traced(self, items: Sequence[pytest.Item]) -> dict[str, list[int]] | None:
        """The lines of each file below ROOT that the tests run."""
        seen: set[tuple[str, int]] = set()
        own, method = str(items[0].path.relative_to(ROOT)), items[0].path.parent.name

        @functools.cache
        def followed(file: str) -> bool:
            return file.startswith(str(ROOT)) and self.tier(str(Path(file).relative_to(ROOT)), own, method) is not None

        def line(frame: Any, event: str, argument: Any) -> Any:
            seen.add((frame.f_code.co_filename, frame.f_lineno))
            return line

        def call(frame: Any, event: str, argument: Any) -> Any:
            return line if followed(frame.f_code.co_filename) else None

        sys.settrace(call)
        outcome = self.run(items)
        sys.settrace(None)
        found: dict[str, list[int]] = defaultdict(list)
        for file, number in sorted(seen):
            found[str(Path(file).relative_to(ROOT))].append(number)
        return found if outcome == "passed" else None

    def changes(self, item: pytest.Item, lines: dict[str, list[int]]) -> list[Change]:
        own = str(item.path.relative_to(ROOT))
        ranked: list[tuple[tuple[int, int], Change]] = []
        for file, numbers in lines.items():
            tier = self.tier(file, own, item.path.parent.name)
            if tier is not None:
                source = (ROOT / file).read_text(encoding="utf-8")
                edits = candidates.of_functions(source, numbers)
                ranked += [((tier, rank), (file, edit, False)) for rank, edit in edits]
        source = item.path.read_text(encoding="utf-8")
        called = {item.originalname, *self.functions_on(own, lines.get(own, []))}  # type: ignore[attr-defined]
        data = candidates.of_data(source, candidates.names_in(source, called))
        data = self.random.sample(data, min(len(data), MOST_OF_TIER))
        ranked += [((4, 0), (own, edit, True)) for edit in data]
        ranked = [(key, change) for key, change in ranked if self.detected[change] < SHARED]
        self.random.shuffle(ranked)
        tiers: dict[int, list[Change]] = defaultdict(list)
        for (tier, _), change in sorted(ranked, key=lambda one: (one[0][0], not self.detected[one[1]], one[0][1])):
            tiers[tier].append(change)
        return [change for tier in sorted(tiers) for change in tiers[tier][:MOST_OF_TIER]][:MOST]

    @staticmethod
    def tier(file: str, own: str, method: str) -> int | None:
        """How late changes of a file are tried; None: not at all."""
        top, _, rest = file.partition("/")
        if top in ("reference", "optimized"):
            return 5 if "valid" in rest else 0 if top == "reference" and method in rest else 1
        if top != "conformance" or rest.startswith(NOT_CHANGED):
            return None
        if file != own and "/test_" in file and "_claims" not in file:
            return None
        return 3 if file == own else 2

    def functions_on(self, file: str, numbers: list[int]) -> set[str]:
        found = set()
        for function in self.functions[str(ROOT / file)]:
            if {number for *_, number in function.__code__.co_lines()} & set(numbers):
                found.add(function.__name__)
        return found

    def install(self, change: Change, item: pytest.Item) -> bool:
        """Whether the change could be made in this process."""
        file, edit, data = change
        path = ROOT / file
        source = edit.applied_to(path.read_text(encoding="utf-8"))
        try:
            code = compile(source, str(path), "exec")
        except SyntaxError:
            return False
        if data:
            exec(code, item.module.__dict__)  # type: ignore[attr-defined]  # tests that are collected read its names
            return True
        changed = {(one.co_qualname, one.co_firstlineno): one for one in _codes(code)}
        done = False
        for function in self.functions[str(path)]:
            old = function.__code__
            new = changed.get((old.co_qualname, old.co_firstlineno))
            if new is not None and new != old and new.co_freevars == old.co_freevars:
                function.__code__ = new
                done = True
        return done


def _codes(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes(inner)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("methods", nargs="+", metavar="METHOD")
    parser.add_argument("--results", type=Path, default=Path("claim-search.jsonl"))
    options = parser.parse_args(arguments)
    done = {test for row in claim_mutants.load() for test in row.tests}
    if options.results.is_file():
        done |= {json.loads(line)["test"] for line in options.results.read_text(encoding="utf-8").splitlines()}
    tests = [test for test in claim_mutants.known_tests() if claim_mutants.method_of(test) in options.methods]
    files = sorted({str(HERE / test.partition("::")[0]) for test in tests if test not in done})
    if not files:
        return 0
    os.environ.setdefault("TRITON_INTERPRET", "1")
    return pytest.main(
        ["-q", "-p", "no:cacheprovider", "--kv-device=cpu", "--hypothesis-profile=quick", "-m", "claim", *files],
        plugins=[Search(options.results, done)],
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MutantError as error:
        sys.exit(str(error))
