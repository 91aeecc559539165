"""The verdict on right implementations in other styles is right: no property is wrong, and the core ones are judged.

``python -m kvtwin.conformance.lab.mutation.power right`` judges each of them with more cases and many seeds.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest

from kvtwin.conformance.capabilities import Capabilities
from kvtwin.conformance.harness import verdict
from kvtwin.conformance.lab.implementations import right, run

FOLDER = Path(right.__file__).parent
#: Tests of the states that other tests do not judge, and the functions that they judge as the same objects.
OF_STATES = "laws or keeps_step or State"
OF_FUNCTIONS = "test_numbers or test_choices or test_free_slots or test_calls"  # of the core properties
ELSEWHERE = {"in_float64", "fused", "gathered_pages", "last_slot_first", "appending"}
EVERY = [(method, module) for module, style in right.RIGHT.items() for method in style.methods]


def module_of(name: str) -> Any:
    return importlib.import_module(f"{right.__name__}.{name}")


def test_every_module_is_listed_with_what_it_has():
    modules = {path.stem: module_of(path.stem) for path in FOLDER.glob("*.py") if path.stem != "__init__"}
    assert {name for name, module in modules.items() if hasattr(module, "CAPABILITIES")} == set(right.RIGHT)
    for method, name in EVERY:
        assert hasattr(modules[name], method), (name, method)
    assert len(right.RIGHT) >= 12 and len({method for method, _ in EVERY}) >= 5


@pytest.mark.slow
@pytest.mark.parametrize(("method", "name"), [pair for pair in EVERY if pair[1] not in ELSEWHERE])
def test_it_is_right(method, name, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = module_of(name)
    provided = vars(getattr(module, method))
    declared = {one.name: getattr(module.CAPABILITIES, one.name) for one in dataclasses.fields(Capabilities)}
    states = any(function.endswith("State") for function in provided)
    found = run.verdict_of(
        method, provided, declared, OF_STATES if states else OF_FUNCTIONS, tmp_path, monkeypatch,
        "suite" if states else "suite/test_properties.py", stranger=FOLDER / f"{name}.py",
    )
    assert not run.wrong(found), run.summary_of(found)
    assert found.verdict == verdict.RIGHT, run.summary_of(found)
