"""The report of a run (``--kv-report``): JSON, and one self-contained HTML page."""

from __future__ import annotations

import datetime
import html
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ...fixtures import accuracy_plot, needle_plot
from ...fixtures.stored import stored_result
from .. import ledger
from . import environment, summary
from .results import KINDS, OUTCOMES, Result, Sum

# Increase it when a key is removed or changes its meaning; new keys do not change it.
SCHEMA_VERSION = 1


def build_report(
    config: pytest.Config,
    backend: environment.Backend,
    implementation: str | None,
    found: Sequence[Result],
    exitstatus: int,
) -> dict[str, Any]:
    """A run as plain values. docs/reference/report.md has the schema."""
    outcomes = summary.claim_outcomes(found)
    return {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "arguments": [str(argument) for argument in config.invocation_params.args],
        "exit_status": int(exitstatus),
        "environment": environment.describe(backend),
        "implementation": summary.under_test(implementation),
        "totals": _counts(Counter(result.outcome for result in found)),
        "methods": {
            method: {kind: _sum(summed) for kind, summed in kinds.items()}
            for method, kinds in summary.by_method(found).items()
        },
        "claims": [
            {
                "id": claim.id,
                "method": claim.method,
                "where": claim.where,
                "statement": claim.statement,
                "verdict": claim.verdict,
                "corrected": claim.corrected,
                "outcome": outcomes.get(claim.id, "not run"),
            }
            for claim in ledger.load()
        ],
        "tests": [_plain(result.as_dict()) for result in found],
    }


def write_report(report: dict[str, Any], path: Path) -> list[str]:
    """Write ``report`` to ``path``: .json writes JSON, .html the page and JSON beside it. Returns the paths."""
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    path.with_suffix(".json").write_text(text, encoding="utf-8")
    if path.suffix == ".json":
        return [str(path)]
    path.write_text(page(report), encoding="utf-8")
    return [str(path), str(path.with_suffix(".json"))]


def _counts(counter: Counter[str]) -> dict[str, int]:
    return {outcome.replace(" ", "_"): counter[outcome] for outcome in OUTCOMES}


def _sum(summed: Sum) -> dict[str, Any]:
    return _plain(
        {
            **_counts(summed.outcomes),
            "decisions": summed.decisions,
            "decisive": summed.decisive,
            "decisive_share": summed.decisive_share,
            "utilisation": summed.utilisation,
            "adjudicated": summed.adjudicated,
        }
    )


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Replace infinities and NaN, which JSON does not have, by null; such a test has failed."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }


STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #1b1f24 }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid #d8dde3 }
td.test { font-family: ui-monospace, monospace; font-size: .85em; overflow-wrap: anywhere }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f4f6f8; padding: .6rem; font-size: .85em }
.passed { color: #1a7f37 } .failed, .error { color: #b3261e; font-weight: 600 }
.not-provided, .skipped, .xfailed, .not-run { color: #7a5c00 }
@media (prefers-color-scheme: dark) {
  body { background: #14171a; color: #dde3ea } th, td { border-color: #343a41 } pre { background: #1f2429 }
  .passed { color: #57c46f } .failed, .error { color: #ff8a80 }
  .not-provided, .skipped, .xfailed, .not-run { color: #e0b94a }
}
"""


def page(report: dict[str, Any]) -> str:
    """The HTML page, without scripts or further files."""
    failed = [test for test in report["tests"] if test["outcome"] in ("failed", "error")]
    totals = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in report["totals"].items() if count)
    title = f"kvtwin: {report['implementation']} against float64"
    versions = ", ".join(f"{name} {found}" for name, found in report["environment"]["versions"].items() if found)
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>',
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{_span('failed' if report['exit_status'] else 'passed', totals or 'no test ran')}<br>"
        f"{html.escape(report['environment']['device'])}, {html.escape(report['environment']['backend'])}<br>"
        f"{html.escape(versions)}<br>{html.escape(report['environment']['platform'])}<br>{report['created']}</p>",
    ]
    for test in failed:
        parts.append(f"<h2>{_span(test['outcome'])} {html.escape(test['nodeid'])}</h2>")
        parts.append(f"<pre>{html.escape(test['message'])}</pre>")
    parts += ["<h2>Methods</h2>", _table(("method", "tests", *MEASURES), _method_rows(report["methods"]))]
    if report["claims"]:
        parts += ["<h2>Claims of the papers</h2>", _claims(report["claims"])]
    parts += [*_accuracy(), *_needle(), *_headline(), *_bands()]
    everything = f"<details><summary>all {len(report['tests'])}</summary>{_tests(report['tests'])}</details>"
    parts += ["<h2>Tests</h2>", everything, "</body></html>"]
    return "\n".join(parts) + "\n"


MEASURES = ("passed", "failed", "not provided", "skipped", "decisive", "of bound", "adjudicated ties")


def _method_rows(methods: dict[str, Any]) -> Iterable[Sequence[str]]:
    for method, kinds in methods.items():
        for kind in (*KINDS, "all"):
            summed = kinds[kind]
            if any(summed[outcome.replace(" ", "_")] for outcome in OUTCOMES):
                yield (
                    html.escape(method),
                    kind.replace("_", " "),
                    str(summed["passed"]),
                    str(summed["failed"] + summed["error"]),
                    str(summed["not_provided"]),
                    str(summed["skipped"] + summed["xfailed"]),
                    summary.percent(summed["decisive_share"]),
                    summary.percent(summed["utilisation"]),
                    str(summed["adjudicated"]),
                )


def _claims(claims: list[dict[str, str]]) -> str:
    rows = (
        (
            html.escape(claim["id"]),
            html.escape(claim["where"]),
            html.escape(claim["statement"]),
            html.escape(ledger.VERDICTS[claim["verdict"]]),
            html.escape(claim["corrected"]),
            _span(claim["outcome"]),
        )
        for claim in claims
    )
    return _table(("id", "where", "the paper", "verdict", "what is true", "test"), rows)


def _stored(
    name: str, title: str, caption: Callable[[dict[str, Any]], str],
    table: Callable[[dict[str, Any]], tuple[Sequence[str], Iterable[Sequence[str]]]] | None = None,
) -> list[str]:
    """Stored figures, which this run did not measure, with plot and table; nothing if there are none."""
    found = stored_result(name)
    if found is None:
        return []
    result, plot = found
    parts = [f"<h2>{title}, as stored</h2>", f"<p>{html.escape(caption(result))}</p>", plot]
    if table is not None:
        heads, rows = table(result)
        parts.append(_table(heads, ([html.escape(cell) for cell in row] for row in rows)))
    return parts


def _accuracy() -> list[str]:
    return _stored(
        "accuracy", "Accuracy over budget", accuracy_plot.caption,
        lambda result: (accuracy_plot.columns(result), accuracy_plot.cells(result)),
    )


def _needle() -> list[str]:
    """Pairs found by length and depth."""
    return _stored(
        "needle", "One pair in a context", needle_plot.caption,
        lambda result: (needle_plot.columns(result), needle_plot.cells(result)),
    )


def _bands() -> list[str]:
    """The study of EpiKV's bands."""
    return _stored("bands", "Hidden-state change and importance by layer", lambda result: (
        f"Fixture model, {result['traces']} of {result['asked']} held-out recall documents answered right, "
        f"{result['tokens']} labelled tokens, of which {100 * result['important']:.1f} % are important. Bars: the mean "
        "over traces, with its standard error; dots: all tokens together."
    ))


def _headline() -> list[str]:
    return _stored(
        "headline", "The papers' headline experiments", lambda result: result["caption"],
        lambda result: (result["columns"], result["rows"]),
    )


def _tests(tests: list[dict[str, Any]]) -> str:
    rows = (
        (
            html.escape(test["nodeid"]),
            _span(test["outcome"]),
            f"{test['duration']:.2f} s",
            f"{test['decisive']} of {test['decisions']}" if test["decisions"] else "",
            "" if test["utilisation"] is None else summary.percent(test["utilisation"]),
            str(test["adjudicated"]) if test["decisions"] else "",
        )
        for test in tests
    )
    heads = ("test", "outcome", "time", "decisive", "of bound", "ties")
    return _table(heads, rows, first="test")


def _span(outcome: str, text: str | None = None) -> str:
    return f'<span class="{outcome.replace(" ", "-")}">{html.escape(outcome if text is None else text)}</span>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], first: str = "") -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    opening = f'<td class="{first}">' if first else "<td>"
    body = "\n".join(f"<tr>{opening}{'</td><td>'.join(row)}</td></tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"
