"""The claims ledger: what the papers say, what of it is true, and which test shows it.

``<method>/claims.toml`` holds one ``[[claim]]`` table per theorem, bound, rewriting, count or figure of a paper::

    [[claim]]
    id = "LF-3"                       # parts are LF-1a, LF-1b
    where = "eq. 12"
    statement = "what the paper says"
    assumptions = "what it assumes"   # "" if nothing
    verdict = "holds"                 # holds, holds-if (an added assumption), false, inconsistent
    corrected = "what is true"        # optional; needed for false
    test = "longflow/test_longflow_claims.py::test_exact_effect"     # or a list of several

``python -m kvtwin.conformance.ledger`` prints the table; the documentation shows it on each method's page.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILE = "claims.toml"

ID = re.compile(r"[A-Z]{2}-\d+[a-z]?")
VERDICTS = {
    "holds": "holds",
    "holds-if": "holds under an added assumption",
    "false": "false",
    "inconsistent": "contradicts itself",
}
PLURALS = {
    "holds": "hold",
    "holds-if": "hold under an added assumption",
    "false": "are false",
    "inconsistent": "contradict themselves",
}
TEXTS = ("id", "where", "statement", "assumptions", "verdict")


class LedgerError(ValueError):
    """A ledger file that breaks the rules above; the message names the file and the claim."""


@dataclass(frozen=True)
class Claim:
    """One ``[[claim]]``. ``tests`` are "file.py::function", the file relative to this folder."""

    id: str
    method: str
    where: str
    statement: str
    assumptions: str
    verdict: str
    corrected: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Mark:
    """One ``@pytest.mark.claim(id)`` in the source of a test, "file.py::function"."""

    id: str
    test: str


def load(folder: Path = HERE) -> tuple[Claim, ...]:
    """Every claim, in the order of the files. Raises LedgerError."""
    claims = [claim for path in sorted(folder.rglob(FILE)) for claim in _read(path)]
    twice = [name for name, count in Counter(claim.id for claim in claims).items() if count > 1]
    if twice:
        raise LedgerError(f"{folder}: ids used twice: {', '.join(twice)}")
    return tuple(claims)


def _read(path: Path) -> Iterator[Claim]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise LedgerError(f"{path}: {error}") from error
    if set(tables) != {"claim"}:
        raise LedgerError(f"{path}: expected [[claim]] tables only, found {', '.join(tables) or 'nothing'}")
    for number, table in enumerate(tables["claim"], start=1):
        name = f"{path.parent.name}/{path.name}, {table.get('id', f'claim {number}')}"
        unknown = set(table) - {*TEXTS, "corrected", "test"}
        if unknown:
            raise LedgerError(f"{name}: unknown keys: {', '.join(sorted(unknown))}")
        yield _claim(name, path.parent.name, table)


def _claim(name: str, method: str, table: dict[str, object]) -> Claim:
    texts: dict[str, str] = {}
    for key in (*TEXTS, "corrected"):
        text = table.get(key, "" if key == "corrected" else None)
        if not isinstance(text, str):
            raise LedgerError(f"{name}: {key} must be a string, got {text!r}")
        if not text.strip() and key not in ("assumptions", "corrected"):
            raise LedgerError(f"{name}: {key} is empty")
        texts[key] = " ".join(text.split())
    if not ID.fullmatch(texts["id"]):
        raise LedgerError(f"{name}: an id looks like LF-3 or LF-3a")
    if texts["verdict"] not in VERDICTS:
        raise LedgerError(f"{name}: verdict {texts['verdict']!r} is none of {', '.join(VERDICTS)}")
    if texts["verdict"] == "false" and not texts["corrected"]:
        raise LedgerError(f"{name}: a false claim says in 'corrected' what is true instead")
    test = table.get("test")
    tests = [test] if isinstance(test, str) else test
    if not isinstance(tests, list) or not tests or not all(isinstance(one, str) and "::" in one for one in tests):
        raise LedgerError(f"{name}: test must be \"file.py::function\", or a list of these, got {test!r}")
    return Claim(method=method, tests=tuple(tests), **texts)


def marks(folder: Path = HERE) -> tuple[Mark, ...]:
    """Every claim marker in the test files of ``folder``, read off their syntax trees."""
    found: list[Mark] = []
    for path in sorted(folder.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                ids = (name for decorator in node.decorator_list for name in _ids(decorator))
                found += [Mark(name, f"{path.relative_to(folder).as_posix()}::{node.name}") for name in ids]
    return tuple(found)


def _ids(tree: ast.AST) -> Iterator[str]:
    """The ids in a decorator: pytest.mark.claim("LF-3"), also inside parametrize(..., pytest.param(..., marks=...))."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.claim"):
            yield from (str(ast.literal_eval(argument)) for argument in node.args)


def problems(claims: Iterable[Claim], found: Iterable[Mark]) -> list[str]:
    """What does not fit between ledger and tests, one line each: both must name each other."""
    claims, found = list(claims), list(found)
    known = {claim.id for claim in claims}
    marked = {(mark.id, mark.test) for mark in found}
    named = {(claim.id, test) for claim in claims for test in claim.tests}
    lines = [f"{mark.test} is marked with {mark.id}, which is in no ledger" for mark in found if mark.id not in known]
    lines += [f"{name}: its test {test} is not marked with it" for name, test in sorted(named - marked)]
    lines += [
        f"{name}: {test} is marked with it, but its 'test' does not say so"
        for name, test in sorted(marked - named)
        if name in known
    ]
    return lines


def counted(claims: Iterable[Claim]) -> str:
    """How many claims have which verdict, in words."""
    counts = Counter(claim.verdict for claim in claims)
    return ", ".join(f"{counts[verdict]} {text}" for verdict, text in PLURALS.items() if counts[verdict])


def table(claims: Iterable[Claim]) -> str:
    """The claims as Markdown, one table per method."""
    parts = []
    claims = list(claims)
    for method in dict.fromkeys(claim.method for claim in claims):
        own = [claim for claim in claims if claim.method == method]
        parts += [f"**{method}**, {len(own)} claims: {counted(own)}.", ""]
        parts += ["| id | where | the paper | verdict | what is true |", "|---|---|---|---|---|"]
        for claim in own:
            truth = claim.corrected or (f"if {claim.assumptions}" if claim.verdict == "holds-if" else "")
            cells = (claim.id, claim.where, claim.statement, VERDICTS[claim.verdict], truth)
            parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        parts.append("")
    return "\n".join(parts).strip()


def main(arguments: list[str] | None = None) -> int:
    description = "Print the claims ledger as Markdown tables."
    argparse.ArgumentParser(prog="python -m kvtwin.conformance.ledger", description=description).parse_args(arguments)
    try:
        print(table(load()))
    except (OSError, LedgerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
