"""The rules of CAKE in the reference, against loops over numbers, and the laws of its cascade.

CAKE has no optimized side yet, so these tests run on the reference alone.
"""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from kvtwin.reference.baselines import _cake as cake

INF = math.inf


def drawn(seed, *, batch=2, group=2, heads=2, tokens=14, window=4, head_dim=4, dtype=torch.float64):
    """Random queries of a window and keys."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads * group, window, head_dim, generator=generator, dtype=torch.float64)
    key = torch.randn(batch, heads, tokens, head_dim, generator=generator, dtype=torch.float64)
    return query.to(dtype), key.to(dtype)


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
def test_observe_follows_its_formulas(padding):
    query, key = drawn(1)
    occupied = torch.ones(2, 14, dtype=torch.bool)
    if padding:
        occupied[0, :3] = occupied[1, 5] = occupied[1, 11] = False
        key = key.masked_fill(~occupied[:, None, :, None], math.nan)
    result = cake.observe(query, key, occupied, gamma=20.0, kernel_size=3)
    score, dispersion, shift = observed_by_loops(query, key, occupied, 20.0, 3)
    expected = torch.cat((score, torch.full((2, 2, 4), INF, dtype=torch.float64)), -1)
    torch.testing.assert_close(result.score, expected.masked_fill(~occupied[:, None], -INF), rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(result.dispersion, dispersion, rtol=1e-10, atol=0)
    torch.testing.assert_close(result.shift, shift, rtol=1e-10, atol=0)


def test_rows_do_not_depend_on_each_other_unless_the_batch_shares_its_preference():
    query, key = drawn(2)
    both, first = cake.observe(query, key), cake.observe(query[:1], key[:1])
    for together, alone in zip(both, first, strict=True):
        assert torch.equal(together[:1], alone)
    own = cake.log_preference(both.dispersion, both.shift, tau1=1.6, tau2=0.4)
    assert torch.equal(own[:1], cake.log_preference(first.dispersion, first.shift, tau1=1.6, tau2=0.4))
    shared = cake.log_preference(both.dispersion, both.shift, tau1=1.6, tau2=0.4, whole_batch=True)
    expected = float(both.dispersion.sum()) ** (1 / 1.6) * float(both.shift.sum()) ** (1 / 0.4)
    torch.testing.assert_close(shared.exp(), torch.full((2,), expected, dtype=torch.float64), rtol=1e-10, atol=0)
    assert own[0] != own[1]


def test_equal_keys_get_bitwise_equal_indicators():
    query, key = drawn(3, tokens=23, dtype=torch.float32)
    score = cake.observe(query, key[:, :, :1].expand(key.shape).contiguous()).score[..., 2:17]  # the pool is whole here
    assert torch.equal(score, score[..., :1].expand(score.shape))


@pytest.mark.parametrize("prefix", (0, 1, 5, 30, 1000))
def test_budgets_follow_their_integer_rules(prefix):
    generator = torch.Generator().manual_seed(prefix)
    for layers in (1, 2, 5, 8):
        for total in (1, 3, 40, 97):
            preferences = (3 * torch.randn(layers, generator=generator, dtype=torch.float64)).exp()
            shares = (preferences / preferences.sum() * total)
            if ((shares - shares.round()).abs() < 1e-9).any() and layers > 1:
                continue  # the two sums may round to either side of an integer
            actual = cake.budgets(preferences.log()[None], torch.tensor([prefix]), total)
            assert actual.tolist() == [budgets_by_loops(preferences.tolist(), prefix, total)]


def test_budgets_of_chosen_cases():
    def of(preferences, prefix, total):
        log = torch.tensor([preferences], dtype=torch.float64).log()
        return cake.budgets(log, torch.tensor([prefix]), total)[0].tolist()

    assert of([7.0], 10, 30) == [10]                    # the first layer: capped, nobody takes the rest
    assert of([1.0, 1.0, 1.0], 100, 31) == [11, 10, 10]  # the remainder goes to the first layers
    # [80, 10, 9]: the excess of 40 goes to two layers, the 1 that trunc left to the first of them.
    assert of([80.5, 10.2, 9.3], 40, 100) == [40, 31, 29]
    assert of([0.0, 0.0], 100, 10) == [5, 5]            # no preference at all: equal shares
    assert of([0.0, 3.0], 100, 10) == [0, 10]


def test_a_small_tau_does_not_leave_the_range_of_floats():
    log = torch.stack([
        cake.log_preference(torch.tensor([one]), torch.tensor([0.1]), tau1=1e-3) for one in (1e5, 1.0001e5)
    ], 1)
    granted = cake.budgets(log, torch.tensor([100]), 100)
    assert granted.sum() == 100 and granted[0, 1] > granted[0, 0]


def test_kept_prefers_high_scores_and_evicts_the_lowest_index_among_equals():
    score = torch.tensor([[[1.0, 1.0, 2.0, -INF, 1.0, INF, INF]]])
    for budget, expected in ((0, [5, 6]), (1, [2, 5, 6]), (2, [2, 4, 5, 6]), (9, [0, 1, 2, 4, 5, 6])):
        assert cake.kept(score, torch.tensor([budget]))[0, 0].nonzero()[:, 0].tolist() == expected


@pytest.mark.parametrize("seed", range(8))
def test_the_cascade_ends_with_the_best_tokens_of_each_layers_smallest_budget(seed):
    """The top b of the top b' is the top b for b <= b'. Budgets that grow again bring no token back."""
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.randint(6, (2, 2, 20), generator=generator).double() for _ in range(5)]
    for score in scores:
        score[..., 16:] = INF
    log = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    prefix = torch.tensor([16, 16])
    granted = [cake.budgets(log[:, : last + 1], prefix, 25) for last in range(5)]
    for layer, holds in enumerate(cake.cascade(scores, log, prefix, 25)):
        smallest = torch.stack([of_last[:, layer] for of_last in granted[layer:]]).amin(0)
        assert torch.equal(holds, cake.kept(scores[layer], smallest))
        assert torch.equal(holds.sum(-1), (smallest + 4)[:, None].expand(2, 2))


@pytest.mark.parametrize(("call", "error", "match"), [
    (lambda q, k: cake.observe(q, k[:, :, :3]), ValueError, "query_window must be .* with W <= T = 3"),
    (lambda q, k: cake.observe(q, k, gamma=INF), ValueError, "gamma must be finite"),
    (lambda q, k: cake.observe(q, k, kernel_size=4), ValueError, "kernel_size must be odd, got 4"),
    (lambda q, k: cake.observe(q, k, torch.ones(2, 14)), TypeError, "occupied must have dtype torch.bool"),
    (lambda q, k: cake.log_preference(q[:, 0, 0, 0], k[:, 0, 0, 0], tau1=0), ValueError, "tau1 must be .* got 0"),
    (lambda q, k: cake.log_preference(q[:, 0, 0, 0], k[:1, 0, 0, 0]), ValueError, "shift must be"),
    (lambda q, k: cake.budgets(q[:, 0, 0], torch.tensor([4, 4]), 0), ValueError, "total must be at least 1"),
    (lambda q, k: cake.budgets(q[:, 0, 0], torch.tensor([4.0, 4.0]), 3), TypeError, "prefix must have dtype"),
    (lambda q, k: cake.kept(k[..., 0], torch.tensor([4])), ValueError, "budget must be"),
    (lambda q, k: cake.cascade([k[..., 0]], q[:, 0, 0], torch.tensor([4, 4]), 3), ValueError, "scores must .* got 1"),
])
def test_bad_arguments_are_named(call, error, match):
    with pytest.raises(error, match=match):
        call(*drawn(5))
