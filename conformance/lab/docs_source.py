"""Import docs/ under a unique name for its tests. It exists in the source tree only, and is in no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"


def docs_module(name: str, reason: str) -> ModuleType:
    """A package in docs/. Skips the test if there is no source tree; `reason` says why it needs docs/."""
    path = DOCS / name / "__init__.py"
    if not path.is_file():
        pytest.skip(f"docs/ is not in the wheel: {reason}")
    alias = f"kvtwin_docs_{name}"
    if alias not in sys.modules:
        spec = importlib.util.spec_from_file_location(alias, path, submodule_search_locations=[str(path.parent)])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[alias] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[alias]
