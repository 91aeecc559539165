"""The tests of claims must be able to fail: each detects a change of the code, or of the figures, that it is about.

``<method>/claim_mutants.toml`` lists the changes. Each test of a claim is in exactly one table, which may stand for
several tests::

    [[mutant]]
    file = "reference/longflow.py"
    old = "old text"                  # occurs in the file exactly once, not inside of a test or a fixture
    new = "new text"
    tests = ["papers/longflow/test_longflow_claims_score.py::test_exact_effect"]   # each of them must fail

``python -m kvtwin.conformance.lab.mutation claims [METHOD...] [--only TEXT] [--again] [--jobs 2]`` makes each change in
a copy of the package and runs its tests (see mutate.py). A test detects the change if it finds a wrong result; other
errors do not count. Results are written to claim_matrix.json as they come, and a change with a result of the present
sources does not run again, so the same command continues a run that was interrupted. Exit code 0 if each test of a
claim detects its change, 1 if a test does not, or has none, 2 if a file is invalid or a test fails as it is.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from . import claim_mutants, mutate
from .claim_mutants import Row
from .kill_matrix import RUNS_WITH, Result
from .mutants import MutantError

MATRIX = Path(__file__).with_name("claim_matrix.json")
Stored = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A row with its mutant's name, and the hash of the sources that its result depends on."""

    row: Row
    name: str
    sources: str

    def is_proven(self, stored: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether a stored result says that all tests of the row detected this very change in these sources."""
        found = stored.get(self.name, {})
        same = (found.get("sources"), found.get("tests")) == (self.sources, len(self.row.tests))
        return same and not found.get("undetected")


def load(path: Path = MATRIX) -> Stored:
    """The stored results, by the mutants' names."""
    if not path.is_file():
        return {}
    return {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))["mutants"]}


def store(cases: Sequence[Case], results: Stored, path: Path = MATRIX) -> None:
    """Write the results of the cases that have one, one line each, in their order."""
    versions = {"python": platform.python_version()} | {name: metadata.version(name) for name in RUNS_WITH}
    rows = [results[case.name] for case in cases if case.name in results]
    head = json.dumps({
        "schema": 1, "command": "python -m kvtwin.conformance.lab.mutation claims", "versions": versions,
        "cpu_seconds": round(sum(row["seconds"] for row in rows)),
    }, indent=1).removesuffix("\n}")
    lines = ",\n  ".join(map(json.dumps, rows))
    path.write_text(f'{head},\n "mutants": [\n  {lines}\n ]\n}}\n', encoding="utf-8")


def table(case: Case, result: Result) -> dict[str, Any]:
    """A result as it is stored. undetected: the tests that did not find the change, and why."""
    found: dict[str, Any] = {
        "name": case.name, "kind": claim_mutants.kind(case.row), "tests": len(case.row.tests),
        "sources": case.sources, "seconds": result.seconds,
    }
    missed = [test for test in case.row.tests if test not in result.killed_by]
    return found | ({"undetected": missed, "detail": result.detail or "passes"} if missed else {})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvtwin.conformance.lab.mutation claims", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="methods whose claims run (default: all)")
    parser.add_argument("--only", metavar="TEXT", help="run only changes with a test whose name contains TEXT")
    parser.add_argument("--again", action="store_true", help="run also what has a result of the present sources")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="parallel processes (default: 2)")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    try:
        return _run(options)
    except MutantError as error:
        print(error, file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    rows, known, tree = claim_mutants.load(), claim_mutants.known_tests(), mutate.here()
    wrong = claim_mutants.problems(rows, known)
    if wrong:
        raise MutantError("\n".join(wrong))
    methods = {row.method for row in rows}
    if not set(options.methods) <= methods:
        raise MutantError(f"no such method: {', '.join(set(options.methods) - methods)}; methods: {sorted(methods)}")
    mutants = {mutant.name: mutant for mutant in (row.mutant for row in rows)}
    tree.check(mutants.values())
    cases = [Case(row, row.mutant.name, tree.sources(row.mutant)) for row in rows]
    results = load()
    chosen = [
        case for case in cases
        if case.row.method in (options.methods or methods)
        and any((options.only or "") in test for test in case.row.tests)
        and (options.again or not case.is_proven(results))
    ]
    if chosen:
        sources = {case.name: case.sources for case in chosen}
        found = mutate.examined(tree, [mutants[case.name] for case in chosen], sources, options.jobs)
        for case, result in zip(chosen, found, strict=True):
            results[case.name] = table(case, result)
            store(cases, results)
    none = claim_mutants.without(rows, known)
    chosen_methods = options.methods or methods
    return _report(cases, results, [test for test in none if claim_mutants.method_of(test) in chosen_methods])


def _report(cases: Sequence[Case], results: Stored, none: Sequence[str]) -> int:
    """Print the tests without a change and those that did not detect theirs, and return the exit code."""
    for test in none:
        print(f"no change: {test}")
    undetected = 0
    for case in cases:
        for test in results.get(case.name, {}).get("undetected", []):
            undetected += 1
            print(f"undetected: {test}\n  {case.row.mutant.what} ({results[case.name]['detail']})")
    proven = sum(len(case.row.tests) for case in cases if case.is_proven(results))
    print(f"{proven} tests of claims detect their change, {undetected} do not, {len(none)} have none")
    return 1 if undetected or none else 0
