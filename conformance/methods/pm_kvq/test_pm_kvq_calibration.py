"""PM-KVQ's calibration: the allocation against all choices, and smoothing that changes no logit:
what only our own sides promise.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.reference.attention import causal_attention
from kvtwin.reference.baselines import pm_kvq_calibration as calibration
from kvtwin.reference.baselines.pm_kvq import dequantize, quantize

pytestmark = pytest.mark.kind("equivalence")


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[float]], list[list[int]], int]:
    """Sensitivities and memory of up to five layers with up to three choices, and a total."""
    choices = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 5)))]
    number = st.sampled_from((0.0, 0.1, 0.2, 0.3, 1.0, 1e-9, 7.5))
    costs = [[draw(number) for _ in range(count)] for count in choices]
    sizes = [[draw(st.integers(0, 6)) for _ in range(count)] for count in choices]
    least = sum(map(min, sizes))
    return costs, sizes, draw(st.integers(least, least + 20))


@given(problem=problems())
@settings(max_examples=60)
def test_the_allocation_is_the_best_of_all_choices(problem):
    costs, sizes, total = problem
    candidates = [
        (sum(Fraction(row[i]) for row, i in zip(costs, chosen, strict=True)),
         sum(row[i] for row, i in zip(sizes, chosen, strict=True)), chosen)
        for chosen in product(*(range(len(row)) for row in costs))
    ]
    assert calibration.allocate(costs, sizes, total) == min(one for one in candidates if one[1] <= total)[2]


def test_layers_that_lose_more_get_more_bits():
    """Budgets of 4 and 2 bits, of which half of the layers can have 4."""
    lost = [[0.1, 0.2], [0.1, 0.9], [0.3, 0.5], [0.0, 1.0]]
    assert calibration.allocate(lost, [4, 2], 12) == (1, 0, 1, 0)
    assert calibration.allocate(lost, [4, 2], 16) == (0, 0, 0, 0)
    assert calibration.allocate(lost, [4, 2], 8) == (1, 1, 1, 1)
    assert calibration.allocate([[1.0, 1.0]] * 3, [4, 2], 12) == (1, 1, 1), "of equal sums, the one with less memory"


def test_many_layers_are_no_trouble():
    lost = [[0.0, ((7 * layer) % 31) / 31, 0.2 + ((5 * layer) % 17) / 17] for layer in range(80)]
    lost = [sorted(row) for row in lost]
    chosen = calibration.allocate(lost, [8, 4, 2], 80 * 4)
    assert sum((8, 4, 2)[i] for i in chosen) <= 320 and len(set(chosen)) == 3


def layer(seed: int = 1, outlier: float = 30.0) -> list[Any]:
    """query [1, 4, 12, 16], key and value [1, 2, 12, 16] float64; one channel of each head's keys is large."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(1, heads, 12, 16, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    found[1][:, 0, :, 3] += outlier
    found[1][:, 1, :, 12] -= outlier
    return found


def test_sensitivity_is_the_mean_change_of_first_order():
    _, key, _ = layer()
    gradient = torch.randn(key.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    error = dequantize(*quantize(key, bits=2, group=8)) - key
    found = [calibration.sensitivity(key, gradient, bits=bits, group=8) for bits in (8, 4, 2)]
    assert found[2] == float((error * gradient).abs().mean())
    assert found[0] < found[1] < found[2]


def test_factors_are_the_largest_numbers_of_rotary_pairs():
    _, key, _ = layer()
    by = calibration.factors(key, 0.5)
    assert by.shape == (2, 16) and torch.equal(by[:, :8], by[:, 8:])
    expected = (key[0, 0, :, [3, 11]].abs().max() ** 0.5).float()
    assert by[0, 3] == by[0, 11] == expected
    assert by[1, 4].item() > 5 > by[0, 4].item()
    assert torch.equal(calibration.factors(key, 0.0), torch.ones(2, 16))
    assert calibration.factors(1e30 * key, 1.0).max() == torch.tensor(1e4)
    assert calibration.factors(0 * key, 1.0).min() == torch.tensor(1e-4)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return causal_attention(query, key, value, torch.ones(1, 12, dtype=torch.bool), scale=0.25)


def error_with(factors: torch.Tensor, given: list[Any], group: int) -> float:
    """The mean squared error of the attention with keys and values of 4 bits, if these factors smooth the keys."""
    query, key, value = given
    q, k = calibration.smoothed(query, key, factors)
    rounded = [dequantize(*quantize(one, bits=4, group=group)) for one in (k, value)]
    return float((attention(q, *rounded) - attention(*given)).square().mean())


def test_smoothing_lowers_the_error_of_few_bits():
    given = layer()
    found = calibration.smooth(*given)
    assert found.exponent > 0
    assert error_with(found.factors, given, 128) < error_with(torch.ones(2, 16), given, 128) / 2
    assert torch.equal(found.factors, calibration.factors(given[1], found.exponent))


def test_smoothing_changes_no_logit():
    """Exactly, with powers of two, which round nothing."""
    query, key, value = layer()
    factors = calibration.factors(key, 0.7).log2().round().exp2()
    q, k = calibration.smoothed(query, key, factors)
    assert not torch.equal(k, key) and torch.equal(attention(q, k, value), attention(query, key, value))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_keys_without_outliers_are_not_worse_for_it(seed):
    """The best of 21 exponents is taken, and 0, which changes nothing, is one of them."""
    given = layer(seed, outlier=0.0)
    found = calibration.smooth(*given, group=8)
    exponents = (*calibration.EXPONENTS, 0.0)
    tried = [error_with(calibration.factors(given[1], exponent), given, 8) for exponent in exponents]
    assert len(tried) == 21 and error_with(found.factors, given, 8) == min(tried)
    assert min(tried) <= error_with(torch.ones(2, 16), given, 8)


def test_factors_move_into_the_weights_before_the_rotary_embedding():
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(12, 24, generator=generator, dtype=torch.float64)
    weights = [torch.randn(heads * 16, 24, generator=generator, dtype=torch.float64) for heads in (4, 2)]
    angle = torch.arange(12, dtype=torch.float64)[:, None] * 0.5 ** torch.arange(8, dtype=torch.float64)

    def rotated(weight: torch.Tensor) -> torch.Tensor:
        x = (hidden[:, None] * weight).sum(-1).view(1, 12, -1, 16).transpose(1, 2)
        first, second = x.chunk(2, -1)
        turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
        return torch.cat(turned, -1)

    query, key = map(rotated, weights)
    by = calibration.factors(key, 0.7).double().log2().round().exp2()           # powers of two round nothing
    expected = calibration.smoothed(query, key, by)
    found = [rotated(weight) for weight in calibration.smoothed_weights(*weights, by)]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    unpaired = by.clone()
    unpaired[:, 0] *= 2
    wrong = rotated(calibration.smoothed_weights(*weights, unpaired)[1])
    assert not torch.equal(wrong, calibration.smoothed(query, key, unpaired)[1])
