"""Tests of the judge of budgets that are outputs, and of layers that decide together: the faults that it must detect,
and the results that it must accept."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance import stats
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import budgets, lockstep
from kvtwin.conformance.judge.bounds import Interval
from kvtwin.conformance.judge.compare import Mismatch
from kvtwin.reference.baselines import cake
from kvtwin.reference.baselines.cake_prompt import divide

INF = torch.inf


def interval(low: list[float], high: list[float] | None = None) -> Interval:
    return Interval(*(torch.tensor([end], dtype=torch.float64) for end in (low, high or low)))


@pytest.fixture(autouse=True)
def _apart() -> Iterator[None]:
    """Count these decisions apart: many are meant to be undecided."""
    with stats.collect(stats.Stats()):
        yield


def judged(
    found: list[int], weights: list[float], *, total: int = 10, most: int = 8, error: float = 0.0, scored: bool = True,
    truth: list[int] | None = None,
) -> Any:
    """Budgets of one row whose weights have these logarithms, with an error."""
    reported, prefix = torch.tensor([weights], dtype=torch.float64), torch.tensor([most])
    return budgets.assert_budgets_right(
        torch.tensor([found]), reported, Interval(reported - error, reported + error), torch.tensor([truth or found]),
        total=total, most=prefix, scored=torch.tensor([scored]),
        rule=lambda wanted, row: divide(wanted, prefix.expand(len(wanted)), total),
    )


def facts(verdict: Any) -> tuple[bool, bool, bool]:
    return verdict.scored.item(), verdict.decisive.item(), verdict.adjudicated.item()


# Shares --------------------------------------------------------------------------------------------------------------


def test_shares_of_exact_numbers_are_their_softmax():
    low, high = budgets.shares(interval([0.0, 1.0, -3.0]))
    expected = torch.tensor([[0.0, 1.0, -3.0]], dtype=torch.float64).softmax(-1)
    assert bool((low <= expected).all() & (expected <= high).all())
    assert bool((high - low < 1e-12).all())


def test_shares_of_intervals_contain_those_of_every_number_within():
    generator = torch.Generator().manual_seed(1)
    middle, error = torch.randn(5, 4, generator=generator, dtype=torch.float64), 0.3
    low, high = budgets.shares(Interval(middle - error, middle + error))
    for _ in range(50):
        found = (middle + error * (2 * torch.rand(5, 4, generator=generator, dtype=torch.float64) - 1)).softmax(-1)
        assert bool(((low <= found) & (found <= high)).all())
    assert bool((low > 0).all()) and bool((high < 1).all())


def test_shares_of_numbers_that_may_be_minus_infinity():
    assert [end.tolist() for end in budgets.shares(interval([-INF, -INF]))] == [[[0.5, 0.5]]] * 2
    low, high = budgets.shares(interval([-INF, 0.0]))
    assert (low[0, 0], high[0, 0]) == (0, 0) and high[0, 1] >= 1 >= low[0, 1]
    low, high = budgets.shares(interval([-INF, -INF], [-INF, 0.0]))
    assert low.tolist() == [[0, 0]] and high[0, 0] >= 1 / 2              # its share if neither has any


# Budgets -------------------------------------------------------------------------------------------------------------


def test_right_budgets_are_decisive():
    assert facts(judged([3, 7], [0.0, 1.0])) == (True, True, False)      # 2.69 and 7.31; the first gets the rest


@pytest.mark.parametrize(("found", "says"), [
    ([2, 8], r"row 0 has \[2, 8\], but its weights, of the logarithms \[0.0, 1.0\], give \[3, 7\]"),
    ([3, 6], r"row 0 has \[3, 6\]"),
    ([7, 3], r"row 0 has \[7, 3\]"),
])
def test_wrong_budgets_are_detected(found, says):
    with pytest.raises(Mismatch, match=says):
        judged(found, [0.0, 1.0], truth=[3, 7])


def test_a_wrong_type_is_detected():
    with pytest.raises(Mismatch, match=r"expected int64 of shape \(1, 2\), got torch.int32"):
        budgets.assert_budgets_right(
            torch.tensor([[3, 7]], dtype=torch.int32), torch.zeros(1, 2), interval([0.0, 0.0]), torch.tensor([[3, 7]]),
            total=10, most=torch.tensor([9]), rule=lambda wanted, row: wanted, scored=torch.tensor([True]),
        )


def test_at_a_threshold_either_truncation_is_right():
    """The shares are 3 and 7 up to rounding. If the second is truncated to 6, the first layer gets what is missing."""
    weights = torch.tensor([3.0, 7.0], dtype=torch.float64).log().tolist()
    for found in ([3, 7], [4, 6]):
        assert facts(judged(found, weights)) == (True, False, False)
    with pytest.raises(Mismatch, match=r"row 0 has \[2, 8\]"):
        judged([2, 8], weights, truth=[3, 7])


def test_budgets_must_follow_from_the_reported_weights_though_others_are_possible():
    """Of the weights within the bounds, some give 4 and 6. The reported ones do not."""
    with pytest.raises(Mismatch, match="give"):
        judged([4, 6], [0.0, 1.0], error=0.5, truth=[3, 7])
    assert facts(judged([3, 7], [0.0, 1.0], error=0.5, truth=[4, 6])) == (True, False, True)


def test_truncations_that_lose_more_than_one_token_per_layer_do_not_count():
    """The first layer's share of 8 is 5.8 to 7.6, the second one's 0.4 to 2.2. They add up to 8, so that they are never
    truncated to 5 and 0, the only case in which the second layer gets 1."""
    assert facts(judged([6, 2], [5.0, 3.0], total=8, most=6, error=0.5)) == (True, True, False)


def test_rows_without_weights_must_be_equal_to_the_truth():
    assert facts(judged([5, 5], [0.0, 1.0], scored=False)) == (False, False, False)
    with pytest.raises(Mismatch, match=r"at \(0, 0\), where no weight decides, expected 5, got 4"):
        judged([4, 5], [0.0, 1.0], scored=False, truth=[5, 5])


def test_too_many_truncations_are_judged_by_the_limits_alone():
    """13 layers of which each may get one more or one less."""
    weights, total = [0.0] * 13, 130
    assert facts(judged([10] * 13, weights, total=total, most=20)) == (True, False, False)
    for wrong in ([10] * 12 + [21], [10] * 12 + [-1], [11] * 13):
        with pytest.raises(Mismatch, match="of at most 20 each and 130 together"):
            judged(wrong, weights, total=total, most=20, truth=[10] * 13)


# Layers --------------------------------------------------------------------------------------------------------------

TRACE = StateTrace(
    method="cake", config=(("budget", 8), ("window", 2), ("kernel_size", 1)), layers=3, batch=2, prompt=30, steps=3,
    key_value_heads=2, seed=5,
)


def faulty(**changed: Any) -> ModuleType:
    """The reference's module with other methods of its cascade or of its state."""
    module = ModuleType("faulty")
    module.CAKECascade, module.CAKEState = cake.CAKECascade, cake.CAKEState
    for name, value in changed.items():
        kind, _, method = name.partition("__")
        setattr(module, kind, type(kind, (getattr(module, kind),), {method: value}))
    return module


