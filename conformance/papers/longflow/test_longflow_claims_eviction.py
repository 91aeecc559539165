"""The victims of LongFlow's score: eq. 2 to 6 as a ranking (claims LF-5, LF-6, LF-19).

Arithmetic is exact (see claim_math), except in the tests of the twins. A test named ..._rejects_... shows that a
slightly stronger statement fails, so the claim's own test is not empty.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kvtwin.conformance.papers.claim_math import (
    attention,
    caches,
    effect,
    lowest,
    many,
    masses,
    minus,
    norm1,
    one_head,
    scaled,
    softmax,
    square,
    vector,
    without,
)

pytestmark = pytest.mark.kind("claims")

HALF = Fraction(1, 2)


@pytest.fixture(scope="module", params=["reference", "optimized"])
def longflow(request, twins):
    return getattr(twins, request.param).longflow


def scores(mass, values) -> list[Fraction]:
    """LongFlowScore of every token (eq. 6)."""
    return [weight * norm1(value) for weight, value in zip(softmax(mass), values, strict=True)]


# ---- LF-5: eq. 2 to 6 as a ranking -----------------------------------------------------------------------------------


@pytest.mark.claim("LF-5a")
@many
@given(cache=caches(), lighter=st.integers(1, 200))
def test_relative_remainder_does_not_depend_on_the_weight(cache, lighter):
    """||R|| / ||c|| = ||o'|| / ||v|| (squared and cross-multiplied) for any weight, even a tiny one."""
    mass, values = cache
    mass = [mass[0] / 2**lighter, *mass[1:]]
    contribution = scaled(softmax(mass)[0], values[0])
    rest = attention(mass[1:], values[1:])
    remainder = minus(effect(mass, values, 0), contribution)
    assert square(remainder) * square(values[0]) == square(rest) * square(contribution)


@pytest.mark.claim("LF-5a")
@pytest.mark.parametrize("heavy", [Fraction(3, 2), Fraction(2), Fraction(10**9)])
def test_lowest_score_is_not_the_lowest_effect(heavy):
    mass, values = [heavy, Fraction(1)], [vector(0), vector(1)]
    effects = [square(effect(mass, values, index)) for index in range(2)]
    assert lowest(scores(mass, values)) == 0
    assert lowest(effects) == 1
    assert effects[0] == heavy**2 * effects[1]                                         # the regret is unbounded
    # The counterexample needs the zero: with a nonzero value of token 0, the two agree.
    assert lowest(scores(mass, [vector(-1), vector(1)])) == 1


@pytest.mark.claim("LF-5a")
@pytest.mark.parametrize("tokens", [2, 1000])
def test_lowest_score_has_the_largest_effect_of_many_equal_weights(longflow, device, tokens):
    """Weights of 1/n and values (0, 1, ..., 1): token 0 has the lowest score and n - 1 times the effect of another."""
    mass, values = [Fraction(1)] * tokens, [vector(0), *[vector(1)] * (tokens - 1)]
    effects = [square(effect(mass, values, index)) for index in (0, 1)]                # all others are equal to token 1
    assert lowest(scores(mass, values)) == 0
    assert effects[0] == (tokens - 1) ** 2 * effects[1]
    assert effects[0] == Fraction(1, tokens) ** 2                                      # the absolute error is small
    flat = torch.ones(tokens, 16)
    flat[0] = 0
    assert longflow.decode_attention(**one_head([0.0] * tokens, flat, device)).slot.tolist() == [0]
    # Without the zero, all effects are 0, and the lowest score is as good as any other.
    assert square(effect(mass, [vector(1)] * tokens, 0)) == 0


