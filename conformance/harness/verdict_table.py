"""The verdict as text, for the terminal: at most 31 lines per method, and more if it is verbose.

The rows of what is right are no wider than 80 characters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from . import power, wording
from .verdict import CONVENTION, RIGHT, WRONG, Judgement, MethodVerdict

COLUMNS = ("property", "verdict", "judged", "wrong (95 %)", "of bound", "")
MOST_CAUSES, MOST_NOTES = 3, 3
WIDTH = 120  # of a row
MESSAGE = 170  # of a message


def lines(found: MethodVerdict, implementation: str, *, verbose: bool = False) -> Iterator[tuple[str, str]]:
    """(text, colour) line by line; colour: "red", "yellow", "green" or ""."""
    colour = {RIGHT: "green", WRONG: "red"}.get(found.verdict, "yellow")
    yield f"{found.method} of {implementation}: {found.verdict.upper()}", colour
    rows = [COLUMNS, *(_row(found.method, name, judged) for name, judged in found.properties.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS) - 1)]
    for row, name in zip(rows, ("", *found.properties), strict=True):
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[-1]
        shade = {WRONG: "red", RIGHT: "", CONVENTION: ""}.get(row[1], "" if row is COLUMNS else "yellow")
        yield "  " + _cut(text.rstrip(), verbose), shade
        if verbose and name and (sizes := power.sizes(found.properties[name].described)):
            yield f"    {sizes}", ""
    yield from _causes(found, verbose)
    yield from ((f"  {text}", "") for text in _coverage(found, verbose))


def _row(method: str, name: str, judged: Judgement) -> tuple[str, ...]:
    counts = power.counts(judged.unit, judged.counts[judged.unit])
    if judged.wrong:
        counts = f"{judged.wrong} wrong" + (f", {judged.decisive} of {judged.decisions}" if judged.decisions else "")
    fewer = power.fewer_than(judged.limit)
    worst = max(judged.worst.items(), key=lambda pair: pair[1], default=None)
    used = "-" if worst is None else f"{wording.of_bound(worst[1], judged.unbounded)} ({worst[0]})"
    says = judged.why
    if name == "traces" and judged.verdict == RIGHT:
        says = f"none wrong, {judged.adjudicated} different but legal"
    if judged.findings:
        first = judged.findings[0]
        where = ".".join(filter(None, ((first.get("subject") or "").removeprefix(f"{method}."), first.get("field"))))
        says = f"{judged.adjudicated} different but legal; " if name == "traces" and judged.wrong else ""
        says += "may follow from " + judged.follows.replace("_", " ") if judged.follows else "see below"
        says += f": {where}" if where else ""
        says += " (expected)" if judged.expected else ""
    return name.replace("_", " "), judged.verdict, counts, f"< {fewer}" if fewer else "-", used, says


def _described(found: MethodVerdict) -> str:
    """The dtypes and sizes of the cases of all properties."""
    each = [one.described for one in found.properties.values()]
    dtypes: Counter[str] = sum((Counter(one["dtypes"]) for one in each), Counter())
    layouts = {name for one in each for name in one["layouts"]}
    text = power.sizes({
        "dtypes": dtypes, "slots": max(one["slots"] for one in each), "rows": sum(one["rows"] for one in each),
        "layouts": {},
    })
    return f"cases: {text}" + (f"; {wording.counted_noun(len(layouts), 'layout')}" if layouts else "") if dtypes else ""


def _causes(found: MethodVerdict, verbose: bool) -> Iterator[tuple[str, str]]:
    causes = found.causes
    for name, judged, consequences in causes if verbose else causes[:MOST_CAUSES]:
        first = judged.findings[0]
        also = f"; may explain {', '.join(one.replace('_', ' ') for one in consequences)}" if consequences else ""
        more = f", in {len(judged.findings)} tests" if len(judged.findings) > 1 else ""
        message = _cut(wording.first_line(first["message"]), verbose, MESSAGE)
        yield f"  {name.replace('_', ' ')}: {message}{more}{also}", "red"
        if judged.blames_us:
            yield f"    {power.BLAMES_US}", ""
        for label in ("case", "replay"):
            if first.get(label):
                yield f"    {label}: {first[label]}", ""
    if len(causes) > MOST_CAUSES and not verbose:
        rest = ", ".join(name.replace("_", " ") for name, _, _ in causes[MOST_CAUSES:])
        yield f"  also wrong: {rest} (-v shows the cases)", "red"


def _coverage(found: MethodVerdict, verbose: bool) -> Iterator[str]:
    described = _described(found)
    if described:
        yield described
    refused = sum(found.refused.values())
    yield f"calls: {found.answered} answered, {refused} refused" + (
        ": " + ", ".join(f"{count} x {what}" for what, count in found.refused.most_common(None if verbose else 2))
        if refused else ""
    )
    if found.outside:
        yield f"declared, so not tested outside of it: {'; '.join(found.outside)}"
    if found.conventions:
        yield f"conventions: {', '.join(found.conventions)}"
    if found.missing:
        yield f"fields that it does not return: {', '.join(sorted(found.missing))}"
    for what, count in found.notes.most_common(None if verbose else MOST_NOTES):
        yield f"note: {_cut(what, verbose)} ({wording.counted_noun(count, 'call')})"
    if found.judged:
        yield f"judged: {', '.join(found.judged)}"
    if found.not_provided:
        names = [message.removeprefix("not provided: ") for message in found.not_provided]
        shown = names if verbose else names[:4]
        yield f"not provided: {', '.join(shown)}" + (f" and {len(names) - len(shown)} more" if names != shown else "")
    if found.others["failed"]:
        yield f"other tests, which judge no single property: {found.others['failed']} failed"


def _cut(text: str, verbose: bool, width: int = WIDTH) -> str:
    return text if verbose or len(text) <= width else text[:width - 3] + "..."
