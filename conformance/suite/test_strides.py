"""Functions and states whose arguments lie in memory each in its own way: judge/subjects.py.

A value that is read at the strides of its key, or a mask at those of another mask, is right wherever both lie alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases import supported
from kvtwin.conformance.cases.layouts import MIXED
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import checkers, subjects
from kvtwin.conformance.judge.subjects import Subject

#: Numbers of slots, and budgets of states: in the interpreter, even and odd ones take different paths.
SIZES = (6, 5)


def mixed_cases(data: Any, subject: Subject) -> Iterator[Any]:
    """Cases with two rows and two KV heads, since strides of an axis of length 1 do not matter, and with masks."""
    arguments: dict[str, Any] = {"layout": (MIXED,)}
    arguments |= {name: ("random",) for name, values in subject.properties.get("free_slots", {}).items()
                  if "random" in values}
    arguments |= {name: ("random",) for name, values in subject.properties.get("decisions", {}).items()
                  if name == "protect" and "random" in values}
    for size in SIZES:
        if subject.sized is not None:
            arguments[subject.sized] = (size, size)
        case = data.draw(subject.draw("layouts", **arguments))
        if supported.shape(2, 2, case.group):
            case = dataclasses.replace(case, batch=2, key_value_heads=2)
        if isinstance(case, StateTrace):
            budget = checkers.with_budget(subject.method, size)
            options = {**case.options, **{name: supported.values(name, (one,))[0] for name, one in budget.items()}}
            case = dataclasses.replace(case, config=tuple(options.items()), prompt=3, steps=2)
        yield case


@pytest.mark.slow_on_cpu
@pytest.mark.property("layouts")
@pytest.mark.kind("equivalence")
@pytest.mark.parametrize("subject", [one for one in subjects.every() if "layouts" in one.properties], ids=str)
@given(data=st.data())
@settings(max_examples=1)
def test_every_argument_is_read_by_its_own_strides(subject, data, twins):
    results = subjects.Results()
    for case in mixed_cases(data, subject):
        for name in subject.fields:
            subject.check(subject.module(twins.optimized), case, name, results=results)
