"""Converts the JSON of a run to a table, to a baseline of this machine, or to thresholds.

    python perf/report.py RUN.json                                                 the table, in Markdown
    python perf/report.py RUN.json --write-baseline perf/baselines/nvidia-h200.json
    python perf/report.py RUN.json --write-baseline perf/baselines/nvidia-h200.json --part
    python perf/report.py RUN.json --held                                          the level reached, as TOML

RUN.json comes from --benchmark-json. A baseline is the same file without the timings of single rounds;
--benchmark-compare=PATH reads it. With --part, the benchmarks of this run replace those of an existing baseline, which
keeps its others. Each replaced benchmark names its run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

COLUMNS = ("benchmark", "ms", "MB", "TB/s", "of copy", "of limit", "against peers", "references", "gate")
DIGITS = 4
#: The key of perf/headline's results in a baseline, which benchmark runs do not change.
HEADLINE = "headline"


class Refused(Exception):
    """The run cannot be converted to the requested output."""


def rows(benchmarks: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row of COLUMNS for each benchmark of a run's JSON that has our figures."""
    found: list[tuple[str, ...]] = []
    for benchmark in benchmarks:
        info = benchmark["extra_info"]
        if "milliseconds" not in info:
            continue
        found.append((
            title(benchmark["name"]),
            f"{info['milliseconds']:.4f}",
            f"{info['bytes'] / 1e6:.1f}",
            f"{info['terabytes_per_second']:.2f}",
            f"{info['share_of_copy']:.0%}",
            f"{info['share_of_limit']:.0%}",
            _beside(info["peers"]),
            _beside(info["references"]),
            _verdict(info),
        ))
    return found


def title(name: str, method: str = "") -> str:
    """test_step[B8] -> step[B8], as in the thresholds; test_step[h2o-B8] too if the method is "h2o"."""
    return name.removeprefix("test_").replace(f"[{method}-", "[", 1)


def _beside(others: Mapping[str, Mapping[str, float]]) -> str:
    """Our time divided by theirs, and their time, fastest first."""
    ordered = sorted(others.items(), key=lambda item: item[1]["milliseconds"])
    return ", ".join(f"{other['ratio']:.3g}x {name} ({other['milliseconds']:.4f})" for name, other in ordered)


def _verdict(info: Mapping[str, Any]) -> str:
    if not info["right"]:
        return "WRONG"
    if info["complaints"]:
        return "FAILS"
    return "passes" if info["gated"] else "none"


def table(found: list[tuple[str, ...]]) -> list[str]:
    """The rows as lines of a Markdown table, aligned for a terminal."""
    lines = [COLUMNS, *found]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    text = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    rule = "-|-".join("-" * width for width in widths)
    return [f"| {text[0]} |", f"|-{rule}-|", *(f"| {line} |" for line in text[1:])]


def roofline_line(roofline: Mapping[str, float | None]) -> str:
    """The roofline of a run as one line of text."""
    return "memory, TB/s: " + ", ".join(f"{name} {value / 1e12:.3f}" for name, value in roofline.items() if value)


def baseline(run: Mapping[str, Any]) -> dict[str, Any]:
    """The baseline of a run. Raises Refused if a benchmark was wrong, since its time is meaningless."""
    measured = [benchmark for benchmark in run["benchmarks"] if "milliseconds" in benchmark["extra_info"]]
    if not measured:
        raise Refused("the run contains no benchmark of kvtwin")
    wrong = [benchmark["fullname"] for benchmark in measured if not benchmark["extra_info"]["right"]]
    if wrong:
        raise Refused(f"wrong after timing, or faster than the roofline: {', '.join(wrong)}")
    kept = {"group", "name", "fullname", "params", "param", "extra_info"}
    return {
        "command": without_paths(run["kvtwin"]["command"]),
        "machine_info": run["machine_info"],
        "roofline": rounded(run["kvtwin"]["roofline"]),
        "cold_l2": run["kvtwin"]["cold_l2"],
        "benchmarks": [
            {name: rounded(value) for name, value in benchmark.items() if name in kept}
            | {"stats": {name: rounded(value) for name, value in benchmark["stats"].items() if name != "data"}}
            for benchmark in sorted(measured, key=lambda benchmark: benchmark["fullname"])
        ],
        "datetime": run["datetime"],
        "version": run["version"],
    }


def replaced(before: dict[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The baseline `before` with the benchmarks of `found`, which keep the command, date and roofline of their run."""
    if before["machine_info"]["gpu"] != found["machine_info"]["gpu"]:
        raise Refused(
            f"the baseline is from {before['machine_info']['gpu']}, the run from {found['machine_info']['gpu']}"
        )
    whole = {one["fullname"]: one for one in before["benchmarks"]}
    for one in found["benchmarks"]:
        run = {name: found[name] for name in ("command", "datetime", "roofline")}
        whole[one["fullname"]] = {**one, "extra_info": {**one["extra_info"], "run": run}}
    return {**before, "benchmarks": [whole[name] for name in sorted(whole)]}


def rounded(value: Any) -> Any:
    """`value` with all floats, also nested ones, rounded to DIGITS significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value


def without_paths(command: str) -> str:
    """The command with absolute paths reduced to file names, since the folders differ between machines."""
    return re.sub(r"(?<![\w.])/(?:[^/\s]+/)*", "", command)


def held(run: Mapping[str, Any]) -> list[str]:
    """The figures of a run's gated benchmarks, as the `held` tables of a thresholds file."""
    lines = []
    for benchmark in run["benchmarks"]:
        info = benchmark["extra_info"]
        if not info.get("gated"):
            continue
        if not info["right"]:
            raise Refused(f"{benchmark['fullname']} is wrong, so its time is meaningless")
        lines += ["", f'["{title(benchmark["name"], benchmark["group"])}".held]']
        if info["strongest"] is not None:
            lines.append(f"ratio.strongest = {info['peers'][info['strongest']]['ratio']:.3f}")
        lines.append(f"share = {info['share_of_copy']:.3f}")
    return lines[1:]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a JSON file of --benchmark-json")
    parser.add_argument("--write-baseline", metavar="PATH", type=Path, help="write a baseline of this machine")
    parser.add_argument("--part", action="store_true", help="with --write-baseline: keep the other benchmarks")
    parser.add_argument("--held", action="store_true", help="print the figures as `held` tables, for perf/thresholds")
    options = parser.parse_args(arguments)
    run = json.loads(options.run.read_text(encoding="utf-8"))
    try:
        if options.held:
            print("\n".join(held(run)))
        else:
            print("\n".join([roofline_line(run["kvtwin"]["roofline"]), "", *table(rows(run["benchmarks"]))]))
        if options.write_baseline is not None:
            found, path = baseline(run), options.write_baseline
            if path.exists():
                before = json.loads(path.read_text(encoding="utf-8"))
                if options.part:
                    found = replaced(before, found)
                elif HEADLINE in before:
                    found[HEADLINE] = before[HEADLINE]
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except Refused as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
