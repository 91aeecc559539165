"""Tests of the judge: every comparator accepts right results, fails for each kind of wrong result, and names it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtwin.conformance import stats
from kvtwin.conformance.cases.case import DecodeCase, WindowCase
from kvtwin.conformance.cases.oracle import oracle
from kvtwin.conformance.judge import bounds
from kvtwin.conformance.judge.bounds import Interval
from kvtwin.conformance.judge.checkers.longflow import assert_decode_right, score_bound
from kvtwin.conformance.judge.checkers.snapkv import assert_compress_right, assert_score_right
from kvtwin.conformance.judge.choices import assert_eviction_right, assert_kept_right
from kvtwin.conformance.judge.compare import JudgeError, Mismatch, assert_same, assert_within
from kvtwin.conformance.judge.ties import tie_classes, window_ties
from kvtwin.conformance.tool.emulate import Machine
from kvtwin.reference.baselines import snapkv
from kvtwin.reference.longflow import DecodeResult, decode_attention


@pytest.fixture(autouse=True)
def keep_failures_out_of_the_tree(tmp_path, monkeypatch):
    """Save the cases of intended failures in a temporary folder."""
    monkeypatch.setenv("KVTWIN_FAILURES", str(tmp_path))


def exact(values: list) -> Interval:
    """Exact scores, as intervals of width 0."""
    return around(values, 0.0)


def around(values: list, error: float) -> Interval:
    tensor = torch.tensor(values, dtype=torch.float64)
    return Interval(tensor - error, tensor + error)


# --- numbers -------------------------------------------------------------------------------------------------------

TRUTH = torch.tensor([1.0, -2.0, 0.0, torch.inf, -torch.inf], dtype=torch.float64)
BOUND = torch.tensor([0.5, 0.25, 0.0, 0.0, 0.0], dtype=torch.float64)


def test_numbers_within_their_bounds_pass_and_report_how_much_of_them_they_used():
    with stats.collect() as seen:
        used = assert_within(torch.tensor([1.25, -2.0, 0.0, torch.inf, -torch.inf]), TRUTH, BOUND)
        assert_within(TRUTH.float(), TRUTH, BOUND)
    assert used == 0.5 and seen.bound_utilisation == 0.5
    # An error equal to the bound passes.
    assert assert_within(torch.tensor([1.5, -1.75, 0.0, torch.inf, -torch.inf]), TRUTH, BOUND) == 1


@pytest.mark.parametrize(("at", "wrong", "says"), [
    (0, 2.0, r"error 1, bound 0\.5: 2 times the bound"), (1, -1.0, r"at \(1,\)"), (2, 1e-300, "bound 0"),
    (0, torch.nan, "got nan"),
    (2, torch.nan, r"expected 0\.0, got nan"), (3, torch.nan, "nan"), (3, 3e38, "expected inf, got 3"),
    (3, -torch.inf, "-inf"),
    (4, torch.inf, "inf"), (0, torch.inf, "got inf"),
])
def test_numbers_beyond_their_bounds_fail(at, wrong, says):
    actual = TRUTH.clone()
    actual[at] = wrong
    with pytest.raises(Mismatch, match=says):
        assert_within(actual, TRUTH, BOUND)


def test_an_infinite_bound_admits_numbers_only():
    truth, bound = torch.ones(1, dtype=torch.float64), torch.full((1,), torch.inf, dtype=torch.float64)
    assert assert_within(torch.full((1,), 1e30), truth, bound) == 0
    for wrong in (torch.inf, torch.nan):
        with pytest.raises(Mismatch):
            assert_within(torch.full((1,), wrong), truth, bound)


def test_the_worst_element_is_reported_by_its_own_bound():
    truth = torch.zeros(2, 2, dtype=torch.float64)
    bound = torch.tensor([[1.0, 1e-6], [1.0, 1.0]], dtype=torch.float64)
    with pytest.raises(Mismatch, match=r"2 of 4 elements.*\(0, 1\)"):
        assert_within(torch.tensor([[0.0, 1e-5], [2.0, 0.0]]), truth, bound)


def test_shapes_must_agree():
    with pytest.raises(Mismatch, match=r"expected shape \(5,\), got \(1, 5\)"):
        assert_within(TRUTH[None], TRUTH, BOUND)
    with pytest.raises(Mismatch, match="expected shape"):
        assert_same(TRUTH[None], TRUTH, what="key")


def test_copies_are_compared_bitwise_where_the_mask_is_set():
    left, right = torch.tensor([[1.0, 2.0, torch.nan]]), torch.tensor([[1.0, 2.5, torch.nan]])
    assert_same(left.half(), left.double(), what="key")
    assert_same(left, right, what="key", where=torch.tensor([True, False, True]))
    with pytest.raises(Mismatch, match=r"key: 1 of 3 elements differ; the first, at \(0, 1\): expected 2.5, got 2.0"):
        assert_same(left, right, what="key")


# --- one victim ----------------------------------------------------------------------------------------------------


def choose(slot: int, scores: Interval, *, occupied=None, protected=None, tie=None, truth: int | None = None):
    """The verdict for one row."""
    size = scores.low.shape[-1]
    occupied = torch.ones(1, size, dtype=torch.bool) if occupied is None else torch.tensor([occupied])
    protected = None if protected is None else torch.tensor([protected])
    scores = Interval(scores.low[None], scores.high[None])
    tie = None if tie is None else torch.tensor([tie])
    return assert_eviction_right(
        torch.tensor([slot]), torch.tensor([slot if truth is None else truth]), scores, occupied=occupied,
        protected=protected, tie=tie,
    )


def test_the_lowest_score_goes_and_nothing_else():
    scores = around([3.0, 1.0, 2.0], 0.25)
    verdict = choose(1, scores, truth=1)
    assert verdict.scored.item() and verdict.decisive.item() and not verdict.adjudicated.item()
    for wrong in (0, 2):
        with pytest.raises(Mismatch, match=rf"row \(0,\) picks slot {wrong}.*but slot 1 scores less: \[0.75, 1.25\]"):
            choose(wrong, scores, truth=1)


@pytest.mark.parametrize(("error", "overlaps"), [(0.4999, False), (0.5, True), (0.5001, True)])
def test_a_tie_is_adjudicated_exactly_when_the_intervals_touch(error, overlaps):
    scores = around([2.0, 1.0, 9.0], error)
    if not overlaps:
        with pytest.raises(Mismatch):
            choose(0, scores, truth=1)
        return
    with stats.collect() as seen:
        verdict = choose(0, scores, truth=1)
    assert verdict.adjudicated.item() and not verdict.decisive.item()
    assert (seen.total, seen.decisive, seen.ties) == (1, 0, 1)


@pytest.mark.parametrize("wrong", [-1, 3, 2**40])
def test_a_slot_out_of_range_fails(wrong):
    with pytest.raises(Mismatch, match="not in 0..2"):
        choose(wrong, exact([1.0, 2.0, 3.0]), truth=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_a_slot_of_another_dtype_or_shape_fails(dtype):
    scores, occupied = exact([[1.0, 2.0]]), torch.ones(1, 2, dtype=torch.bool)
    for wrong in (torch.zeros(1, dtype=dtype), torch.zeros(1, 1, dtype=torch.int64)):
        with pytest.raises(Mismatch, match="expected int64"):
            assert_eviction_right(wrong, torch.zeros(1, dtype=torch.int64), scores, occupied=occupied)


def test_free_slots_go_first_and_in_order():
    scores, occupied = exact([0.0, 1.0, 0.5, 2.0]), [True, False, True, False]
    verdict = choose(1, scores, occupied=occupied)
    assert not verdict.scored.item()  # the mask decides, not the score
    for wrong in (0, 2, 3):
        with pytest.raises(Mismatch, match="must pick slot 1, the lowest free slot.*\n.*1, 3"):
            choose(wrong, scores, occupied=occupied, truth=1)
    # A free slot is chosen before an unprotected token, even if it is marked as protected.
    choose(1, scores, occupied=occupied, protected=[False, True, False, False])


def test_protected_slots_stay():
    scores, protected = exact([0.0, 1.0, 2.0]), [True, False, False]
    assert choose(1, scores, protected=protected).decisive.item()
    with pytest.raises(Mismatch, match=r"slot 0, which is protected, while these are not: \[1, 2\]"):
        choose(0, scores, protected=protected, truth=1)
    choose(0, exact([5.0, 1.0]), protected=[True, True])
    with pytest.raises(Mismatch, match="must pick slot 0, the lowest index, since all are protected"):
        choose(1, exact([5.0, 1.0]), protected=[True, True], truth=0)


def test_exact_ties_must_go_to_the_lowest_index():
    scores, tie = around([4.0, 1.0, 1.0, 1.0], 0.1), [0, 1, 1, 3]
    assert choose(1, scores, tie=tie).decisive.item() is False  # slot 3 has an equal score only within the bounds
    choose(3, scores, tie=tie, truth=1)
    with pytest.raises(Mismatch, match="slot 2, but slot 1 holds an equal token"):
        choose(2, scores, tie=tie, truth=1)
    assert choose(1, scores, tie=[0, 1, 1, 1]).decisive.item()  # a tie decides
    # Here the lowest slot of a tie is protected, so the next one is right.
    choose(2, scores, tie=[0, 1, 1, 1], protected=[False, True, False, False])


def test_an_oracle_that_orders_equal_tokens_by_its_last_digit_is_set_right():
    verdict = choose(1, around([4.0, 1.0, 1.0], 0.1), tie=[0, 1, 1], truth=2)
    assert verdict.decisive.item() and not verdict.adjudicated.item()


def test_an_oracle_that_is_wrong_by_its_own_intervals_is_the_judges_error():
    with pytest.raises(JudgeError, match="contradicts itself"):
        choose(1, exact([2.0, 1.0]), truth=0)


def test_scores_of_minus_infinity_are_equal_not_ordered():
    """For zero values, and norms that may have been flushed to zero."""
    scores = Interval(torch.tensor([-torch.inf, 0.0, -torch.inf]), torch.tensor([-80.0, 0.0, -torch.inf]))
    with stats.collect():  # not decisive, which is right here
        assert choose(0, scores, truth=2).adjudicated.item()
    with pytest.raises(Mismatch):
        choose(1, scores, truth=2)


def test_rows_without_numbers_are_held_to_their_masks_alone():
    scores = Interval(torch.full((3,), torch.nan), torch.full((3,), torch.nan))
    assert not choose(2, scores).scored.item()
    with pytest.raises(Mismatch, match="protected"):
        choose(0, scores, protected=[True, False, False], truth=1)


def test_ties_are_bitwise_equal_tokens_and_zero_values():
    key = torch.tensor([1.0, 1.0, 2.0, 1.0, 5.0, 6.0]).view(1, 1, 6, 1)
    value = torch.tensor([3.0, 3.0, 3.0, 4.0, 0.0, -0.0]).view(1, 1, 6, 1)
    full = torch.ones(1, 6, dtype=torch.bool)
    assert tie_classes(key, value, full).tolist() == [[0, 0, 2, 3, 4, 4]]
    # An unoccupied slot ties with nothing.
    assert tie_classes(key, value, torch.tensor([[False, True, True, True, False, True]])).tolist() == [
        [0, 1, 2, 3, 4, 5]
    ]
    # Heads that share a decision must all agree. Other heads need not.
    two = (torch.cat([key, key]).view(1, 2, 6, 1), torch.cat([value, value.flip(2)]).view(1, 2, 6, 1))
    assert tie_classes(*two, full).tolist() == [[0, 1, 2, 3, 4, 5]]
    both = torch.ones(1, 2, 6, dtype=torch.bool)
    assert tie_classes(*two, both, per_head=True)[0, 0].tolist() == [0, 0, 2, 3, 4, 4]
    # Equal float64 results alone are not a tie: keys of -0 and 0 have equal scores, but different bits.
    assert tie_classes(torch.tensor([0.0, -0.0]).view(1, 1, 2, 1), torch.ones(1, 1, 2, 1), full[:, :2]).tolist() == [
        [0, 1]
    ]


# --- a kept set ----------------------------------------------------------------------------------------------------


def keep(kept: list[int], scores: Interval, *, truth: list[int] | None = None, occupied=None, protected=None,
         window: int = 1, tie=None):
    """The verdict for one row. -1 is padding of `kept`."""
    size = scores.low.shape[-1]
    as_mask = {name: None if mask is None else torch.tensor([mask]) for name, mask in
               (("occupied", occupied), ("protected", protected), ("tie", tie))}
    if as_mask["occupied"] is None:
        as_mask["occupied"] = torch.ones(1, size, dtype=torch.bool)
    return assert_kept_right(
        *(torch.tensor([tokens], dtype=torch.int64) for tokens in (kept, kept if truth is None else truth)),
        Interval(scores.low[None], scores.high[None]), window=window, **as_mask,
    )


SCORES = [5.0, 1.0, 3.0, 1.5, 9.0]  # the last token is the window


def test_the_best_of_the_prefix_stay_with_the_window():
    with stats.collect() as seen:
        verdict = keep([0, 2, 4], around(SCORES, 0.25))
    # Scores decide about four tokens of the prefix, but not about the window.
    assert (seen.total, seen.decisive) == (4, 4) and verdict.decisive.item()
    with pytest.raises(Mismatch, match=r"token 2 is evicted with a score in \[2.75, 3.25\], but token 3 is kept"):
        keep([0, 3, 4], around(SCORES, 0.25), truth=[0, 2, 4])
    with pytest.raises(Mismatch, match="tokens of the window.*evicted, although the budget has room"):
        keep([0, 2, 3], around(SCORES, 0.25), truth=[0, 2, 4])


def test_kept_tokens_near_the_cut_are_adjudicated_and_those_far_from_it_decisive():
    with stats.collect() as seen:
        verdict = keep([0, 3, 4], around(SCORES, 1.0), truth=[0, 2, 4])
    assert verdict.adjudicated.item() and (seen.total, seen.decisive, seen.ties) == (4, 1, 1)


@pytest.mark.parametrize(("wrong", "says"), [
    ([2, 0, 4], "ascend"), ([0, 0, 4], "unique"), ([0, 4, 5], "of 0..4"), ([0, 4, -1], "expected 3 tokens"),
    ([-1, 0, 4], "expected 3 tokens"),
])
def test_a_kept_set_of_the_wrong_form_fails(wrong, says):
    with pytest.raises(Mismatch, match=says):
        keep(wrong, around(SCORES, 0.25), truth=[0, 2, 4])
    with pytest.raises(Mismatch, match="expected int64"):
        assert_kept_right(
            torch.tensor([[0, 4]]), torch.tensor([[0, 2, 4]]), exact([SCORES]), window=1, protected=None,
            occupied=torch.ones(1, 5, dtype=torch.bool),
        )


def test_only_occupied_tokens_are_kept_and_missing_ones_come_last():
    occupied = [True, False, False, False, True]
    assert not keep([0, 4, -1], around(SCORES, 0.25), occupied=occupied).scored.item()
    for wrong, says in (([0, 2, 4], "expected 2 tokens"), ([0, 2, -1], "padding")):
        with pytest.raises(Mismatch, match=says):
            keep(wrong, around(SCORES, 0.25), occupied=occupied, truth=[0, 4, -1])


def test_protected_tokens_stay_before_the_window_and_the_window_before_the_prefix():
    shield = [False, True, False, False, False]
    assert not keep([1, 4], exact(SCORES), protected=shield).scored.item()
    for wrong in ([0, 4], [0, 1]):
        with pytest.raises(Mismatch, match="evicted, although the budget has room"):
            keep(wrong, exact(SCORES), protected=shield, truth=[1, 4])
    # With more protected tokens than the budget, scores decide.
    both = [True, True, False, False, False]
    keep([0], exact(SCORES), protected=both)
    with pytest.raises(Mismatch, match="token 0 is evicted"):
        keep([1], exact(SCORES), protected=both, truth=[0])
    with pytest.raises(Mismatch, match="kept before tokens of higher priority|evicted, although the budget has room"):
        keep([4], exact(SCORES), protected=both, truth=[0])


def test_newest_tokens_of_the_window_are_kept():
    keep([3, 4], exact(SCORES), window=3)
    for wrong in ([2, 4], [0, 4]):
        with pytest.raises(Mismatch, match="the newest must be kept"):
            keep(wrong, exact(SCORES), window=3, truth=[3, 4])


def test_of_equal_tokens_the_lower_indices_are_evicted():
    scores, tie = around([1.0, 1.0, 1.0, 9.0, 9.0], 0.1), [0, 0, 0, 3, 4]
    with stats.collect() as seen:
        keep([2, 3, 4], scores, tie=tie)
    assert (seen.total, seen.decisive) == (4, 4)
    for wrong in ([0, 3, 4], [1, 3, 4]):
        with pytest.raises(Mismatch, match="score the same by construction"):
            keep(wrong, scores, tie=tie, truth=[2, 3, 4])
    # A choice of the oracle that is wrong by rounding is corrected, and the other side is not blamed.
    assert not keep([2, 3, 4], scores, tie=tie, truth=[1, 3, 4]).adjudicated.item()
    # Scores that are equal only within the bounds are adjudicated.
    assert keep([1, 3, 4], scores, truth=[2, 3, 4]).adjudicated.item()


def test_an_empty_choice_is_a_choice():
    keep([], exact(SCORES))


def test_pooled_scores_tie_where_neighbourhoods_are_equal():
    key = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 7.0]).view(1, 1, 7, 1)
    full = torch.ones(1, 7, dtype=torch.bool)

    def ties(kernel_size: int, occupied: Tensor = full, shared: bool = True) -> list[int]:
        return window_ties(key, occupied, 1, kernel_size, shared_heads=shared).flatten().tolist()[:6]

    assert ties(1) == [0, 1, 0, 1, 0, 1] == ties(1, shared=False)
    assert ties(3) == [0, 1, 2, 1, 2, 5]  # at 0 and 5 the pool extends beyond the prefix
    assert ties(5) == [0, 1, 2, 3, 4, 5]
    # An unoccupied token adds 0 to the pool, like positions beyond an end, so tokens 0 and 4 tie.
    assert ties(3, torch.tensor([[True] * 3 + [False] + [True] * 3])) == [0, 1, 2, 3, 0, 5]


# --- whole verdicts ------------------------------------------------------------------------------------------------


def computed(case: DecodeCase, machine: Machine | None = None) -> DecodeResult:
    """A right result in float32, with another arithmetic than the oracle's."""
    machine = machine or Machine("pairwise")
    output, score, log_score = machine.decode(
        case.query, case.key, case.value, case.occupied, scale=case.factor, per_head=case.per_head
    )
    protected = torch.zeros_like(case.occupied) if case.protected is None else case.protected
    order = log_score.masked_fill(protected, torch.inf).masked_fill(~case.occupied, -torch.inf)
    slots = torch.arange(order.shape[-1]).expand(order.shape)
    victim = slots.where(order == order.amin(-1, keepdim=True), order.shape[-1]).amin(-1)
    return DecodeResult(output, score.masked_fill(protected & case.occupied, torch.inf), victim)


