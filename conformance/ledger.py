"""The claims ledger: what the papers say, what of it is true, and which test shows it.

``papers/<method>/claims.toml`` says which version of a paper is judged, and holds one ``[[claim]]`` table per theorem,
bound, rewriting, count or figure of it::

    version = "arXiv 2504.15364, version 2"
    code = "https://github.com/name/repository, commit 0123abc"      # if there is released code that we have read

    [[claim]]
    id = "LF-3"                       # parts are LF-3a, LF-3b
    where = "eq. 12"
    quote = "the words of the paper"  # or a list of several; " ... " marks an omission
    statement = "what they say, in our words"
    assumptions = "what it assumes"   # "" if nothing
    verdict = "holds"                 # one of VERDICTS
    corrected = "what is true"        # required unless the verdict is holds, holds-if or ours
    released = "what file.py of the released code does"              # where it differs from the text, or completes it
    defence = "..."                   # the strongest defence of the paper, and why it fails: false, inconsistent
    test = "papers/longflow/test_longflow_claims.py::test_exact_effect"     # or a list of several

Our copies of the papers are text extracted from PDF or HTML, which loses some symbols and figures. If it has lost the
words of a claim, ``lost`` says what is missing, instead of ``quote``. A claim with the verdict "ours" has neither.

An ``[[omitted]]`` table names a statement of the paper that has no claim, and the reason::

    [[omitted]]
    where = "section 4.4"
    quote = "the words of the paper"
    why = "it needs an A100 GPU and a model of 1.7 billion parameters"

``python -m kvtwin.conformance.ledger`` prints both; the documentation shows them on each method's page.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

HERE = Path(__file__).resolve().parent
FILE = "claims.toml"

MARKUP, BACKSLASH = re.compile(r"(?=[\\*_`$<\[])"), r"\\"
ID = re.compile(r"[A-Z]{2}-\d+[a-z]?")
SOURCE_FILE = re.compile(r"\b[\w/]+\.(py|cu|md)\b")
VERDICTS = {
    "holds": "holds",
    "holds-if": "holds under an added assumption",
    "false": "false",
    "inconsistent": "contradicts itself",
    "misprint": "a misprint",
    "unproven": "neither proved nor refuted here",
    "gap": "a definition is missing",
    "ours": "ours, not the paper's",
}
OURS, MISPRINT = "ours", "misprint"
APART = (OURS, MISPRINT)  # neither is a claim of a paper: they are counted and shown apart
PLURALS = {
    "holds": "hold",
    "holds-if": "hold under an added assumption",
    "false": "are false",
    "inconsistent": "contradict themselves",
    "unproven": "are neither proved nor refuted",
    "gap": "lack a definition",
}
NEED_CORRECTION = ("false", "inconsistent", "misprint", "unproven", "gap")
NEED_DEFENCE = ("false", "inconsistent")
TEXTS = ("id", "where", "statement", "assumptions", "verdict")
OPTIONAL = ("lost", "corrected", "defence", "released")


class LedgerError(ValueError):
    """A ledger file that breaks the rules above; the message names the file and the claim."""


@dataclass(frozen=True)
class Claim:
    """One ``[[claim]]``. ``tests`` are "file.py::function", the file relative to this folder."""

    id: str
    method: str
    where: str
    quotes: tuple[str, ...]
    lost: str
    statement: str
    assumptions: str
    verdict: str
    corrected: str
    defence: str
    released: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """What a ledger judges: the version of the paper, and the released code that was read, if any."""

    version: str
    code: str


@dataclass(frozen=True)
class Omission:
    """One ``[[omitted]]``: a statement of the paper that has no claim."""

    method: str
    where: str
    quote: str
    why: str


@dataclass(frozen=True)
class Mark:
    """One ``@pytest.mark.claim(id)`` in the source of a test, "file.py::function"."""

    id: str
    test: str


def load(folder: Path = HERE) -> tuple[Claim, ...]:
    """Every claim, in the order of the files. Raises LedgerError."""
    known = sources(folder)
    claims = [
        _claim(f"{path.parent.name}/{path.name}, {table.get('id', f'claim {number}')}", path.parent.name, table)
        for path in _files(folder) for number, table in enumerate(_tables(path)["claim"], start=1)
    ]
    homeless = [claim.id for claim in claims if claim.released and not known[claim.method].code]
    if homeless:
        raise LedgerError(f"{folder}: 'released' needs 'code' at the top of the file: {', '.join(homeless)}")
    twice = [name for name, count in Counter(claim.id for claim in claims).items() if count > 1]
    if twice:
        raise LedgerError(f"{folder}: ids used twice: {', '.join(twice)}")
    return tuple(claims)


def omitted(folder: Path = HERE) -> tuple[Omission, ...]:
    """Every statement that is left out, in the order of the files. Raises LedgerError."""
    return tuple(
        _omission(f"{path.parent.name}/{path.name}, omitted {number}", path.parent.name, table)
        for path in _files(folder) for number, table in enumerate(_tables(path).get("omitted", []), start=1)
    )


def sources(folder: Path = HERE) -> dict[str, Source]:
    """What the ledger of each method judges. Raises LedgerError."""
    return {path.parent.name: _source(f"{path.parent.name}/{path.name}", _tables(path)) for path in _files(folder)}


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob(FILE))


def parsed(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises LedgerError, which names the file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise LedgerError(f"{path}: {error}") from error


def _tables(path: Path) -> dict[str, Any]:
    tables = parsed(path)
    if "claim" not in tables or not set(tables) <= {"version", "code", "claim", "omitted"}:
        found = ", ".join(tables) or "nothing"
        raise LedgerError(f"{path}: expected version, code, [[claim]] and [[omitted]] tables only, found {found}")
    return tables


def _source(name: str, tables: dict[str, Any]) -> Source:
    return Source(string(name, tables, "version"), string(name, tables, "code") if "code" in tables else "")


def _claim(name: str, method: str, table: dict[str, object]) -> Claim:
    refuse_unknown(name, table, {*TEXTS, *OPTIONAL, "quote", "test"})
    texts = {key: string(name, table, key, empty=key == "assumptions") for key in TEXTS}
    texts |= {key: string(name, table, key) if key in table else "" for key in OPTIONAL}
    verdict = texts["verdict"]
    if not ID.fullmatch(texts["id"]):
        raise LedgerError(f"{name}: an id looks like LF-3 or LF-3a")
    if verdict not in VERDICTS:
        raise LedgerError(f"{name}: verdict {verdict!r} is none of {', '.join(VERDICTS)}")
    if verdict in NEED_CORRECTION and not texts["corrected"]:
        raise LedgerError(f"{name}: the verdict {verdict!r} needs 'corrected', which says what is true instead")
    if (verdict in NEED_DEFENCE) is not bool(texts["defence"]):
        raise LedgerError(f"{name}: 'defence' is for the verdicts {' and '.join(NEED_DEFENCE)}, which need it")
    if texts["released"] and not SOURCE_FILE.search(texts["released"]):
        raise LedgerError(f"{name}: 'released' must name the file of the released code")
    quotes = strings(name, "quote", table["quote"]) if "quote" in table else ()
    if bool(quotes) + bool(texts["lost"]) != (verdict != OURS):
        raise LedgerError(f"{name}: a claim has either 'quote' or 'lost', and one that is {OURS!r} has neither")
    tests = strings(name, "test", table.get("test"))
    if not all("::" in one for one in tests):
        raise LedgerError(f"{name}: test must be \"file.py::function\", or a list of these, got {tests!r}")
    return Claim(method=method, quotes=quotes, tests=tests, **texts)


def _omission(name: str, method: str, table: dict[str, object]) -> Omission:
    refuse_unknown(name, table, {"where", "quote", "why"})
    return Omission(method, *(string(name, table, key) for key in ("where", "quote", "why")))


def refuse_unknown(name: str, table: dict[str, object], known: set[str]) -> None:
    unknown = set(table) - known
    if unknown:
        raise LedgerError(f"{name}: unknown keys: {', '.join(sorted(unknown))}")


def string(name: str, table: dict[str, object], key: str, *, empty: bool = False) -> str:
    text = table.get(key)
    if not isinstance(text, str):
        raise LedgerError(f"{name}: {key} must be a string, got {text!r}")
    if not text.strip() and not empty:
        raise LedgerError(f"{name}: {key} is empty")
    return " ".join(text.split())


def strings(name: str, key: str, value: object) -> tuple[str, ...]:
    """A string, or a list of strings, as a tuple."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) and one.strip() for one in texts):
        raise LedgerError(f"{name}: {key} must be a string or a list of strings, got {value!r}")
    return tuple(" ".join(one.split()) for one in texts)


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


