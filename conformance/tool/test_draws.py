"""A test with too few decisive choices runs further rounds until it has enough, in which strategies draw plain
cases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import core, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvtwin.conformance import discovery, stats
from kvtwin.conformance.cases import draws, key_cases, strategies, thought_cases
from kvtwin.conformance.cases.key_cases import UNDECIDED
from kvtwin.conformance.harness.enough import check_decided
from kvtwin.conformance.judge import subjects

pytest_plugins = ["pytester"]

#: The subjects of methods' states.
STATES = [subject for subject in subjects.every() if isinstance(subject, subjects.StateSubject)]
SETTINGS = settings(max_examples=5, derandomize=True, database=None)


def drawing(decide):
    """A test with five examples. `decide(plain)` is the number of decisions of each, and the number of decisive
    ones."""
    seen = []

    @SETTINGS
    @given(number=st.integers(0, 2**62))
    def test(number):
        seen.append((draws.plain_only(), number))
        stats.decisions(*decide(draws.plain_only()))

    return test, seen


def counted(test) -> stats.Stats:
    with stats.collect() as found:
        draws.until_decided(test, "name")
    return found


def test_a_test_that_has_decided_enough_is_called_once():
    test, seen = drawing(lambda plain: (2, 1))
    assert not counted(test).vacuous
    assert len(seen) == 5
    assert not any(plain for plain, _ in seen)


def test_a_test_with_too_few_decisions_draws_more_plain_cases():
    test, seen = drawing(lambda plain: (1, 1) if plain else (100, 0))
    found = counted(test)
    assert not found.vacuous
    assert [plain for plain, _ in seen] == 5 * [False] + 20 * [True], "16 decisions are enough: 4 rounds of 5 examples"
    assert (found.plain_total, found.plain_decisive) == (20, 20)
    assert len(set(seen)) > 20, "rounds must draw other numbers, although the profile is derandomized"


def test_a_test_that_cannot_decide_stays_vacuous():
    test, seen = drawing(lambda plain: (10, 4))
    assert counted(test).vacuous
    assert len(seen) == 5 * (1 + draws.MOST_ROUNDS)


def test_a_test_without_a_decision_is_tried_again_and_then_left_to_its_masks():
    test, seen = drawing(lambda plain: (0, 0))
    assert not counted(test).vacuous
    assert len(seen) == 5 * (1 + draws.IDLE_ROUNDS)
    # A test whose first cases decide nothing continues with cases that do.
    test, seen = drawing(lambda plain: (4, 4) if plain else (0, 0))
    assert counted(test).decisive == 20


def test_a_test_that_asks_for_no_decision_or_draws_nothing_is_called_once():
    calls = []

    @SETTINGS
    @given(st.just(None))
    def without_a_comparator(_):
        calls.append("drawn")

    def without_draws():
        calls.append("plain")
        stats.decisions(10, 0)

    counted(without_a_comparator)
    assert counted(without_draws).vacuous, "an error of the test's author: there is nothing else to draw"
    assert calls.count("plain") == 1
    assert len(calls) == 2, calls


def test_an_implementation_that_refuses_plain_cases_ends_the_rounds():
    @SETTINGS
    @given(st.integers(0, 3))
    def test(_):
        import hypothesis

        hypothesis.assume(not draws.plain_only())
        stats.decisions(10, 1)

    assert counted(test).vacuous


def test_the_seed_of_the_test_is_put_back():
    test, _ = drawing(lambda plain: (10, 0))
    counted(test)
    assert test._hypothesis_internal_use_seed is None
    assert not draws.plain_only()


def test_a_state_machine_runs_again_and_longer():
    runs = []

    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            runs.append(0)

        @rule(number=st.integers(0, 2**62))
        def decide(self, number):
            runs[-1] += 1
            stats.decisions(1, draws.plain_only())

    def test():
        draws.run_machine(Machine, settings=settings(SETTINGS, stateful_step_count=4))

    assert draws.is_drawn(test)
    assert counted(test).plain_decisive >= stats.LEAST_PLAIN_DECISIONS
    assert max(runs) > 4


def test_too_few_decisions_of_our_own_are_vacuous_and_of_others_not_provided(pytester):
    pytester.makepyfile(
        """
        from hypothesis import given, settings, strategies
        from kvtwin.conformance import stats

        @settings(max_examples=3)
        @given(strategies.integers())
        def test_undecided(twins, number):
            stats.decisions(10, 4)
        """
    )
    pytester.mkpydir("theirs")
    pytester.syspathinsert()
    profile = ("-p", "no:cacheprovider", "--hypothesis-profile", settings.get_current_profile_name())
    ours = pytester.runpytest_inprocess(*profile, "--kv-device", "auto")
    ours.assert_outcomes(failed=1)
    ours.stdout.fnmatch_lines(["vacuous: * decisions were decisive (40%)*"])
    theirs = pytester.runpytest_inprocess(*profile, "--kv-impl", "theirs")
    theirs.stdout.fnmatch_lines(["*1 not provided in *"])
    theirs.stdout.no_fnmatch_line("vacuous:*")


# Plain cases ----------------------------------------------------------------------------------------------------------


def collected(strategy):
    """A hundred cases."""
    found = []

    @settings(max_examples=100, derandomize=True, database=None, deadline=None)
    @given(strategy)
    def collect(case):
        found.append(case)

    collect()
    return found


def plain(strategy):
    """A hundred plain cases."""
    with stats.plain_round():
        return collected(strategy)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_plain_cases_are_float32_and_small_and_leave_something_to_decide(device):
    for case in plain(strategies.decode_cases(device=device)):
        assert (case.content, case.dtype, case.occupancy, case.protect) == ("ordinary", torch.float32, "full", "none")
        assert 2 <= case.slots <= draws.PLAIN_SLOTS
    for case in plain(strategies.window_cases(device=device)):
        assert (case.content, case.dtype, case.occupancy, case.protect) == ("ordinary", torch.float32, "none", "none")
        assert case.observers < case.budget < case.tokens <= draws.PLAIN_SLOTS
    for case in plain(key_cases.key_cases(device=device)):
        assert (case.content, case.dtype, case.protect, case.recent) == ("ordinary", torch.float32, "none", 0)
        assert case.budget < case.slots <= draws.PLAIN_SLOTS
    for case in plain(thought_cases.segment_cases(device=device)):
        assert (case.content, case.dtype) == ("ordinary", torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("pair", discovery.methods(), ids=str)
def test_plain_traces_are_as_long_as_they_may_be(pair):
    for trace in plain(strategies.state_traces(pair.name, max_prompt=14, max_steps=5))[:20]:
        assert (trace.content, trace.dtype, trace.padding) == ("ordinary", torch.float32, "none")
        assert (trace.prompt, trace.steps) == (14, 5)


def test_a_run_on_a_gpu_draws_from_one_third(monkeypatch):
    """With the profile gpu, the same third everywhere in a run. In some run, each option is drawn."""
    options = [(16, "a"), (32, "a"), (64, "b"), (128, "b"), (256, "c")]

    def third(seed, run="one") -> list:
        monkeypatch.setattr(core, "global_force_seed", seed)
        monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", run)
        return draws.third_of_run(options)

    monkeypatch.setattr(draws, "_profile", lambda: "ci")
    assert third(1) == third(2) == options
    monkeypatch.setattr(draws, "_profile", lambda: "gpu")
    thirds = [third(seed) for seed in range(20)]
    assert all(len(one) == 2 and one == sorted(one) for one in thirds)
    assert {option for one in thirds for option in one} == set(options)
    assert third(7, "one") == third(7, "two") == thirds[7]
    assert len({str(third(None, str(run))) for run in range(20)}) > 1
    assert third(None, "one") == third(None, "one")


def test_a_test_keeps_the_contents_that_it_is_about():
    """If no content of a test is plain, its contents are kept, because its statements need not hold for others."""
    for case in plain(key_cases.key_cases(content=UNDECIDED)):
        assert case.content in UNDECIDED
    low = (torch.float16, torch.bfloat16)
    assert {case.dtype for case in plain(strategies.decode_cases(device="cpu", dtypes=low))} == set(low)


def test_other_rounds_draw_everything():
    """A strategy that draws only plain cases would test little."""
    found = collected(strategies.decode_cases(device="cpu"))
    assert {case.dtype for case in found} == set(strategies.DTYPES)
    assert len({case.content for case in found}) > 10
    assert {case.protect for case in found} > {"none", "random"}


@pytest.mark.slow
@pytest.mark.parametrize("prop", ["decisions", "ties"])
@pytest.mark.parametrize("subject", [subject for subject in STATES if subject.choices], ids=str)
def test_the_simplest_plain_case_leaves_something_to_decide(subject, prop, twins):
    """Every round draws it first, whatever the seed. Without it, few examples may all be settled by masks."""
    @settings(max_examples=1, database=None, derandomize=True)
    @given(st.data())
    def judge(data):
        cases = subject.draw_each(data, prop) if prop == "ties" else [data.draw(subject.draw(prop))]
        for case in cases:
            subject.check(subject.module(twins.optimized), case, subject.choices[0], decides=True)

    with stats.collect() as counted, stats.plain_round():
        judge()
    assert counted.plain_total


def test_a_test_of_choices_needs_a_choice():
    """Masks settled all of them. Other tests, and those of another implementation, may pass."""
    counted = stats.Stats(asked=True)
    check_decided(counted, None)
    check_decided(counted, "theirs", 16)
    with pytest.raises(pytest.fail.Exception, match="masks settled every decision"):
        check_decided(counted, None, 16)
