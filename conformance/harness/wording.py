"""The words of messages: one line of them, a count, and an assertion without a message in words of its own."""

from __future__ import annotations

import linecache
import math
import re
import traceback
from pathlib import Path

import pytest

MOST = 300  # characters of a line
PACKAGE = __name__.partition(".")[0] + "."
#: What precedes the place of an error.
RAISED = "  raised in "
#: Of a case that behaves differently when it is judged again.
DIFFERS = (
    "the same case behaves differently when it is judged again: what a call returns, raises or refuses depends on more "
    "than its arguments"
)
#: What pytest.raises says.
NOTHING_RAISED = re.compile(r"^DID NOT RAISE (?:<class ')?(.*?)(?:'>)?$", re.DOTALL)
OTHER_MESSAGE = re.compile(r"^Regex pattern did not match\.\s+Expected regex: (.*?)\s+Actual message: (.*)$", re.DOTALL)


def first_line(message: str | BaseException | None) -> str:
    """The first line that says something, without the colon after which the next line would follow; at most `MOST`
    characters. "" for an empty message."""
    lines = (line.strip() for line in str(message or "").splitlines())
    line = next(filter(None, lines), "").rstrip(":; ")
    return line if len(line) <= MOST else f"{line[:MOST - 3]}..."


def without(message: str, field: str | None) -> str:
    """A message that follows the name of the field, without the name at its own beginning."""
    return message.removeprefix(f"{field}: ")


def counted_noun(count: int, what: str) -> str:
    """ "1 test", "2 tests"."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def of_bound(fraction: float | None, unbounded: str | None = None) -> str:
    """An error as a fraction of its bound; None, or infinite: it is no finite one, for the reason `unbounded`
    (judge.mismatch)."""
    if fraction is None or not math.isfinite(fraction):
        return unbounded or "unbounded"
    if fraction <= 1:
        return f"{100 * fraction:.3g} %"
    return f"{fraction:,.0f} times" if 100 < fraction < 1e7 else f"{fraction:.3g} times"


def plainly(error: BaseException, tests: Path) -> str:
    """What a failed test found, in words that need no knowledge of the test.

    tests: the folder of the tests. The judge's errors say it themselves. pytest adds the values of an ``assert`` to its
    message: of an assertion with a message, that alone counts; of one without, the expression and its values. Any other
    error gets its class and place.
    """
    lines = str(error).splitlines()
    if type(error).__module__.startswith(PACKAGE):
        return "\n".join(lines)
    if type(error).__module__.startswith("hypothesis."):
        return DIFFERS if differs(error) else "no case of this test could be drawn"
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, pytest.fail.Exception) or any("_pytest" in one.filename for one in frames[-1:]):
        text = NOTHING_RAISED.sub(r"expected \1, and nothing was raised", "\n".join(lines))
        return OTHER_MESSAGE.sub(r"expected an error whose message matches \1, got \2", text)
    if isinstance(error, AssertionError) and any(tests in Path(one.filename).parents for one in frames[-1:]):
        added = next((number for number, line in enumerate(lines) if line.startswith("assert ")), len(lines))
        values = lines[0].removeprefix("assert ") if lines else "False"
        return "\n".join(lines[:added]) or f"expected {_expression(frames[-1])}\n  got {values}"
    first = ": ".join([type(error).__name__, *lines[:1]])
    place = [f"{RAISED}{frames[-1].filename}, line {frames[-1].lineno}"] if frames else []
    return "\n".join([first, *place, *lines[1:]])


def error_and_place(message: str) -> tuple[str, str] | None:
    """The error, without its numbers, and its place in a message of `plainly` about an error that the implementation
    raises; None for other messages."""
    first, *lines = message.splitlines() or [""]
    place = next((line for line in lines if line.startswith(RAISED)), None)
    return None if place is None else (re.sub(r"\d+", "0", first), place)


def differs(error: BaseException) -> bool:
    """True for an error of Hypothesis about a case that behaves differently when it is judged again."""
    from hypothesis.errors import Flaky, UnsatisfiedAssumption

    return isinstance(error, Flaky | UnsatisfiedAssumption)


def _expression(frame: traceback.FrameSummary) -> str:
    """What the ``assert`` of a frame asserts."""
    first = frame.lineno or 1
    lines = linecache.getlines(frame.filename)[first - 1:frame.end_lineno or first]
    return " ".join(line.strip() for line in lines).removeprefix("assert ")