def counts(claims: Iterable[Claim]) -> str:
    """How many of the papers' claims have which verdict, in words; misprints and statements of ours apart."""
    counts = Counter(claim.verdict for claim in claims)
    said = ", ".join(f"{counts[verdict]} {text}" for verdict, text in PLURALS.items() if counts[verdict])
    misprints = f"{counts[MISPRINT]} misprint{'s' if counts[MISPRINT] > 1 else ''}" if counts[MISPRINT] else ""
    added = f"{counts[OURS]} statements of ours hold" if counts[OURS] else ""
    return "; ".join(part for part in (said, misprints, added) if part)


def table(
    claims: Iterable[Claim], left_out: Iterable[Omission] = (), judged: Mapping[str, Source] = MappingProxyType({})
) -> str:
    """The claims as Markdown: per method, what was judged, what the paper says, its misprints, what we add, and what is
    left out."""
    parts: list[str] = []
    claims, left_out = list(claims), list(left_out)
    for method in dict.fromkeys(claim.method for claim in claims):
        own = [claim for claim in claims if claim.method == method]
        said = [claim for claim in own if claim.verdict not in APART]
        parts += [f"**{method}**, {len(said)} claims: {counts(said) or 'none'}.", ""]
        if method in judged:
            code = f" Released code: {judged[method].code}." if judged[method].code else ""
            parts += [f"Judged: {judged[method].version}.{code}", ""]
        parts += markdown_rows(("id", "where", "the paper", "verdict", "what is true"), map(_row, said))
        printed = [(*_row(claim)[:3], _row(claim)[4]) for claim in own if claim.verdict == MISPRINT]
        if printed:
            parts += [f"**{method}**, misprints, which are not counted as claims:", ""]
            parts += markdown_rows(("id", "where", "the paper", "what is meant"), printed)
        added = [(claim.id, claim.where, _with_assumptions(claim)) for claim in own if claim.verdict == OURS]
        if added:
            parts += [f"**{method}**, {len(added)} statements of ours, which correct or complete the paper's:", ""]
            parts += markdown_rows(("id", "where", "statement"), added)
        missing = [(one.where, quoted(one.quote), one.why) for one in left_out if one.method == method]
        if missing:
            parts += [f"**{method}**, {len(missing)} statements of the paper that are not checked here:", ""]
            parts += markdown_rows(("where", "the paper", "why not"), missing)
    return "\n".join(parts).strip()


