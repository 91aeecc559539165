"""The terminal summary: a table of methods and kinds of tests, decisive shares, and claims of the ledger."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest

from .. import discovery, ledger
from . import power, results, verdict_table
from .results import KINDS, Result, Sum
from .verdict import RIGHT, MethodVerdict

NONE = "-"
COLUMNS = ("method", *(kind.replace("_", " ") for kind in KINDS), "decisive", "of bound", "ties")
SHORT = {
    "error": "error", "not provided": "n/p", "environment": "environment", "skipped": "skipped", "xfailed": "xfailed",
}
LEGEND = (
    "decisive: share of kept/evicted decisions that only one answer fits; of bound: largest error as a share of what\n"
    "the arithmetic can lose; ties: choices that differ within the bounds, adjudicated"
)


def under_test(implementation: str | None) -> str:
    """The name of the implementation under test and, for --kv-impl, its path."""
    if implementation is None:
        return discovery.OPTIMIZED
    module = importlib.import_module(implementation)
    folders = ", ".join(getattr(module, "__path__", ()))  # of a package without __init__.py
    return f"{implementation} ({getattr(module, '__file__', None) or folders or 'no file'})"


def by_method(found: Iterable[Result]) -> dict[str, dict[str, Sum]]:
    """method -> kind -> sum, with the sum over all kinds under "all"; methods in the order of discovery."""
    found = [result for result in found if result.method]
    names = [pair.name for pair in discovery.pairs()]
    seen = {str(result.method) for result in found}
    rows = {}
    for method in sorted(seen, key=lambda name: (names.index(name) if name in names else len(names), name)):
        own = [result for result in found if result.method == method]
        rows[method] = {kind: results.total(one for one in own if one.kind == kind) for kind in KINDS}
        rows[method]["all"] = results.total(own)
    return rows


def cell(summed: Sum) -> str:
    """Format the counts of one kind of tests: "12", "11, 1 failed", "0, 4 n/p"."""
    if not summed.outcomes:
        return NONE
    parts = [str(summed.outcomes["passed"])]
    parts += [f"{summed.outcomes['failed']} failed"] if summed.outcomes["failed"] else []
    parts += [f"{summed.outcomes[outcome]} {short}" for outcome, short in SHORT.items() if summed.outcomes[outcome]]
    return ", ".join(parts)


def percent(share: float | None) -> str:
    """Format a share as a percentage with three significant digits."""
    return NONE if share is None else f"{100 * share:.3g} %"


def rows(found: Iterable[Result]) -> list[tuple[str, ...]]:
    """The rows of the table, as text."""
    return [
        (
            method,
            *(cell(kinds[kind]) for kind in KINDS),
            percent(kinds["all"].decisive_share),
            percent(kinds["all"].utilisation),
            str(kinds["all"].adjudicated) if kinds["all"].decisions else NONE,
        )
        for method, kinds in by_method(found).items()
    ]


def claim_outcomes(found: Iterable[Result]) -> dict[str, str]:
    """claim id -> "passed", "failed", or another outcome, over all tests that carry its marker."""
    outcomes: dict[str, str] = {}
    for result in found:
        for claim in result.claims:
            outcome = "failed" if result.failed else result.outcome
            # A failure takes precedence, then a pass: a claim with a skipped variant counts as checked.
            if outcome == "failed" or outcomes.get(claim) not in ("failed", "passed"):
                outcomes[claim] = outcome
    return outcomes


def claim_lines(found: Iterable[Result]) -> list[str]:
    """One line per method that has a ledger and ran some of its claims."""
    outcomes = claim_outcomes(found)
    ledgers = ledger.load()
    lines = []
    for method in dict.fromkeys(claim.method for claim in ledgers):
        own = [claim for claim in ledgers if claim.method == method]
        checked = [claim for claim in own if outcomes.get(claim.id) in ("passed", "failed")]
        if not checked:
            continue
        said = [sum(claim.verdict not in ledger.APART for claim in claims) for claims in (checked, own)]
        shown = ledger.counts(claim for claim in checked if outcomes[claim.id] == "passed")
        failed = ", ".join(claim.id for claim in checked if outcomes[claim.id] == "failed")
        parts = [part for part in (shown, f"FAILED: {failed}" if failed else "") if part]
        lines.append(f"claims of {method}: {said[0]} of {said[1]} checked: {'; '.join(parts)}")
    return lines


def refusals(found: Iterable[Result]) -> list[str]:
    """The calls that the implementation under test refused, and how often."""
    found = [result for result in found if result.refused]
    counts: Counter[str] = sum((Counter(result.refused) for result in found), Counter())
    answered = sum(result.answered for result in found)
    tests = f"{len(found)} test{'s' if len(found) > 1 else ''}"
    heading = f"unsupported arguments, skipped in {tests} ({answered} calls returned):"
    return [heading, *(f"  {count} x {what}" for what, count in sorted(counts.items()))] if found else []


def write_verdicts(
    terminal: pytest.TerminalReporter, verdicts: Mapping[str, MethodVerdict], implementation: str, *, verbose: bool,
    device: str, seed: int | None,
) -> None:
    """Print the verdict on each method of somebody else's implementation. device: "cpu" or "cuda". seed: of the cases
    that were drawn, None if each run draws the same."""
    terminal.write_sep("=", f"kvtwin: verdict on {implementation}")
    for found in verdicts.values():
        for text, colour in verdict_table.lines(found, implementation, verbose=verbose):
            terminal.write_line(text, **({colour: True} if colour else {}))
    if verdicts and device == "cpu":
        terminal.write_line(power.ON_A_CPU, light=True)
    if seed is not None:
        terminal.write_line(f"seed {seed}: --seed {seed} draws the same cases again", light=True)
    if not verdicts:
        terminal.write_line(f"no test called {implementation}: nothing is covered", yellow=True)


def verdict_line(verdicts: Mapping[str, MethodVerdict]) -> str:
    """"verdict: right: longflow, keydiff; not covered: h2o (ties)": every method, and what is not right of it."""
    parts = []
    for name in dict.fromkeys(found.verdict for found in verdicts.values()):
        methods = [
            found.method + ("" if name == RIGHT else f" ({', '.join(found.open) or 'tests of no property'})")
            for found in verdicts.values() if found.verdict == name
        ]
        parts.append(f"{name}: {', '.join(methods)}")
    return f"verdict: {'; '.join(parts)}"


def write(terminal: pytest.TerminalReporter, found: list[Result], implementation: str | None) -> None:
    """Print the table of methods; nothing if no test of a method ran."""
    body = rows(found)
    if not body:
        return
    terminal.write_sep("=", f"kvtwin: {implementation or discovery.OPTIMIZED} against float64")
    table = [COLUMNS, *body]
    widths = [max(len(row[column]) for row in table) for column in range(len(COLUMNS))]
    for row in table:
        bad = any(" failed" in text or " error" in text for text in row)
        line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        terminal.write_line(line.rstrip(), red=bad, bold=row is COLUMNS)
    for line in claim_lines(found):
        terminal.write_line(line, red="FAILED" in line)
    own = results.total(result for result in found if not result.method)
    if own.outcomes:
        terminal.write_line(f"the suite's own tests: {cell(own)}", red=bool(own.failed))
    if any("n/p" in text for row in body for text in row):
        missing = Counter(result.message for result in found if result.outcome == "not provided")
        for message, count in sorted(missing.items()):
            terminal.write_line(f"n/p = {message} ({count} test{'s' if count > 1 else ''})", yellow=True)
    for line in refusals(found):
        terminal.write_line(line, yellow=True)
    for line in LEGEND.splitlines():
        terminal.write_line(line, light=True)