def exact_effects(weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """How much the output changes without each token (LF-3b): [cases, size]."""
    output = (weight[:, :, None] * value).sum(1, keepdim=True)
    return weight / (1 - weight) * (value - output).norm(dim=-1)


@pytest.mark.claim("LF-5a")
def test_lowest_score_agrees_with_the_lowest_effect_often_but_not_always(record_property):
    """Measured on Gaussian scores and values with one head."""
    generator = torch.Generator().manual_seed(0)
    cases, size, dim = 500, 32, 16
    weight = torch.randn(cases, size, generator=generator, dtype=torch.float64).softmax(-1)
    value = torch.randn(cases, size, dim, generator=generator, dtype=torch.float64)
    agree = (weight * value.abs().sum(-1)).argmin(-1) == exact_effects(weight, value).argmin(-1)
    record_property("share of equal victims", f"{agree.double().mean().item():.3f}")
    assert 0 < int(agree.sum()) < cases


@pytest.mark.claim("LF-5b")
@many
@given(cache=caches())
def test_exact_effect_ranks_from_the_output_alone(cache):
    mass, values = cache
    output = attention(mass, values)
    cheap = [
        (weight / (1 - weight)) ** 2 * square(minus(value, output))
        for weight, value in zip(softmax(mass), values, strict=True)
    ]
    assert lowest(cheap) == lowest(square(effect(mass, values, index)) for index in range(len(mass)))


@pytest.mark.claim("LF-5b")
def test_exact_effect_rejects_dropping_the_factor():
    mass, values = vector(1, 1, 3), [vector(-2), vector(2), vector(-1)]
    output, weight = attention(mass, values), softmax(mass)
    without_factor = [w**2 * square(minus(v, output)) for w, v in zip(weight, values, strict=True)]
    assert lowest(without_factor) != lowest(square(effect(mass, values, index)) for index in range(3))


@pytest.mark.claim("LF-5c")
def test_score_norm_reverses_the_order_of_the_objective():
    mass, values = vector(1, 1), [vector(1, 0), vector(Fraction(3, 5), Fraction(3, 5))]
    weight = softmax(mass)
    assert lowest(scores(mass, values)) == 0
    assert lowest(square(scaled(w, v)) for w, v in zip(weight, values, strict=True)) == 1
    assert lowest(scores(mass, [values[0], vector(Fraction(3, 5), 0)])) == 1           # no reversal on one axis


def victim_within(mass, values, factor: Fraction = Fraction(1)) -> bool:
    """Whether the victim's ||c||_2 is at most sqrt(d) times the smallest one, in squares."""
    squares = [square(scaled(w, v)) for w, v in zip(softmax(mass), values, strict=True)]
    return squares[lowest(scores(mass, values))] <= factor * len(values[0]) * min(squares)


@pytest.mark.claim("LF-5d")
@many
@given(cache=caches())
def test_victim_is_within_root_d_of_the_smallest_contribution(cache):
    assert victim_within(*cache)


@pytest.mark.claim("LF-5d")
def test_victim_rejects_99_percent_of_root_d():
    assert not victim_within(vector(1, 1), [vector(1, 0), vector(HALF, HALF)], Fraction(99, 100) ** 2)


# ---- LF-6: the victim ------------------------------------------------------------------------------------------------

SINK = vector(18, 1, 1), [vector(0), vector(1), vector(1)]                             # weights .9, .05, .05


@pytest.mark.claim("LF-6a")
def test_null_sink_goes_first_and_the_output_grows_tenfold():
    mass, values = SINK
    assert lowest(scores(mass, values)) == 0 == softmax(mass).index(max(softmax(mass)))
    before, after = attention(mass, values), attention(mass[1:], values[1:])
    assert softmax(mass)[0] == Fraction(9, 10)
    assert after == scaled(Fraction(10), before)
    assert square(effect(mass, values, 0)) == 81 * square(before)
    assert lowest(scores(mass, [vector(1)] * 3)) == 1                                  # equal values: lowest weight


@pytest.mark.claim("LF-6a")
def test_twins_evict_a_null_sink(longflow, device):
    values = torch.zeros(3, 16)
    values[1:, 0] = 1
    cache = one_head([2.890625, 0, 0], values, device)                                 # exp(2.89) = 18.0
    first = longflow.decode_attention(**cache)
    assert first.slot.tolist() == [0]
    cache["occupied"][0, 0] = False
    after = longflow.decode_attention(**cache).output[0, 0, 0]
    assert 9 < after / first.output[0, 0, 0] < 11
    even = longflow.decode_attention(**one_head([2.890625, 0, 0], torch.ones(3, 16), device))
    assert even.slot.tolist() == [1]


@pytest.mark.claim("LF-6b")
@many
@given(cache=caches())
def test_victim_weight_is_bounded_by_the_spread_of_value_norms(cache):
    mass, values = cache
    norms = [norm1(value) for value in values]
    assume(min(norms) > 0)
    assert light_victim(mass, values, max(norms) / min(norms))


def light_victim(mass, values, spread: Fraction) -> bool:
    weight = softmax(mass)
    evicted = weight[lowest(scores(mass, values))]
    return evicted <= spread * min(weight) and evicted <= spread / len(weight)


@pytest.mark.claim("LF-6b")
def test_victim_weight_rejects_99_percent_of_the_spread():
    assert light_victim(vector(3, 1), [vector(1), vector(3)], Fraction(3))
    assert not light_victim(vector(3, 1), [vector(1), vector(3)], Fraction(99, 100) * 3)
    assert not light_victim(vector(1, 1, 1), [vector(1)] * 3, Fraction(99, 100))


@pytest.mark.claim("LF-6c")
@pytest.mark.parametrize(("sinks", "stays"), [(1, True), (0, False)])
def test_sinks_keep_a_null_sink(longflow, device, sinks, stays):
    config = longflow.LongFlowConfig(budget=3, sinks=sinks, scale=1.0)
    state = longflow.LongFlowState(
        config, batch=1, query_heads=1, key_value_heads=1, head_dim=16, dtype=torch.float32, device=device
    )
    query = torch.zeros(1, 1, 16, device=device)
    query[..., 0] = 1
    for token in range(5):
        key, value = torch.zeros_like(query), torch.ones_like(query)
        if token == 0:
            key[..., 0], value[:] = 3, 0
        state.step(query, key, value)
    assert (0 in state.positions[0].tolist()) is stays


# ---- LF-19: Z and Z^(\i) ---------------------------------------------------------------------------------------------


@pytest.mark.claim("LF-19a")
@pytest.mark.parametrize("tokens", [2, 100, 10_000])
def test_many_tokens_do_not_keep_the_denominator(tokens):
    """If a zero value has half of the weight, it is evicted first, which halves Z for any number of tokens."""
    mass = [Fraction(tokens - 1), *[Fraction(1)] * (tokens - 1)]
    total = sum(mass)
    assert (total - mass[0]) / total == HALF
    products = [m * norm for m, norm in zip(mass, [0] + [1] * (tokens - 1), strict=True)]
    assert lowest(products) == 0
    assert (total - mass[1]) / total > HALF or tokens == 2                             # any other eviction keeps more


@pytest.mark.claim("LF-19b")
@many
@given(mass=st.lists(masses, min_size=2, max_size=8))
def test_denominator_shrinks_by_the_victims_weight(mass):
    total = sum(mass)
    ratios = [sum(without(mass, index)) / total for index in range(len(mass))]
    assert ratios == [1 - weight for weight in softmax(mass)]
    assert max(ratios) >= 1 - Fraction(1, len(mass))                                   # that of the lowest weight


@pytest.mark.claim("LF-19b")
def test_denominator_rejects_more_than_its_share():
    weight = softmax(vector(1, 1, 1))[0]
    assert not 1 - weight >= 1 - Fraction(99, 100) / 3