def _row(claim: Claim) -> tuple[str, ...]:
    words = " ".join(map(quoted, claim.quotes)) or f"(Lost: {claim.lost})"
    defence = f"In its defence: {claim.defence}" if claim.defence else ""
    truth = " ".join(filter(None, (_assumed(claim), claim.corrected, defence, _released(claim))))
    return claim.id, claim.where, f"{claim.statement} {words}", VERDICTS[claim.verdict], truth


def quoted(words: str) -> str:
    """Words of a paper in quotation marks, with Markdown's characters escaped."""
    return f"\u201c{MARKUP.sub(BACKSLASH, words)}\u201d"


def _with_assumptions(claim: Claim) -> str:
    return " ".join(filter(None, (claim.statement, _assumed(claim), claim.corrected, _released(claim))))


def _assumed(claim: Claim) -> str:
    return f"Assumed: {claim.assumptions}." if claim.assumptions else ""


def _released(claim: Claim) -> str:
    return f"As released: {claim.released}" if claim.released else ""


def markdown_rows(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = (heads, ("---",) * len(heads), *rows)
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in lines] + [""]


def main(arguments: list[str] | None = None) -> int:
    description = "Print the claims ledger as Markdown tables."
    argparse.ArgumentParser(prog="python -m kvtwin.conformance.ledger", description=description).parse_args(arguments)
    try:
        print(table(load(), omitted(), sources()))
    except (OSError, LedgerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
