"""No method of the optimized side imports a private module or name of another method. Shared code is in ``_common``."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtwin.optimized

PACKAGE = "kvtwin.optimized"
FOLDER = Path(kvtwin.optimized.__file__).parent
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py"))
SHARED = "_common"
GROUPS = ("baselines",)  # folders with a module per method


def method_of(module: str) -> str:
    """The method that a module below the package belongs to: "longflow" or "baselines.h2o"."""
    first, *rest = module.split(".")
    return f"{first}.{rest[0]}" if first in GROUPS and rest else first


def private_imports(source: str, file: str) -> Iterator[str]:
    """The imports of private parts of other methods in a file, given by its path below the package."""
    *folders, name = file.removesuffix(".py").split("/")
    own = method_of(".".join(folders if name == "__init__" else [*folders, name]))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), ".".join((PACKAGE, *folders)))
            found = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for imported in found:
            inner = imported.removeprefix(f"{PACKAGE}.")
            if inner == imported or inner.split(".")[0] == SHARED or method_of(inner) == own:
                continue
            if any(part.startswith("_") for part in inner.split(".")):
                yield f"line {node.lineno}: {inner}"


@pytest.mark.parametrize("file", FILES)
def test_no_method_imports_a_private_part_of_another(file):
    wrong = list(private_imports((FOLDER / file).read_text(encoding="utf-8"), file))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("file", "source", "allowed"), [
    ("longflow/state.py", "from . import _ops", True),
    ("longflow/state.py", "from .._common.launch import INTERPRETED", True),
    ("longflow/state.py", "from ..baselines.snapkv import choose", True),
    ("longflow/__init__.py", "from ._ops import step", True),
    ("epikv/_step.py", "from .._common import _private", True),
    ("baselines/h2o.py", "from .._common.block_cache.state import BlockState", True),
    ("synckv/_attend_kernels.py", "import torch\nfrom triton import _C", True),
    ("synckv/_attend_kernels.py", "from ..longflow._attend_kernels import attend_kernel", False),
    ("synckv/_attend_kernels.py", "from ..longflow import _attend_kernels", False),
    ("epikv/_hybrid_kernels.py", "def f():\n    from ..thinkv._thoughts_kernels import count_kernel", False),
    ("epikv/_hybrid_kernels.py", "from ..thinkv.thoughts import _cut", False),
    ("baselines/h2o.py", "from .snapkv import _observe", False),
    ("hf/longflow.py", "import kvtwin.optimized.longflow._ops", False),
])
def test_the_rule_can_fail(file, source, allowed):
    assert (not list(private_imports(source, file))) == allowed
