"""The readings: every place where a paper leaves a choice, what we chose, and the option for the other choice.

``papers/<method>/readings.toml`` holds one ``[[reading]]`` table per choice::

    [[reading]]
    id = "shared-slot"                # unique within the method
    where = "section 3.4"
    quote = "the words of the paper"  # or a list of several
    ours = "what we do"
    others = "what else the words may mean"
    option = "per_head=True"          # what gives the other reading, or a list of several, or "" if nothing does
    why = "why there is no option"    # required if there is none

An option is written as the arguments of the method's config, or as a call of a function that the method exports:
``quantize(scale_rule="mse")``. The value ``...`` stands for one that depends on the model. As in the ledger, ``lost``
stands for words that our copy of the paper has lost. Only baselines, whose papers we do not quote, may have neither.

The documentation shows the readings on each method's page.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import discovery
from .ledger import HERE, LedgerError, markdown_rows, parsed, quoted, refuse_unknown, string, strings

FILE = "readings.toml"
ID = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
TEXTS = ("id", "where", "ours", "others")
OPTIONAL = ("lost", "why")


@dataclass(frozen=True)
class Reading:
    """One ``[[reading]]``."""

    id: str
    method: str
    where: str
    quotes: tuple[str, ...]
    lost: str
    ours: str
    others: str
    options: tuple[str, ...]
    why: str


def load(folder: Path = HERE) -> tuple[Reading, ...]:
    """Every reading, in the order of the files. Raises LedgerError, which names the file and the reading."""
    found: list[Reading] = []
    baselines = {pair.name for pair in discovery.methods() if pair.is_baseline}
    for path in sorted(folder.rglob(FILE)):
        baseline = path.parent.name in baselines
        place = path.relative_to(folder).as_posix()
        own = [
            _reading(f"{place}, {table.get('id', f'reading {number}')}", path.parent.name, table, baseline)
            for number, table in enumerate(_tables(path, place), start=1)
        ]
        twice = [name for name, count in Counter(one.id for one in own).items() if count > 1]
        if twice:
            raise LedgerError(f"{place}: ids used twice: {', '.join(twice)}")
        found += own
    return tuple(found)


def _tables(path: Path, place: str) -> list[dict[str, object]]:
    tables = parsed(path)
    if set(tables) != {"reading"}:
        raise LedgerError(f"{place}: expected [[reading]] tables only, found {', '.join(tables) or 'nothing'}")
    return tables["reading"]


def _reading(name: str, method: str, table: dict[str, object], baseline: bool) -> Reading:
    refuse_unknown(name, table, {*TEXTS, *OPTIONAL, "quote", "option"})
    texts = {key: string(name, table, key) for key in TEXTS}
    texts |= {key: string(name, table, key) if key in table else "" for key in OPTIONAL}
    if not ID.fullmatch(texts["id"]):
        raise LedgerError(f"{name}: an id looks like shared-slot")
    quotes = strings(name, "quote", table["quote"]) if "quote" in table else ()
    if bool(quotes) + bool(texts["lost"]) not in ((0, 1) if baseline else (1,)):
        raise LedgerError(f"{name}: a reading has either 'quote' or 'lost'; only a baseline may have neither")
    options = () if table.get("option") == "" else strings(name, "option", table.get("option"))
    for option in options:
        try:
            arguments(option)
        except (SyntaxError, ValueError) as error:
            raise LedgerError(f"{name}: option must be like 'name=value', got {option!r}") from error
    if bool(options) is bool(texts["why"]):
        raise LedgerError(f"{name}: 'why' is for a reading without an option, which needs it")
    return Reading(method=method, quotes=quotes, options=options, **texts)


def arguments(option: str) -> tuple[str, dict[str, object]]:
    """The function that an option calls, "" for the method's config, and the arguments by name."""
    call = ast.parse(option if re.match(r"\w+\(", option) else f"config({option})", mode="eval").body
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.keywords and not call.args):
        raise ValueError(f"expected name=value, got {option!r}")
    if any(one.arg is None for one in call.keywords):
        raise ValueError(f"expected name=value, got {option!r}")
    named = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    return "" if call.func.id == "config" else call.func.id, named


def table(readings: Iterable[Reading]) -> str:
    """Readings as a Markdown table."""
    heads = ("where", "the paper", "here", "other readings", "option")
    return "\n".join(markdown_rows(heads, map(_row, readings))).strip()


def _row(one: Reading) -> tuple[str, ...]:
    words = " ".join(map(quoted, one.quotes)) or (f"(Lost: {one.lost})" if one.lost else "")
    option = ", or ".join(f"`{option}`" for option in one.options) or f"None: {one.why}"
    return one.where, words, one.ours, one.others, option
