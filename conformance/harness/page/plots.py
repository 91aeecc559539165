"""The plots of a verdict, as SVG: errors over their bounds, by field, by shape and along a trace, and decisive shares.
Each says in words what it shows. An error that is no finite multiple of its bound is drawn beside the scale, with its
name: NaN, infinity, or "not exact" where the bound is 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...judge.properties import PROPERTIES
from ..verdict import WRONG
from .markup import fold, name, of_bound, text

WIDTH, LEFT, RIGHT, ROW, TOP = 500, 176, 492, 22, 26
BESIDE = 84  # the width of the room for errors that are no finite multiples of their bounds, if there are some
LEAST, MOST = 1e-6, 1e12  # errors beyond these are drawn here
#: The shape of each dtype: a path around (0, 0).
SHAPES = {
    "float32": "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z", "float16": "M-4.5 -4.5h9v9h-9z",
    "bfloat16": "M0 -5.5L5.5 4.5h-11z",
}
OTHER = "M0 -6L6 0L0 6L-6 0z"
SHAPE_NAMES = {"float32": "circle", "float16": "square", "bfloat16": "triangle"}

#: The largest error as a fraction of its bound, and its name if that is infinite.
Error = tuple[float, str]
#: (property, field) -> dtype -> the largest error.
Errors = dict[tuple[str, str], dict[str, Error]]


def figures(report: Mapping[str, Any]) -> list[str]:
    """The plots of every method; a method without numbers has none."""
    found = {}
    for method, properties in report["verdicts"].items():
        tests = report["tests"]
        drawn = [plot for plot in (
            errors_plot(method, errors(tests, method)), shapes_plot(method, shapes(tests, method)),
            drift_plot(method, drift(tests, method)), decisive_plot(method, properties),
        ) if plot]
        if drawn:
            found[method] = f'<div class="plots">{"".join(drawn)}</div>'
    if len(found) < 2:
        return list(found.values())
    return [
        fold(text(method), drawn, shown=report["overall"][method]["verdict"] == WRONG)
        for method, drawn in found.items()
    ]


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


def errors_plot(method: str, found: Errors) -> str:
    """Rows: property and field; marks: dtypes."""
    rows = {f"{judged.replace('_', ' ')} {field}".strip(): row for (judged, field), row in found.items()}
    dtypes = dict.fromkeys(dtype for row in rows.values() for dtype in row)
    shapes = ", ".join(f"{SHAPE_NAMES.get(dtype, 'diamond')} {dtype}" for dtype in dtypes)
    caption = f"The largest error as a fraction of its bound, by property and field ({shapes})."
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


def shapes_plot(method: str, found: Mapping[str, Error]) -> str:
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


def drift_plot(method: str, found: Mapping[int, float]) -> str:
    """Across: steps; up: errors over their bounds, logarithmic."""
    if len(found) < 2:
        return ""
    finite = {number: used for number, used in found.items() if math.isfinite(used)}
    lowest, highest = (pick(map(_drawn, finite.values()), default=1.0) for pick in (min, max))
    bottom, top = math.floor(min(math.log10(lowest), -1)), math.ceil(max(math.log10(highest), 1))
    left, height, last = LEFT - 100, 130, max(found)

    def across(step: int) -> float:
        return left + (RIGHT - left) * step / last

    def up(used: float) -> float:
        return TOP + height * (top - math.log10(_drawn(used))) / (top - bottom)

    parts = [
        f'<rect class="beyond" x="{left}" y="{TOP}" width="{RIGHT - left}" height="{up(1) - TOP:.1f}"/>',
        f'<text class="bad" x="{RIGHT}" y="{TOP - 8}" text-anchor="end">wrong: beyond the bound</text>',
    ]
    step = max(1, math.ceil((top - bottom) / 5))
    for power in sorted({0, *range(top, bottom - 1, -step)}):
        style, label = ("bound", "bound") if power == 0 else ("grid", f"1e{power}")
        parts.append(f'<path class="{style}" d="M{left} {up(10.0**power):.1f}H{RIGHT}"/>')
        at = f'x="{left - 8}" y="{up(10.0**power) + 4:.1f}"'
        parts.append(f'<text class="soft" {at} text-anchor="end">{label}</text>')
    line = "L".join(f"{across(number):.1f} {up(used):.1f}" for number, used in finite.items())
    parts += [f'<path class="drift" d="M{line}"/>'] if finite else []
    parts += [
        f'<path class="mark bad" transform="translate({across(number):.1f} {TOP})" d="{OTHER}">'
        f"<title>step {number}: {of_bound(used)}</title></path>"
        for number, used in found.items() if number not in finite
    ]
    for number, anchor in ((0, "start"), (last, "end")):
        parts.append(
            f'<text class="soft" x="{across(number):.1f}" y="{TOP + height + 16}" text-anchor="{anchor}">'
            f"step {number}</text>"
        )
    worst = max(found, key=lambda number: found[number])
    said = [f"step {number}: {of_bound(found[number])}" for number in (min(found), last)]
    said.append(f"the largest, at step {worst}: {of_bound(found[worst])}")
    caption = "The largest error of a state at each step of the recorded traces, as a fraction of its bound."
    if len(finite) < len(found):
        caption += " Diamonds at the top: steps with NaN, infinity, or an inexact number where the bound is 0."
    return _figure(f"{method}: errors along a trace", said, TOP + height + 26, parts, caption)


def decisive_plot(method: str, properties: Mapping[str, Mapping[str, Any]]) -> str:
    """A bar per property: the share of decisions that only one answer fits."""
    rows = {judged: one for judged, one in properties.items() if one["decisions"]}
    if not rows:
        return ""
    parts, said, full = [], [], 200
    for number, (judged, one) in enumerate(rows.items()):
        top = 6 + ROW * number
        share = one["decisive"] / one["decisions"]
        label = f"{one['decisive']:,} of {one['decisions']:,}"
        parts += [
            f'<text x="{LEFT}" y="{top + 15}" text-anchor="end">{name(judged)}</text>',
            f'<rect class="rest" x="{LEFT + 8}" y="{top + 4}" width="{full}" height="{ROW - 8}"/>',
            f'<rect class="mark" x="{LEFT + 8}" y="{top + 4}" width="{full * share:.1f}" height="{ROW - 8}"/>',
            f'<text class="soft" x="{LEFT + full + 14}" y="{top + 15}">{label}</text>',
        ]
        said.append(f"{judged.replace('_', ' ')}: {label}, {100 * share:.3g} %")
    caption = "Decisive decisions: those for which the error bounds leave one right answer. The others decide nothing."
    return _figure(f"{method}: decisive share of the decisions", said, 12 + ROW * len(rows), parts, caption)


def _rows_plot(title: str, rows: Mapping[str, Mapping[str, Error]], caption: str) -> str:
    """Rows by label, marks by dtype, "" for none; the horizontal axis is logarithmic, with the bound at 1."""
    if not rows:
        return ""
    every = [error for row in rows.values() for error in row.values()]
    largest = max((_drawn(used) for used, why in every if not why), default=1.0)
    right = RIGHT - BESIDE if any(why for _, why in every) else RIGHT
    decades = max(2, min(math.ceil(math.log10(largest)), 12))
    lowest = round(math.log10(LEAST))

    def across(power: float) -> float:
        return LEFT + 8 + (power - lowest) / (decades - lowest) * (right - LEFT - 24)

    height = TOP + ROW * len(rows) + 26
    one, end = across(0), TOP + ROW * len(rows)
    parts = [
        f'<rect class="beyond" x="{one:.1f}" y="{TOP}" width="{RIGHT - one:.1f}" height="{end - TOP}"/>',
        f'<text class="bad" x="{RIGHT}" y="{TOP - 8}" text-anchor="end">wrong: beyond the bound</text>',
    ]
    parts += [f'<path class="grid" d="M{right} {TOP}V{end}"/>'] if right < RIGHT else []
    step = 2 if (decades - lowest) * 16 <= right - LEFT else 4  # a label takes 32
    for power in range(-(-lowest // step) * step, decades + 1, step):
        style, label = ("grid", f"{10.0**power:.0e}".replace("e-0", "e-").replace("e+0", "e"))
        if power == 0:
            style, label = "bound", "bound"
        parts.append(f'<path class="{style}" d="M{across(power):.1f} {TOP}V{end}"/>')
        parts.append(f'<text class="soft" x="{across(power):.1f}" y="{end + 16}" text-anchor="middle">{label}</text>')
    said = []
    for number, (label, row) in enumerate(rows.items()):
        middle = TOP + ROW * number + ROW / 2
        parts.append(f'<text x="{LEFT}" y="{middle + 4:.1f}" text-anchor="end">{text(_short(label))}</text>')
        beside = right + 2
        for dtype, (used, why) in row.items():
            bad = " bad" if used > 1 else ""
            what = f"{label}, {dtype}" if dtype else label
            if why:
                beside += 12
            at = f"translate({beside if why else across(math.log10(_drawn(used))):.1f} {middle:.1f})"
            parts.append(
                f'<path class="mark{bad}" transform="{at}" d="{SHAPES.get(dtype, OTHER)}">'
                f"<title>{text(f'{what}: {of_bound(used, why)}')}</title></path>"
            )
        names = [why for _, why in row.values() if why]
        if names:
            parts.append(f'<text class="bad" x="{beside + 8}" y="{middle + 4:.1f}">{text(min(names))}</text>')
        said.append(
            f"{label}: " + ", ".join(f"{dtype} {of_bound(used, why)}".strip() for dtype, (used, why) in row.items())
        )
    return _figure(title, said, height, parts, caption)


def _figure(title: str, said: Sequence[str], height: float, parts: Sequence[str], caption: str) -> str:
    inside = "\n".join(parts)
    return (
        f'<figure><svg class="plot" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{text(title)}. '
        f'{text("; ".join(said))}">\n{inside}\n</svg><figcaption>{text(title)}. {text(caption)}</figcaption></figure>\n'
    )


def _drawn(used: float) -> float:
    return min(max(used, LEAST), MOST)


def _short(label: str, most: int = 24) -> str:
    return label if len(label) <= most else f"{label[:most - 1]}…"
