"""Mutation testing: the suite must detect every mutant that ``methods/<method>/mutants.toml`` lists.

``python -m kvtwin.conformance.lab.mutation [METHOD...] [--only NAME] [--stale] [--jobs 2] [--store]`` applies each
mutant to a copy of the package and runs, in a separate process (mutate_server.py), the tests that should detect it::

    control = "suite/snapkv/test_snapkv.py::test_other"  # must pass with every mutant of this file

    [[mutant]]
    name = "tie-to-the-highest-index"
    file = "optimized/longflow/_attend_kernels.py"
    replace = [["old text", "new text"]]        # each old text occurs in the file exactly once
    what = "what is wrong with it, in a line"
    killers = ["suite/longflow/test_longflow.py::test_ties"]  # at least one of them must fail
    control = "test_..."                        # optional: another control for this one
    crash = true                                # optional: dying from a signal counts as killed
    class = "a"                                 # optional: one of CLASSES
    fits = ["decisions", "state"]               # optional: what a verdict may call wrong (verdict_matrix.py)

The mutants of another package's method (see own_methods.py) are in its folder. Files and tests of that package begin
with the package's name: "key_norm/optimized.py", "key_norm/test_key_norm.py::test_ties".

A mutant is *killed* if a killer fails (mutate_probe.py defines which errors count), and *survives* if all killers
pass. It is *broken*, which proves nothing, if it does not import, fails its control, or ends killers with other errors
or an unexpected signal. Exit code 0 if all mutants are killed, 1 if not, 2 if a file of mutants is invalid or the suite
fails without mutants. ``--store`` writes the kill matrix beside the mutants. ``--stale`` runs only the mutants of which
no stored result says that they were killed, or whose mutated file, or a test file of their control and killers, has
changed since.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import importlib.util
import json
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...own_methods import MethodError
from ...progress import bar, say
from . import kill_matrix, mutate_probe, others
from .kill_matrix import Result
from .mutants import HERE, Mutant, MutantError, everyone, is_of
from .mutate_probe import ORDER, PROFILE
from .mutate_server import Server

IGNORED = shutil.ignore_patterns("__pycache__", ".*")  # what is not copied
CPU_SECONDS = 240  # of one process: a mutant may loop for ever
TESTS_AT_ONCE = 60  # of one process without a mutant, which has no more time


@dataclass(frozen=True)
class Tree:
    """The folders of a package by name, as {"optimized": path}, and how to run its tests.

    tests: the folder that test ids are relative to. linked: large folders, which are linked and cannot be mutated.
    others: the folders of other packages, by name.
    """

    namespace: str
    folders: dict[str, Path]
    tests: str = "conformance"
    linked: tuple[str, ...] = ("fixtures",)
    arguments: tuple[str, ...] = ("--kv-device", "cpu")
    others: dict[str, Path] = field(default_factory=dict)

    def is_other(self, place: str) -> bool:
        """Whether a file or a test belongs to another package."""
        return place.partition("/")[0] in self.others

    def place(self, file: str) -> str:
        """The path of a file in a copy."""
        return file if self.is_other(file) else f"{self.namespace}/{file}"

    def test_place(self, test: str) -> str:
        """The path of a test in a copy."""
        return test if self.is_other(test) else f"{self.namespace}/{self.tests}/{test}"

    def source(self, file: str) -> str:
        folder, _, rest = file.partition("/")
        folders = {**self.folders, **self.others}
        if folder not in folders or not (folders[folder] / rest).is_file():
            raise MutantError(f"file {file} does not exist")
        return (folders[folder] / rest).read_text(encoding="utf-8")

    def test_source(self, file: str) -> str:
        """The text of a test file."""
        return self.source(file if self.is_other(file) else f"{self.tests}/{file}")

    def tests_in(self, file: str) -> set[str]:
        """The test functions of a test file, "Class::function" where one is in a class."""
        tree = ast.parse(self.test_source(file))
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        inner = {f"{node.name}::{name}" for node in classes for name in _functions(node)}
        return {*_functions(tree), *(node.name for node in classes), *inner}

    def sources(self, mutant: Mutant) -> str:
        """Hash of the mutated file and of the test files of the control and the killers."""
        tests = {test.partition("::")[0] for test in (mutant.control, *mutant.killers) if test}
        texts = [self.source(mutant.file), *(self.test_source(file) for file in sorted(tests))]
        return hashlib.sha256(repr(texts).encode()).hexdigest()[:12]

    def check(self, mutants: Iterable[Mutant]) -> None:
        """Raise MutantError, with all problems, unless each mutant applies, is Python, and names existing tests."""
        problems, tests_in = [], functools.cache(self.tests_in)
        for mutant in mutants:
            try:
                compile(mutant.applied_to(self.source(mutant.file)), mutant.file, "exec")
                for test in filter(None, (mutant.control, *mutant.killers)):
                    file, _, function = test.partition("::")
                    if function and function.partition("[")[0] not in tests_in(file):
                        raise MutantError(f"test {test} does not exist")
            except (MutantError, SyntaxError) as error:
                problems.append(f"{mutant.method}/{kill_matrix.MUTANTS}: {mutant.name}: {error}")
        if problems:
            raise MutantError("\n".join(problems))

    def copy(self, root: Path) -> None:
        """Copy the package to `root`, with an empty pytest configuration beside it."""
        (root / self.namespace).mkdir(parents=True)
        (root / self.namespace / "__init__.py").touch()     # a package comes before one that is installed
        for name, folder in self.folders.items():
            target = root / self.namespace / name
            if name in self.linked:
                target.symlink_to(folder, target_is_directory=True)
            else:
                shutil.copytree(folder, target, ignore=IGNORED)
        for name, folder in self.others.items():
            shutil.copytree(folder, root / name, ignore=IGNORED)
        (root / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n", encoding="utf-8")


def _functions(node: ast.Module | ast.ClassDef | ast.If) -> list[str]:
    """The functions of a module or a class, including those inside `if` statements."""
    found = [inner.name for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)]
    return found + [name for inner in node.body if isinstance(inner, ast.If) for name in _functions(inner)]


def here() -> Tree:
    """The package that this module belongs to: a source tree or an installed one."""
    folders = {}
    for name in ("reference", "optimized", "conformance", "fixtures"):
        spec = importlib.util.find_spec(f"kvtwin.{name}")
        if spec is None or spec.origin is None:
            raise MutantError(f"kvtwin.{name} is not installed")
        folders[name] = Path(spec.origin).parent
    return Tree("kvtwin", folders, others=others.packages())


class Lab:
    """A clean copy of the tree, and a further copy for each mutant. Leaving the ``with`` block stops the servers."""

    def __init__(self, tree: Tree, root: Path) -> None:
        self.tree, self.root = tree, root
        self.pristine = root / "pristine"
        tree.copy(self.pristine)
        self._idle: list[Server] = []  # one per thread that was in `run` at the same time

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        while self._idle:
            self._idle.pop().close()

    @contextlib.contextmanager
    def _server(self) -> Iterator[Server]:
        try:
            server = self._idle.pop()
        except IndexError:
            server = Server()
        try:
            yield server
        except BaseException:
            server.close()
            raise
        self._idle.append(server)

    def baseline(self, tests: Sequence[str]) -> float:
        """Run tests on the unmutated copy. Raises MutantError unless all pass. Returns CPU seconds."""
        facts, code, seconds = self._pytest(self.pristine, tests)
        passed = {fact["test"] for fact in facts if fact.get("outcome") == "passed"}
        bad = [fact for fact in facts if fact.get("outcome") in ("wrong", "error") or "broken" in fact]
        lacking = [test for test in tests if not any(is_of(done, test) for done in passed)]
        if bad or lacking or code:
            said = [f"{fact.get('test', '')} {fact.get('message', fact.get('broken', ''))}".strip() for fact in bad]
            lacking = [f"{test} did not pass" for test in lacking]
            ended = f" (exit code {code})" if code else ""
            raise MutantError("\n  ".join([f"the suite fails without mutants{ended}:", *said, *lacking]))
        return seconds

    def run(self, mutant: Mutant, sources: str = "") -> Result:
        """Apply a mutant to a copy and run its killers. sources: `Tree.sources` when the tree was copied."""
        root = self.root / mutant.name
        # Includes the byte code of the baseline run; that of the mutated file is stale and removed below.
        shutil.copytree(self.pristine, root, symlinks=True)
        source = root / self.tree.place(mutant.file)
        source.write_text(mutant.applied_to(source.read_text(encoding="utf-8")), encoding="utf-8")
        for stale in source.parent.glob(f"__pycache__/{source.stem}.*"):
            stale.unlink()
        facts, code, seconds = self._pytest(root, mutant.killers, mutant)
        shutil.rmtree(root)
        outcome = verdict(mutant, facts, code)
        return Result(
            mutant.name, mutant.method, mutant.what, mutant.file, mutant.digest, seconds=round(seconds, 1),
            sources=sources, **outcome,
        )

    def _pytest(
        self, root: Path, tests: Sequence[str], mutant: Mutant | None = None
    ) -> tuple[list[dict[str, Any]], int, float]:
        """Run tests in a copy, after the mutant's control.

        Returns the probe's records, with test ids as in the files of mutants, the exit code of the process (negative:
        a signal), and CPU seconds including its children.
        """
        tree, folder = self.tree, Path(tempfile.mkdtemp(dir=self.root))
        log, output = folder / "log.jsonl", folder / "output.txt"
        order = {"log": str(log), "seconds": CPU_SECONDS, "control": "", "module": None}
        if mutant is not None:
            tests = tuple(filter(None, (mutant.control, *tests)))
            source = tree.place(mutant.file)
            module = source.removesuffix(".py").replace("/", ".")
            order |= {"control": mutant.control, "module": module, "source": str(root / source)}
        prefix = tree.test_place("")
        arguments = [
            *("-q", "-p", "no:cacheprovider", "-p", mutate_probe.__name__, f"--hypothesis-profile={PROFILE}"),
            *(*tree.arguments, *map(tree.test_place, tests)),
        ]
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        environ = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, ORDER: json.dumps(order)}
        for name in ("PYTEST_ADDOPTS", "PYTHONPYCACHEPREFIX"):
            environ.pop(name, None)
        with self._server() as server:
            code, seconds = server.pytest(arguments, root=root, environ=environ, output=output)
        facts = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []
        for fact in facts:
            fact |= {"test": fact["test"].removeprefix(prefix)} if "test" in fact else {}
        if not facts:
            said = output.read_text(encoding="utf-8", errors="replace").strip()
            facts.append({"broken": f"pytest ran nothing: {said[-1000:]}"})
        return facts, code, seconds


def verdict(mutant: Mutant, facts: Sequence[dict[str, Any]], code: int) -> dict[str, Any]:
    """status, killed_by, let_live and detail of a mutant, from the probe's records and the exit code."""
    said = {fact["test"]: fact for fact in facts if "test" in fact}  # the last record of each test
    control = [fact for test, fact in said.items() if mutant.control and is_of(test, mutant.control)]
    named = {
        killer: [fact["outcome"] for test, fact in said.items() if is_of(test, killer)] for killer in mutant.killers
    }
    # A signal struck in a test that started and did not end.
    deadly = {"wrong", "started"} if code < 0 and mutant.crash and code != -signal.SIGXCPU else {"wrong"}
    killed_by = tuple(killer for killer, outcomes in named.items() if deadly & set(outcomes))
    let_live = tuple(killer for killer, outcomes in named.items() if outcomes and set(outcomes) <= {"passed"})
    detail = next((fact["broken"] for fact in facts if "broken" in fact), "")
    if not detail and mutant.control and {fact["outcome"] for fact in control} != {"passed"}:
        detail = f"fails its control: {_messages(control)}"
    if not detail and not killed_by and code < 0:
        detail = f"ended by {signal.Signals(-code).name}, which kills only a mutant with crash = true"
    elif not detail and not killed_by and len(let_live) < len(mutant.killers):
        detail = f"neither passed nor found wrong: {_messages(said.values())}"
    status = "broken" if detail else "killed" if killed_by else "survived"
    return {"status": status, "killed_by": killed_by, "let_live": let_live, "detail": detail}


