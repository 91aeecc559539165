"""kvtwin has no import cycles. test_rooms.py draws the arrows between the rooms of conformance/.

The import graph is read from the syntax trees. Imports inside functions count, because delaying an import does not
remove a cycle. Modules that are imported by names computed at run time (discovery, the judge's checkers) are not in the
graph.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Set
from pathlib import Path

import pytest

import kvtwin.conformance

FOLDERS = ("reference", "optimized", "conformance", "fixtures")
ROOT = Path(kvtwin.conformance.__path__[0]).parent
Graph = dict[str, set[str]]


def sources() -> dict[str, Path]:
    """Every module of the package by its name."""
    return {
        ".".join(("kvtwin", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
        for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    }


def import_graph(texts: Mapping[str, str], packages: Set[str]) -> Graph:
    """Module -> the modules among `texts` that it imports, anywhere in its source. packages: the __init__ modules."""
    graph: Graph = {}
    for module, text in texts.items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                # A package is its own first level; elsewhere the first level is the folder of the module.
                above = node.level - (module in packages)
                folder = module.split(".")[:-above or None] if node.level else []
                base = ".".join([*folder, *([node.module] if node.module else [])])
                # `from package import name`: name is a module, or something that the package defines.
                named |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in texts else base for alias in node.names}
        graph[module] = {name for name in named if name in texts and name != module}
    return graph


def reachable(graph: Graph, start: str) -> set[str]:
    """The modules that `start` imports, directly or through others."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of modules that import each other, sorted."""
    closure = {module: reachable(graph, module) for module in graph}
    groups = {
        tuple(sorted({module} | {other for other in closure[module] if module in closure[other]}))
        for module in graph if module in closure[module]
    }
    return [list(group) for group in sorted(groups)]


def rooms(graph: Graph, folders: Mapping[str, str], depth: int) -> Graph:
    """Room -> the rooms that its modules import. folders: the folder of each module, such as "optimized/hf". A room is
    a folder at most `depth` below a side, with all that is in it but other rooms."""
    room = {module: "/".join(folder.split("/")[:depth + 1]) for module, folder in folders.items()}
    made: Graph = {one: set() for one in room.values()}
    for module, imported in graph.items():
        made[room[module]] |= {room[other] for other in imported} - {room[module]}
    return made


@pytest.fixture(scope="module")
def graph():
    paths = sources()
    packages = {module for module, path in paths.items() if path.name == "__init__.py"}
    return import_graph({module: path.read_text(encoding="utf-8") for module, path in paths.items()}, packages)


def test_no_module_imports_itself_through_others(graph):
    assert cycles(graph) == []


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_no_room_imports_itself_through_others(side, depth, graph):
    inside = {module for module in graph if module.startswith(f"kvtwin.{side}.")}
    own = {module: graph[module] & inside for module in inside}
    paths = sources()
    found = rooms(own, {module: paths[module].relative_to(ROOT).parent.as_posix() for module in inside}, depth)
    assert len(found) > 4 and any(found.values())
    assert cycles(found) == []


def test_a_circle_of_rooms_is_found():
    graph = {"s.a": {"s.x.b"}, "s.x.b": set(), "s.x.c": {"s.d"}, "s.d": set()}
    folders = {"s.a": "s", "s.x.b": "s/x", "s.x.c": "s/x", "s.d": "s"}
    assert cycles(graph) == []
    assert cycles(rooms(graph, folders, 1)) == [["s", "s/x"]]
    assert cycles(rooms(graph, {**folders, "s.x.b": "s/x/y"}, 2)) == []


def test_the_graph_holds_what_modules_import(graph):
    assert "kvtwin.conformance.judge.compare" in graph["kvtwin.conformance.judge.lockstep"]
    assert "kvtwin.conformance.harness.suite" in graph["kvtwin.conformance.plugin"], "imported inside a function"
    assert "kvtwin.reference.attention" in graph["kvtwin.conformance.judge.bounds"], "a relative import, two levels up"
    assert "kvtwin.optimized.longflow" in reachable(graph, "kvtwin.optimized.hf.longflow")


@pytest.mark.parametrize(("texts", "expected"), [
    ({"p.a": "from . import b", "p.b": "from .c import f", "p.c": "import p.a"}, [["p.a", "p.b", "p.c"]]),
    ({"p.a": "from .b import f", "p.b": "def f():\n    from p import a"}, [["p.a", "p.b"]]),
    ({"p": "from .q import a", "p.q": "from ..p import f"}, [["p", "p.q"]]),
    ({"p": "from .q import f", "p.q": "from . import r", "p.q.r": "from .. import f"}, [["p", "p.q", "p.q.r"]]),
    ({"p.a": "from . import b", "p.b": "import json", "p.c": "from . import a, b"}, []),
], ids=["three modules", "inside a function", "package and module", "three levels", "none"])  # fmt: skip
def test_cycles_are_found(texts, expected):
    packages = {module for module in texts if any(other.startswith(f"{module}.") for other in texts)}
    assert cycles(import_graph(texts, packages)) == expected