@pytest.mark.parametrize("per_head", [False, True])
def test_a_right_step_passes_and_each_field_can_fail(per_head):
    case = DecodeCase(batch=3, key_value_heads=2, group=2, slots=20, protect="newest", per_head=per_head, seed=5)
    right = computed(case)
    with stats.collect() as seen:
        verdict = assert_decode_right(right, case)
    assert bool(verdict.decisive.all()) and seen.decisive == seen.total == verdict.scored.numel()
    truth = oracle(decode_attention, case)
    beyond = truth.output + 2 * bounds.decode_output(case)
    spoiled_score = right.score.clone()
    spoiled_score[0, ..., 3] += 2 * score_bound(case)[0, ..., 3].float() + 2.0**-20
    newest = torch.full_like(right.slot, case.slots - 1)
    for wrong, says in (
        (right._replace(output=beyond.float()), "output: .* beyond their bound"),
        (right._replace(output=right.output.clone().fill_(torch.nan)), "output: .* nan"),
        (right._replace(output=right.output.double()), "expected dtype float32"),
        (right._replace(score=spoiled_score), "score: "), (right._replace(score=right.score / 2), "score: "),
        (right._replace(slot=newest), "protected"), (right._replace(slot=(right.slot + 1) % 19), "scores less"),
    ):
        with pytest.raises(AssertionError, match="(?s)" + says):
            assert_decode_right(wrong, case)


def test_a_right_compression_passes_and_each_field_can_fail():
    case = WindowCase(batch=2, key_value_heads=2, tokens=30, observers=4, budget=12, occupancy="left_padding", seed=1)
    right = snapkv.compress(**case.snapkv_inputs, shared_heads=True)
    assert bool(assert_compress_right(right, case).scored.all())
    stale = right.key.clone()
    stale[0, 1, 2] = 0
    swapped = right.kept.clone()
    gone = next(token for token in range(30) if token not in right.kept[0])
    swapped[0] = torch.cat([right.kept[0, 1:], torch.tensor([gone])]).sort().values
    for wrong, says in (
        (right._replace(key=stale), "compressed key"), (right._replace(value=right.value.flip(0)), "compressed value"),
        (right._replace(kept=swapped), "kept"), (right._replace(value=right.value.double()), "expected dtype float32"),
    ):
        with pytest.raises(AssertionError, match=says):
            assert_compress_right(wrong, case)
    score = snapkv.window_score(**case.score_inputs, shared_heads=True)
    assert_score_right(score, case, shared_heads=True)
    with pytest.raises(Mismatch, match="window score"):
        assert_score_right(score.roll(1, -1), case, shared_heads=True)
