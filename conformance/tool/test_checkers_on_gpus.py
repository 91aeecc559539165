"""Checkers draw longer sequences if there is a GPU. Their configs must be valid there too, which this test shows
without one."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtwin.conformance import discovery
from kvtwin.conformance.judge import checkers

METHODS = [pair for pair in discovery.methods() if hasattr(checkers.checker_of(pair.name), "configs")]


@pytest.fixture
def loaded(monkeypatch):
    """Loads another copy of a method's checker, and of what it imports from its package."""
    def load(name, gpu):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        package = checkers.__name__
        with monkeypatch.context() as patch:
            for module in [one for one in sys.modules if one.startswith(f"{package}.")]:
                patch.delitem(sys.modules, module)
                patch.delattr(checkers, module.rpartition(".")[2], raising=False)
            return importlib.import_module(f"{package}.{name}")
    return load


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("pair", METHODS, ids=str)
def test_all_configs_are_valid(pair, gpu, loaded):
    judge = loaded(pair.name, gpu)
    small = getattr(judge, "SMALL", {}) | getattr(judge, "small", lambda budget: {})(8)
    for more in ({}, *getattr(judge, "GROUPINGS", ()), *getattr(judge, "LAWS", ()), *getattr(judge, "COMPILED", ())):
        of_config = {name: value for name, value in more.items() if name != "sink_logits"}  # which states take
        pair.config(**{**checkers.with_budget(pair.name, 8), **small, **of_config})

    @settings(max_examples=40, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def draw(data):
        pair.config(**data.draw(judge.configs(*(64, 32) if gpu else (8, 8))))

    draw()
