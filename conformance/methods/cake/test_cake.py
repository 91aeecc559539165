"""CAKE's functions: what a window observes, preferences and budgets, against loops over Python's numbers. The bounds
of `observe` are judged with the properties of every method: what only our own sides promise.
"""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from kvtwin.conformance.cases.case import WindowCase
from kvtwin.conformance.judge.checkers.cake import assert_observe_right, observe_inputs
from kvtwin.conformance.judge.checkers.cake_bounds import ROUNDING, observation_intervals
from kvtwin.conformance.judge.compare import assert_within
from kvtwin.conformance.suite.cake.test_cake import INF, both_sides, cake_of, drawn
from kvtwin.reference.baselines import cake_prompt as rules

pytestmark = pytest.mark.kind("equivalence")


def observed_by_loops(query, key, occupied, gamma, kernel_size):
    """`observe` with Python's floats: indicators of the prefix [B, Hkv, P], dispersion and shift per row."""
    batch, query_heads, window, head_dim = query.shape
    heads, tokens = key.shape[1:3]
    prefix, group = tokens - window, query_heads // heads
    scores, dispersions, shifts = [], [], []
    for b in range(batch):
        dispersion = shift = 0.0
        of_head = [[0.0] * prefix for _ in range(heads)]
        for h in range(query_heads):
            rows = []
            for i in range(window):
                last = prefix + i
                if not occupied[b, last]:
                    continue
                seen = [j for j in range(last + 1) if occupied[b, j]]
                logit = {j: float(query[b, h, i] @ key[b, h // group, j]) / math.sqrt(head_dim) for j in seen}
                total = sum(math.exp(one) for one in logit.values())
                rows.append([math.exp(logit[j]) / total if j in logit else 0.0 for j in range(prefix)])
            columns = list(zip(*rows, strict=True))
            dispersion -= sum(one * math.log(one + 1e-10) for row in rows for one in row)
            variance = [statistics.variance(column) for column in columns]
            shift += sum(variance)
            indicator = [statistics.mean(c) + gamma * v for c, v in zip(columns, variance, strict=True)]
            for j in range(prefix):
                near = range(max(0, j - kernel_size // 2), min(prefix, j + kernel_size // 2 + 1))
                of_head[h // group][j] += sum(indicator[n] for n in near) / kernel_size / group
        scores.append(of_head)
        dispersions.append(dispersion)
        shifts.append(shift)
    return (torch.tensor(each, dtype=torch.float64) for each in (scores, dispersions, shifts))


def errors(query, key, occupied, **options):
    """The most by which float32 results of `observe` may differ from the exact ones: score, dispersion, shift."""
    found = observation_intervals(query.float(), key.float(), occupied, **{"gamma": 200.0, "scale": None, **options})
    return [
        torch.maximum(one.high - exact, exact - one.low).nan_to_num(0)       # of infinite scores, inf - inf
        for one, exact in zip((found.score, found.dispersion, found.shift), found.exact, strict=True)
    ]


def budgets_by_loops(preferences, prefix, total):
    """`budgets` of one row with Python's integers."""
    granted = [int(one / sum(preferences) * total) for one in preferences]
    excess = sum(max(one - prefix, 0) for one in granted)
    granted = [min(one, prefix) for one in granted]
    for sign in (1, 0):
        amount = excess if sign else total - sum(granted)
        takers = [i for i, one in enumerate(granted) if (one < prefix if amount > 0 else one > 1)]
        for place, i in enumerate(takers if amount else []):
            extra = abs(amount) // len(takers) + (place < abs(amount) % len(takers))
            granted[i] += extra if amount > 0 else -extra
    return [min(max(one, 0), prefix) for one in granted]


@pytest.mark.parametrize("padding", (False, True))
def test_the_reference_observes_by_its_formulas(padding):
    query, key = (each.double() for each in drawn(1, dtype=torch.float32))
    occupied = torch.ones(2, 14, dtype=torch.bool)
    if padding:
        occupied[0, :3] = occupied[1, 5] = occupied[1, 11] = False
        key = key.masked_fill(~occupied[:, None, :, None], math.nan)
    result = rules.observe(query, key, occupied, gamma=20.0, kernel_size=3)
    score, dispersion, shift = observed_by_loops(query, key, occupied, 20.0, 3)
    expected = torch.cat((score, torch.full((2, 2, 4), INF, dtype=torch.float64)), -1)
    truth = (expected.masked_fill(~occupied[:, None], -INF), dispersion, shift)
    allowed = errors(query, key, occupied, gamma=20.0, kernel_size=3)
    for name, one, other, error in zip(result._fields, result, truth, allowed, strict=True):
        # Errors are proportional to u, in float64 2^-29 times that of float32. Both sides are computed in float64.
        assert_within(one, other, 2 * 2.0**-29 * error, what=name)


@both_sides
def test_a_window_of_one_query_has_no_shift(side, twins, device):
    query, key = (each.to(device) for each in drawn(4, dtype=torch.float32))
    found = cake_of(twins, side).observe(query[:, :, -1:], key)
    assert found.shift.tolist() == [0.0, 0.0] and bool((found.dispersion > 0).all())
    assert bool(found.score[..., -1].isinf().all()) and bool(found.score[..., :-1].isfinite().all())
    whole = cake_of(twins, side).observe(query, key[:, :, -4:].contiguous())
    assert (whole.shift.tolist(), whole.dispersion.tolist()) == ([0.0, 0.0], [0.0, 0.0])


@both_sides
@pytest.mark.parametrize("padding", ["none", "random"])
def test_a_window_may_have_more_queries_than_a_tile(padding, side, twins, device):
    """Tiles have 16 queries in the interpreter and 64 on a GPU."""
    case = WindowCase(
        key_value_heads=1, group=2, tokens=130, observers=70 if device.type == "cuda" else 37, kernel_size=3, seed=9,
        occupancy=padding, device=str(device),
    )
    assert_observe_right(cake_of(twins, side).observe(**observe_inputs(case)), case)


@both_sides
def test_a_padded_row_is_the_same_row_without_padding(side, twins, device):
    query, key = (each.to(device) for each in drawn(6, dtype=torch.float32))
    occupied = torch.ones(2, 14, dtype=torch.bool, device=device)
    occupied[1, :5] = False
    both = cake_of(twins, side).observe(query, key, occupied, kernel_size=3)
    alone = cake_of(twins, side).observe(query[1:], key[1:, :, 5:].contiguous(), kernel_size=3)
    assert bool((both.score[1, :, :5] == -INF).all())
    of_both = errors(query, key, occupied, kernel_size=3)
    of_alone = errors(query[1:], key[1:, :, 5:], occupied[1:, 5:], kernel_size=3)
    found = both.score[..., 5:], both.dispersion, both.shift
    allowed = of_both[0][..., 5:], *of_both[1:]
    for name, one, error, other, more in zip(both._fields, found, allowed, alone, of_alone, strict=True):
        assert_within(one[1:], other.double(), error[1:] + more, what=name)


@both_sides
def test_rows_do_not_depend_on_each_other_unless_the_batch_shares_its_preference(side, twins, device):
    cake = cake_of(twins, side)
    query, key = (each.to(device) for each in drawn(2, dtype=torch.float32))
    both, first = cake.observe(query, key), cake.observe(query[:1], key[:1])
    for together, alone in zip(both, first, strict=True):
        assert torch.equal(together[:1], alone)
    own = cake.log_preference(both.dispersion, both.shift, tau1=1.6, tau2=0.4)
    assert torch.equal(own[:1], cake.log_preference(first.dispersion, first.shift, tau1=1.6, tau2=0.4))
    assert own.dtype == torch.float64
    shared = cake.log_preference(both.dispersion, both.shift, tau1=1.6, tau2=0.4, whole_batch=True)
    dispersion, shift = (float(each.double().sum()) for each in (both.dispersion, both.shift))
    parts = math.log(dispersion) / 1.6, math.log(shift) / 0.4
    # A sum of two rows has one more rounding, an error of the logarithm of at most u.
    allowed = ROUNDING * (sum(map(abs, parts)) + 1 / 1.6 + 1 / 0.4)
    assert shared.tolist() == pytest.approx([sum(parts)] * 2, rel=0, abs=allowed)
    assert own[0] != own[1]


@both_sides
def test_a_preference_is_a_product_of_powers(side, twins, device):
    dispersion = torch.tensor([3.0, 1e3, 0.0, -1e-9, 5.0], device=device)
    shift = torch.tensor([0.2, 1e-6, 0.5, 0.5, 0.0], device=device)
    for tau1, tau2 in ((1.0, 1.0), (1.6, 0.4), (1e-3, 2.0)):
        found = cake_of(twins, side).log_preference(dispersion, shift, tau1=tau1, tau2=tau2).tolist()
        for one, d, s in zip(found[:2], dispersion.tolist(), shift.tolist(), strict=False):
            parts = math.log(d) / tau1, math.log(s) / tau2
            assert one == pytest.approx(sum(parts), rel=0, abs=ROUNDING * sum(map(abs, parts)))
        assert found[2:] == [-INF] * 3


@both_sides
def test_equal_keys_get_bitwise_equal_indicators(side, twins, device):
    query, key = (each.to(device) for each in drawn(3, tokens=23, dtype=torch.float32))
    score = cake_of(twins, side).observe(query, key[:, :, :1].expand(key.shape).contiguous()).score
    score = score[..., 2:17]  # the pool is whole here
    assert torch.equal(score, score[..., :1].expand(score.shape))


@both_sides
@pytest.mark.parametrize("prefix", (0, 1, 5, 30, 1000))
def test_budgets_follow_their_integer_rules(prefix, side, twins, device):
    generator = torch.Generator().manual_seed(prefix)
    for layers in (1, 2, 5, 8):
        for total in (1, 3, 40, 97):
            preferences = (3 * torch.randn(layers, generator=generator, dtype=torch.float64)).exp()
            shares = (preferences / preferences.sum() * total)
            if ((shares - shares.round()).abs() < 1e-9).any() and layers > 1:
                continue  # the two sums may round to either side of an integer
            given = preferences.log()[None].to(device), torch.tensor([prefix], device=device), total
            actual = cake_of(twins, side).budgets(*given)
            assert actual.dtype == torch.int64
            assert actual.tolist() == [budgets_by_loops(preferences.tolist(), prefix, total)]


@both_sides
def test_budgets_of_chosen_cases(side, twins, device):
    def budgets_of(preferences, prefix, total):
        log = torch.tensor([preferences], dtype=torch.float64, device=device).log()
        return cake_of(twins, side).budgets(log, torch.tensor([prefix], device=device), total)[0].tolist()

    assert budgets_of([7.0], 10, 30) == [10]                    # the first layer: capped, nobody takes the rest
    assert budgets_of([1.0, 1.0, 1.0], 100, 31) == [11, 10, 10]  # the remainder goes to the first layers
    # [80, 10, 9]: the excess of 40 goes to two layers, the 1 that trunc left to the first of them.
    assert budgets_of([80.5, 10.2, 9.3], 40, 100) == [40, 31, 29]
    # [10, 5, 1]: the excess of 4 fills the second layer and beyond, so that the third gets the 1 that is missing.
    assert budgets_of([10.3, 5.4, 1.3], 6, 17) == [6, 6, 4]
    assert budgets_of([0.0, 0.0], 100, 10) == [5, 5]            # no preference at all: equal shares
    assert budgets_of([0.0, 3.0], 100, 10) == [0, 10]
    assert budgets_of([math.nan, 3.0], 100, 10) == [0, 10]      # NaN is no preference
    assert budgets_of([math.nan, 0.0], 100, 10) == [5, 5]


@both_sides
def test_rows_have_budgets_of_their_own(side, twins, device):
    log = torch.tensor([[0.0, 3.0, 1.0], [2.0, -INF, 0.0]], dtype=torch.float64, device=device)
    prefix = torch.tensor([50, 9], device=device)
    found = cake_of(twins, side).budgets(log, prefix, 30)
    for row in range(2):
        expected = budgets_by_loops(log[row].exp().tolist(), int(prefix[row]), 30)
        assert found[row].tolist() == expected


@both_sides
def test_a_small_tau_does_not_leave_the_range_of_floats(side, twins, device):
    cake = cake_of(twins, side)
    log = torch.stack([
        cake.log_preference(
            torch.tensor([one], device=device), torch.tensor([0.1], device=device), tau1=1e-3
        ) for one in (1e5, 1.0001e5)
    ], 1)
    granted = cake.budgets(log, torch.tensor([100], device=device), 100)
    assert granted.sum() == 100 and granted[0, 1] > granted[0, 0]


def test_kept_prefers_high_scores_and_evicts_the_lowest_index_among_equals():
    score = torch.tensor([[[1.0, 1.0, 2.0, -INF, 1.0, INF, INF]]])
    for budget, expected in ((0, [5, 6]), (1, [2, 5, 6]), (2, [2, 4, 5, 6]), (9, [0, 1, 2, 4, 5, 6])):
        assert rules.kept(score, torch.tensor([budget]))[0, 0].nonzero()[:, 0].tolist() == expected
