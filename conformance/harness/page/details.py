"""What the folded parts of the page show: kinds of tests, claims, stored results, and all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ....fixtures import accuracy_plot, needle_plot
from ....fixtures.stored import stored_result
from ... import ledger
from ..results import FAILED, KINDS, OUTCOMES
from ..wording import of_bound
from .markup import part

Values = Mapping[str, Any]

#: The page shows so many failed tests with their messages, and so many more by id. The JSON file has all.
MOST_MESSAGES, MOST_IDS = 60, 400
MEASURES = ("passed", "failed", "not provided", "environment", "skipped", "decisive", "of bound", "adjudicated ties")


def failed_tests(tests: Iterable[Values]) -> dict[str, Any]:
    """Failed tests: with messages, then by id, then by number."""
    found = list(tests)
    more = found[MOST_MESSAGES:]
    return {
        "tests": found[:MOST_MESSAGES], "more": len(more), "ids": [test["nodeid"] for test in more[:MOST_IDS]],
        "left": max(0, len(more) - MOST_IDS),
    }


def _fold(title: str, label: str, heads: Sequence[str] = (), rows: Iterable[Sequence[Any]] = (), **more: Any) -> Values:
    """A part that the reader opens, with a table if there are heads. More: a caption, a plot, columns of numbers and
    of long texts."""
    return {
        "title": title, "label": label, "heads": heads, "rows": list(rows), "caption": "", "plot": "", "numbers": (),
        "long": (), **more,
    }


def kinds(methods: Mapping[str, Mapping[str, Values]]) -> list[Values]:
    """The table of methods and kinds of tests."""
    rows = [
        [
            method,
            kind.replace("_", " "),
            summed["passed"],
            summed["failed"] + summed["error"],
            summed["not_provided"],
            summed["environment"],
            summed["skipped"] + summed["xfailed"],
            "-" if summed["decisive_share"] is None else f"{100 * summed['decisive_share']:.3g} %",
            of_bound(summed["utilisation"]) if summed["decisions"] or summed["utilisation"] is not None else "-",
            summed["adjudicated"],
        ]
        for method, by_kind in methods.items() for kind in (*KINDS, "all") for summed in (by_kind[kind],)
        if any(summed[outcome.replace(" ", "_")] for outcome in OUTCOMES)
    ]
    title = "Tests by method and kind"
    return [_fold(title, title, ("method", "tests", *MEASURES), rows, numbers=MEASURES)] if rows else []


def claims(found: Iterable[Values]) -> list[Values]:
    """The claims that the run checked."""
    rows = [
        [
            part("code", claim["id"]), part("badge", claim["outcome"]), claim["where"], claim["statement"],
            ledger.VERDICTS[claim["verdict"]], claim["corrected"],
        ]
        for claim in found if claim["outcome"] != "not run"
    ]
    if not rows:
        return []
    heads = ("id", "test", "where", "statement", "verdict", "what is true")
    title = f"Claims of the papers: {len(rows):,} checked"
    return [_fold(title, "Claims of the papers", heads, rows, long=("statement", "what is true"))]


def accuracy(rows: Sequence[Mapping[str, Any]]) -> Values:
    """How the small model answers with the implementation, and with the reference in its place. Empty without rows."""
    if not rows:
        return {}
    tasks = list(dict.fromkeys(task for row in rows for task in row["reference"]))

    def percent(one: Mapping[str, Any]) -> str:
        error = one["standard_error"]
        return f"{100 * one['accuracy']:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")

    sides = ("reference", "tested")
    return {
        "heads": ["method", "through", "budget", *(f"{task}, {side}" for task in tasks for side in sides)],
        "rows": [
            [row["method"], part("code", row["through"]), f"{row['budget']:,}",
             *(percent(row[side][task]) if task in row[side] else row["why"] for task in tasks for side in sides)]
            for row in rows
        ],
    }  # fmt: skip


def stored_results() -> list[Values]:
    """What kvtwin's own methods reached in earlier runs, with plots."""
    return [
        *_stored(
            "accuracy", "Accuracy over budget", accuracy_plot.caption,
            lambda result: (accuracy_plot.columns(result), accuracy_plot.cells(result)),
        ),
        *_stored(
            "needle", "One pair in a context", needle_plot.caption,
            lambda result: (needle_plot.columns(result), needle_plot.cells(result)),
        ),
        *_stored(
            "headline", "The papers' headline experiments", lambda result: result["caption"],
            lambda result: (result["columns"], result["rows"]),
        ),
        *_stored("bands", "Hidden-state change and importance by layer", lambda result: (
            f"Fixture model, {result['traces']} of {result['asked']} held-out recall documents answered right, "
            f"{result['tokens']} labelled tokens, of which {100 * result['important']:.1f} % are important. Bars: the "
            "mean over traces, with its standard error; dots: all tokens together."
        )),
    ]


def _stored(
    stem: str, title: str, caption: Callable[[dict[str, Any]], str],
    cells: Callable[[dict[str, Any]], tuple[Sequence[str], Iterable[Sequence[str]]]] | None = None,
) -> list[Values]:
    """Stored figures, which this run did not measure, with plot and table; nothing if there are none."""
    found = stored_result(stem)
    if found is None:
        return []
    result, plot = found
    table = () if cells is None else cells(result)
    return [_fold(f"{title}, as stored", title, *table, caption=caption(result), plot=Markup(plot))]


def tests(found: Sequence[Values]) -> Values:
    """Every test: failed ones by name, those that did not run by reason, passed ones by file."""
    reasons: dict[tuple[str, str], list[str]] = {}
    files: dict[str, list[Values]] = {}
    for test in found:
        if test["outcome"] == "passed":
            files.setdefault(test["nodeid"].split("::")[0], []).append(test)
        elif test["outcome"] not in FAILED:
            reasons.setdefault((test["outcome"], test["message"]), []).append(test["nodeid"])
    ordered = sorted(reasons.items(), key=lambda pair: -len(pair[1]))
    return {
        "count": len(found), "failed": failed_tests(test for test in found if test["outcome"] in FAILED),
        "reasons": [
            [part("badge", outcome), f"{len(ids):,}", message, part("code", ids[0])]
            for (outcome, message), ids in ordered[:MOST_IDS]
        ],
        "more_reasons": max(0, len(ordered) - MOST_IDS),
        "files": [_file(file, inside) for file, inside in sorted(files.items())],
        "heads": ("file", "passed", "time", "decisive", "of bound", "ties"),
    }


def _file(file: str, inside: Sequence[Values]) -> tuple[Any, ...]:
    decisions, decisive, ties = (sum(test[key] for test in inside) for key in ("decisions", "decisive", "adjudicated"))
    used = [test["utilisation"] for test in inside if test["utilisation"] is not None]
    return (
        part("code", file),
        f"{len(inside):,}",
        f"{sum(test['duration'] for test in inside):.1f} s",
        f"{decisive:,} of {decisions:,}" if decisions else "-",
        of_bound(max(used)) if used else "-",
        f"{ties:,}" if decisions else "-",
    )
