"""Formats the figures of the headline experiments as a table and as plots, for the report and the documentation.

    python -m perf.headline.page FOLDER            print the table; FOLDER is the output of python -m perf.headline
    python -m perf.headline.page FOLDER --store    ... and store the figures in perf/baselines/MACHINE.json, and the
                                                   table and plots in fixtures/ for the report and the documentation
    python -m perf.headline.page --again           write the table and plots again from the stored figures
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..device import slug
from ..report import HEADLINE, rounded
from . import EXPERIMENTS
from .generate import CAPTURED
from .plots import Panel, bars, lines, svg
from .rows import COLUMNS, rows

ROOT = Path(__file__).resolve().parent.parent.parent
STORED = "headline.json", "headline.svg"

Figures = Mapping[str, Any]


def merged(folder: Path, before: Figures | None = None) -> dict[str, Any]:
    """The experiments in a folder, and those of `before` that the folder lacks."""
    found = dict((before or {}).get("experiments", {}))
    for name in EXPERIMENTS:
        path = folder / f"{name}.json"
        if path.is_file():
            found[name] = rounded(json.loads(path.read_text(encoding="utf-8")))
    if not found:
        raise SystemExit(f"{folder} has no JSON of an experiment")
    if any(one["tiny"] for one in found.values()):
        raise SystemExit(f"{folder} has figures of a --tiny run, which are meaningless")
    gpus = {one["machine"]["gpu"] for one in found.values()}
    if len(gpus) != 1:
        raise SystemExit(f"the experiments ran on different GPUs: {', '.join(map(str, sorted(gpus)))}")
    return {"gpu": gpus.pop(), "experiments": {name: found[name] for name in EXPERIMENTS if name in found}}


def table(result: Figures) -> list[str]:
    """Lines of Markdown: a row for each figure of the papers, then missing experiments and complaints."""
    text = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    text += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows(result)]
    missing = [name for name in EXPERIMENTS if name not in result["experiments"]]
    if missing:
        text += ["", f"Not measured yet: {', '.join(missing)}."]
    complaints = [
        f"{name}: {complaint}" for name, one in result["experiments"].items() for complaint in one["complaints"]
    ]
    if complaints:
        text += ["", "Complaints of the run: " + "; ".join(complaints) + "."]
    return text


def caption(result: Figures) -> str:
    """Machine and versions in one sentence."""
    one = next(iter(result["experiments"].values()))
    roofline, machine = one["roofline"] or {}, one["machine"]
    return (
        f"{result['gpu']}, copy {roofline.get('copy', 0) / 1e12:.2f} TB/s, driver {machine['driver']}, CUDA "
        f"{machine['cuda']}, torch {machine['torch']}, triton {machine['triton']}. Models of the true shape, random "
        "weights in bfloat16."
    )


def panels(result: Figures) -> list[Panel]:
    """The plots of the figures."""
    all_figures = {name: one["figures"] for name, one in result["experiments"].items()}
    found: list[Panel] = []
    for name, title in (
        ("longflow", "Qwen3-1.7B shape, 16,000 tokens, tokens per second"),
        ("thinkv", "Llama-8B shape, 32,768 tokens, tokens per second"),
    ):
        rates = {
            f"{system}, {one['batch']} rows": one["tokens_per_second"]
            for system, one in all_figures.get(name, {}).items() if "tokens_per_second" in one
        }
        if rates:
            found.append(bars(title, rates, [one for one in rates if one.startswith(name)]))
    epikv = all_figures.get("epikv", {})
    if "steps" in epikv:
        times = {name: one["milliseconds"] for name, one in epikv["steps"].items()}
        found.append(bars("Llama-8B shape, batch 1, budget 8192, ms a step", times, ["epikv"]))
    keydiff = all_figures.get("keydiff", {})
    if "eviction" in keydiff:
        series = {name: _by_number(keydiff["eviction"][key]) for name, key in (
            ("KeyDiff", "milliseconds"), ("eager PyTorch", "eager"),
        )}
        found.append(lines("Eviction of three quarters, ms by tokens", series))
    first = {name: one["seconds_to_first_token"] for name, one in keydiff.items() if "seconds_to_first_token" in one}
    if first:
        found.append(bars("131,072 tokens, seconds to the first token", first, ["keydiff"]))
    synckv = {name: one for name, one in all_figures.get("synckv", {}).items() if name.startswith("B1-")}
    if synckv:
        series = {name: {
            1024 * int(setting.split("-")[1].rstrip("K")): one[f"{key}, ms a step"]
            for setting, one in synckv.items() if f"{key}, ms a step" in one
        } for name, key in (("full attention",) * 2, ("SyncKV", "synckv"), ("offloaded", "offloaded"))}
        found.append(lines("Llama-8B shape, batch 1, ms a step by tokens", {k: v for k, v in series.items() if v}))
    for setting, systems in all_figures.get("generate", {}).items():
        times = {name: one["ms_per_token"] for name, one in systems.items() if "ms_per_token" in one}
        if times:
            ours = [name for name in times if name.endswith(CAPTURED)]
            found.append(bars(f"transformers' generate, {setting}, ms per token", times, ours))
    memory = all_figures.get("memory", {})
    if memory:
        peaks = {name: one["peak_bytes"] / 2**30 for name, one in memory.items()}
        ours = [name for name in peaks if "grown" not in name]
        found.append(bars("Peak at a budget of 1024, batch 16, GiB", peaks, ours))
    return found


def _by_number(points: Mapping[str, float]) -> dict[int, float]:
    return {int(key): value for key, value in points.items()}


def generated(result: Figures) -> dict[Path, str]:
    """The files that are generated from the figures, with their contents."""
    baseline = ROOT / "perf" / "baselines" / f"{slug(result['gpu'])}.json"
    beside = json.loads(baseline.read_text(encoding="utf-8")) if baseline.exists() else {"benchmarks": []}
    report, plot = (ROOT / "fixtures" / name for name in STORED)
    said = {"caption": caption(result), "columns": COLUMNS, "rows": rows(result)}
    return {
        baseline: json.dumps({**beside, HEADLINE: result}, indent=1) + "\n",
        report: json.dumps(said, indent=1) + "\n",
        plot: svg("The papers' headline experiments", panels(result)),
    }


def stored() -> Iterator[Figures]:
    """The stored experiments of all machines' baselines."""
    for path in sorted((ROOT / "perf" / "baselines").glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8")).get(HEADLINE)
        if found is not None:
            yield found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="the folder of python -m perf.headline --out")
    parser.add_argument("--store", action="store_true", help="write the baseline and the files in fixtures/")
    parser.add_argument("--again", action="store_true", help="write the files in fixtures/ again from the baseline")
    options = parser.parse_args(arguments)
    before = next(stored(), None)
    if options.again:
        if before is None:
            parser.error("--again needs a baseline with headline experiments, found none")
        result: Figures = before
    elif options.folder is None:
        parser.error("give a folder or --again")
    else:
        result = merged(options.folder, before if options.store else None)
    print("\n".join([caption(result), "", *table(result)]))
    if options.store or options.again:
        for path, text in generated(result).items():
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