def test_layers_of_the_reference_are_right():
    summary = lockstep.run(TRACE, faulty())
    assert summary.steps == 9 and summary.decisive > 20


def even(self: Any, log_preferences: Tensor, prefix: Tensor, total: int) -> Tensor:
    return cake.budgets(torch.zeros_like(log_preferences), prefix, total)


def swapped(self: Any, log_preferences: Tensor, prefix: Tensor, total: int) -> Tensor:
    return cake.budgets(log_preferences.flip(0), prefix, total)


def greedy(self: Any, log_preferences: Tensor, prefix: Tensor, total: int) -> Tensor:
    return cake.budgets(log_preferences, prefix, total + 1)


@pytest.mark.parametrize("share", [even, swapped, greedy])
def test_wrong_budgets_of_a_cascade_are_detected(share):
    with pytest.raises(Mismatch, match="budgets after layer"):
        lockstep.run(TRACE, faulty(CAKECascade___share=share))


def test_a_preference_beyond_its_bounds_is_detected():
    def admit(self: Any, state: Any, layer: int, log_preference: Tensor, occupied: Tensor) -> None:
        cake.CAKECascade.admit(self, state, layer, log_preference + 1e-3 * layer, occupied)

    with pytest.raises(Mismatch, match="layer 1 of 3: log_preferences after layer 1"):
        lockstep.run(TRACE, faulty(CAKECascade__admit=admit))


def test_an_earlier_layer_that_keeps_other_tokens_is_detected():
    """The number of tokens is right."""
    def evict(self: Any, budget: Tensor) -> None:
        if self.layer == 0 and len(self.cascade._states) == 3:
            self._score = -self._score.masked_fill(self._score.isinf(), 0) + self._score.masked_fill(
                ~self._score.isinf(), 0
            )
        cake.CAKEState.evict(self, budget)

    with pytest.raises(Mismatch, match="layer 2 of 3: tokens kept of the prompt .*layer 0, row 0"):
        lockstep.run(TRACE, faulty(CAKEState__evict=evict))


def test_an_earlier_layer_that_evicts_too_little_is_detected():
    def evict(self: Any, budget: Tensor) -> None:
        if len(self.cascade._states) == self.layer + 1:
            cake.CAKEState.evict(self, budget)

    with pytest.raises(Mismatch, match="layer 2 of 3: tokens kept of the prompt: layer 0"):
        lockstep.run(TRACE, faulty(CAKEState__evict=evict))