def _messages(facts: Iterable[dict[str, Any]]) -> str:
    lines = [
        f"{fact['test']}: {fact['outcome']}: {fact.get('message', '')[:500]}"
        for fact in facts if fact["outcome"] != "passed"
    ]
    return "; ".join(lines) or "it did not run"


def main(arguments: Sequence[str] | None = None) -> int:
    description = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m kvtwin.conformance.lab.mutation", description=description)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="methods whose mutants run (default: all)")
    parser.add_argument("--only", action="append", metavar="NAME", help="run only this mutant; may be repeated")
    parser.add_argument("--stale", action="store_true", help="run only mutants without a result of the present sources")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="parallel processes (default: 2)")
    parser.add_argument("--store", action="store_true", help="write the results beside the mutants, in mutants.json")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    try:
        results, mutants = _run(options.methods, options.only, options.jobs, stale=options.stale)
    except (MutantError, MethodError) as error:
        print(error, file=sys.stderr)
        return 2
    if not results:
        print("all stored results are of the present sources")
        return 0
    print(f"\n{kill_matrix.matrix(results)}")
    if options.store:
        kill_matrix.store(results, {(one.method, one.name): one.digest for one in mutants}, HERE, others.files())
    alive = [result for result in results if result.status != "killed"]
    for result in alive:
        print(f"\n{result.status}: {result.name} ({result.what})\n  {result.detail or 'no killer failed'}")
    print(f"\n{len(results) - len(alive)} of {len(results)} mutants killed")
    return 1 if alive else 0


