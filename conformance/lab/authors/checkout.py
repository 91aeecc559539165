"""A checkout of an authors' repository: what it is, which commit it has, and how its files are loaded."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .comparison import Comparison

#: Modules by name, with what they have.
StandIns = Mapping[str, Mapping[str, Any]]
#: In a folder without .git, such as an unpacked archive, the file that has the commit.
COMMIT_FILE = "COMMIT"


@dataclass(frozen=True)
class Project:
    """The repository of a paper's authors.

    repository: the address; its last part is the name of the folder. commit: the one that `compare` was written for.
    files: the files that `compare` loads, by which a checkout is recognized. compare: yields what was compared.
    """

    repository: str
    commit: str
    files: tuple[str, ...]
    compare: Callable[[Checkout], Iterator[Comparison]]

    @property
    def name(self) -> str:
        return self.repository.rsplit("/", 1)[-1]

    def clone(self, root: Path) -> str:
        """The commands that bring the checkout."""
        folder = root / self.name
        return f"git clone {self.repository} {folder} && git -C {folder} checkout {self.commit}"


@dataclass(frozen=True)
class Checkout:
    """The folder of a project."""

    folder: Path

    @property
    def commit(self) -> str:
        """What git says, or the file COMMIT in a folder that git does not manage, or "" for unknown."""
        if (self.folder / ".git").exists():
            asked = ["git", "-C", str(self.folder), "rev-parse", "HEAD"]
            return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        stated = self.folder / COMMIT_FILE
        return stated.read_text(encoding="utf-8").strip() if stated.is_file() else ""

    def load(
        self, module: str, *, root: str = "", stand_ins: StandIns | None = None, bare: Iterable[str] | StandIns = (),
    ) -> Any:
        """Import `module` of the checkout, from its folder `root`.

        stand_ins: modules by name, with what they have; whatever else is imported from them, or from modules below
        them, is an empty class. bare: packages of the checkout whose __init__ is not run, perhaps with names that they
        have then. Neither the stand-ins nor
        the checkout's modules stay importable, and nothing is written to the checkout.
        """
        start = self.folder / root
        packages = bare if isinstance(bare, Mapping) else {name: {} for name in bare}
        with _imports(start, dict(stand_ins or {}), packages):
            return importlib.import_module(module)


@contextmanager
def _imports(start: Path, stand_ins: StandIns, bare: StandIns) -> Iterator[None]:
    wrote = sys.dont_write_bytecode
    own = {path.stem for path in start.iterdir() if path.is_dir() or path.suffix == ".py"}
    tops = {name.partition(".")[0] for name in stand_ins} - own
    held = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in tops | own}
    finder = _StandIns(tops, stand_ins)
    sys.meta_path.insert(0, finder)
    sys.path.insert(0, str(start))
    sys.dont_write_bytecode = True
    for name, names in bare.items():
        package = ModuleType(name)
        package.__dict__.update(names)
        package.__path__ = [str(start.joinpath(*name.split(".")))]
        sys.modules[name] = package
    try:
        yield
    finally:
        sys.dont_write_bytecode = wrote
        sys.path.remove(str(start))
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in tops | own]:
            del sys.modules[name]
        sys.modules.update(held)
        importlib.invalidate_caches()


class _StandIn(ModuleType):
    """A module that has what it was given, and an empty class for any other name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)})
        setattr(self, name, made)
        return made


class _StandIns:
    """Finds the stand-ins, before any installed package of these names. A package that the checkout has itself stays,
    but for the modules that are given."""

    def __init__(self, tops: set[str], given: StandIns) -> None:
        self.tops, self.given = tops, given

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.partition(".")[0] not in self.tops and name not in self.given:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        module = _StandIn(spec.name)
        given = self.given.get(spec.name, {})
        module.__dict__.update(given)
        module.__dict__["__all__"] = list(given)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """A stand-in runs nothing."""
