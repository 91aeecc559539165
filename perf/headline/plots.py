"""Draws panels of bars and of lines as one SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtwin.fixtures import plotting

WIDTH, HEIGHT, COLUMNS = 500, 290, 2
#: Fills its place in the figure.
Panel = Callable[[Any], None]


def number(value: float) -> str:
    """The value with three significant digits, without an exponent."""
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{digits}f}"


def bars(title: str, values: Mapping[str, float], ours: Sequence[str] = ()) -> Panel:
    """A bar per name, from 0, with its value. `ours` have the first colour, the others are grey."""

    def draw(axes: Any) -> None:
        colours = [plotting.COLOURS[0 if name in ours else -1] for name in values]
        size = 12 if len(values) < 14 else 9
        axes.set_title(title, x=-0.9, gid="panel")
        drawn = axes.barh(range(len(values)), list(values.values()), 0.7, color=colours)
        axes.bar_label(drawn, fmt=number, padding=4, fontsize=size)
        axes.set_yticks(range(len(values)), list(values), fontsize=size)
        axes.set(xticks=[], ylim=(max(len(values), 9) - 0.5, -0.5))

    return draw


def lines(title: str, series: Mapping[str, Mapping[int, float]]) -> Panel:
    """A line per name over x. Both axes are logarithmic (x in powers of 2, y of 10), so all values must be positive."""

    def draw(axes: Any) -> None:
        for colour, (name, points) in zip(plotting.COLOURS, series.items(), strict=False):
            axes.loglog(sorted(points), [points[x] for x in sorted(points)], color=colour, label=name, gid="line")
        xs = sorted({x for points in series.values() for x in points})
        values = [y for points in series.values() for y in points.values()]
        powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
        axes.set_title(title, x=-0.9, gid="panel")
        axes.minorticks_off()
        axes.set_xticks(xs[:: max(1, len(xs) // 5)], [_thousands(x) for x in xs[:: max(1, len(xs) // 5)]])
        axes.set_yticks([10.0**power for power in powers], [f"{10.0**power:g}" for power in powers])
        axes.set_ylim(10.0 ** powers[0], 10.0 ** powers[-1])
        axes.grid(axis="y")
        axes.legend(loc="upper right", bbox_to_anchor=(-0.2, 1), handlelength=1)

    return draw


def svg(label: str, panels: Sequence[Panel]) -> str:
    """The panels in rows of two."""

    def draw(figure: Any) -> None:
        places = plotting.panels(
            figure, len(panels), COLUMNS, left=240, right=70, across=310, top=28, bottom=30, down=64
        )
        for panel, axes in zip(panels, places, strict=True):
            panel(axes)

    return plotting.svg(label, (COLUMNS * WIDTH, -(-len(panels) // COLUMNS) * HEIGHT), draw)


def _thousands(x: int) -> str:
    return f"{x // 2**20}M" if x >= 2**20 else f"{x // 1024}K" if x >= 1024 else str(x)
