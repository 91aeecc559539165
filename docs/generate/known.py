"""The pages about the public model, from the results that are stored in fixtures/known_results.

pytest conformance/suite --kv-device=cpu -k public_model --kv-report=FILE.html
python -c "from docs.generate.known import store; store('FILE.json')"      # what that report says about the traces
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .markdown import escape, markdown_table
from .stored import ROOT, read

Row = dict[str, Any]
TRACES = "fixtures/known_results/traces.json"


def rows() -> list[Row]:
    return [json.loads(line) for line in read("fixtures/known_results/results.jsonl").splitlines()]


def known_page() -> str:
    from kvtwin.fixtures import known_plot

    found = rows()
    parts = [
        "# Accuracy of a public model\n\n![Accuracy of SmolLM2-135M-Instruct over bytes held](known.svg)\n\n"
        "Budgets are shares of the context and its answer; a cell is the result in percent, or the perplexity, with "
        "its interval. [Accuracy](../../explanation/accuracy.md#a-public-model) describes the tasks.\n\n"
        f"{escape(known_plot.caption(found))}\n"
    ]
    for task in dict.fromkeys(row["task"] for row in found):
        of_task = [row for row in found if row["task"] == task]
        parts.append(f"## {task.capitalize()}\n\n{_table(of_task, 'method', _method)}\n")
    parts.append(f"`kvtwin accuracy --model known --device cuda` measures these.\n\n{_traces()}")
    return "\n".join(parts)


def of_report(report: dict[str, Any]) -> dict[str, Any]:
    """Per method, how many decisions its golden traces compare, how many are decisive, and the largest error as a share
    of its bound."""
    return {
        "torch": report["environment"]["versions"]["torch"], "triton": report["environment"]["versions"]["triton"],
        "methods": {
            name: [of["golden"][number] for number in ("decisions", "decisive", "utilisation")]
            for name, of in report["methods"].items()
        },
    }


def _traces() -> str:
    stored = json.loads(read(TRACES))
    lines = ([name, f"{decisive:,} of {decisions:,}" if decisions else "-", f"{100 * share:.0f} %"]
             for name, (decisions, decisive, share) in stored["methods"].items())
    return (
        "## Golden traces\n\nWhat verdicts see of this model: queries, keys and values of three layers. A decision is "
        "decisive if the bounds leave one right answer; quantizers decide nothing. The last column is the largest "
        "error of the optimized side as a share of its bound.\n\n"
        f"{markdown_table(['method', 'decisive decisions', 'largest error'], lines)}\n\n"
        f"On a CPU, with torch {stored['torch']} and triton {stored['triton']}: "
        "`pytest conformance/suite --kv-device=cpu -k public_model`.\n"
    )


def of_method(name: str) -> str:
    """A method's table and plot, for its page."""
    own = [row for row in rows() if not row["side"] or row["method"].split(" (")[0] == name]
    if not any(row["side"] for row in own):
        return ""
    table = _table(own, "task, method", lambda row: f"{row['task']}, {_method(row)}")
    return (
        f"![Accuracy of SmolLM2-135M-Instruct over bytes held](../results/known-{name}.svg)\n\n{table}\n\n"
        "SmolLM2-135M-Instruct, in percent or as perplexity, with intervals of 95 %, by share of the context; see "
        "[Accuracy of a public model](../results/known.md).\n"
    )


def plots() -> dict[str, str]:
    from kvtwin.fixtures import known_plot

    found = rows()
    names = dict.fromkeys(row["method"].split(" (")[0] for row in found if row["side"])
    return {"results/known.svg": known_plot.svg(found)} | {
        f"results/known-{name}.svg": known_plot.svg(
            [row for row in found if not row["side"] or row["method"].split(" (")[0] == name]
        ) for name in names
    }


def _method(row: Row) -> str:
    return row["method"] + (", reference" if row["side"] == "reference" else "")


def _table(of: list[Row], title: str, label: Any) -> str:
    """A line per label, a column per share of the context, with intervals."""
    from kvtwin.fixtures import known_plot

    shares = sorted({_divisor(row) for row in of})
    cells: dict[str, dict[int, str]] = {}
    for row in known_plot.ordered(of):
        cells.setdefault(label(row), {})[_divisor(row)] = known_plot.said(row).replace(" %", "")
    head = [title, *("1" if one == 1 else f"1/{one}" for one in shares)]
    return markdown_table(head, ([escape(name), *(of_one.get(one, "") for one in shares)]
                                 for name, of_one in cells.items()))


def _divisor(row: Row) -> int:
    """Of the budget: the last part of a point's name."""
    return int(row["point"].rpartition("/")[2])


def store(path: str) -> None:
    found = of_report(json.loads(Path(path).read_text(encoding="utf-8")))
    (ROOT / TRACES).write_text(json.dumps(found) + "\n", encoding="utf-8")
