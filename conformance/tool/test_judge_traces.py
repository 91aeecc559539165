"""Tests of the judge: on recorded traces, wrong choices are counted, and errors are recorded by step."""

from __future__ import annotations

import types

import pytest
import torch

from kvtwin.conformance import stats
from kvtwin.conformance.cases.case import Case, DecodeCase, WindowCase
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import lockstep, mismatch
from kvtwin.conformance.judge.bounds import Interval
from kvtwin.conformance.judge.choices import assert_eviction_right, assert_kept_right
from kvtwin.conformance.judge.compare import JudgeError, Mismatch, assert_within
from kvtwin.conformance.judge.compare_by_age import assert_kept_by_age_right
from kvtwin.conformance.judge.fields import field
from kvtwin.conformance.judge.trace import follow
from kvtwin.conformance.lab.implementations.longflow_states import LongFlow, SecondBestAtTimes


@pytest.fixture(autouse=True)
def keep_failures_out_of_the_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTWIN_FAILURES", str(tmp_path))


def around(*values: float, error: float = 0.25) -> Interval:
    middle = torch.tensor([values], dtype=torch.float64)
    return Interval(middle - error, middle + error)


ALL = torch.ones(1, 3, dtype=torch.bool)
NONE = torch.zeros(1, 3, dtype=torch.bool)


def evicts(slot: int, scores: Interval, truth: int = 0):
    return assert_eviction_right(torch.tensor([slot]), torch.tensor([truth]), scores, occupied=ALL)


def keeps(kept: list[int], scores: Interval, truth: tuple[int, ...] = (1, 2)):
    given = torch.tensor([kept]), torch.tensor([truth])
    return assert_kept_right(*given, scores, occupied=ALL, protected=None, window=0)


def stays(kept: list[int], scores: Interval, truth: tuple[int, ...] = (1, 2)):
    masks = (torch.isin(torch.arange(3), torch.tensor(one))[None] for one in (kept, truth))
    return assert_kept_by_age_right(
        *masks, scores, occupied=ALL, protected=NONE, age=torch.arange(3)[None], budget=2
    )


