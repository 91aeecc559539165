"""Modules import the private parts of their own method alone, and no method imports another unless it is built on it.

Code of several methods is in ``optimized/_common`` and ``reference``'s own modules; what both sides need is in
``reference/contract``. Private is a module or a name that begins with an underscore.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtwin.conformance
from kvtwin.conformance import discovery

PACKAGE = "kvtwin"
ROOT = Path(kvtwin.conformance.__path__[0]).parent
SIDES = ("reference", "optimized")
PARTS = (*SIDES, "conformance", "fixtures")
FILES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))
}
SHARED = "_common"
GROUPS = ("baselines", "contract")  # folders with a module, or a folder, per method
METHODS = [pair.path for pair in discovery.built_in()]
#: The private modules of `optimized` that the suite imports outside of tests, by the last name of the module that does.
#: Tests of our own kernels import what they test.
NEEDED = {
    "capacity": {"optimized._common.launch"},  # the sizes that kernels take
    "compile_only": {"optimized._common.launch"},  # the kernels' launches, which it compiles and does not run
    "stand_in": {"optimized._common.graph", "optimized.hf._captured"},  # what it stands in for: CUDA graphs on a CPU
    "synckv_offloaded": {"optimized.synckv._transfers"},  # transfers that a test delays
    "thinkv_paging": {"optimized.thinkv._paging_ops"},  # an operation without a public function
}
#: The methods that are built on another one.
BUILT_ON = {
    ("baselines.pm_kvq", "baselines.kivi"),  # the same quantizer and words of codes
    ("baselines.vatp", "baselines.h2o"),  # H2O's attention, weighted by the values
    ("epikv", "thinkv"),  # one policy of EpiKV cuts a trace by ThinKV's thoughts
}


def method_of(module: str) -> str:
    """The method that a module of a side belongs to, "longflow" or "baselines.h2o", or the part that is no method's.

    A module of a group may have a further name behind the method's: "baselines.kivi_kernels".
    """
    first, *rest = module.split(".")
    if first not in GROUPS or not rest:
        return first
    name = f"baselines.{rest[0]}"
    found = [path for path in METHODS if name == path or name.startswith(f"{path}_")]
    if first == "contract":
        found += [path for path in METHODS if path == rest[0]]
    return max(found, key=len) if found else first


def imported(source: str, file: str) -> Iterator[tuple[int, str]]:
    """(line, module or name) of the imports in a file that are below kvtwin, without "kvtwin." """
    folders = file.split("/")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), ".".join((PACKAGE, *folders)))
            found = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for one in found:
            if one.startswith(f"{PACKAGE}."):
                yield node.lineno, one.removeprefix(f"{PACKAGE}.")


def place_of(file: str) -> tuple[str, str, str]:
    """The part of kvtwin that a file is in, its module below the part, and the module's last name."""
    part, *rest = file.removesuffix("/__init__.py").removesuffix(".py").split("/")
    return part, ".".join(rest), rest[-1] if rest else ""


def private_imports(source: str, file: str) -> Iterator[str]:
    """The imports of private parts of other methods, or of another side, in a file, given by its path."""
    part, module, last = place_of(file)
    for line, one in imported(source, file):
        side, _, inner = one.partition(".")
        if side not in SIDES or not any(name.startswith("_") for name in inner.split(".")):
            continue
        if side == part and (inner.split(".")[0].startswith("_") or method_of(inner) == method_of(module)):
            continue
        tests = part == "conformance" and last.startswith("test_")
        if side == "optimized" and (tests or any(f"{one}.".startswith(f"{known}.") for known in NEEDED.get(last, ()))):
            continue
        yield f"line {line}: {one}"


def other_methods(source: str, file: str) -> set[tuple[str, str]]:
    """(method of a file of a side, another method of the same side that it imports)."""
    part, module, _ = place_of(file)
    own, parts = method_of(module), (one.split(".", 1) for _, one in imported(source, file))
    others = {method_of(inner) for side, *rest in parts if side == part for inner in rest}
    return {(own, other) for other in others - {own} if own in METHODS and other in METHODS}


def test_no_module_imports_a_private_part_of_another_side_or_method():
    assert len(FILES) > 400
    wrong = [f"{file}, {found}" for file, source in FILES.items() for found in private_imports(source, file)]
    assert not wrong, "\n".join(wrong)


