"""PM-KVQ's calibration: the allocation against all choices, and smoothing that changes no logit."""

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


@pytest.mark.kind("bad_input")
@pytest.mark.parametrize(("arguments", "error", "says"), [
    (([], [4], 1), ValueError, "sensitivities needs a list of numbers per layer, got none"),
    (([[0.1, float("nan")]], [4, 2], 4), ValueError, r"sensitivities\[0\] must be finite and at least 0"),
    (([[0.1, 0.2]], [4], 4), ValueError, "memory needs as many layers and choices as sensitivities"),
    (([[0.1, 0.2]], [4, 2.0], 4), TypeError, "memory must be an int, got float"),
    (([[0.1, 0.2]] * 2, [4, 2], 3), ValueError, "total must be at least 4, the least memory of all layers, got 3"),
    (([["0.1"]], [4], 4), TypeError, r"sensitivities\[0\] must be a float, got str"),
], ids=str)
def test_wrong_arguments_of_allocate(arguments, error, says):
    with pytest.raises(error, match=f"^{says}"):
        calibration.allocate(*arguments)


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
    assert found[2] == pytest.approx(float((error * gradient).abs().mean()))
    assert found[0] < found[1] < found[2]


def test_factors_are_the_largest_numbers_of_rotary_pairs():
    _, key, _ = layer()
    by = calibration.factors(key, 0.5)
    assert by.shape == (2, 16) and torch.equal(by[:, :8], by[:, 8:])
    expected = key[0, 0, :, [3, 11]].abs().max().sqrt()
    assert by[0, 3].item() == by[0, 11].item() == pytest.approx(float(expected))
    assert by[1, 4].item() > 5 > by[0, 4].item()
    assert torch.equal(calibration.factors(key, 0.0), torch.ones(2, 16))
    assert float(calibration.factors(1e30 * key, 1.0).max()) == pytest.approx(1e4)
    assert float(calibration.factors(0 * key, 1.0).min()) == pytest.approx(1e-4)


def test_smoothing_changes_no_logit_and_lowers_the_error_of_few_bits():
    query, key, value = layer()
    found = calibration.smooth(query, key, value)
    q, k = calibration.smoothed(query, key, found.factors)
    occupied = torch.ones(1, 12, dtype=torch.bool)
    truth, same = (causal_attention(*given, value, occupied, scale=0.25) for given in ((query, key), (q, k)))
    assert torch.allclose(same, truth, rtol=0, atol=1e-12)
    rounded = [dequantize(*quantize(one, bits=4)) for one in (value, key, k)]
    errors = [
        float((causal_attention(one, other, rounded[0], occupied, scale=0.25) - truth).square().mean())
        for one, other in ((query, rounded[1]), (q, rounded[2]))
    ]
    assert found.exponent > 0 and errors[1] < errors[0] / 2
    assert torch.equal(found.factors, calibration.factors(key, found.exponent))


def test_even_keys_are_not_worse_for_it():
    """An exponent of 0 is tried as well."""
    query, key, value = layer(outlier=0.0)
    found = calibration.smooth(query, key, value, group=8)
    assert found.exponent in (*calibration.EXPONENTS, 0.0) and len(calibration.EXPONENTS) == 20


def test_factors_move_into_the_weights_before_the_rotary_embedding():
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(12, 24, generator=generator, dtype=torch.float64)
    weights = [torch.randn(heads * 16, 24, generator=generator, dtype=torch.float64) for heads in (4, 2)]
    angle = torch.arange(12, dtype=torch.float64)[:, None] * 0.5 ** torch.arange(8, dtype=torch.float64)

    def rotated(weight: torch.Tensor) -> torch.Tensor:
        x = (hidden @ weight.T).view(1, 12, -1, 16).transpose(1, 2)
        first, second = x.chunk(2, -1)
        turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
        return torch.cat(turned, -1)

    query, key = map(rotated, weights)
    by = calibration.factors(key, 0.7).double()
    expected = calibration.smoothed(query, key, by)
    found = [rotated(weight) for weight in calibration.smoothed_weights(*weights, by)]
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    unpaired = by.clone()
    unpaired[:, 0] *= 2
    wrong = rotated(calibration.smoothed_weights(*weights, unpaired)[1])
    assert not torch.allclose(wrong, calibration.smoothed(query, key, unpaired)[1], rtol=1e-3)
