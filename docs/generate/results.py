"""The pages of stored results."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .authors import authors_page
from .known import known_page
from .markdown import escape, markdown_table
from .power import power_page
from .stored import ROOT, baselines, benchmark_table, kill_matrices, machine_of, stored
from .verdict_matrix import verdict_matrix_page


def result_pages() -> dict[str, str]:
    return {
        "claims": claims_page(), "authors": authors_page(), "accuracy": accuracy_page(),
        "known": known_page(), "needle": needle_page(), "bands": bands_page(),
        "headline": headline_page(), "benchmarks": benchmarks_page(), "kill-matrix": kill_matrix_page(),
        "verdict-matrix": verdict_matrix_page(), "power": power_page(),
    }  # fmt: skip


def claims_page() -> str:
    from kvtwin.conformance import ledger

    return (
        "# Claims of the papers\n\nGenerated from `conformance/*/claims.toml`. Each claim has tests that assert its "
        "verdict; see [the claims ledger](../../explanation/ledger.md).\n\n"
        f"{anchored(ledger.table(ledger.load(), ledger.omitted(), ledger.sources()))}\n"
    )


CLAIM_ID = r"[A-Z]{2}-\d+[a-z]?"


def anchored(table: str) -> str:
    """The rows of the ledger's tables, each with a target for links."""
    row = re.compile(rf"^\| ({CLAIM_ID}) \|", re.MULTILINE)
    return row.sub(lambda found: f"| [{found[1]}]{{#{found[1].lower()}}} |", table)


def linked(page: str) -> str:
    """A page, with each claim that it names as a link to the ledger."""
    to = "../reference/results/claims.md"
    return re.sub(rf"\b{CLAIM_ID}\b", lambda found: f"[{found[0]}]({to}#{found[0].lower()})", page)


def accuracy_page() -> str:
    from kvtwin.fixtures import accuracy_plot

    result = stored("accuracy")
    return (
        "# Accuracy over budget\n\n![Accuracy over budget, a panel per task and a line per method](accuracy.svg)\n\n"
        f"{accuracy_plot.markdown(result)}\n\n{escape(accuracy_plot.caption(result))}\n\n"
        "One small model and one way to ask: these are results of these settings, not a ranking of the methods.\n"
    )


def needle_page() -> str:
    from kvtwin.fixtures import needle_plot

    result = stored("needle")
    return (
        "# One pair at a given depth\n\n![Recalled pairs, by length and depth](needle.svg)\n\n"
        f"{markdown_table(needle_plot.columns(result), needle_plot.cells(result))}\n\n"
        f"{escape(needle_plot.caption(result))}\n"
    )


def bands_page() -> str:
    result = stored("bands")
    rows = [
        [str(one["layer"]), f"{one['pooled']:+.3f}", f"{one['mean']:+.3f}", f"{one['standard_error']:.3f}"]
        for one in result["layers"]
    ]
    return (
        "# EpiKV's bands in the fixture model\n\nThe protocol is that of EpiKV's appendix C: windows of the context "
        "are replaced by padding, one at a time; a token is important if this changes the answer. The table has "
        "Spearman's rank correlation of these labels with the change of the hidden state.\n\n"
        "![Correlation by layer](bands.svg)\n\n"
        f"{markdown_table(['layer', 'all tokens', 'mean over documents', 'standard error'], rows)}\n\n"
        f"{result['traces']} documents, {result['tokens']:,} tokens, {result['important']:.1%} of them important.\n"
    )


def headline_page() -> str:
    result = stored("headline")
    return (
        "# The papers' headline experiments\n\n![The papers' headline experiments](headline.svg)\n\n"
        f"{escape(result['caption'])}\n\n{markdown_table(result['columns'], result['rows'])}\n\n"
        "`python -m tox -e headline` measures these; [Run on a GPU](../../how-to/gpu.md) says how.\n"
    )


def benchmarks_page() -> str:
    parts = [
        "# Benchmarks\n\nMedians of device time with a cold L2 cache. The share is that of the copy bandwidth that the "
        "same run measured: a kernel that reads more than it writes can exceed 100 %. The last column is our time over "
        "that of the fastest peer on the same inputs, in the same run; less than 1 means that ours is faster.\n"
    ]
    for machine, run in baselines():
        parts += [f"## {machine}\n\n{machine_of(run)}.\n\n### Against the bars\n", bars_table(machine, run)]
        timed = [one for one in run["benchmarks"] if "milliseconds" in one["extra_info"]]
        for group in sorted({one["group"] or "prompts" for one in timed}):
            own = [one for one in timed if (one["group"] or "prompts") == group]
            parts.append(f"### {group}\n\n{benchmark_table(own)}\n")
    return "\n".join(parts)


