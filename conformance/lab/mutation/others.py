"""The mutants of other packages' methods: mutants.toml in the folder of the module of a method's entry point."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ... import discovery
from ...own_methods import Declared
from . import kill_matrix


def _declared() -> list[Declared]:
    found = [pair.declared for pair in discovery.methods() if pair.declared is not None]
    return [one for one in found if (one.folder / kill_matrix.MUTANTS).is_file()]


def files() -> dict[str, Path]:
    """The files of mutants, by method. Raises MethodError."""
    return {one.method.name: one.folder / kill_matrix.MUTANTS for one in _declared()}


def packages() -> dict[str, Path]:
    """The folders of the packages with the references, by their names. Raises MethodError."""
    found = {}
    for one in _declared():
        name = one.method.reference.partition(".")[0]
        spec = importlib.util.find_spec(name)
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        if not folders:
            raise one.fail("reference", f"mutants need a package, and {name} is a single module")
        found[name] = Path(folders[0])
    return found
