"""The kill matrix: which tests detect which mutants. It is stored beside each file of mutants."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

#: Names of the files: of mutants, and of their kill matrix.
MUTANTS, MATRIX = "mutants.toml", "mutants.json"
SCHEMA = 1
RUNS_WITH = ("torch", "triton", "hypothesis", "pytest")


@dataclass(frozen=True)
class Result:
    """The result of a mutant. killed_by, let_live: killers that failed, that passed; detail: why it is broken; sources:
    a hash of the mutated file and of the test files, empty in results of earlier versions."""

    name: str
    method: str
    what: str
    file: str
    digest: str
    status: str
    killed_by: tuple[str, ...]
    let_live: tuple[str, ...]
    seconds: float
    detail: str = ""
    sources: str = ""


def matrix(results: Sequence[Result]) -> str:
    """The kill matrix: a row per mutant, a column per test; # killed it, o passed, . is not one of its killers."""
    tests = sorted({test for result in results for test in (*result.killed_by, *result.let_live)})
    width = max((len(result.name) for result in results), default=0)
    numbers = [f"{number:2}" for number in range(1, len(tests) + 1)]
    lines = [f"{number} {test}" for number, test in zip(numbers, tests, strict=True)]
    lines += ["", *(" " * (width + 12) + "".join(number[digit] for number in numbers) for digit in (0, 1))]
    for result in results:
        row = "".join("#" if test in result.killed_by else "o" if test in result.let_live else "." for test in tests)
        lines.append(f"{result.name:{width}}  {result.status:8}  {row}  {result.seconds:5.1f} s")
    return "\n".join(lines)


def matrix_file(method: str, folder: Path, others: Mapping[str, Path] = MappingProxyType({})) -> Path:
    """The path of a method's kill matrix, beside its file of mutants. others: files in other folders, by method."""
    if method in others:
        return others[method].with_name(MATRIX)
    (mutants,) = (path for path in folder.rglob(MUTANTS) if path.parent.name == method)
    return mutants.with_name(MATRIX)


def store(
    results: Sequence[Result], digests: Mapping[tuple[str, str], str], folder: Path,
    others: Mapping[str, Path] = MappingProxyType({}),
) -> None:
    """Write results to mutants.json beside each file of mutants, in its order, one line each. Stored results of mutants
    that did not run are kept if their substitution is unchanged. digests: of all mutants, by method and name. others:
    files of mutants outside of the folder, by method."""
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in RUNS_WITH}
    for method in sorted({result.method for result in results}):
        path = matrix_file(method, folder, others)
        order = {name: digest for (of, name), digest in digests.items() if of == method}
        old = stored(path) if path.is_file() else []
        rows = {row["name"]: row for row in old if order.get(row["name"]) == row["digest"]}
        for result in results:
            if result.method == method:
                rows[result.name] = {key: value for key, value in asdict(result).items() if value and key != "method"}
        lines = ",\n  ".join(json.dumps(rows[name]) for name in order if name in rows)
        head = json.dumps({
            "schema": SCHEMA, "method": method, "command": f"python -m kvtwin.conformance.lab.mutation {method}",
            "versions": versions, "cpu_seconds": round(sum(row["seconds"] for row in rows.values())),
        }, indent=1).removesuffix("\n}")
        path.write_text(f'{head},\n "mutants": [\n  {lines}\n ]\n}}\n', encoding="utf-8")


def stored(path: Path) -> list[dict[str, Any]]:
    """The stored results of a method, as tables of Result's fields without empty ones."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["mutants"]
    return rows
