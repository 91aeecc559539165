"""Import perf/ under a unique name for its tests. It exists in the source tree only, and is in no package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PERF = Path(__file__).resolve().parent.parent.parent / "perf"
NAME = "kvtwin_perf"


def perf_module(name: str) -> ModuleType:
    """A module of perf/. The modules that it imports from perf/ are found under the same name."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            NAME, PERF / "__init__.py", submodule_search_locations=[str(PERF)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return importlib.import_module(f"{NAME}.{name}")
