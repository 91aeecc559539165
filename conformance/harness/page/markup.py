"""The templates' environment. Everything that comes from a test or an implementation is escaped where a template prints
it, with control characters made visible and long texts shortened."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from ..verdict import CONVENTION, ENVIRONMENT, NOT_COVERED, RIGHT, WRONG
from ..wording import counted_noun, of_bound

#: Control characters, which HTML does not have, become visible ones.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
#: The class and the sign of each verdict and of each outcome of a test.
BADGES = {
    RIGHT: ("right", "✓"), WRONG: ("wrong", "✗"), NOT_COVERED: ("open", "?"), CONVENTION: ("note", "≈"),
    ENVIRONMENT: ("note", "!"), "passed": ("right", "✓"), "failed": ("wrong", "✗"), "error": ("wrong", "✗"),
}
MOST_TEXT = 3000  # characters of one message


@cache
def environment() -> Environment:
    made = Environment(
        loader=FunctionLoader(_template), autoescape=True, finalize=_plain, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )
    made.filters |= {"of_bound": of_bound, "counted": counted_noun}
    made.filters["words"] = lambda name: name.replace("_", " ")
    made.filters["commas"] = lambda number: f"{number:,}"
    made.globals["BADGES"] = BADGES
    return made


def _template(file: str) -> str:
    return resources.files(__package__).joinpath(file).read_text(encoding="utf-8")


def _plain(value: Any) -> Any:
    """What a template prints: HTML as it is, everything else as text that autoescape then escapes."""
    if isinstance(value, Markup):
        return value
    text = str(value)
    if len(text) > MOST_TEXT:
        text = f"{text[:MOST_TEXT]} ... and {len(text) - MOST_TEXT} more characters"
    return text.translate(_VISIBLE)


def part(macro: str, *arguments: Any) -> Markup:
    """What a macro of parts.html makes of the arguments."""
    made: Markup = getattr(environment().get_template("parts.html").module, macro)(*arguments)
    return made
