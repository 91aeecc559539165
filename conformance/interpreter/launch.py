"""Avoid repeated work in the launch of an interpreted kernel.

The parameters of a function are looked up once. All functions of a language module are replaced, and restored, in one
step. CPU tensors are not copied.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, wraps
from operator import itemgetter
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch


class Members:
    """Some members of a module or class. `values` gets and sets all of them at once, in order."""

    def __init__(self, owner: Any, names: Sequence[str]) -> None:
        self._owner, self._names = owner, names
        pick = itemgetter(*names) if len(names) > 1 else lambda mapping: (mapping[names[0]],)
        self._pick: Callable[[Any], tuple[Any, ...]] | None = pick if type(owner) is ModuleType else None

    @property
    def values(self) -> tuple[Any, ...]:
        if self._pick is not None:
            return self._pick(vars(self._owner))
        return tuple([getattr(self._owner, name) for name in self._names])

    @values.setter
    def values(self, values: Sequence[Any]) -> None:
        if self._pick is not None:
            vars(self._owner).update(zip(self._names, values, strict=True))
            return
        for name, value in zip(self._names, values, strict=True):
            setattr(self._owner, name, value)


def remember_parameters(interpreter: ModuleType) -> None:
    """Give the interpreter an `inspect` that caches the parameters of each function."""
    specification = cache(inspect.getfullargspec)

    def getcallargs(function: Any, /, *arguments: Any, **named: Any) -> dict[str, Any]:
        if type(function) is not FunctionType:
            return inspect.getcallargs(function, *arguments, **named)
        found = specification(function)
        names = found.args
        known = {**dict(zip(names, arguments, strict=False)), **named}
        if (
            found.varargs or found.varkw or found.kwonlyargs or known.keys() != set(names)
            or len(arguments) + len(named) != len(names)
        ):  # fmt: skip
            return inspect.getcallargs(function, *arguments, **named)  # defaults, or an error to raise
        return known

    ours = {"getfullargspec": specification, "getcallargs": getcallargs}
    interpreter.inspect = SimpleNamespace(**{**vars(inspect), **ours})  # type: ignore[attr-defined]


def copy_nothing(interpreter: ModuleType) -> None:
    """Pass CPU tensors to a kernel directly instead of copying them."""
    executor = interpreter.GridExecutor
    to, back = executor._init_args_hst, executor._restore_args_dev

    def is_here(argument: Any) -> bool:
        kind = type(argument)
        if kind is torch.Tensor:
            return argument.device.type == "cpu"
        return kind in (int, float, bool, str, torch.dtype) or argument is None

    @wraps(to)
    def init_args_hst(self: Any, args_dev: Any, kwargs: Any) -> Any:
        if all(map(is_here, args_dev)) and all(map(is_here, kwargs.values())):
            return args_dev, kwargs
        return to(self, args_dev, kwargs)

    @wraps(back)
    def restore_args_dev(self: Any, args_dev: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
        if args_hst is not args_dev or kwargs_hst is not kwargs:
            back(self, args_dev, args_hst, kwargs, kwargs_hst)

    executor._init_args_hst, executor._restore_args_dev = init_args_hst, restore_args_dev
