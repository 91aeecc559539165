"""What must be right of the implementation under test before any test runs: its modules, and the names in them."""

from __future__ import annotations

import difflib
import inspect
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from .. import discovery
from . import naming
from .impl import MISSING, Facade

#: How alike two names are that stand for the same thing.
ALIKE = 0.8


def check(facade: Facade, methods: Iterable[str], required: Iterable[str]) -> None:
    """Import the module of each method, and look for misspelt names.

    Raises pytest.UsageError with one line if an import raises anything, if a public function or class has almost the
    name of one that the module lacks, or if a required method has none of the functions and classes that it may have.
    """
    required = set(required)
    for pair in discovery.pairs():
        if pair.name not in methods:
            continue
        try:
            found = facade.module(pair.name)
        except (Exception, SystemExit) as error:
            raise pytest.UsageError(
                f"{naming.impl()} {facade!r}: importing its {pair.name} raised {_said(error)}"
            ) from error
        _check_names(found, pair, pair.name in required, facade)


def _check_names(found: Any, pair: discovery.Pair, required: bool, facade: Facade) -> None:
    wanted = [name for name in pair.exports if not name.endswith(("Config", "Result"))]
    provided = [name for name in wanted if getattr(found, name, None) is not None] if found is not MISSING else []
    lacking = [name for name in wanted if name not in provided]
    if required and not provided:
        where = f"{facade!r} has no module or attribute {pair.name}" if found is MISSING else (
            f"its {pair.name} ({getattr(found, '__file__', None) or repr(found)}) has none of its functions and classes"
        )
        raise pytest.UsageError(
            f"{naming.impl()}: nothing of {pair.name} to judge: {where}{_alike(found, wanted, lacking)}. It may have: "
            f"{', '.join(wanted)}"
        )
    similar = _alike(found, wanted, lacking)
    if similar:
        raise pytest.UsageError(f"{naming.impl()} {facade!r}, {pair.name}: a name is not known{similar}")


def _alike(found: Any, known: Sequence[str], lacking: Sequence[str]) -> str:
    """": ...: did you mean ...?" for the functions and classes of a module that have almost a name that it lacks."""
    places = (getattr(found, "__name__", None), getattr(found, "__module__", None))
    own = [
        name for name, value in getattr(found, "__dict__", {}).items()
        if not name.startswith("_") and name not in known and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ in places
    ]
    near = {name: difflib.get_close_matches(name, own, n=1, cutoff=ALIKE) for name in lacking}
    said = [f"{names[0]}: did you mean {name}?" for name, names in near.items() if names]
    return f": {' '.join(said)}" if said else ""


def _said(error: BaseException) -> str:
    """The error with the place where it was raised, or of which a SyntaxError speaks."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    text = str(error).strip().splitlines()
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith("<frozen")]
    place = f" ({Path(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' + text[0] if text else ''}{place}"
