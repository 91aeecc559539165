"""The properties of every method's functions and states, one property at a time: judge/subjects.py.

Each test judges one field of the results. The cases of a property differ from ordinary ones in what the property is
about and in nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance import stats
from kvtwin.conformance.cases import supported
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.judge import calls, many, mismatch, repeats, sizes, subjects
from kvtwin.conformance.judge.compare import Mismatch
from kvtwin.conformance.judge.subjects import Results, StateSubject, Subject, check_each
from kvtwin.conformance.refusals import NotProvided

pytestmark = [pytest.mark.main, pytest.mark.first]

EVERY = subjects.every()
FUNCTIONS = [subject for subject in EVERY if not isinstance(subject, StateSubject)]
few = settings(max_examples=max(at_least(4), settings().max_examples // 6))
some = settings(max_examples=max(at_least(4), settings().max_examples // 3))
# Several cases each; two examples, since the first is always the simplest that Hypothesis can draw.
each = settings(max_examples=max(2, settings().max_examples // 20))


@pytest.fixture(scope="module")
def results() -> Results:
    return Results()


#: Properties of states of which test_lockstep.py and the laws draw cases, too. A quick run leaves them to these.
DRAWN_ELSEWHERE = ("extreme_numbers", "layouts", "independence")
#: The properties that a quick run judges of a function that is `also` judged.
ALSO = ("accuracy", "free_slots")


def judged(prop: str, *, numbers: bool = True, choices: bool = True):
    """Run a test for each subject that has cases of the property, and each of its fields."""
    return property_test(prop, (
        (subject, name) for subject in EVERY
        if prop in subject.properties and (subject.batched or prop != "independence")
        for name in (*(subject.numbers if numbers else ()), *(subject.choices if choices else ()))
    ))


def marks(subject: Subject, prop: str) -> tuple[pytest.MarkDecorator, ...]:
    """slow_on_cpu for properties that other tests judge as well."""
    long = prop in DRAWN_ELSEWHERE if isinstance(subject, StateSubject) else subject.also and prop not in ALSO
    return (pytest.mark.slow_on_cpu,) if long else ()


def property_test(prop: str, parameters: Iterable[tuple[Subject, str]]):
    """Run a test for each of these subjects and fields."""
    def mark(test: Any) -> Any:
        test.subjects_and_fields = [
            pytest.param(subject, name, id=f"{subject}-{name}", marks=marks(subject, prop))
            for subject, name in parameters
        ]
        return test

    return mark


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes as `pytest.mark.parametrize` would, with which Hypothesis would draw other cases for each field."""
    if hasattr(metafunc.function, "subjects_and_fields"):
        metafunc.parametrize(("subject", "field"), metafunc.function.subjects_and_fields)


@pytest.mark.property("accuracy")
@judged("accuracy", choices=False)
@given(data=st.data())
@few
def test_numbers_are_within_their_bounds(subject, field, data, twins, results):
    subject.check(subject.module(twins.optimized), data.draw(subject.draw("accuracy")), field, results=results)


@pytest.mark.property("decisions")
@judged("decisions", numbers=False)
@given(data=st.data())
@some
def test_choices_are_right(subject, field, data, twins, results):
    case = data.draw(subject.draw("decisions"))
    subject.check(subject.module(twins.optimized), case, field, decides=True, results=results)


@pytest.mark.property("ties")
@judged("ties", numbers=False)
@given(data=st.data())
@each
def test_of_equal_tokens_the_lowest_goes_first(subject, field, data, twins, results):
    check_each(subject.draw_each(data, "ties"), lambda case: subject.check(
        subject.module(twins.optimized), case, field, decides=True, results=results
    ))


@pytest.mark.property("free_slots")
@judged("free_slots")
@given(data=st.data())
@each
def test_free_slots_influence_nothing(subject, field, data, twins, results):
    """They hold zeros, NaN, infinities or old tokens."""
    check_each(subject.draw_each(data, "free_slots"), lambda case: subject.check(
        subject.module(twins.optimized), case, field, results=results
    ))