def _stored(method: str) -> list[dict[str, Any]]:
    """The stored results of a method, if there are any."""
    path = kill_matrix.matrix_file(method, HERE, others.files())
    return kill_matrix.stored(path) if path.is_file() else []


def without_proof(
    mutants: Sequence[Mutant], sources: Mapping[str, str], rows: Iterable[Mapping[str, Any]]
) -> list[Mutant]:
    """The mutants of which no stored row says that they were killed with these substitutions and sources, by name."""
    proven = {(row["name"], row["digest"], row.get("sources")) for row in rows if row["status"] == "killed"}
    return [mutant for mutant in mutants if (mutant.name, mutant.digest, sources[mutant.name]) not in proven]


def _run(
    methods: Sequence[str], only: Sequence[str] | None, jobs: int, *, stale: bool = False
) -> tuple[list[Result], list[Mutant]]:
    mutants = everyone()
    chosen = [mutant for mutant in mutants if not methods or mutant.method in methods]
    chosen = [mutant for mutant in chosen if not only or mutant.name in only]
    unknown = {*methods, *(only or ())} - {mutant.method for mutant in mutants} - {mutant.name for mutant in mutants}
    if unknown or not chosen:
        there = sorted({mutant.method for mutant in mutants})
        raise MutantError(f"no such method or mutant: {', '.join(sorted(unknown))}; methods: {', '.join(there)}")
    tree = here()
    tree.check(chosen)
    sources = {mutant.name: tree.sources(mutant) for mutant in chosen}
    if stale:
        rows = [row for method in sorted({mutant.method for mutant in chosen}) for row in _stored(method)]
        chosen = without_proof(chosen, sources, rows)
        if not chosen:
            return [], mutants
    return list(examined(tree, chosen, sources, jobs)), mutants