def bars_table(machine: str, run: Any) -> str:
    """What perf/thresholds asks for, beside what was measured."""
    measured = {_gate(one): one["extra_info"] for one in run["benchmarks"]}
    rows = []
    for (file, key), bar in bars().items():
        info = measured.get((file, key))
        for what, asked in bar.items():
            found = None if info is None else _measured(info, what, machine)
            if found is not None:
                rows.append([f"`{file}` `{key}`", escape(what), f"{found:.3g}", f"{asked:g}"])
    return markdown_table(["benchmark", "quantity", "measured", "bar"], rows) + "\n"


def bars() -> dict[tuple[str, str], dict[str, float]]:
    """What perf/thresholds asks for: (file, benchmark) -> quantity -> bar."""
    return {
        (path.stem, key): dict(_flat(gate.get("bar", {})))
        for path in sorted((ROOT / "perf" / "thresholds").glob("*.toml"))
        for key, gate in tomllib.loads(path.read_text(encoding="utf-8")).items()
    }


def _gate(one: dict[str, Any]) -> tuple[str, str]:
    """Where perf/thresholds has the gate of a stored benchmark: the file and the key."""
    title, method = one["name"].removeprefix("test_"), f"[{one['group']}-"
    if method in title:
        return one["group"], title.replace(method, "[", 1)
    return Path(one["fullname"].split("::")[0]).stem.removeprefix("bench_"), title


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _measured(info: Any, what: str, machine: str) -> float | None:
    kind, _, name = what.partition(".")
    if kind == "ratio":
        name = info["strongest"] if name == "strongest" else name
        others = {**info["peers"], **info["references"]}
        return others[name]["ratio"] if name in others else None
    if kind == "milliseconds":
        return info["milliseconds"] if name == machine else None
    return info.get({"share": "share_of_copy"}.get(what, what))


def mutant_classes() -> str:
    """A table of the mutants of each class by method."""
    from kvtwin.conformance.lab.mutation import mutants as lists

    mutants = lists.load()
    rows = []
    for letter, what in lists.CLASSES.items():
        methods = Counter(mutant.method for mutant in mutants if mutant.of_class == letter)
        by_method = ", ".join(f"{method} {number}" for method, number in sorted(methods.items()))
        rows.append([letter, escape(what), str(methods.total()), by_method])
    return markdown_table(["class", "mistake", "mutants", "by method"], rows)


def claim_changes() -> str:
    """How many tests of claims detect their change, by ledger and by what is changed."""
    from kvtwin.conformance.lab.mutation import claim_lane, claim_mutants

    results = claim_lane.load()
    counts: dict[str, Counter[str]] = {}
    for row in claim_mutants.load():
        found = results[row.mutant.name]
        counts.setdefault(row.method, Counter())[found["kind"]] += found["tests"] - len(found.get("undetected", []))
    kinds = claim_mutants.KINDS
    rows = [[method, *(str(of[kind]) for kind in kinds), str(of.total())] for method, of in counts.items()]
    return markdown_table(["ledger", *kinds.values(), "tests"], rows)


def kill_matrix_page() -> str:
    found = kill_matrices()
    rows = [
        [name, str(len(one["mutants"])), str(sum(mutant["status"] == "killed" for mutant in one["mutants"]))]
        for name, one in found.items()
    ]
    parts = [
        "# Kill matrix\n\nA mutant is one deliberate mistake in one file. `python -m tox -e mutants` applies each "
        "of them to a copy and runs the tests that must fail.\n\n"
        + markdown_table(["method", "mutants", "killed"], rows)
        + "\n\n## Classes\n\nSome mistakes survived in classes, whole kinds of cases that no test had. Mutants of "
        "these classes are marked:\n\n" + mutant_classes()
        + "\n\n## Tests of claims\n\nEach test of a claim must detect one change of what it is about: of the reference "
        "or the optimized version, of helpers that tests share, or of a function or figures beside the test. "
        "`python -m tox -e mutants -- claims` makes the changes.\n\n" + claim_changes()
    ]
    for name, one in found.items():
        rows = [
            [f"`{mutant['name']}`", escape(mutant["what"]), mutant["status"],
             ", ".join(f"`{test.split('::')[-1]}`" for test in mutant.get("killed_by", []))]
            for mutant in one["mutants"]
        ]  # fmt: skip
        parts.append(f"## {name}\n\n{markdown_table(['mutant', 'mistake', 'status', 'killed by'], rows)}")
    return "\n\n".join(parts) + "\n"
