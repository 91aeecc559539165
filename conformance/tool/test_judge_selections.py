"""Tests of the judge of selections: the faults that it must detect, and the choices that it must accept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtwin.conformance import stats
from kvtwin.conformance.judge.bounds import Interval
from kvtwin.conformance.judge.compare import JudgeError, Mismatch
from kvtwin.conformance.judge.mismatch import WrongTie, counting
from kvtwin.conformance.judge.selections import assert_selected_right, rank_in_class
from kvtwin.reference.baselines.quest import select_pages

SCORE = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0, 9.0]], dtype=torch.float64)


def judged(selected: list[int], *, truth: list[int] | None = None, error: float = 0.0, **more: Any) -> Any:
    """Three of the first five units. Units 2 and 3 are equal."""
    given: dict[str, Any] = {
        "candidates": torch.arange(6)[None] < 5, "tie": torch.tensor([[0, 1, 2, 2, 4, 5]]), **more
    }
    ends = Interval(SCORE - error, SCORE + error)
    return assert_selected_right(torch.tensor([selected]), torch.tensor([truth or [0, 2, 3]]), ends, **given)


def test_the_best_units_are_right_and_decisive():
    verdict = judged([0, 2, 3])
    assert (verdict.scored.item(), verdict.decisive.item(), verdict.adjudicated.item()) == (True, True, False)


@pytest.mark.parametrize(("selected", "says"), [
    ([0, 1, 2], r"row \(0,\) selects unit 1, whose score is in \[1, 1\], but not unit 3 with \[2, 2\]"),
    ([0, 2, 5], "unit 5 of row .* is not a candidate"),
    ([0, 3, 2], r"row \(0,\) does not ascend, or has -1 before an index: \[0, 3, 2\]"),
    ([0, 2, 2], "does not ascend"),
    ([0, -1, 2], "does not ascend, or has -1 before an index"),
    ([0, 2, -1], r"row \(0,\) has 2 units, expected 3"),
    ([0, 2, 6], r"6 at \(0, 2\) is not in 0..5"),
    ([-2, 0, 2], r"-2 at \(0, 0\) is not in 0..5"),
], ids=str)
def test_a_wrong_selection_is_detected(selected, says):
    with pytest.raises(Mismatch, match=says):
        judged(selected)


def test_a_wrong_type_or_shape_is_detected():
    for selected in (torch.tensor([[0, 2, 3]], dtype=torch.int32), torch.tensor([[0, 2]])):
        with pytest.raises(Mismatch, match=r"expected int64 of shape \(1, 3\), got"):
            assert_selected_right(
                selected, torch.tensor([[0, 2, 3]]), Interval(SCORE, SCORE), candidates=torch.arange(6)[None] < 5
            )


def test_of_equal_units_the_first_is_selected():
    truth = [0, 2]
    assert_selected_right(
        torch.tensor([[0, 2]]), torch.tensor([truth]), Interval(SCORE, SCORE), candidates=torch.arange(6)[None] < 5,
        tie=torch.tensor([[0, 1, 2, 2, 4, 5]]),
    )
    with pytest.raises(WrongTie, match="selects unit 3, but not a lower one that scores the same"):
        judged([0, 3], truth=truth)
    # Float64 may rank equal units otherwise.
    verdict = judged([0, 2], truth=[0, 3])
    assert not verdict.adjudicated.item() and verdict.decisive.item()


def test_without_classes_equal_scores_are_no_tie():
    assert judged([0, 3], truth=[0, 2], tie=None).adjudicated.item()


def test_a_difference_within_the_bounds_is_an_adjudicated_tie():
    verdict = judged([0, 1, 2], error=0.5)
    assert (verdict.decisive.item(), verdict.adjudicated.item()) == (False, True)
    with pytest.raises(Mismatch, match="selects unit 1"):
        judged([0, 1, 2], error=0.49)


def test_forced_units_are_selected_whatever_they_score():
    forced = torch.arange(6)[None] == 4
    assert judged([0, 2, 4], truth=[0, 2, 4], forced=forced).decisive.item()
    with pytest.raises(Mismatch, match="unit 4 of row .* must be selected"):
        judged([0, 2, 3], truth=[0, 2, 4], forced=forced)


def test_rows_with_few_candidates_decide_nothing():
    with stats.collect(counted := stats.Stats()):
        verdict = judged([0, 1, -1], truth=[0, 1, -1], candidates=torch.arange(6)[None] < 2)
    assert not verdict.scored.item() and counted.total == 0


def test_the_oracle_is_judged_too():
    with pytest.raises(JudgeError, match="the oracle's selected: row .* selects unit 4"):
        judged([0, 2, 3], truth=[0, 2, 4])


def test_units_without_a_number_may_rank_anywhere():
    score = SCORE.index_fill(1, torch.tensor([2]), torch.nan)
    for selected in ([0, 1, 3], [0, 2, 3]):
        assert_selected_right(
            torch.tensor([selected]), torch.tensor([[0, 1, 3]]), Interval(score, score),
            candidates=torch.arange(6)[None] < 5,
        )


def test_wrong_choices_can_be_counted():
    with stats.collect(counted := stats.Stats()), counting() as messages:
        verdict = judged([0, 1, 2])
    assert counted.wrong == len(messages) == 1 and not verdict.adjudicated.item()


def by_hand(low: list[float], high: list[float], tie: list[int], among: list[bool], wanted: int) -> list[bool]:
    """Whether each unit is selected, or not, by every score within its interval."""
    units = [unit for unit in range(len(low)) if among[unit]]
    found = []
    for unit in range(len(low)):
        others = [other for other in units if other != unit]
        equal = [other for other in others if tie[other] == tie[unit]]
        below = sum(high[other] < low[unit] for other in others) + sum(other > unit for other in equal)
        above = sum(low[other] > high[unit] for other in others) + sum(other < unit for other in equal)
        found.append(among[unit] and (below >= len(units) - wanted or above >= wanted))
    return found


@given(
    seed=st.integers(0, 2**31 - 1), units=st.integers(2, 12), k=st.integers(1, 5),
    error=st.sampled_from((0.0, 0.1, 1.0)),
)
@settings(max_examples=20)
def test_decisive_units_are_those_that_no_score_moves(seed, units, k, error):
    generator = torch.Generator().manual_seed(seed)
    tie = torch.randint(0, units, (3, 2, units), generator=generator)
    index = torch.arange(units)
    same = tie[..., None] == tie[..., None, :]
    tie = index.expand(same.shape).where(same, units).amin(-1)                    # the lowest of its class
    score = torch.randn(3, 2, units, generator=generator, dtype=torch.float64).gather(-1, tie)
    count = torch.randint(1, units + 1, (3,), generator=generator)
    candidates = (index < count[:, None, None]).expand(3, 2, units)
    truth = select_pages(score, count, k=k, keep_last=False)
    with stats.collect(counted := stats.Stats()):
        assert_selected_right(truth, truth, Interval(score - error, score + error), candidates=candidates, tie=tie)
    total = decisive = 0
    for low, high, names, among in zip(
        *(tensor.flatten(0, 1).tolist() for tensor in (score - error, score + error, tie, candidates)), strict=True
    ):
        if sum(among) > k:
            total += sum(among)
            decisive += sum(by_hand(low, high, names, among, k))
    assert (counted.total, counted.decisive) == (total, decisive)


def test_rank_in_class():
    tie = torch.tensor([[0, 1, 0, 0, 1, 5]])
    among = torch.tensor([[True, True, False, True, True, True]])
    ranks: Tensor = rank_in_class(tie, among)
    assert ranks.tolist() == [[0, 0, 0, 1, 1, 0]]