def examined(tree: Tree, mutants: Sequence[Mutant], sources: Mapping[str, str], jobs: int) -> Iterator[Result]:
    """The result of each mutant, in order, after its tests have passed without mutants. sources: `Tree.sources` of
    each, by name. Raises MutantError if a test does not pass."""
    with tempfile.TemporaryDirectory(prefix="kvtwin-mutants-") as folder:
        tests = sorted({test for mutant in mutants for test in (mutant.control, *mutant.killers) if test})
        with Lab(tree, Path(folder)) as lab, ThreadPoolExecutor(jobs) as pool:
            parts = min(len(tests), max(jobs, math.ceil(len(tests) / TESTS_AT_ONCE)))
            seconds = sum(pool.map(lab.baseline, [tests[start::parts] for start in range(parts)]))
            print(f"{len(tests)} tests pass without mutants ({seconds:.0f} s of CPU)", flush=True)
            with bar(len(mutants), "mutant") as progress:
                for result in pool.map(lab.run, mutants, [sources[mutant.name] for mutant in mutants]):
                    say(f"{result.status:8} {result.name} ({result.seconds:.1f} s)")
                    seconds += result.seconds
                    progress.update()
                    yield result
    print(f"{seconds:.0f} s of CPU in total")


if __name__ == "__main__":
    sys.exit(main())