@pytest.mark.property("extreme_numbers")
@judged("extreme_numbers")
@given(data=st.data())
@each
def test_extreme_numbers(subject, field, data, twins, results):
    check_each(subject.draw_each(data, "extreme_numbers"), lambda case: subject.check(
        subject.module(twins.optimized), case, field, results=results
    ))


@pytest.mark.property("layouts")
@judged("layouts")
@given(data=st.data())
@each
def test_layouts(subject, field, data, twins, results):
    check_each(subject.draw_each(data, "layouts"), lambda case: subject.check(
        subject.module(twins.optimized), case, field, results=results
    ))


@pytest.mark.property("independence")
@judged("independence")
@given(data=st.data())
@each
def test_rows_and_heads_have_their_own_results(subject, field, data, twins, results):
    """Several rows and heads, and groups of any size."""
    check_each(subject.draw_shapes(data), lambda case: subject.check(
        subject.module(twins.optimized), case, field, results=results
    ))


@pytest.mark.property("layouts")
@property_test("layouts", ((subject, name) for subject in FUNCTIONS if subject.sized for name in subject.fields))
@given(data=st.data())
@settings(max_examples=1)
def test_large_tensors(subject, field, data, twins, results):
    """Several tiles or splits, of which the last one is full, or not, or has a single slot: judge/sizes.py."""
    check_each(sizes.cases(subject, data), lambda case: subject.check(
        subject.module(twins.optimized), case, field, results=results
    ))


@pytest.mark.property("decisions")
@property_test("decisions", (
    (subject, name) for subject in FUNCTIONS if subject.sized and subject.batched and not subject.also
    for name in subject.choices
))
@given(data=st.data())
@settings(max_examples=1)
def test_choices_of_many_rows(subject, field, data, twins, results):
    check_each(many.cases(subject, data), lambda case: subject.check(
        subject.module(twins.optimized), case, field, decides=True, results=results
    ))


@pytest.mark.property("traces")
@property_test("traces", (
    (subject, name) for subject in FUNCTIONS if subject.recorded is not None for name in subject.choices
))
def test_decisions_on_recorded_traces(subject, field, twins, device):
    """Of a trained model on real text. All of them are judged, and the wrong ones counted."""
    module, wrong_cases = subject.module(twins.optimized), 0

    def check(case: Any) -> None:
        nonlocal wrong_cases
        before = len(wrong)
        try:
            subject.check(module, case, field, decides=True, results=results)
        except Mismatch as error:
            stats.wrong(1)
            wrong.append(str(error).splitlines()[0])
        wrong_cases += len(wrong) > before

    with mismatch.counting() as wrong:
        checked = check_each(subject.recorded(device), check)
    assert not wrong, f"{wrong_cases} of {checked} recorded cases have a wrong choice; the first: {wrong[0]}"


# What one call must not do to another: judge/calls.py -----------------------------------------------------------------

functions, batched = (
    pytest.mark.parametrize("subject", [
        pytest.param(subject, id=str(subject), marks=marks(subject, prop))
        for subject in FUNCTIONS if subject.batched or prop != "independence"
    ]) for prop in ("repeatability", "independence")
)


@pytest.mark.property("repeatability")
@functions
@given(data=st.data())
@few
def test_calls_do_not_change_later_calls(subject, data, twins):
    calls.leaves_nothing_behind(subject, subject.module(twins.optimized), data.draw(subject.draw("repeatability")))


@pytest.mark.property("repeatability")
@pytest.mark.parametrize("subject", [subject for subject in FUNCTIONS if subject.sized and not subject.also], ids=str)
@given(data=st.data())
@settings(max_examples=1)
def test_many_launches_give_the_same_bits(subject, data, twins):
    module, case = subject.module(twins.optimized), many.one(subject, data)
    repeats.assert_repeats_often(subject, module, case, many.launches())
    calls.remembers_no_contents(subject, module, case)


@pytest.mark.property("independence")
@batched
@given(data=st.data())
@few
def test_a_row_does_not_depend_on_other_rows(subject, data, twins):
    if supported.rows(2) < 2:
        raise NotProvided("more than one row")
    case = data.draw(subject.draw("independence").filter(lambda case: case.batch > 1))
    calls.rows_are_apart(subject, subject.module(twins.optimized), case)
