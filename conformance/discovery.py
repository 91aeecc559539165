"""Discovery of the twins in the source folders.

A *pair* is a module with an ``__all__`` in ``kvtwin.reference`` or ``kvtwin.reference.baselines``, and the module of
the same name under ``kvtwin.optimized``. A *method* is a pair whose ``__all__`` contains a ``*Config``. ``__all__`` is
read from the syntax tree, so that discovery imports neither torch nor triton.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

REFERENCE = "kvtwin.reference"
OPTIMIZED = "kvtwin.optimized"
FOLDERS = ("", "baselines")  # below kvtwin.reference; "" is the folder itself
NO_PAIRS = (*FOLDERS, "hf")


@dataclass(frozen=True)
class Pair:
    """A module and its twin. ``name`` is for example "snapkv", ``path`` "baselines.snapkv"."""

    name: str
    path: str
    exports: tuple[str, ...]

    @property
    def is_method(self) -> bool:
        return any(export.endswith("Config") for export in self.exports)

    @property
    def is_baseline(self) -> bool:
        return self.path.startswith("baselines.")

    @property
    def has_paper(self) -> bool:
        """Whether the docstring of the reference has a line "Paper: ..."; random eviction, a control, has none."""
        return "\nPaper: " in (self.reference.__doc__ or "")

    @property
    def reference(self) -> ModuleType:
        return importlib.import_module(f"{REFERENCE}.{self.path}")

    @property
    def optimized(self) -> ModuleType:
        """kvtwin's own optimized module; the implementation under test is ``twins.optimized`` (see ``--kv-impl``)."""
        return importlib.import_module(f"{OPTIMIZED}.{self.path}")

    @property
    def config(self) -> type | None:
        """The method's configuration class; None if the pair is not a method."""
        return self._class("Config")

    @property
    def state(self) -> type | None:
        """The reference's state class; None if there is none."""
        return self._class("State")

    def _class(self, suffix: str) -> type | None:
        names = [export for export in self.exports if export.endswith(suffix)]
        if len(names) > 1:
            raise LookupError(f"{self.path}: expected at most one *{suffix} in __all__, got {', '.join(names)}")
        return getattr(self.reference, names[0]) if names else None

    def __str__(self) -> str:
        return self.name


@cache
def _found() -> tuple[Pair, ...]:
    found = [pair for folder in FOLDERS for pair in _pairs_in(folder)]
    names = [pair.name for pair in found]
    for name in names:
        if names.count(name) > 1:
            raise LookupError(f"two modules are called {name!r}, but names of pairs must be unique")
    return tuple(sorted(found, key=lambda pair: (not pair.is_method, pair.name)))


def pairs() -> list[Pair]:
    """All pairs, sorted by name, methods first."""
    return list(_found())


def methods() -> list[Pair]:
    """The pairs that are methods."""
    return [pair for pair in pairs() if pair.is_method]


def _pairs_in(folder: str) -> list[Pair]:
    found = []
    for entry in sorted((_root() / folder).iterdir()):
        source = entry / "__init__.py" if entry.is_dir() else entry
        name = entry.stem
        if source.suffix != ".py" or not source.is_file() or name.startswith("_") or name in NO_PAIRS:
            continue
        exports = _exports(source)
        if exports:
            found.append(Pair(name=name, path=f"{folder}.{name}" if folder else name, exports=exports))
    return found


def _root() -> Path:
    spec = importlib.util.find_spec(REFERENCE)
    if spec is None or not spec.origin:
        raise LookupError(f"{REFERENCE} is not installed")
    return Path(spec.origin).parent


def _exports(source: Path) -> tuple[str, ...]:
    """The literal ``__all__`` of a module, empty if it has none."""
    for node in ast.parse(source.read_text(encoding="utf-8"), filename=str(source)).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return tuple(ast.literal_eval(node.value))
    return ()
