"""The report of a run (``--kv-report``): its data, as JSON. The package `page` beside this file makes the HTML page."""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from .. import ledger
from . import environment, summary
from .page import page
from .results import OUTCOMES, Result, Sum
from .verdict import Judgement, MethodVerdict

# Increase it when a key is removed or changes its meaning; new keys do not change it. report.schema.json has it too.
SCHEMA_VERSION = 2
#: Of the first finding of a wrong property.
FINDING = ("test", "subject", "field", "dtype", "error", "message", "of_bound", "case", "replay")
NOT_PROVIDED = "not provided: "


def schema() -> dict[str, Any]:
    """The JSON Schema of a report."""
    text = resources.files(__package__).joinpath("report.schema.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def build_report(
    found: Sequence[Result],
    verdicts: Mapping[str, MethodVerdict],
    *,
    backend: environment.Backend,
    implementation: str | None,
    arguments: Sequence[object],
    exit_status: int,
    seed: int | None = None,
) -> dict[str, Any]:
    """A run as plain values: docs/reference/report.md. arguments: pytest's command line. seed: of the drawn cases."""
    outcomes = summary.claim_outcomes(found)
    made = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "arguments": [str(argument) for argument in arguments],
        "exit_status": int(exit_status),
        "seed": seed,
        "environment": environment.describe(backend),
        "implementation": summary.under_test(implementation),
        "overall": {method: _overall(one) for method, one in verdicts.items()},
        "verdicts": {
            method: {name: _judgement(judged) for name, judged in one.properties.items()}
            for method, one in verdicts.items()
        },
        "coverage": {method: _coverage(one) for method, one in verdicts.items()},
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
        "tests": [result.as_dict() for result in found],
    }
    plain: dict[str, Any] = _finite(made)
    return plain


def write_report(report: dict[str, Any], path: Path) -> list[str]:
    """Write ``report`` to ``path``: .json writes JSON, .html the page and JSON beside it. Returns the paths."""
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    made = page(report) if path.suffix != ".json" else None
    write_whole(path.with_suffix(".json"), text)
    if made is None:
        return [str(path)]
    write_whole(path, made)
    return [str(path), str(path.with_suffix(".json"))]


def write_whole(path: Path, text: str) -> None:
    """Write a file as a whole: where that fails, an earlier one stays."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _overall(found: MethodVerdict) -> dict[str, Any]:
    return {
        "verdict": found.verdict,
        "expected": found.verdict == "wrong" and found.expected,
        "causes": [{"property": name, "consequences": others} for name, _, others in found.causes],
        "failed_others": found.others["failed"],
    }


def _judgement(found: Judgement) -> dict[str, Any]:
    """The verdict on one property, with its first finding: that of the shortest case."""
    first = found.findings[0] if found.findings else {}
    return {
        "verdict": found.verdict,
        "cases": found.cases,
        "decisions": found.decisions,
        "decisive": found.decisive,
        "adjudicated": found.adjudicated,
        "wrong": found.wrong,
        "elements": found.elements,
        "launches": found.launches,
        **found.described,
        "lacking": dict(found.lacking),
        "unit": found.unit,
        "limit": found.limit,
        "worst": dict(found.worst),
        "why": found.why,
        "follows": found.follows,
        "expected": found.expected,
        "findings": len(found.findings),
        "checker": found.blames_us,
        "unbounded": found.unbounded,
        **{key: first.get(key) for key in FINDING},
    }


def _coverage(found: MethodVerdict) -> dict[str, Any]:
    return {
        "calls": found.answered + sum(found.refused.values()),
        "answered": found.answered,
        "refused": dict(found.refused.most_common()),
        "missing": dict(found.missing.most_common()),
        "notes": dict(found.notes.most_common()),
        "judged": list(found.judged),
        "not_provided": [message.removeprefix(NOT_PROVIDED) for message in found.not_provided],
        "outside": list(found.outside),
        "conventions": list(found.conventions),
    }


def _counts(counter: Counter[str]) -> dict[str, int]:
    return {outcome.replace(" ", "_"): counter[outcome] for outcome in OUTCOMES}


def _sum(summed: Sum) -> dict[str, Any]:
    return {
        **_counts(summed.outcomes),
        "decisions": summed.decisions,
        "decisive": summed.decisive,
        "decisive_share": summed.decisive_share,
        "utilisation": summed.utilisation,
        "adjudicated": summed.adjudicated,
    }


def _finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
