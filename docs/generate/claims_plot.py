"""The plot of the page on claims: three counterexamples, computed by the references."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """A curve and what the paper claims. Axes start at `start`; `ticks` are the numbers on them, with their texts."""

    title: str
    across: str
    line: Points
    claimed: Points
    ticks: tuple[dict[float, str], dict[float, str]]


def live_tokens() -> Panel:
    """TK-9b: the most live tokens at the end of each segment of ThinKV, for a budget of 1,024."""
    from kvtwin.reference.thinkv import ThinKVConfig

    config = ThinKVConfig(budget=1024)
    line = []
    for segments in range(1, 65_536 // config.tau + 1):
        live = max(config.budget, config.retention[-1] * (segments - 1) + config.tau)
        line.append((segments * config.tau / 1024, live))
    return Panel(
        "ThinKV: live tokens, budget 1,024 (TK-9a)", "tokens generated / 1,024", line,
        [(0, config.budget), (64, config.budget)],
        ({0: "0", 32: "32", 64: "64"}, {0: "0", 1024: "1,024", 2048: "2,048"}),
    )


def first_window() -> Panel:
    """EK-6c: EpiKV's scores for linear trends of the two bands, without any other signal."""
    import torch

    from kvtwin.reference.epikv import rolling_zscore

    t = torch.arange(200, dtype=torch.float64)
    falling, rising = rolling_zscore((50 - 0.1 * t)[None], 64)[0], rolling_zscore((10 + 0.2 * t)[None], 64)[0]
    score = (falling - rising).tolist()
    return Panel(
        "EpiKV: score of linear trends (EK-6c)", "token", list(enumerate(score)), [(0, score[-1]), (199, score[-1])],
        ({0: "0", 64: "64", 199: "199"}, {0: "0", -2: "-2", -4: "-4"}),
    )


def misses() -> Panel:
    """KD-3a: keys at +-angle and twice at 180 degrees, of which KeyDiff keeps two. log10 of objective over optimum."""
    import torch

    from kvtwin.reference.keydiff import evict

    def objective(key: torch.Tensor) -> float:
        return float(key.sum(0).square().sum())

    line = []
    for step in range(3, 121):
        angle = math.radians(0.5 * step)
        key = torch.tensor(
            [[math.cos(one), math.sin(one)] for one in (angle, -angle, math.pi, math.pi)], dtype=torch.float64
        )
        kept = evict(key[None, None], key[None, None], 2).kept[0, 0]
        best = min(objective(key[[i, j]]) for i in range(4) for j in range(i))
        line.append((0.5 * step, math.log10(objective(key[kept]) / best)))
    return Panel(
        "KeyDiff: objective over its optimum (KD-3a)", "angle in degrees", line, [(0, 0), (60, 0)],
        ({0: "0", 30: "30", 60: "60"}, {0: "1", 2: "100", 4: "10,000"}),
    )


def svg() -> str:
    """The panels side by side, and a legend."""
    from kvtwin.fixtures import plotting

    shown = (misses(), live_tokens(), first_window())

    def draw(figure: Any) -> None:
        for panel, axes in zip(shown, plotting.panels(figure, 3, 3, left=64, bottom=78, across=84), strict=True):
            axes.plot(*zip(*panel.claimed, strict=True), "--", color=plotting.COLOURS[1], label="what the paper claims")
            axes.plot(*zip(*panel.line, strict=True), color=plotting.COLOURS[0], label="what happens")
            for axis, ticks in zip((axes.xaxis, axes.yaxis), panel.ticks, strict=True):
                axis.set_ticks(list(ticks), labels=list(ticks.values()))
            axes.set(title=panel.title, xlabel=panel.across, xlim=_ends(panel.ticks[0]), ylim=_ends(panel.ticks[1]))
            axes.grid(axis="y")
        figure.legend(*axes.get_legend_handles_labels(), loc="lower left", ncols=2, bbox_to_anchor=(0.05, 0))

    return plotting.svg("Three counterexamples: " + "; ".join(panel.title for panel in shown), (1150, 310), draw)


def _ends(ticks: dict[float, str]) -> tuple[float, float]:
    return min(ticks), max(ticks)
