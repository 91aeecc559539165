"""Draws panels of bars and of lines as one SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

# Okabe and Ito's colours, distinguishable with colour blindness.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d00", "#7f7f7f")
WIDTH, HEIGHT, GAP, COLUMNS = 470, 250, 40, 2
STYLE = """
.kv-headline { color: #1b1f24; font: 12px system-ui, sans-serif; max-width: 100%; height: auto }
.kv-headline text { fill: currentColor } .kv-headline .line { fill: none; stroke-width: 2 }
.kv-headline .axis { stroke: currentColor; stroke-opacity: .25 }
@media (prefers-color-scheme: dark) { .kv-headline { color: #dde3ea } }
"""

Panel = list[str]


def number(value: float) -> str:
    """The value with three significant digits, without an exponent."""
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{digits}f}"


def bars(title: str, values: Mapping[str, float], ours: Sequence[str] = ()) -> Panel:
    """A bar per name, from 0, with its value. `ours` have the first colour, the others are grey."""
    most = max(values.values()) or 1.0
    step = min(26.0, (HEIGHT - 30) / len(values))
    found = [_title(title)]
    for place, (name, value) in enumerate(values.items()):
        y, width = 24 + place * step, max(1.0, 150 * value / most)
        colour = COLOURS[0] if name in ours else COLOURS[-1]
        found += [
            f'<text x="254" y="{y + step / 2 + 3:.1f}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="260" y="{y:.1f}" width="{width:.1f}" height="{step * 0.7:.1f}" fill="{colour}"/>',
            f'<text x="{264 + width:.1f}" y="{y + step / 2 + 3:.1f}">{number(value)}</text>',
        ]
    return found


def lines(title: str, series: Mapping[str, Mapping[int, float]]) -> Panel:
    """A line per name over x. Both axes are logarithmic (x in powers of 2, y of 10), so all values must be positive."""
    xs = sorted({x for points in series.values() for x in points})
    values = [y for points in series.values() for y in points.values()]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    left, right, top, bottom = 60, WIDTH - 120, 28, HEIGHT - 24

    def at(x: float, y: float) -> str:
        across = (math.log2(x) - math.log2(xs[0])) / max(1e-9, math.log2(xs[-1]) - math.log2(xs[0]))
        up = (math.log10(y) - low) / (high - low)
        return f"{left + across * (right - left):.1f} {bottom - up * (bottom - top):.1f}"

    found = [_title(title)]
    for power in range(low, high + 1):
        height = float(at(xs[0], 10.0**power).split()[1])
        found.append(f'<path class="axis" d="M {left} {height:.1f} H {right}"/>')
        found.append(f'<text x="{left - 6}" y="{height + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for x in xs[:: max(1, len(xs) // 5)]:
        found.append(
            f'<text x="{at(x, 10.0**low).split()[0]}" y="{HEIGHT - 6}" text-anchor="middle">{_thousands(x)}</text>'
        )
    for place, (name, points) in enumerate(series.items()):
        colour = COLOURS[place % len(COLOURS)]
        path = " L ".join(at(x, points[x]) for x in sorted(points))
        found.append(f'<path class="line" stroke="{colour}" d="M {path}"/>')
        y = 40 + 18 * place
        found.append(f'<path class="line" stroke="{colour}" d="M {right + 8} {y} h 16"/>')
        found.append(f'<text x="{right + 28}" y="{y + 4}">{escape(name)}</text>')
    return found


def svg(label: str, panels: Sequence[Panel]) -> str:
    """The panels in rows of two."""
    rows = -(-len(panels) // COLUMNS)
    width, height = COLUMNS * WIDTH + (COLUMNS - 1) * GAP, rows * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="kv-headline" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">',
        f"<title>{escape(label)}</title><style>{STYLE}</style>",
    ]
    for place, panel in enumerate(panels):
        across, down = place % COLUMNS * (WIDTH + GAP), place // COLUMNS * (HEIGHT + GAP) + 16
        parts += [f'<g transform="translate({across} {down})">', *panel, "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _title(text: str) -> str:
    return f'<text x="0" y="8" font-weight="600">{escape(text)}</text>'


def _thousands(x: int) -> str:
    return f"{x // 2**20}M" if x >= 2**20 else f"{x // 1024}K" if x >= 1024 else str(x)
