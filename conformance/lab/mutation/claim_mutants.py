"""The tables ``claim_mutants.toml``: for each test of a claim, a change that it must detect. See claim_lane.py."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ... import ledger
from .mutants import HERE, Mutant, MutantError

FILE = "claim_mutants.toml"
KEYS = {"file", "old", "new", "tests"}
#: What a change is a change of, in words.
KINDS = {
    "side": "the reference or the optimized version",
    "shared": "what the suite's tests share",
    "model": "a function beside the test",
    "figures": "figures beside the test",
}


@dataclass(frozen=True)
class Row:
    """One ``[[mutant]]``: `file` has `new` instead of `old`, and each of `tests` must then find something wrong."""

    method: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def mutant(self) -> Mutant:
        """The same for mutate.py. Its name is that of the method and the digest of the change."""
        made = Mutant("", self.method, self.file, ((self.old, self.new),), "", self.tests, "")
        return Mutant(
            f"{self.method}-{made.digest}", self.method, self.file, made.replace, f"{self.old!r} -> {self.new!r}",
            self.tests, "",
        )


def method_of(test: str) -> str:
    """The folder of a test: the method whose ledger it belongs to."""
    return Path(test.partition("::")[0]).parent.name


def known_tests() -> list[str]:
    """Every test of a claim, as in the ledgers."""
    return list(dict.fromkeys(test for claim in ledger.load() for test in claim.tests))


def load(folder: Path = HERE) -> list[Row]:
    """All rows. Raises MutantError for an invalid file."""
    rows = []
    for path in sorted(folder.rglob(FILE)):
        for number, table in enumerate(tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []), start=1):
            if set(table) != KEYS or not isinstance(table["tests"], list) or not table["tests"]:
                raise MutantError(f"{path}: mutant {number}: expected {', '.join(sorted(KEYS))}, got {sorted(table)}")
            rows.append(Row(path.parent.name, table["file"], table["old"], table["new"], tuple(table["tests"])))
    return rows


def without(rows: Iterable[Row], known: Sequence[str]) -> list[str]:
    """The tests of claims that no row has."""
    there = {test for row in rows for test in row.tests}
    return [test for test in known if test not in there]


def problems(rows: Sequence[Row], known: Sequence[str]) -> list[str]:
    """What is wrong with the rows beside what `Tree.check` finds, one line each."""
    count = Counter(test for row in rows for test in row.tests)
    lines = [f"{test} is the test of no claim" for test in count if test not in known]
    lines += [f"{test} is in {number} rows" for test, number in count.items() if number > 1]
    return lines + [
        f"{row.method}/{FILE}: {row.old!r} is inside of a test or a fixture" for row in rows if in_tests(row)
    ]


def in_tests(row: Row, folder: Path = HERE.parent) -> bool:
    """Whether the change is inside of a test or a fixture: it would change what the test expects, not what it tests."""
    tree = ast.parse((folder / row.file).read_text(encoding="utf-8"))
    lines = set(changed_lines(row, folder))
    return any(
        lines & set(range(min((one.lineno for one in node.decorator_list), default=node.lineno), last + 1))
        for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and is_of_tests(node)
        for last in (node.end_lineno or node.lineno,)
    )


def is_of_tests(node: ast.AST) -> bool:
    """Whether a function is a test, a fixture, or draws cases."""
    if not isinstance(node, ast.FunctionDef):
        return False
    decorated = " ".join(map(ast.unparse, node.decorator_list))
    return node.name.startswith(("test_", "assert_", "check")) or "fixture" in decorated or "composite" in decorated \
        or "torch.Generator(" in ast.unparse(node)


def kind(row: Row, folder: Path = HERE.parent) -> str:
    """One of KINDS."""
    if not row.file.startswith("conformance/"):
        return "side"
    if not Path(row.file).name.startswith("test_"):
        return "shared"
    tree = ast.parse((folder / row.file).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    spans = [range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in functions]
    inside = all(any(line in span for span in spans) for line in changed_lines(row, folder))
    return "model" if inside else "figures"


def changed_lines(row: Row, folder: Path = HERE.parent) -> Iterator[int]:
    """The lines, from 1, of the file that the change changes."""
    before, _, _ = (folder / row.file).read_text(encoding="utf-8").partition(row.old)
    first, old, new = before.count("\n") + 1, row.old.split("\n"), row.new.split("\n")
    for number, line in enumerate(old):
        if len(old) != len(new) or line != new[number]:
            yield first + number