def test_what_the_suite_needs_of_private_modules_is_imported():
    names = {
        (place_of(file)[2], one) for file, source in FILES.items() if file.startswith("conformance/")
        for _, one in imported(source, file)
    }
    for last, modules in NEEDED.items():
        for module in modules:
            assert any(of == last and f"{one}.".startswith(f"{module}.") for of, one in names), (last, module)


def test_methods_import_those_alone_that_they_are_built_on():
    found = {pair for file, source in FILES.items() if file.startswith(SIDES) for pair in other_methods(source, file)}
    assert found == BUILT_ON


@pytest.mark.parametrize(("file", "source", "allowed"), [
    ("optimized/longflow/state.py", "from . import _ops", True),
    ("optimized/longflow/state.py", "from .._common.launch import INTERPRETED", True),
    ("optimized/longflow/state.py", "from ..baselines.snapkv import choose", True),
    ("optimized/longflow/__init__.py", "from ._ops import step", True),
    ("optimized/epikv/_step.py", "from .._common import _private", True),
    ("optimized/baselines/h2o.py", "from .._common.block_cache.state import BlockState", True),
    ("optimized/synckv/_attend_kernels.py", "import torch\nfrom triton import _C", True),
    ("optimized/longflow/state.py", "from ...reference.contract.arguments import check_config", True),
    ("reference/longflow.py", "from ._ranks import of_all_ranks", True),
    ("reference/baselines/cake.py", "from .._ranks import of_all_ranks", True),
    ("conformance/suite/longflow/test_longflow.py", "from kvtwin.optimized.longflow import _ops", True),
    ("conformance/capacity.py", "from ..optimized._common.launch import padded_head_dim", True),
    ("optimized/synckv/_attend_kernels.py", "from ..longflow._attend_kernels import attend_kernel", False),
    ("optimized/synckv/_attend_kernels.py", "from ..longflow import _attend_kernels", False),
    ("optimized/epikv/_hybrid_kernels.py", "def f():\n    from ..thinkv._thoughts_kernels import count_kernel", False),
    ("optimized/epikv/_hybrid_kernels.py", "from ..thinkv.thoughts import _cut", False),
    ("optimized/baselines/h2o.py", "from .snapkv import _observe", False),
    ("optimized/hf/longflow.py", "import kvtwin.optimized.longflow._ops", False),
    ("optimized/longflow/state.py", "from ...reference._ranks import of_all_ranks", False),
    ("optimized/longflow/state.py", "from ...reference.contract import _arguments", False),
    ("optimized/longflow/state.py", "from ...reference.longflow import _next_slot", False),
    ("conformance/suite/longflow/test_longflow.py", "from kvtwin.reference._ranks import of_all_ranks", False),
    ("conformance/cases/oracle.py", "from ...reference import _ranks", False),
    ("conformance/cases/oracle.py", "from ...optimized.longflow._ops import step", False),
    ("conformance/capacity.py", "from ..optimized._common.graph import captured", False),
    ("fixtures/record.py", "from ..optimized._common import graph", False),
])
def test_the_rule_about_private_parts_can_fail(file, source, allowed):
    assert (not list(private_imports(source, file))) == allowed


@pytest.mark.parametrize(("file", "source", "expected"), [
    ("optimized/longflow/state.py", "from ..baselines.snapkv import choose", {("longflow", "baselines.snapkv")}),
    ("reference/longflow.py", "from .baselines.snapkv import compress", {("longflow", "baselines.snapkv")}),
    ("optimized/baselines/pm_kvq_kernels.py", "from .kivi_kernels import a", {("baselines.pm_kvq", "baselines.kivi")}),
    ("reference/epikv/state.py", "from ..contract.thinkv.types import Thought", {("epikv", "thinkv")}),
    ("reference/contract/pm_kvq.py", "from .kivi import check_group", {("baselines.pm_kvq", "baselines.kivi")}),
    ("optimized/baselines/kivi.py", "from .kivi_kernels import a\nfrom ..blocks import b", set()),
    ("optimized/longflow/state.py", "from ...reference.baselines.snapkv import SnapKVConfig", set()),
    ("optimized/hf/quest.py", "from ..baselines.quest import QuestState", set()),
])
def test_the_rule_about_other_methods_can_fail(file, source, expected):
    assert other_methods(source, file) == expected
