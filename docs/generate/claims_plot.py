"""The plot of the page on claims: three counterexamples, computed by the references."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 200, 64, 52, 84  # of a panel, and around it
STYLE = """
.kv-claims { color: #1b1f24; font: 12px system-ui, sans-serif; max-width: 100%; height: auto }
.kv-claims text { fill: currentColor } .kv-claims .line { fill: none; stroke-width: 2; stroke: #0072b2 }
.kv-claims .claimed { fill: none; stroke-width: 2; stroke: #d55e00; stroke-dasharray: 6 4 }
.kv-claims .axis { stroke: currentColor; stroke-opacity: .25 }
@media (prefers-color-scheme: dark) { .kv-claims { color: #dde3ea } }
"""
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
    panels = (misses(), live_tokens(), first_window())
    width, height = LEFT + len(panels) * (WIDTH + GAP), TOP + HEIGHT + 70
    label = "Three counterexamples: " + "; ".join(panel.title for panel in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="kv-claims" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{label}"><title>{label}</title><style>{STYLE}</style>'
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, LEFT + number * (WIDTH + GAP))
    below = TOP + HEIGHT + 60
    for x, kind, text in ((LEFT, "line", "what happens"), (LEFT + 160, "claimed", "what the paper claims")):
        parts.append(f'<path class="{kind}" d="M {x} {below} h 24"/><text x="{x + 30}" y="{below + 4}">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, left: float) -> Iterator[str]:
    (first, last), (low, high) = ((min(ticks), max(ticks)) for ticks in panel.ticks)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + WIDTH * (x - first) / (last - first), TOP + HEIGHT * (high - y) / (high - low)

    def path(points: Points) -> str:
        return "M " + " L ".join("{:.1f} {:.1f}".format(*place(x, y)) for x, y in points)

    yield f'<text x="{left}" y="{TOP - 18}" font-weight="600">{panel.title}</text>'
    for y, text in panel.ticks[1].items():
        at = place(first, y)[1]
        yield f'<path class="axis" d="M {left} {at:.1f} h {WIDTH}"/>'
        yield f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{text}</text>'
    for x, text in panel.ticks[0].items():
        yield f'<text x="{place(x, low)[0]:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{text}</text>'
    yield f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 36}" text-anchor="middle">{panel.across}</text>'
    yield f'<path class="claimed" d="{path(panel.claimed)}"/><path class="line" d="{path(panel.line)}"/>'
