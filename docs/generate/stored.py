"""What the repository stores of earlier runs: results, benchmarks and kill matrices."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .markdown import escape

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
PLOTS = ("accuracy", "needle", "headline", "bands")


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def stored(name: str) -> Any:
    return json.loads(read(f"fixtures/{name}.json"))


def baselines() -> Iterator[tuple[str, Any]]:
    for path in sorted((ROOT / "perf" / "baselines").glob("*.json")):
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))


def machine_of(run: Any) -> str:
    info = run["machine_info"]
    return (
        f"{info['gpu']}, copy {run['roofline']['copy'] / 1e12:.2f} TB/s, CUDA {info['cuda']}, torch {info['torch']}, "
        f"triton {info['triton']}"
    )


def benchmark_table(benchmarks: Iterable[Any]) -> str:
    """Time, share of the copy bandwidth, and ratio to the fastest peer of the same run."""
    lines = ["| benchmark | ms | of copy bandwidth | time over the fastest peer's |", "|---|---|---|---|"]
    for one in benchmarks:
        info = one["extra_info"]
        if "milliseconds" not in info:
            continue
        peer = info["strongest"]
        ratio = "no peer" if peer is None else f"{info['peers'][peer]['ratio']:.3g} ({peer})"
        title = one["name"].removeprefix("test_")
        lines.append(f"| `{title}` | {info['milliseconds']:.4g} | {info['share_of_copy']:.0%} | {escape(ratio)} |")
    return "\n".join(lines)


def kill_matrices() -> dict[str, Any]:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(ROOT.glob("conformance/**/mutants.json"))]
    return {one["method"]: one for one in found}
