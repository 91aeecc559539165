"""A state that lacks attributes of the reference's, such as scores: the suite judges it on the others."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from .fields import Missing, MissingField

#: Where the suite is, but for the implementations with which it tests itself.
SUITE = Path(__file__).resolve().parents[1]
IMPLEMENTATIONS = SUITE / "lab" / "implementations"
#: What every state has: without them there is nothing to compare.
METHODS = ("prefill", "step")
NEEDED = ("occupied", "positions", "tokens_seen", *METHODS)


class MissingAttribute(MissingField, AttributeError):
    """A test reads an attribute that a state lacks."""


def absent(state: Any, name: str) -> AttributeError:
    """The error for an attribute that a state does not have."""
    kind = type(state).__name__
    if name in NEEDED:
        return AttributeError(f"{kind} has no attribute {name!r}, which every state needs")
    if name.startswith("_"):
        return AttributeError(f"{kind} has no attribute {name!r}")
    return MissingAttribute(f"{kind}: {name}")


def is_read_by_the_suite(name: str, ours: type) -> bool:
    """True if it is the suite, the caller of the caller, that reads `name`, and this is a tensor of ours, the
    reference's state."""
    return name in _tensors(ours) and _of_the_suite(sys._getframe(2).f_code.co_filename)


@functools.cache
def _of_the_suite(file: str) -> bool:
    return SUITE in Path(file).parents and IMPLEMENTATIONS not in Path(file).parents


@functools.cache
def _tensors(ours: type) -> frozenset[str]:
    own = (name.lstrip("_") for what in ("_per_slot", "_per_row") for name in getattr(ours, what, ()))
    return frozenset({"score", "next_slot", *own})


class Lacking:
    """The tested state, for lockstep. An attribute of the reference's that it lacks, or that is None, is a `Missing`,
    unless it is one of NEEDED. All else is the state's own."""

    def __init__(self, tested: Any, reference: Any) -> None:
        object.__setattr__(self, "_tested", tested)
        object.__setattr__(self, "_reference", reference)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._tested, name, None)
        if value is None and self._may_lack(name):
            return Missing(f"{type(self._tested).__name__}: {name}")
        return getattr(self._tested, name) if value is None else value

    def _may_lack(self, name: str) -> bool:
        """False for what the reference lacks as well, and for methods."""
        if name.startswith("_") or name in NEEDED:
            return False
        expected = getattr(self._reference, name, None)
        return expected is not None and not callable(expected)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._tested, name, value)
