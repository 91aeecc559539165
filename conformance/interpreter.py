"""Triton's interpreter, without work that it does twice.

To interpret a kernel, Triton replaces every function of ``triton.language`` by one that computes with numpy, and puts
them back afterwards. It goes over the whole language again at every call of a device function from within the kernel,
and finds all of it replaced: about a third of the time of a kernel that is made of small functions. Here that second
round is left out. What is computed stays the same, since the kernel's own round has done it all.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

MODULE = "triton.runtime.interpreter"


class _Nothing:
    """The patches of a device function whose kernel made them: there is nothing to undo."""

    def restore(self) -> None:
        """Undo nothing."""


def patch_once() -> bool:
    """Make the interpreter patch the language once per kernel; whether it does now.

    False where no kernel can be interpreted in this process, or where the interpreter is built otherwise than the ones
    that this was written for (triton 3.6 to 3.9): it is then left as it is.
    """
    interpreter = sys.modules.get(MODULE)
    if interpreter is None:
        return False
    original = getattr(interpreter, "_patch_lang", None)
    if not callable(original) or not _one_argument(original) or not hasattr(interpreter, "tl"):
        return False
    if not hasattr(original, "patches"):
        interpreter._patch_lang = _once(original, interpreter.tl)  # type: ignore[attr-defined]
    return True


def _one_argument(function: Callable[..., Any]) -> bool:
    return list(inspect.signature(function).parameters) == ["fn"]


def _once(original: Callable[[Any], Any], language: ModuleType) -> Callable[[Any], Any]:
    patched: frozenset[str] = frozenset()  # the languages that the kernel that runs now has patched
    kept: frozenset[str] = frozenset()  # those that a device function has patched: nobody ever undoes that

    @cache
    def seen_by(function: Any) -> frozenset[str]:
        """Which of the modules that get patched a function can name."""
        modules = [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
        return frozenset(module.__name__ for module in modules if module in (language, language.core))

    def patch_lang(fn: Any) -> Any:
        nonlocal patched, kept
        if patched and seen_by(fn) <= patched | kept:
            return _Nothing()
        scope = original(fn)
        if patched:
            kept |= seen_by(fn) - patched
            return scope
        restore = getattr(scope, "restore", None)
        if restore is None:
            return scope
        patched = seen_by(fn)

        def restore_and_forget() -> None:
            nonlocal patched
            patched = frozenset()
            restore()

        scope.restore = restore_and_forget
        return scope

    patch_lang.patches = original  # type: ignore[attr-defined]
    return patch_lang
