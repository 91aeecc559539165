"""Which twins there are: found in the folders, never listed by hand.

A *pair* is a module with an ``__all__`` that lies in ``kvtwin.reference`` or ``kvtwin.reference.baselines``; its twin
has the same name under ``kvtwin.optimized``. A *method* is a pair whose ``__all__`` holds a ``*Config``. ``__all__`` is
read off the syntax tree, so that looking around imports neither torch nor triton.
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
    """One module and its twin. ``name`` is "longflow" or "snapkv", ``path`` "longflow" or "baselines.snapkv"."""

    name: str
    path: str
    exports: tuple[str, ...]

    @property
    def is_method(self) -> bool:
        return any(export.endswith("Config") for export in self.exports)

    @property
    def reference(self) -> ModuleType:
        return importlib.import_module(f"{REFERENCE}.{self.path}")

    @property
    def optimized(self) -> ModuleType:
        """Our own optimized side; what a run tests is ``twins.optimized`` (see ``--kv-impl``)."""
        return importlib.import_module(f"{OPTIMIZED}.{self.path}")

    @property
    def config(self) -> type | None:
        """The method's configuration class, None for a pair that is no method."""
        return self._class("Config")

    @property
    def state(self) -> type | None:
        """The reference's state class, None for a pair that has none."""
        return self._class("State")

    def _class(self, suffix: str) -> type | None:
        names = [export for export in self.exports if export.endswith(suffix)]
        if len(names) > 1:
            raise LookupError(f"{self.path}: one *{suffix} per module, __all__ holds {', '.join(names)}")
        return getattr(self.reference, names[0]) if names else None

    def __str__(self) -> str:
        return self.name


@cache
def _found() -> tuple[Pair, ...]:
    found = [pair for folder in FOLDERS for pair in _pairs_in(folder)]
    names = [pair.name for pair in found]
    for name in names:
        if names.count(name) > 1:
            raise LookupError(f"two modules are called {name!r}: a pair's name is what tests and reports know it by")
    return tuple(sorted(found, key=lambda pair: (not pair.is_method, pair.name)))


def pairs() -> list[Pair]:
    """Every pair, methods first, each group by name."""
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
