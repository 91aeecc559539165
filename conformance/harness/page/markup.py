"""The parts that the page is made of: escaped text, verdicts, tables, folds. Plain values in, HTML out."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..verdict import CONVENTION, ENVIRONMENT, NOT_COVERED, RIGHT, WRONG

#: Control characters, which HTML does not have, become visible ones.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
#: The class and the sign of each verdict and of each outcome of a test.
_BADGES = {
    RIGHT: ("right", "✓"), WRONG: ("wrong", "✗"), NOT_COVERED: ("open", "?"), CONVENTION: ("note", "≈"),
    ENVIRONMENT: ("note", "!"), "passed": ("right", "✓"), "failed": ("wrong", "✗"), "error": ("wrong", "✗"),
}
MOST_TEXT = 3000  # characters of one message


def text(value: Any) -> str:
    """Escaped text, shortened if it is long. Everything that comes from a test or an implementation passes here."""
    found = str(value)
    if len(found) > MOST_TEXT:
        found = f"{found[:MOST_TEXT]} ... and {len(found) - MOST_TEXT} more characters"
    return html.escape(found.translate(_VISIBLE))


def name(value: str) -> str:
    """The name of a property, a kind or an outcome, as words."""
    return text(value.replace("_", " "))


def badge(verdict: str, more: str = "") -> str:
    """A verdict or an outcome: a sign and words, coloured."""
    style, sign = _BADGES.get(verdict, ("open", "?"))
    return f'<span class="badge {style}">{sign} {name(verdict)}{text(more)}</span>'


def of_bound(fraction: float | None, unbounded: str | None = None) -> str:
    """An error as a fraction of its bound; None, or infinite: it is no finite one, for the reason `unbounded`
    (judge.mismatch)."""
    if fraction is None or not math.isfinite(fraction):
        return unbounded or "unbounded"
    if fraction <= 1:
        return f"{100 * fraction:.3g} %"
    return f"{fraction:,.0f} times" if 100 < fraction < 1e7 else f"{fraction:.3g} times"


def code(value: Any) -> str:
    return f"<code>{text(value)}</code>"


def pre(value: Any) -> str:
    return f"<pre>{text(value)}</pre>"


def fold(summary: str, *inside: str, shown: bool = False) -> str:
    """A part that the reader opens. summary and inside: HTML."""
    content = "\n".join(inside)
    return f'<details class="block"{" open" if shown else ""}><summary>{summary}</summary>\n{content}\n</details>'


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, label: str, numbers: Sequence[str] = (),
    long: Sequence[str] = (), matrix: bool = False,
) -> str:
    """A table in a box that scrolls if it is too wide. Cells are HTML; the first of each row is its head.

    label: what it shows, for screen readers. numbers: the columns of numbers. long: the columns of long texts; on a
    narrow screen each row of a table that has some becomes a block, with the heads before the cells. matrix: cells are
    verdicts.
    """
    kinds = [
        ' class="number"' if head in numbers else ' class="long"' if head in long else "" for head in heads
    ]
    names = [f' data-head="{text(head)}"' if long else "" for head in heads]
    top = "".join(f'<th scope="col"{kind}>{text(head)}</th>' for head, kind in zip(heads, kinds, strict=True))
    body = "\n".join(
        f'<tr><th scope="row">{row[0]}</th>'
        + "".join(
            f"<td{kind}{named if cell != '-' else ''}>{cell}</td>"
            for cell, kind, named in zip(row[1:], kinds[1:], names[1:], strict=True)
        ) + "</tr>"
        for row in rows
    )
    style = ' class="matrix"' if matrix else ' class="blocks"' if long else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{text(label)}"><table{style}>\n'
        f"<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def listing(pairs: Iterable[tuple[str, str]]) -> str:
    """Terms and what belongs to them; pairs without content are left out. Contents are HTML."""
    return "<dl>" + "\n".join(f"<dt>{text(term)}</dt><dd>{inside}</dd>" for term, inside in pairs if inside) + "</dl>"


def bullets(items: Iterable[str]) -> str:
    """A list of HTML items; nothing if there are none."""
    found = "".join(f"<li>{item}</li>" for item in items)
    return f"<ul>{found}</ul>" if found else ""
