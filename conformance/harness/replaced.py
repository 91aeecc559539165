"""The functions that judge: whether an implementation under test has replaced one of them, and the old one again.

Replaced are functions of torch, Python's built-in functions and those of math, and the functions of kvtwin's judge and
of its reference. An attribute counts, and so does the code of a function.
"""

from __future__ import annotations

import builtins
import itertools
import math
import operator
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

#: The parts of kvtwin that judge.
JUDGES = ("kvtwin.conformance.judge", "kvtwin.conformance.harness", "kvtwin.reference")
#: Of torch and of its tensors. A library may replace others when it is imported, such as `Tensor.to`.
OF_TORCH = (
    "abs", "all", "allclose", "amax", "amin", "any", "argmax", "argmin", "clone", "copy_", "double", "eq", "equal",
    "float", "flatten", "ge", "gt", "isclose", "isfinite", "isinf", "isnan", "item", "le", "lt", "masked_fill", "max",
    "maximum", "min", "minimum", "ne", "nonzero", "sum", "tolist", "view", "where", "__eq__", "__ne__", "__lt__",
    "__le__", "__gt__", "__ge__", "__and__", "__or__", "__invert__", "__sub__", "__bool__", "__float__", "__int__",
)
ABSENT: Any = object()
CODE = "__code__"


class Places:
    """Attributes by their owner and name, as they are when this object is made."""

    def __init__(self) -> None:
        where = list(_all())
        self.functions = [owner for owner, name in where if name == CODE]
        attributes = [one for one in where if one[1] != CODE]
        self.where = [*attributes, *((one, CODE) for one in self.functions)]
        # Many calls under test ask for the values: so there is one lookup in each owner, made here.
        self.looked_up = [
            (vars(owner).get, [name for _, name in names])
            for owner, names in itertools.groupby(attributes, operator.itemgetter(0))
        ]
        self.original = self.values()

    def values(self) -> list[Any]:
        found: list[Any] = []
        for get, names in self.looked_up:
            found.extend(map(get, names, itertools.repeat(ABSENT)))
        found.extend(map(operator.attrgetter(CODE), self.functions))
        return found

    def changed(self, before: list[Any]) -> list[str]:
        """The names of those that are others than `before`, what `values` was. Puts the old ones back."""
        now = self.values()
        if all(map(operator.is_, now, before)):
            return []
        found = []
        for (owner, name), old, new in zip(self.where, before, now, strict=True):
            if old is not new:
                _put_back(owner, name, old)
                found.append(_label(owner, name))
        return list(dict.fromkeys(found))


def _label(owner: Any, name: str) -> str:
    where = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
    return f"the code of {where}" if name == CODE else f"{where}.{name}"


def _put_back(owner: Any, name: str, old: Any) -> None:
    if old is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, old)


def _all() -> Iterator[tuple[Any, str]]:
    import torch

    for owner in (torch, torch.Tensor):
        yield from ((owner, name) for name in OF_TORCH if hasattr(owner, name))
    yield from ((owner, name) for owner in (builtins, math) for name, value in vars(owner).items() if callable(value))
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if not isinstance(name, str) or not name.startswith(JUDGES):
            continue
        for key, value in list(vars(module).items()):
            if callable(value) and not key.startswith("__"):
                yield module, key
                if isinstance(value, FunctionType) and value.__module__ == name:
                    yield value, CODE
