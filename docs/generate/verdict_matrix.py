"""The page of the verdict's kill matrix: which mutants ``kvtwin verify METHOD --impl`` calls wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .markdown import escape, markdown_table

if TYPE_CHECKING:
    from kvtwin.conformance.lab.mutation.verdict_results import Row

ABOUT = """# The verdict's kill matrix

The [kill matrix](kill-matrix.md) is about all tests. This page is about what somebody gets who runs `kvtwin verify
METHOD --impl MODULE`: each mutant of kvtwin's two sides is copied into a package of its own, and judged as that
module, on the CPU, with the verdict's profile and seed. A run stops at the first property that is wrong. If the entry
of a mutant lists the properties that fit, another one does not count. [Break
things](../../contributing/break-things.md#the-verdicts-own-kill-matrix) says how to make these results.
"""


def verdict_matrix_page() -> str:
    from kvtwin.conformance.lab.mutation import mutants as lists
    from kvtwin.conformance.lab.mutation import verdict_results as results

    rows = results.explained(results.stored(), results.reasons())
    if not rows:
        return f"{ABOUT}\nNo results are stored.\n"
    return "\n\n".join([
        ABOUT + f"\nStored: {len(rows):,} of {len(lists.load()):,} mutants.", _by_method(rows), _by_property(rows),
        _not_found(rows), _valid(rows), _outside(rows),
    ]) + "\n"


def _by_method(rows: Sequence[Row]) -> str:
    from kvtwin.conformance.lab.mutation import verdict_results as results

    *shares, total = results.shares(rows)
    table = [
        [share.method, str(share.judged), str(share.found), share.shown(), *(str(share.statuses[one]) for one in (
            results.CRASHED, results.UNFIT, results.RIGHT, results.NOT_COVERED, results.BROKEN, results.VALID,
            results.OUTSIDE,
        ))]
        for share in (*shares, total)
    ]
    columns = ["method", "judged", "found", "share (95 % interval)", "crashed", "wrong, but does not fit",
               "called right", "not covered", "broken", "valid", "outside"]
    return (
        "## By method\n\nThe interval is the exact one of a binomial share (Clopper and Pearson): what such mutants in "
        "general would give. *Found*: called wrong, or *crashed*: the run ended as a user's would. *Broken*: the run "
        "ended without a verdict for another reason. *Valid*: the mutant is a right implementation, and called right. "
        "*Outside*: no verdict on a CPU can see what it changes. Neither counts as judged; if the valid ones counted "
        f"as not found, the share would be {total.with_valid:.1%}.\n\n{markdown_table(columns, table)}"
    )


def _by_property(rows: Sequence[Row]) -> str:
    from kvtwin.conformance.judge.properties import PROPERTIES
    from kvtwin.conformance.lab.mutation import verdict_results as results

    found = results.shares(rows)[-1].properties
    seconds = sorted(row.cpu for row in rows if row.status == results.WRONG) or [0.0]
    table = [[name.replace("_", " "), str(found[name])] for name in PROPERTIES]
    return (
        "## By property\n\nThe property under which a mutant was found first, in the order in which the run takes the "
        f"tests: the likeliest first. Half of the mutants were found within {seconds[len(seconds) // 2]:.1f} s of CPU "
        f"time, without imports and collection.\n\n{markdown_table(['property', 'mutants'], table)}"
    )


def _not_found(rows: Sequence[Row]) -> str:
    from kvtwin.conformance.lab.mutation import verdict_results as results

    table = [[row.method, f"`{row.name}`", escape(row.what), row.status] for row in results.not_found(rows)]
    said = markdown_table(["method", "mutant", "mistake", "verdict"], table) if table else "None."
    return f"## Not found\n\n{said}"


def _valid(rows: Sequence[Row]) -> str:
    from kvtwin.conformance.lab.mutation import verdict_results as results

    table = [
        [row.method, f"`{row.name}`", escape(row.what), escape(row.detail)]
        for row in rows if row.status == results.VALID
    ]
    said = markdown_table(["method", "mutant", "what it changes", "why it is right"], table) if table else "None."
    return f"## Right implementations\n\n{said}"


def _outside(rows: Sequence[Row]) -> str:
    from kvtwin.conformance.lab.mutation import verdict_results as results

    left = [row for row in rows if row.status == results.OUTSIDE]
    parts = ["## Outside"] + ([] if left else ["None."])
    for reason, count in Counter(row.detail for row in left).most_common():
        names = ", ".join(f"`{row.name}`" for row in left if row.detail == reason)
        parts.append(f"{escape(reason)} ({count}): {names}.")
    return "\n\n".join(parts)
