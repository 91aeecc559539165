"""The properties at sizes that people serve, on a GPU: judge/served.py.

Small cases have no second wave of programs, no hundredth split and no full grid, so what goes wrong there shows here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvtwin.conformance import discovery
from kvtwin.conformance.cases import gpu_memory
from kvtwin.conformance.judge import checkers, fresh, repeats, served, subjects
from kvtwin.conformance.judge.subjects import Results, StateSubject, check_each

pytestmark = pytest.mark.served
FUNCTIONS = [subject for subject in subjects.every() if not isinstance(subject, StateSubject)]
SIZED = [subject for subject in FUNCTIONS if subject.sized and subject.batched]
STATES = [subject for subject in subjects.every() if isinstance(subject, StateSubject)]
#: The properties, and whether they are judged by numbers and by choices.
PROPERTIES = {
    "accuracy": (True, False), "decisions": (False, True), "ties": (False, True), "free_slots": (True, True),
    "extreme_numbers": (True, True), "layouts": (True, True), "independence": (True, True),
}
#: Of a function that is `also` judged, these are enough.
ALSO = ("accuracy", "free_slots")


@pytest.fixture(scope="module")
def results() -> Results:
    return {}


@pytest.fixture(scope="module")
def process(request: pytest.FixtureRequest) -> Iterator[fresh.Process]:
    started = fresh.Process(request.config.getoption("kv_impl"))
    yield started
    started.close()


@pytest.fixture(autouse=True)
def _memory(request: pytest.FixtureRequest, device: torch.device) -> Iterator[None]:
    """The next test finds the memory of the last one free. Somebody else's implementation may need many times as much
    as a kernel: of the processes that judge it, one at a time runs such a test, unless its cases are small."""
    small = any(mark.kwargs.get("small") for mark in request.node.iter_markers("served"))
    if device.type == "cuda" and request.config.getoption("kv_impl") is not None and not small:
        gpu_memory.lock_memory(torch.device("cuda", torch.cuda.current_device()), "served", 1)
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize(("subject", "prop", "field"), [
    pytest.param(subject, prop, field, id=f"{subject}-{prop}-{field}", marks=pytest.mark.property(prop))
    for prop, (numbers, choices) in PROPERTIES.items() for subject in SIZED
    if prop in subject.properties and (not subject.also or prop in ALSO)
    for field in (*(subject.numbers if numbers else ()), *(subject.choices if choices else ()))
])
def test_functions_are_right(subject, prop, field, twins, results):
    module = subject.module(twins.optimized)
    check_each(served.cases(subject, prop), lambda case: subject.check(
        module, case, field, decides=prop in ("decisions", "ties"), results=results
    ))


@pytest.mark.property("repeatability")
@pytest.mark.parametrize("subject", [subject for subject in SIZED if not subject.also], ids=str)
def test_functions_give_the_same_bits_in_a_hundred_launches(subject, twins, process):
    module = subject.module(twins.optimized)
    check_each(
        served.cases(subject, "repeatability"), lambda case: repeats.assert_repeats(subject, module, case, process)
    )


@pytest.mark.served(small=True)
@pytest.mark.property("repeatability")
@pytest.mark.parametrize("subject", [subject for subject in SIZED if not subject.also], ids=str)
def test_functions_give_the_same_bits_in_thousands_of_launches(subject, twins):
    module = subject.module(twins.optimized)
    check_each(
        served.cases(subject, "repeatability", [served.OFTEN] * 2),
        lambda case: repeats.assert_repeats_often(subject, module, case),
    )


@pytest.mark.served(long=True)
@pytest.mark.property("state")
@pytest.mark.parametrize("subject", STATES, ids=str)
def test_states_keep_step_for_hundreds_of_steps(subject, twins, results):
    for field in subject.fields:
        subject.check(subject.module(twins.optimized), served.long_trace(subject), field, results=results)


@pytest.mark.served(long=True)
@pytest.mark.property("state")
@pytest.mark.parametrize("subject", STATES, ids=str)
def test_states_keep_step_with_float64(subject, twins, results):
    module = subject.module(twins.optimized)

    def check(trace):
        for field in subject.fields:
            subject.check(module, trace, field, results=results)

    check_each(served.traces(subject), check)


@pytest.mark.served(long=True)
@pytest.mark.property("repeatability")
@pytest.mark.parametrize("subject", STATES, ids=str)
def test_states_give_the_same_bits_again(subject, twins):
    module, pair = subject.module(twins.optimized), checkers.pair(subject.method)

    def check(trace):
        config = pair.config(**trace.options)
        repeats.assert_state_repeats(
            subject, module, trace, lambda: getattr(module, subject.name)(config, **trace.sizes)
        )

    check_each(served.traces(subject), check)


def test_every_method_is_judged_at_these_sizes():
    assert {subject.method for subject in (*SIZED, *STATES)} == {pair.name for pair in discovery.methods()}
