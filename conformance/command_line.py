"""What the commands share: errors of one line, names that are close to known ones, and numbers within a range.

This module imports neither torch nor pytest.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Sequence
from typing import NoReturn

#: How alike a name and the known one are that a message proposes.
ALIKE = 0.75


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line. Exits with 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (--help explains the options)\n")


def unknown(what: str, names: Sequence[str], known: Sequence[str]) -> str:
    """"no method 'longflw': did you mean longflow? There are: ..." for names that are not known."""
    near = [one for name in names for one in difflib.get_close_matches(name, known, n=1, cutoff=ALIKE)]
    meant = f": did you mean {', '.join(dict.fromkeys(near))}?" if near else ";"
    return f"no {what} {', '.join(map(repr, names))}{meant} {'There' if near else 'there'} are: {', '.join(known)}"


def number(least: float, most: float, *, whole: bool = True) -> Callable[[str], float]:
    """The type of an option that is a number from `least` to `most`; an integer if it is `whole`."""
    def read(text: str) -> float:
        try:
            found = int(text) if whole else float(text)
        except ValueError:
            found = math.nan
        if not least <= found <= most:
            kind = "an integer" if whole else "a number"
            raise argparse.ArgumentTypeError(f"expected {kind} from {least:,} to {most:,}, got {text!r}")
        return found

    return read


def words(text: str) -> str:
    """The type of an option that must not be empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"expected a text that is not empty, got {text!r}")
    return text
