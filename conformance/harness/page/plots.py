"""The plots of a verdict, as SVG: errors over their bounds, by field, by shape and along a trace, and decisive shares.
Each says in words what it shows. An error that is no finite multiple of its bound is drawn beside the scale, with its
name: NaN, infinity, or "not exact" where the bound is 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from ....fixtures.plotting import BEYOND, NOTE, TEXT, WRONG, panels, shown, svg
from ...judge.properties import PROPERTIES
from ..wording import of_bound

WIDTH, LEFT, ROW, TOP = 500, 176, 22, 26
LEAST, MOST = -6, 12  # the powers of 10 between which errors are drawn
#: The mark of each dtype, and its name.
MARKS = {"float32": ("o", "circle"), "float16": ("s", "square"), "bfloat16": ("^", "triangle")}
OTHER = "D", "diamond"

#: The largest error as a fraction of its bound, and its name if that is infinite.
Error = tuple[float, str]
#: (property, field) -> dtype -> the largest error.
Errors = dict[tuple[str, str], dict[str, Error]]


class Plot(NamedTuple):
    drawn: Markup
    caption: str


def figures(report: Mapping[str, Any]) -> dict[str, list[Plot]]:
    """The plots of every method; a method without numbers has none."""
    found = {}
    for method, properties in report["verdicts"].items():
        tests = report["tests"]
        made = (
            errors_plot(method, errors(tests, method)), shapes_plot(method, shapes(tests, method)),
            drift_plot(method, drift(tests, method)), decisive_plot(method, properties),
        )
        if any(made):
            found[method] = [plot for plot in made if plot]
    return found


def errors(tests: Iterable[Mapping[str, Any]], method: str) -> Errors:
    """The largest errors of a method. A failed test counts with the error it found."""
    found: Errors = {}

    def add(judged: str, field: str | None, dtype: str, used: float | None, unbounded: str | None = None) -> None:
        _keep(found.setdefault((judged, field or ""), {}), dtype, used, unbounded)

    for test in tests:
        if test["method"] != method or test["judges"] is None:
            continue
        finding = test["finding"]
        if finding.get("property", test["judges"]) == test["judges"]:
            for dtype, used in test["worst"].items():
                add(test["judges"], test["judged_field"], dtype, used)
        if "of_bound" in finding:
            add(finding["property"] or test["judges"], finding["field"], finding["dtype"], finding["of_bound"],
                finding.get("unbounded"))
    order = list(PROPERTIES)
    return dict(sorted(found.items(), key=lambda pair: (order.index(pair[0][0]), pair[0][1])))


def _keep(row: dict[Any, Error], key: Any, used: float | None, unbounded: str | None = None) -> None:
    """Keep the larger error. used: a fraction of the bound; None if it is infinite, for the reason `unbounded`."""
    error = (math.inf, unbounded or "unbounded") if used is None or math.isinf(used) else (used, "")
    row[key] = max(error, row.get(key, (0.0, "")))


def errors_plot(method: str, found: Errors) -> Plot | None:
    """Rows: property and field; marks: dtypes."""
    rows = {f"{judged.replace('_', ' ')} {field}".strip(): row for (judged, field), row in found.items()}
    dtypes = dict.fromkeys(dtype for row in rows.values() for dtype in row)
    marks = ", ".join(f"{MARKS.get(dtype, OTHER)[1]} {dtype}" for dtype in dtypes)
    caption = f"The largest error as a fraction of its bound, by property and field ({marks})."
    return _rows_plot(f"{method}: largest errors over their bounds", rows, caption)


def shapes(tests: Iterable[Mapping[str, Any]], method: str) -> dict[str, Error]:
    """The largest error of a method by head dimension, group and slots: "D 64"."""
    found: dict[str, Error] = {}
    for test in tests:
        if test["method"] != method:
            continue
        finding = test["finding"]
        for size, used in test["shapes"].items():
            _keep(found, size, used)
        for size in finding.get("sizes", ()):
            _keep(found, size, finding.get("of_bound"), finding.get("unbounded"))
    order = "DGS"
    return dict(sorted(found.items(), key=lambda pair: (order.find(pair[0][0]), int(pair[0].split()[1]))))


def shapes_plot(method: str, found: Mapping[str, Error]) -> Plot | None:
    """Rows: sizes."""
    names = {"D": "head dimension {}", "G": "group of {}", "S": "up to {} tokens"}
    rows = {names[size[0]].format(size.split()[1]): {"": used} for size, used in found.items()}
    caption = "The largest error as a fraction of its bound, by head dimension, query heads per KV head, and tokens."
    return _rows_plot(f"{method}: largest errors by shape", rows, caption)


def drift(tests: Iterable[Mapping[str, Any]], method: str) -> dict[int, float]:
    """The largest error of a method at each step of the recorded traces; an unbounded one is infinite."""
    found: dict[int, float] = {}
    for test in tests:
        for step, used in test["drift"].items() if test["method"] == method else ():
            found[int(step)] = max(math.inf if used is None else used, found.get(int(step), 0.0))
    return dict(sorted(found.items()))


def drift_plot(method: str, found: Mapping[int, float]) -> Plot | None:
    """Across: steps; up: errors over their bounds, logarithmic."""
    if len(found) < 2:
        return None
    finite = {number: _power(used) for number, used in found.items() if math.isfinite(used)}
    bottom, top = math.floor(min([-1, *finite.values()])), math.ceil(max([1, *finite.values()]))
    last = max(found)

    def draw(figure: Any) -> None:
        (axes,) = panels(figure, 1, left=LEFT - 100, right=8, top=TOP, bottom=26)
        axes.set(xlim=(0, last), ylim=(bottom, top))
        axes.axhspan(0, top, color=BEYOND, linewidth=0, gid="beyond")
        _powers(axes.yaxis, range(bottom, top + 1, max(1, math.ceil((top - bottom) / 5))))
        axes.axhline(0, color=WRONG, linewidth=1.5, gid="bound")
        axes.set_title("wrong: beyond the bound", loc="right", color=WRONG, fontweight="normal")
        axes.plot(list(finite), list(finite.values()), color=NOTE, linewidth=1.5, gid="drift")
        for number in found.keys() - finite.keys():
            _mark(axes, number, top, OTHER[0], found[number], f"step {number}: {of_bound(found[number])}")
        axes.set_xticks([0, last], ["step 0", f"step {last}"])
        for label, side in zip(axes.get_xticklabels(), ("left", "right"), strict=True):
            label.set_horizontalalignment(side)

    worst = max(found, key=lambda number: found[number])
    said = [f"step {number}: {of_bound(found[number])}" for number in (min(found), last)]
    said.append(f"the largest, at step {worst}: {of_bound(found[worst])}")
    caption = "The largest error of a state at each step of the recorded traces, as a fraction of its bound."
    if len(finite) < len(found):
        caption += " Diamonds at the top: steps with NaN, infinity, or an inexact number where the bound is 0."
    return _plot(f"{method}: errors along a trace", said, TOP + 156, draw, caption)


def decisive_plot(method: str, properties: Mapping[str, Mapping[str, Any]]) -> Plot | None:
    """A bar per property: the share of decisions that only one answer fits."""
    rows = {judged.replace("_", " "): one for judged, one in properties.items() if one["decisions"]}
    if not rows:
        return None
    shares = [one["decisive"] / one["decisions"] for one in rows.values()]
    labels = [f"{one['decisive']:,} of {one['decisions']:,}" for one in rows.values()]

    def draw(figure: Any) -> None:
        (axes,) = panels(figure, 1, left=LEFT, right=120, top=6, bottom=6)
        axes.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5), xticks=[])
        axes.barh(range(len(rows)), 1, 0.6, color=TEXT, alpha=0.2)
        axes.barh(range(len(rows)), shares, 0.6, color=NOTE)
        axes.set_yticks(range(len(rows)), list(rows))
        for number, label in enumerate(labels):
            axes.text(1.02, number, label, va="center")

    said = [f"{name}: {label}, {100 * share:.3g} %" for name, label, share in zip(rows, labels, shares, strict=True)]
    caption = "Decisive decisions: those for which the error bounds leave one right answer. The others decide nothing."
    return _plot(f"{method}: decisive share of the decisions", said, 12 + ROW * len(rows), draw, caption)


def _rows_plot(title: str, rows: Mapping[str, Mapping[str, Error]], caption: str) -> Plot | None:
    """Rows by label, marks by dtype, "" for none; the horizontal axis is logarithmic, with the bound at 1."""
    if not rows:
        return None
    every = [error for row in rows.values() for error in row.values()]
    last = max([2, *(math.ceil(_power(used)) for used, why in every if not why)])
    named = any(why for _, why in every)  # these have a third of the width, beside the scale
    unit = (last - LEAST) / (200 if named else 300)
    end = last + unit * (100 if named else 8)

    def draw(figure: Any) -> None:
        (axes,) = panels(figure, 1, left=LEFT, right=8, top=TOP, bottom=26)
        axes.set(xlim=(LEAST - 8 * unit, end), ylim=(len(rows) - 0.5, -0.5))
        axes.axvspan(0, end, color=BEYOND, linewidth=0, gid="beyond")
        step = 2 if 32 * unit <= 2 else 4  # a label takes 32
        _powers(axes.xaxis, range(-(-LEAST // step) * step, last + 1, step))
        axes.axvline(0, color=WRONG, linewidth=1.5, gid="bound")
        if named:
            axes.axvline(last + 8 * unit, color=TEXT, alpha=0.25, linewidth=1, gid="end")
        axes.set_title("wrong: beyond the bound", loc="right", color=WRONG, fontweight="normal")
        axes.set_yticks(range(len(rows)), [_short(shown(label)) for label in rows])
        for number, (label, row) in enumerate(rows.items()):
            beside = last + 4 * unit
            for dtype, (used, why) in row.items():
                beside += 14 * unit if why else 0
                what = f"{label}, {dtype}: {of_bound(used, why)}" if dtype else f"{label}: {of_bound(used, why)}"
                _mark(axes, beside if why else _power(used), number, MARKS.get(dtype, OTHER)[0], used, what)
            names = [why for _, why in row.values() if why]
            axes.text(beside + 9 * unit, number, min(names, default=""), va="center", color=WRONG)

    said = [
        f"{label}: " + ", ".join(f"{dtype} {of_bound(used, why)}".strip() for dtype, (used, why) in row.items())
        for label, row in rows.items()
    ]
    return _plot(title, said, TOP + ROW * len(rows) + 26, draw, caption)


def _plot(title: str, said: Sequence[str], height: float, draw: Callable[[Any], None], caption: str) -> Plot:
    made = svg(f"{title}. {'; '.join(said)}", (WIDTH, height), draw, inline=True)
    return Plot(Markup(made), f"{title}. {caption}")


def _mark(axes: Any, x: float, y: float, mark: str, used: float, what: str) -> None:
    """A mark, which says what it is if the pointer is on it."""
    style = {"color": WRONG if used > 1 else NOTE, "alpha": 0.8, "markeredgewidth": 0}
    axes.plot([x], [y], linestyle="", marker=mark, markersize=9, gid=f"mark|{shown(what)}", **style)


def _powers(axis: Any, powers: Sequence[int]) -> None:
    """Ticks for powers of 10, with the bound at 1."""
    at = sorted({0, *powers})
    axis.set_ticks(at, labels=[f"1e{power}" if power else "bound" for power in at])
    axis.grid(True)


def _power(used: float) -> float:
    return min(max(math.log10(used), LEAST), MOST) if used > 0 else LEAST


def _short(label: str, most: int = 24) -> str:
    return label if len(label) <= most else f"{label[:most - 1]}…"