SCORES = around(0, 0.4, 2)
CHOICES = {
    "slot": (evicts, 0, 1, 2), "kept": (keeps, [1, 2], [0, 2], [0, 1]), "by age": (stays, [1, 2], [0, 2], [0, 1]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_wrong_choice_is_counted_and_a_legal_one_is_not(name):
    choose, best, legal, wrong = CHOICES[name]
    with mismatch.counting() as messages:
        for choice, counts in ((best, (0, 0)), (legal, (0, 1)), (wrong, (1, 0))):
            with stats.collect() as seen:
                verdict = choose(choice, SCORES)
            assert (seen.wrong, seen.ties) == counts
            assert seen.total == (1 if choose is evicts else 3), "a wrong choice is a decision too"
            assert int(verdict.adjudicated.sum()) == counts[1]
    (message,) = messages
    assert "score" in message
    with pytest.raises(Mismatch, match="score"):
        choose(wrong, SCORES)


@pytest.mark.parametrize(("choose", "wrong"), [
    (evicts, 3), (keeps, [2, 1]), (keeps, [1, 3]), (stays, [1]), (stays, [0, 1, 2]),
], ids=lambda value: getattr(value, "__name__", str(value)))  # fmt: skip
def test_a_choice_that_cannot_be_adopted_ends_the_trace(choose, wrong):
    with mismatch.counting() as messages, pytest.raises(Mismatch):
        choose(wrong, SCORES)
    assert not messages


def test_an_eviction_at_the_wrong_time_cannot_be_adopted():
    everything, kept = ALL, torch.tensor([[False, True, True]])
    with mismatch.counting(), pytest.raises(Mismatch, match="budget has room"):
        assert_kept_by_age_right(
            kept, everything, SCORES, occupied=ALL, protected=NONE, age=torch.arange(3)[None], budget=2,
            over_budget=torch.tensor([False]),
        )


@pytest.mark.parametrize(
    ("choose", "truth"), [(evicts, 2), (keeps, (0, 1)), (stays, (0, 1))], ids=["evicts", "keeps", "stays"]
)
def test_an_oracle_that_is_wrong_is_still_the_judges_error(choose, truth):
    right = 0 if choose is evicts else [1, 2]
    with mismatch.counting(), pytest.raises(JudgeError):
        choose(right, SCORES, truth=truth)


TRACE = StateTrace(
    batch=2, key_value_heads=2, group=2, config=(("budget", 6), ("window", 2)), prompt=9, steps=20, seed=1
)


def run(state: type, trace: StateTrace = TRACE) -> lockstep.Summary:
    return lockstep.run(trace, types.SimpleNamespace(LongFlowState=state))


def test_a_trace_goes_on_after_wrong_choices():
    """Steps 2, 6, 10, ... of two rows, from the one after which all slots are taken on."""
    with stats.collect() as seen, pytest.raises(Mismatch, match="10 choices are wrong; the first: .*slot") as raised, \
            follow():
        run(SecondBestAtTimes)
    assert seen.wrong == 10 and seen.total == 2 * 20 + 2 * 7  # 20 steps of two rows, and 7 tokens before the window
    assert sorted(seen.drift) == list(range(20)) and max(seen.drift.values()) <= 1
    assert 0 < seen.bound_utilisation <= 1
    assert "replay" not in str(raised.value)


class WrongOutputAtStep5(LongFlow):
    def step(self, *token: torch.Tensor) -> torch.Tensor:
        output = super().step(*token)
        return output + 1 if self.tokens_seen == TRACE.prompt + 6 else output


def test_a_trace_goes_on_after_wrong_outputs_which_are_recorded_by_step():
    with stats.collect() as seen, pytest.raises(Mismatch, match="output at step 5"), follow() as wrong:
        run(WrongOutputAtStep5)
    assert not wrong and not seen.wrong
    assert [step for step, used in seen.drift.items() if used > 1] == [5]
    assert len(seen.drift) == 20


def test_a_right_trace_raises_nothing_and_counts():
    with stats.collect() as alone:
        run(LongFlow)
    with stats.collect() as seen, follow() as wrong:
        run(LongFlow)
    assert not wrong and seen.wrong == 0
    assert (seen.total, seen.decisive, seen.bound_utilisation) == (
        alone.total, alone.decisive, alone.bound_utilisation
    )  # fmt: skip
    assert not alone.drift, "traces that are drawn have no common step"


def test_errors_of_the_prompt_have_no_step():
    one = torch.ones(1, dtype=torch.float64)
    with stats.collect() as seen, follow():
        with field("output"):
            assert_within(one, one, one, what="output")
        stats.at_step(3)
        with field("output"):
            assert_within(one * 1.5, one, one, what="output")
    assert seen.drift == {3: 0.5}


@pytest.mark.parametrize(("case", "sizes"), [
    (DecodeCase(head_dim=64, group=4, slots=1), ["D 64", "G 4", "S 1"]),
    (DecodeCase(slots=16), ["D 16", "G 1", "S 16"]), (DecodeCase(slots=17), ["D 16", "G 1", "S 64"]),
    (WindowCase(tokens=300), ["D 16", "G 1", "S 1024"]), (StateTrace(prompt=3, steps=2), ["D 16", "G 1", "S 16"]),
], ids=str)  # fmt: skip
def test_sizes_of_cases(case, sizes):
    assert stats.sizes_of(case) == sizes


def test_errors_are_recorded_by_size():
    with stats.collect() as seen:
        for used, group in ((0.5, 4), (0.25, 1)):
            inner, case = stats.Stats(bound_utilisation=used), Case(head_dim=64, group=group)
            stats.include(inner, judged=True, choice=False, decides=False, case=case, subject="f")
        stats.include(stats.Stats(bound_utilisation=9.0), judged=True, choice=True, decides=False,
                      case=Case(head_dim=64, seed=1), subject="f")
    assert seen.shapes == {"D 64": 0.5, "G 4": 0.5, "G 1": 0.25}
