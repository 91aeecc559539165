"""Discovery of the twins in the source folders and in other packages.

A *pair* is a module with an ``__all__`` in ``kvtwin.reference`` or ``kvtwin.reference.baselines``, and the module of
the same name under ``kvtwin.optimized``. A *method* is a pair whose ``__all__`` contains a ``*Config``. ``__all__`` is
read from the syntax tree, so that discovery imports neither torch nor triton. The methods of other packages, which
own_methods.py finds by their entry points, are pairs too; one of them may have functions alone.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType

from .own_methods import Declared, declared, literal_all

REFERENCE = "kvtwin.reference"
OPTIMIZED = "kvtwin.optimized"
FOLDERS = ("", "baselines")  # below kvtwin.reference; "" is the folder itself
NO_PAIRS = (*FOLDERS, "hf")


@dataclass(frozen=True)
class Pair:
    """A module and its twin. ``name`` is for example "snapkv", ``path`` "baselines.snapkv". ``declared``: where another
    package declares it, None for kvtwin's own; ``path`` is then the name."""

    name: str
    path: str
    exports: tuple[str, ...]
    declared: Declared | None = field(default=None, kw_only=True)

    @property
    def reference_name(self) -> str:
        """The name of the reference's module."""
        return f"{REFERENCE}.{self.path}" if self.declared is None else self.declared.method.reference

    @property
    def optimized_name(self) -> str:
        """The name of the optimized module."""
        return f"{OPTIMIZED}.{self.path}" if self.declared is None else self.declared.method.optimized

    @property
    def is_method(self) -> bool:
        return self.declared is not None or self.has_state

    @property
    def has_state(self) -> bool:
        """Whether it has a config and a state, rather than functions alone."""
        return any(export.endswith("Config") for export in self.exports)

    @property
    def is_baseline(self) -> bool:
        return self.path.startswith("baselines.")

    @property
    def takes_blocks(self) -> bool:
        """Whether the state takes blocks of tokens, as a `BlockState` does."""
        return hasattr(self.state, "append_block")

    @property
    def has_paper(self) -> bool:
        """Whether the docstring of the reference has a line "Paper: ..."; random eviction, a control, has none."""
        return "\nPaper: " in (self.reference.__doc__ or "")

    @property
    def reference(self) -> ModuleType:
        return importlib.import_module(self.reference_name)

    @property
    def optimized(self) -> ModuleType:
        """The optimized module of this pair; the implementation under test is ``twins.optimized`` (``--kv-impl``)."""
        return importlib.import_module(self.optimized_name)

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
    found += _pairs_of_others(dict.fromkeys(reserved_names(), "a module of kvtwin"))
    return tuple(sorted(found, key=lambda pair: (not pair.is_method, pair.name)))


def reserved_names() -> set[str]:
    """The names that another package's method cannot have: those of kvtwin's modules beside its methods."""
    folders = [_folder(package) / inner for package in (REFERENCE, OPTIMIZED) for inner in FOLDERS]
    return {path.stem for folder in folders for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"}


def _pairs_of_others(owners: dict[str, str]) -> list[Pair]:
    """The methods of other packages. owners: what has each name that is not free."""
    found: list[Pair] = []
    folders: dict[Path, str] = {}
    for one in declared():
        name = one.method.name
        if name in owners:
            raise one.fail("name", f"{name!r} is the name of {owners[name]}")
        if one.folder in folders:  # it has the tests and the mutants of one method
            raise one.fail("entry point", f"its module must be in another folder than that of {folders[one.folder]}")
        owners[name] = folders[one.folder] = one.entry
        found.append(Pair(name=name, path=name, exports=one.exports, declared=one))
    return found


def pairs() -> list[Pair]:
    """All pairs, sorted by name, methods first. Raises MethodError for a wrong declaration in another package."""
    return list(_found())


def methods() -> list[Pair]:
    """The pairs that are methods, kvtwin's and those of other packages."""
    return [pair for pair in pairs() if pair.is_method]


def with_state() -> list[Pair]:
    """The methods that have a state."""
    return [pair for pair in methods() if pair.has_state]


def built_in() -> list[Pair]:
    """kvtwin's own methods."""
    return [pair for pair in methods() if pair.declared is None]


def is_ours(kind: type) -> bool:
    """Whether a class belongs to kvtwin or to the package of a method."""
    return kind.__module__.partition(".")[0] in _packages()


@cache
def _packages() -> frozenset[str]:
    """The packages that methods are in."""
    return frozenset(name.partition(".")[0] for pair in pairs() for name in (pair.reference_name, pair.optimized_name))


def _pairs_in(folder: str) -> list[Pair]:
    found = []
    for entry in sorted((_folder(REFERENCE) / folder).iterdir()):
        source = entry / "__init__.py" if entry.is_dir() else entry
        name = entry.stem
        if source.suffix != ".py" or not source.is_file() or name.startswith("_") or name in NO_PAIRS:
            continue
        exports = literal_all(source)
        if exports:
            found.append(Pair(name=name, path=f"{folder}.{name}" if folder else name, exports=exports))
    return found


def _folder(package: str) -> Path:
    """The folder of a package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.origin:
        raise LookupError(f"{package} is not installed")
    return Path(spec.origin).parent
