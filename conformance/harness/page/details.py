"""The folded parts of the page: kinds of tests, claims, stored results, and all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ....fixtures import accuracy_plot, needle_plot
from ....fixtures.stored import stored_result
from ... import ledger
from ..results import FAILED, KINDS, OUTCOMES
from ..wording import counted
from .markup import badge, bullets, code, fold, name, of_bound, pre, table, text

Values = Mapping[str, Any]

#: The page shows so many failed tests with their messages, and so many more by id. The JSON file has all.
MOST_MESSAGES, MOST_IDS = 60, 400
MEASURES = ("passed", "failed", "not provided", "environment", "skipped", "decisive", "of bound", "adjudicated ties")


def failed(tests: Iterable[Values]) -> list[str]:
    """Failed tests, each with its message in a fold."""
    found = list(tests)
    parts = [
        fold(f"{badge(test['outcome'])} {code(test['nodeid'])}", pre(test["message"])) for test in found[:MOST_MESSAGES]
    ]
    more = found[MOST_MESSAGES:]
    if more:
        listed = bullets(code(test["nodeid"]) for test in more[:MOST_IDS])
        left = f"<p>The JSON file has {counted(len(more) - MOST_IDS, 'more')}.</p>" if len(more) > MOST_IDS else ""
        parts.append(fold(f"{len(more):,} more failed tests", listed, left))
    return parts


def kinds(methods: Mapping[str, Mapping[str, Values]]) -> list[str]:
    """The table of methods and kinds of tests."""
    rows = [
        (
            text(method),
            name(kind),
            str(summed["passed"]),
            str(summed["failed"] + summed["error"]),
            str(summed["not_provided"]),
            str(summed["environment"]),
            str(summed["skipped"] + summed["xfailed"]),
            "-" if summed["decisive_share"] is None else f"{100 * summed['decisive_share']:.3g} %",
            of_bound(summed["utilisation"]) if summed["decisions"] or summed["utilisation"] is not None else "-",
            str(summed["adjudicated"]),
        )
        for method, by_kind in methods.items() for kind in (*KINDS, "all") for summed in (by_kind[kind],)
        if any(summed[outcome.replace(" ", "_")] for outcome in OUTCOMES)
    ]
    if not rows:
        return []
    shown = table(("method", "tests", *MEASURES), rows, label="Tests by method and kind", numbers=MEASURES)
    return [fold("Tests by method and kind", shown)]


def claims(found: Iterable[Values]) -> list[str]:
    """The claims that the run checked."""
    ran = [claim for claim in found if claim["outcome"] != "not run"]
    if not ran:
        return []
    rows = (
        (
            code(claim["id"]), badge(claim["outcome"]), text(claim["where"]), text(claim["statement"]),
            text(ledger.VERDICTS[claim["verdict"]]), text(claim["corrected"]),
        )
        for claim in ran
    )
    heads = ("id", "test", "where", "statement", "verdict", "what is true")
    shown = table(heads, rows, label="Claims of the papers", long=("statement", "what is true"))
    return [fold(f"Claims of the papers: {len(ran):,} checked", shown)]


def accuracy(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How the small model answers with the implementation, and with the reference in its place. Empty without rows."""
    if not rows:
        return
    tasks = list(dict.fromkeys(task for row in rows for task in row["reference"]))

    def percent(one: Mapping[str, Any]) -> str:
        error = one["standard_error"]
        return f"{100 * one['accuracy']:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")

    yield "<h2>Accuracy of a small model</h2>"
    yield (
        "<p>kvtwin's small model answers questions with the implementation, and with the reference in its place: "
        "answers in percent, with the standard error over documents.</p>"
    )
    heads = ["method", "through", "budget", *(f"{task}, {side}" for task in tasks for side in ("reference", "tested"))]
    cells = (
        [
            text(row["method"]), code(row["through"]), f"{row['budget']:,}",
            *(percent(row[side][task]) if task in row[side] else text(row["why"])
              for task in tasks for side in ("reference", "tested")),
        ]
        for row in rows
    )  # fmt: skip
    yield table(heads, cells, label="Accuracy of a small model", numbers=("budget",))


def stored_results() -> list[str]:
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
) -> list[str]:
    """Stored figures, which this run did not measure, with plot and table; nothing if there are none."""
    found = stored_result(stem)
    if found is None:
        return []
    result, plot = found
    parts = [
        f"<p>{text(caption(result))}</p>",
        f'<div class="scroll" role="region" tabindex="0" aria-label="{text(title)}, plot">{plot}</div>',
    ]
    if cells is not None:
        heads, rows = cells(result)
        parts.append(table(heads, ([text(cell) for cell in row] for row in rows), label=title))
    return [fold(f"{text(title)}, as stored", *parts)]


def tests(found: Sequence[Values]) -> list[str]:
    """Every test: failed ones by name, those that did not run by reason, passed ones by file."""
    parts = failed(test for test in found if test["outcome"] in FAILED)
    parts += _by_reason(test for test in found if test["outcome"] not in ("passed", *FAILED))
    parts += _by_file(test for test in found if test["outcome"] == "passed")
    return [fold(f"All {counted(len(found), 'test')}", *parts)]


def _by_reason(found: Iterable[Values]) -> Iterator[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for test in found:
        reasons.setdefault((test["outcome"], test["message"]), []).append(test["nodeid"])
    if not reasons:
        return
    ordered = sorted(reasons.items(), key=lambda pair: -len(pair[1]))
    rows = (
        (badge(outcome), f"{len(ids):,}", text(message), code(ids[0]))
        for (outcome, message), ids in ordered[:MOST_IDS]
    )
    heads = ("outcome", "tests", "reason", "the first")
    yield table(
        heads, rows, label="Tests that did not run to their end", numbers=("tests",), long=("reason", "the first")
    )
    if len(ordered) > MOST_IDS:
        yield f"<p>The JSON file has {counted(len(ordered) - MOST_IDS, 'more reason')}.</p>"


def _by_file(found: Iterable[Values]) -> Iterator[str]:
    files: dict[str, list[Values]] = {}
    for test in found:
        files.setdefault(test["nodeid"].split("::")[0], []).append(test)
    if not files:
        return
    rows = (_file(file, inside) for file, inside in sorted(files.items()))
    numbers = ("passed", "time", "decisive", "of bound", "ties")
    yield table(("file", *numbers), rows, label="Passed tests by file", numbers=numbers)


def _file(file: str, inside: Sequence[Values]) -> tuple[str, ...]:
    decisions, decisive, ties = (sum(test[key] for test in inside) for key in ("decisions", "decisive", "adjudicated"))
    used = [test["utilisation"] for test in inside if test["utilisation"] is not None]
    return (
        code(file),
        f"{len(inside):,}",
        f"{sum(test['duration'] for test in inside):.1f} s",
        f"{decisive:,} of {decisions:,}" if decisions else "-",
        of_bound(max(used)) if used else "-",
        f"{ties:,}" if decisions else "-",
    )
