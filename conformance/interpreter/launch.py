"""Avoid repeated work in the launch of an interpreted kernel.

The parameters of a function are looked up once. What replaces the functions of the language is made once, and all
functions of a module are replaced, and restored, in one step. Numbers, and the types of tensors, are converted once.
CPU tensors are not copied.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, wraps
from operator import itemgetter
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from . import internals

MOST_NUMBERS = 10_000  # arguments, cached as tensors of a few hundred bytes each


class Members:
    """Some members of a module or class. `values` gets and sets all of them at once, in order."""

    def __init__(self, owner: Any, names: Sequence[str]) -> None:
        self.owner, self.names = owner, names
        pick = itemgetter(*names) if len(names) > 1 else lambda mapping: (mapping[names[0]],)
        self._pick: Callable[[Any], tuple[Any, ...]] | None = pick if type(owner) is ModuleType else None

    @property
    def values(self) -> tuple[Any, ...]:
        if self._pick is not None:
            return self._pick(vars(self.owner))
        return tuple([getattr(self.owner, name) for name in self.names])

    @values.setter
    def values(self, values: Sequence[Any]) -> None:
        if self._pick is not None:
            vars(self.owner).update(zip(self.names, values, strict=True))
            return
        for name, value in zip(self.names, values, strict=True):
            setattr(self.owner, name, value)


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


def remember_patches(interpreter: ModuleType, seen_by: Callable[[Any], Any]) -> None:
    """Make the changes of `_patch_lang` once for each set of modules that it changes, `seen_by(function)`."""
    original, scope_type = interpreter._patch_lang, interpreter._LangPatchScope
    known: dict[Any, list[tuple[Any, str, Any]]] = {}

    @wraps(original)
    def patch_lang(fn: Any) -> Any:
        seen = seen_by(fn)
        if seen not in known:
            scope = original(fn)
            known[seen] = _changes(scope, interpreter._MISSING)
            return scope
        scope = scope_type()
        for change in known[seen]:
            scope.set_attr(*change)
        return scope

    interpreter._patch_lang = patch_lang  # type: ignore[attr-defined]


def _changes(scope: Any, missing: Any) -> list[tuple[Any, str, Any]]:
    """The changes that a scope has made, as arguments of `set_attr`: one for each owner, and one for each attribute
    that the owner did not have before."""
    owners: dict[int, tuple[Any, dict[str, bool]]] = {}
    for owner, name, before in scope._changes:
        several = isinstance(owner, Members)
        _, names = owners.setdefault(id(owner.owner if several else owner), (owner.owner if several else owner, {}))
        for changed in owner.names if several else (name,):
            names.setdefault(changed, before is not missing)
    found: list[tuple[Any, str, Any]] = []
    for owner, names in owners.values():
        members = Members(owner, [name for name, was_there in names.items() if was_there])
        found += [(members, "values", members.values)] if members.names else []
        found += [(owner, name, getattr(owner, name)) for name, was_there in names.items() if not was_there]
    return found


def remember_arguments(interpreter: ModuleType) -> None:
    """Convert each integer once, and make the type of a tensor once for each dtype."""
    if not internals.has_sources(interpreter, internals.ARGUMENTS):
        return
    original, handle, tensor = interpreter._implicit_cvt, interpreter.TensorHandle, interpreter.tl.tensor
    numbers: dict[int, Any] = {}
    types: dict[torch.dtype, Any] = {}

    @wraps(original)
    def implicit_cvt(arg: Any) -> Any:
        kind = type(arg)
        if kind is int:
            found = numbers.get(arg)
            if found is None:
                found = original(arg)
                if len(numbers) < MOST_NUMBERS:
                    found.handle.data.flags.writeable = False
                    numbers[arg] = found
            return found
        if kind is torch.Tensor:
            known = types.get(arg.dtype)
            if known is not None:
                return tensor(handle(np.array([arg.data_ptr()], np.uint64), known), known)
            found = original(arg)
            types[arg.dtype] = found.type
            return found
        return original(arg)

    interpreter._implicit_cvt = implicit_cvt  # type: ignore[attr-defined]


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
