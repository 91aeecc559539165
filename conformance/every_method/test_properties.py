"""The properties of every method's functions and states, one property at a time: judge/subjects.py.

Each test judges one field of the results. The cases of a property differ from ordinary ones in what the property is
about and in nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtwin.conformance.judge import stats, subjects
from kvtwin.conformance.judge.compare import Mismatch, assert_same
from kvtwin.conformance.judge.fields import Missing
from kvtwin.conformance.judge.subjects import StateSubject, Subject

EVERY = subjects.every()
FUNCTIONS = [subject for subject in EVERY if not isinstance(subject, StateSubject)]
few = settings(max_examples=max(4, settings().max_examples // 6))
some = settings(max_examples=max(4, settings().max_examples // 3))
# Several cases each; two examples, since the first is always the simplest that Hypothesis can draw.
each = settings(max_examples=max(2, settings().max_examples // 20))


def judged(aspect: str, *, numbers: bool = True, choices: bool = True):
    """Run a test for each subject that has cases of the property, and each of its fields."""
    parameters = [
        pytest.param(subject, name, id=f"{subject}-{name}")
        for subject in EVERY if aspect in subject.aspects and (subject.batched or aspect != "independence")
        for name in (*(subject.numbers if numbers else ()), *(subject.choices if choices else ()))
    ]
    return pytest.mark.parametrize(("subject", "field"), parameters)


@pytest.mark.property("accuracy")
@judged("accuracy", choices=False)
@given(data=st.data())
@few
def test_numbers_are_within_their_bounds(subject, field, data, twins):
    subject.check(subject.module(twins.optimized), data.draw(subject.draw("accuracy")), field)


@pytest.mark.property("decisions")
@judged("decisions", numbers=False)
@given(data=st.data())
@some
def test_choices_are_right(subject, field, data, twins):
    subject.check(subject.module(twins.optimized), data.draw(subject.draw("decisions")), field, decides=True)


@pytest.mark.property("ties")
@judged("ties", numbers=False)
@given(data=st.data())
@each
def test_of_equal_tokens_the_lowest_goes_first(subject, field, data, twins):
    for case in subject.draw_each(data, "ties"):
        subject.check(subject.module(twins.optimized), case, field, decides=True)


@pytest.mark.property("free_slots")
@judged("free_slots")
@given(data=st.data())
@each
def test_free_slots_influence_nothing(subject, field, data, twins):
    """They hold zeros, NaN, infinities or old tokens."""
    for case in subject.draw_each(data, "free_slots"):
        subject.check(subject.module(twins.optimized), case, field)


@pytest.mark.property("extreme_numbers")
@judged("extreme_numbers")
@given(data=st.data())
@each
def test_extreme_numbers(subject, field, data, twins):
    for case in subject.draw_each(data, "extreme_numbers"):
        subject.check(subject.module(twins.optimized), case, field)


@pytest.mark.property("layouts")
@judged("layouts")
@given(data=st.data())
@each
def test_layouts(subject, field, data, twins):
    for case in subject.draw_each(data, "layouts"):
        subject.check(subject.module(twins.optimized), case, field)


@pytest.mark.property("independence")
@judged("independence")
@given(data=st.data())
@each
def test_rows_and_heads_have_their_own_results(subject, field, data, twins):
    """Several rows and heads, and groups of any size."""
    for case in subject.draw_shapes(data):
        subject.check(subject.module(twins.optimized), case, field)


@pytest.mark.property("layouts")
@pytest.mark.parametrize(("subject", "field"), [
    pytest.param(subject, name, id=f"{subject}-{name}") for subject in FUNCTIONS if subject.sized
    for name in subject.fields
])
@given(data=st.data())
@settings(max_examples=1)
def test_large_tensors(subject, field, data, twins):
    """Several tiles or splits, and a last one that is not full."""
    case = data.draw(subject.draw("accuracy", **{subject.sized: subjects.LARGE}))
    subject.check(subject.module(twins.optimized), case, field)


@pytest.mark.property("traces")
@pytest.mark.parametrize(("subject", "field"), [
    pytest.param(subject, name, id=f"{subject}-{name}")
    for subject in FUNCTIONS if subject.recorded is not None for name in subject.choices
])
def test_decisions_on_recorded_traces(subject, field, twins, device):
    """Of a trained model on real text. All of them are judged, and the wrong ones counted."""
    module, wrong, recorded = subject.module(twins.optimized), [], list(subject.recorded(device))
    for case in recorded:
        try:
            subject.check(module, case, field, decides=True)
        except Mismatch as error:
            wrong.append(str(error).splitlines()[0])
    assert not wrong, f"{len(wrong)} of {len(recorded)} recorded cases have a wrong choice; the first: {wrong[0]}"


# What one call must not do to another ---------------------------------------------------------------------------------

functions = pytest.mark.parametrize("subject", FUNCTIONS, ids=str)
batched = pytest.mark.parametrize("subject", [subject for subject in FUNCTIONS if subject.batched], ids=str)


def returned(subject: Subject, module: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The fields of a call's result."""
    result = getattr(module, subject.name)(**inputs)
    if isinstance(result, Tensor):
        return {"result": result}
    return {name: value for name, value in result._asdict().items() if not isinstance(value, Missing)}


def copies(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in tensors.items()}


def assert_same_fields(actual: dict[str, Tensor], expected: dict[str, Tensor], why: str) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(actual[name], tensor, what=f"{name} {why}")


@pytest.mark.property("repeatability")
@functions
@given(data=st.data())
@few
def test_a_call_leaves_nothing_behind(subject, data, twins):
    """The same call gives the same bits. It changes neither its inputs nor the results of earlier calls, and remembers
    nothing of tensors whose contents change."""
    module = subject.module(twins.optimized)
    case = data.draw(subject.draw("repeatability"))
    inputs, others = (subject.inputs(one) for one in (case, replace(case, seed=case.seed ^ 1)))
    before = copies(inputs)
    first = returned(subject, module, inputs)
    expected = copies(first)
    assert_same_fields(tensors(inputs), tensors(before), "after the call (an input)")
    assert_same_fields(returned(subject, module, inputs), expected, "of the same call again")
    changed = copies(returned(subject, module, others))
    assert_same_fields(first, expected, "of the first call, after another one")
    mine = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    assert_same_fields(returned(subject, module, mine), expected, "of a call with copies")
    for name, tensor in tensors(others).items():
        mine[name].copy_(tensor)
    assert_same_fields(returned(subject, module, mine), changed, "after the contents of the inputs changed")
    stats.case()


def tensors(inputs: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


@pytest.mark.property("independence")
@batched
@given(data=st.data())
@few
def test_a_row_does_not_depend_on_other_rows(subject, data, twins):
    """All other rows hold NaN."""
    case = data.draw(subject.draw("independence").filter(lambda case: case.batch > 1))
    module, inputs = subject.module(twins.optimized), subject.inputs(case)
    expected = returned(subject, module, inputs)
    row = data.draw(st.integers(0, case.batch - 1))

    def alone(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return tensor
        others = torch.arange(case.batch, device=tensor.device) != row
        return tensor.masked_fill(others.view(-1, *[1] * (tensor.dim() - 1)), torch.nan)

    actual = returned(subject, module, {name: alone(value) for name, value in inputs.items()})
    assert_same_fields(
        {name: tensor[row] for name, tensor in actual.items()},
        {name: tensor[row] for name, tensor in expected.items()},
        f"of row {row}, after all other rows became NaN",
    )
    stats.case()
