"""One module per repository. Each has a `PROJECT`; `everyone()` finds them."""

from __future__ import annotations

import importlib
import pkgutil

from ..checkout import Project


def everyone() -> list[Project]:
    """The projects of all modules here, by the names of the modules."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}").PROJECT for name in names]
