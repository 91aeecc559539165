"""The rooms of conformance/, their floors, and the budget of lines of each."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kvtwin.conformance import plugin
from kvtwin.conformance.tool.test_imports import import_graph

HERE, CI = plugin.HERE, plugin.HERE.parent / ".ci"
PACKAGE = "kvtwin.conformance"
#: Files of conformance/ itself that every room may import.
BASE = (
    "capabilities", "command_line", "discovery", "ledger", "own_methods", "progress", "readings", "refusals",
    "registry", "stats",
)
#: From the ground floor up. A room imports from its own floor only itself, and from floors below what it likes.
FLOORS = (
    {"base", "interpreter"}, {"cases"}, {"judge"}, {"harness"}, {"suite", "adapters", "way in"}, {"papers", "lab"},
    {"methods", "tool"},
)
#: The rooms that are not installed. Nothing below imports them.
OUTSIDE = {"papers", "lab", "methods", "tool"}
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(module: str) -> str:
    """The room of a module, given without the package's name."""
    first, _, rest = module.partition(".")
    return first if rest or first in FLOOR else "base" if first in BASE else "way in"


def wrong(graph: dict[str, set[str]]) -> list[str]:
    """The imports of modules, by names without the package's, that no floor allows."""
    return [
        f"{room_of(module)} imports {room_of(name)}: {module}, {name}"
        for module, names in sorted(graph.items()) for name in sorted(names)
        if room_of(module) != room_of(name) and FLOOR[room_of(name)] >= FLOOR[room_of(module)]
    ]


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    paths = {
        ".".join((PACKAGE, *path.relative_to(HERE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in HERE.rglob("*.py") if path.relative_to(HERE).parts[0] not in ("template", "command")
    }
    texts = {module: path.read_text(encoding="utf-8") for module, path in paths.items()}
    found = import_graph(texts, {module for module, path in paths.items() if path.name == "__init__.py"})
    short = f"{PACKAGE}."
    return {
        module.removeprefix(short): {name.removeprefix(short) for name in names if name != PACKAGE}
        for module, names in found.items() if module != PACKAGE
    }


def test_imports_lead_downstairs(graph):
    assert len(FLOORS) <= 7
    assert not wrong(graph)


def test_every_room_has_a_floor_and_modules(graph):
    assert {room_of(module) for module in graph} == set(FLOOR)
    assert {path.name for path in HERE.iterdir() if path.is_dir() and list(path.glob("*.py"))} <= {*FLOOR, "command"}


@pytest.mark.parametrize(("module", "name"), [
    ("cases.case", "judge.bounds"), ("judge.ties", "harness.impl"), ("harness.suite", "lab.soak"),
    ("stats", "cases.draws"), ("suite.test_laws", "tool.test_rooms"), ("papers.longflow.test_a", "lab.soak"),
    ("cli", "suite.test_laws"),
])
def test_an_import_upstairs_or_next_door_is_found(module, name):
    assert len(wrong({module: {name}})) == 1
    assert not wrong({module: {"capabilities" if module != "stats" else "refusals", module}})


# .ci/budget.py -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def budget():
    spec = importlib.util.spec_from_file_location("kvtwin_ci_budget", CI / "budget.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_file_belongs_to_the_innermost_room_and_what_is_outside_is_not_installed(budget):
    rooms = ["conformance", "conformance/judge", "conformance/judge/checkers", "conformance/lab", "perf"]
    lines = {"conformance/a.py": 1, "conformance/judge/checkers/a.py": 10, "conformance/lab/m/a.py": 100, "x.py": 1000}
    assert budget.sizes(lines, rooms) == {
        "conformance": 1, "conformance/judge": 0, "conformance/judge/checkers": 10, "conformance/lab": 100, "perf": 0,
        "installed": 11,
    }
    assert {Path(room).name for room in budget.OUTSIDE} == OUTSIDE


@pytest.mark.parametrize(("lines", "status"), [(5, 0), (6, 1)])
def test_a_room_over_its_budget_is_an_error(lines, status, budget, tmp_path, monkeypatch, capsys):
    (tmp_path / "budget.toml").write_text('"perf" = 5\n"installed" = 0\n')
    monkeypatch.setattr(budget, "BUDGETS", tmp_path / "budget.toml")
    monkeypatch.setattr(budget, "here", lambda: {"perf/a.py": lines})
    monkeypatch.setattr(budget, "on_main", lambda: {"perf/a.py": 3})
    assert budget.main([]) == status
    printed = capsys.readouterr().out
    assert f"{lines - 3:+}" in printed
    assert ("over its budget" in printed) == bool(status)
