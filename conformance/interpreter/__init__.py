"""Preparation of Triton's interpreter: call `prepare` before a kernel is interpreted on the CPU.

`prepare` installs arithmetic whose results depend on the operands only and not on the CPU (arithmetic.py). It also
applies the accelerator, which avoids repeated work in the interpreter and computes the same bits. The accelerator is
off with KVTWIN_INTERPRETER=plain and for versions of Triton that it does not support (internals.py).
docs/explanation/interpreter.md explains both.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from types import ModuleType

from .internals import MODULE, VERSIONS, parts_off, problems

__all__ = ["FALSE", "INTERPRET", "MODULE", "VARIABLE", "Prepared", "interprets", "mode", "plan", "prepare", "turn_on"]

#: The environment variable that selects the mode, and its values. The first mode is the default.
VARIABLE = "KVTWIN_INTERPRETER"
MODES = ("fast", "plain")
#: Triton's variable that turns its interpreter on, and the values that leave it off.
INTERPRET = "TRITON_INTERPRET"
FALSE = ("", "0", "false", "off", "no", "n")


@dataclass(frozen=True)
class Prepared:
    """What `prepare` did in this process. ``str`` returns one line for the user.

    problems: why the accelerator is off although it was asked for. doubts: why results may depend on the CPU. off: the
    parts that the accelerator does without.
    """

    mode: str
    version: str
    problems: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    off: tuple[str, ...] = ()

    @property
    def accelerated(self) -> bool:
        return self.mode == "fast" and not self.problems

    @property
    def in_order(self) -> bool:
        """Whether there are neither problems nor doubts, and no part is off."""
        return not self.problems and not self.doubts and not self.off

    def __str__(self) -> str:
        if self.accelerated:
            differs = f": triton {self.version} differs from {VERSIONS}"
            without = f" in part, without {', '.join(self.off)}{differs}" if self.off else ""
            said = f"accelerated{without} ({VARIABLE}=plain turns this off)"
        elif self.mode == "plain":
            said = f"plain ({VARIABLE}=plain)"
        else:
            said = (
                f"plain and slow: the accelerator is written for triton {VERSIONS}, and triton {self.version} differs: "
                f"{_first(self.problems)}"
            )
        return f"{said}; results may depend on this CPU: {_first(self.doubts)}" if self.doubts else said


def _first(reasons: tuple[str, ...]) -> str:
    return reasons[0] + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "")


def mode() -> str:
    """The mode in KVTWIN_INTERPRETER. Raises ValueError for an unknown mode."""
    asked = os.environ.get(VARIABLE, MODES[0])
    if asked not in MODES:
        raise ValueError(f"{VARIABLE} must be {' or '.join(map(repr, MODES))}, got {asked!r}")
    return asked


def turn_on() -> None:
    """Turn Triton's interpreter on in this process, if triton is not imported yet. Its mode cannot change later."""
    if "triton" not in sys.modules:
        os.environ.setdefault(INTERPRET, "1")


def prepare() -> Prepared | None:
    """Import and prepare Triton's interpreter in this process. Returns None if kernels are not interpreted here.

    Only the first call prepares it; later calls return the same result. Raises ValueError for an unknown mode in
    KVTWIN_INTERPRETER.
    """
    asked = mode()
    module = _interpreter()
    if module is None:
        return None
    done: Prepared | None = getattr(module, "_kvtwin", None)
    if done is None:
        from . import arithmetic, language

        done = plan(module, asked)
        language.read_numbers(module)
        language.read_masks(module)
        arithmetic.install(module)
        if done.accelerated:
            language.accelerate(module)
        module._kvtwin = done  # type: ignore[attr-defined]
    return done


def plan(module: ModuleType, asked: str) -> Prepared:
    """What `prepare` does in this mode with the module of an interpreter."""
    from . import arithmetic

    doubts = arithmetic.problems(module)
    found = problems(module) + doubts if asked == "fast" else []
    off = parts_off(module) if asked == "fast" and not found else []
    return Prepared(asked, importlib.import_module("triton").__version__, tuple(found), tuple(doubts), tuple(off))


def _interpreter() -> ModuleType | None:
    """The module of Triton's interpreter if kernels are interpreted in this process, else None."""
    language = sys.modules.get("triton.language.standard")
    if language is None:
        if os.environ.get(INTERPRET, "").lower() in FALSE:
            return None
        try:
            language = importlib.import_module("triton.language.standard")
        except ImportError:  # the reference works without triton
            return None
    return sys.modules.get(MODULE) if interprets(language) else None


def interprets(standard: ModuleType) -> bool:
    """Whether triton was imported with its interpreter on, judged by its module triton.language.standard.

    triton.jit creates tl.cdiv at import, so the type of tl.cdiv shows the value of TRITON_INTERPRET at that time.
    """
    return type(standard.cdiv).__name__ == "InterpretedFunction"
