"""Drift between queries: eq. 10 and 15, and the combined bound that D.3 only mentions (claims LF-9, LF-10).

Arithmetic is exact (see claim_math), except in the tests of the twins. Points on a rational sphere give queries of
rational length. A test named ..._rejects_... shows that a slightly stronger statement fails.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtwin.conformance.cases.oracle import attend
from kvtwin.conformance.judge.bounds import arithmetic, output_error
from kvtwin.conformance.papers.claim_geometry import on_sphere
from kvtwin.conformance.papers.claim_math import (
    Vector,
    at_most_tanh,
    attention,
    caches,
    components,
    dot,
    effect,
    growth,
    largest_change,
    many,
    masses,
    minus,
    one_head,
    scaled,
    softmax,
    square,
    vector,
)

pytestmark = pytest.mark.kind("claims")


@pytest.fixture(scope="module", params=["reference", "optimized"])
def longflow(request, twins):
    return getattr(twins, request.param).longflow


# ---- LF-9: eq. 10 and 15 ---------------------------------------------------------------------------------------------


points = st.tuples(*[st.fractions(-3, 3, max_denominator=50)] * 2)
units = points.map(on_sphere)
keys = st.lists(st.tuples(*[components] * 3), min_size=1, max_size=4)


def squared_drifts(query: Vector, later: Vector, keys: list[Vector]) -> list[Fraction]:
    """(s'_j - s_j)^2 for s = q . k / sqrt(d)."""
    return [dot(minus(later, query), key) ** 2 / len(query) for key in keys]


def drift_within(query, later, keys, squared_distance: Fraction, factor: Fraction = Fraction(1)) -> bool:
    """Whether max |ds| <= factor * distance * max ||k|| / sqrt(d), in squares."""
    bound = factor**2 * squared_distance * max(map(square, keys)) / len(query)
    return max(squared_drifts(query, later, keys)) <= bound


@pytest.mark.claim("LF-9a")
@given(units, units, st.fractions(0, 9), st.fractions(0, 9), keys)
def test_score_drift_by_cauchy_schwarz(query, later, length, later_length, keys):
    query, later = scaled(length, query), scaled(later_length, later)
    assert drift_within(query, later, keys, square(minus(later, query)))


@pytest.mark.claim("LF-9a")
def test_score_drift_rejects_99_percent_along_the_key():
    query, later = vector(1, 0, 0), vector(0, 1, 0)
    along = [minus(later, query)]
    assert drift_within(query, later, along, Fraction(2))
    assert not drift_within(query, later, along, Fraction(2), Fraction(99, 100))


@pytest.mark.claim("LF-9b")
@given(units, units, keys)
def test_cosine_gives_the_drift_of_unit_queries(query, later, keys):
    assert square(query) == square(later) == 1
    assert square(minus(later, query)) == 2 * (1 - dot(query, later))
    assert drift_within(query, later, keys, 2 * (1 - dot(query, later)))


@pytest.mark.claim("LF-9b")
def test_cosine_rejects_queries_of_other_lengths_and_float_arithmetic():
    query = vector(1, 0, 0)
    assert not drift_within(query, scaled(Fraction(2), query), [query], Fraction(0))   # cos = 1
    later = on_sphere((Fraction(1, 2**30), Fraction(0)))                               # an angle of 2^-29
    assert square(minus(later, query)) > 0
    assert 1 - float(later[0]) == 0                                                    # 1 - cos cancels in float64
    assert not drift_within(query, later, [minus(later, query)], Fraction(0))


@pytest.mark.claim("LF-9c")
@pytest.mark.parametrize("angle", [1.0, 1e-1, 1e-2, 1e-3])
def test_outputs_converge_as_unit_queries_do(longflow, device, angle):
    """Keys e1 and e2, values 0 and 1, queries at 0 and `angle`. Logits are at most 1 and drift by D <= angle, so the
    outputs differ by at most tanh(D / 2) <= angle / 2 (LF-7c), and by at least angle / 8: the difference of the logits
    grows by sin - cos + 1 > 3/4 angle, and a logistic function has a slope above .19 between -1 and 1. Both outputs
    carry an error in float32."""
    values = torch.zeros(2, 16)
    values[1] = 1
    cache = one_head([0.0, 0.0], values, device)
    cache["key"] = torch.eye(2, 16, device=device)[None, None]
    outputs, slack = [], 0.0
    for turn in (0.0, angle):
        query = torch.zeros(1, 1, 16)
        query[0, 0, :2] = torch.tensor([math.cos(turn), math.sin(turn)])
        case = {**cache, "query": query.to(device)}
        outputs.append(longflow.decode_attention(**case).output.cpu())
        slack += float(output_error(attend(**case), arithmetic(torch.float32)).max())
    change = float((outputs[1] - outputs[0]).abs().max())
    assert change <= angle / 2 + slack
    assert change >= angle / 8 - slack > 0                                             # so angle / 9 is no bound


@pytest.mark.claim("LF-9c")
def test_cosine_of_one_does_not_stop_the_weights(longflow, device):
    """With q' = 2 q, logits (0, 1) become (0, 2), and the weight of token 1 rises from 0.73 to 0.88."""
    values = torch.zeros(2, 16)
    values[1] = 1
    cache = one_head([0.0, 1.0], values, device)
    before = longflow.decode_attention(**cache).output
    after = longflow.decode_attention(**{**cache, "query": 2 * cache["query"]}).output
    same = longflow.decode_attention(**{**cache, "query": 1 * cache["query"]}).output
    assert (after - before).min() > 0.1
    assert torch.equal(same, before)                                                   # no drift, no change


def drift_of_norms(length: Fraction, later_length: Fraction, cosine: Fraction) -> Fraction:
    """||q' - q||^2 by the law of cosines."""
    return length**2 + later_length**2 - 2 * length * later_length * cosine


@pytest.mark.claim("LF-9d")
@given(units, units, st.fractions(0, 9), st.fractions(0, 9), keys)
def test_drift_of_queries_of_any_length(query, later, length, later_length, keys):
    squared = drift_of_norms(length, later_length, dot(query, later))
    query, later = scaled(length, query), scaled(later_length, later)
    assert square(minus(later, query)) == squared
    assert drift_within(query, later, keys, squared)


@pytest.mark.claim("LF-9d")
def test_drift_rejects_99_percent_and_the_cosine_alone():
    assert not drift_within(vector(1, 0, 0), vector(2, 0, 0), [vector(1, 0, 0)], Fraction(1), Fraction(99, 100))
    assert drift_of_norms(Fraction(1), Fraction(2), Fraction(1)) == 1 != 2 * (1 - 1)


# ---- LF-10: the combined bound ---------------------------------------------------------------------------------------


@st.composite
def drifting(draw: st.DrawFn) -> tuple[list[Fraction], list[Fraction], list[Vector]]:
    """One set of tokens at two steps. Half of the draws are the extreme case: two tokens with opposite values."""
    if draw(st.booleans()):
        mass = draw(masses)
        return [mass, Fraction(1)], [Fraction(1), mass], [vector(-1, 2), vector(1, -2)]
    before, values = draw(caches())
    return before, draw(st.lists(masses, min_size=len(before), max_size=len(before))), values


def error(before, after, values, index: int) -> Fraction:
    """E_i of eq. 7 for one set of tokens, over V^2."""
    ours = square(scaled(softmax(before)[index], values[index]))
    largest = max(map(square, values)) or Fraction(1)
    return abs(square(effect(after, values, index)) - ours) / largest


def derived_bound_holds(before, after, values, index, factor: Fraction = Fraction(1)) -> bool:
    """E_i <= V^2 (3 a'^2 + (a + a') tanh(w/4)).

    Proof: o - o^(\\i) = a' (v - o') at step t + 1, with o' = o^(\\i) (LF-3b). So E_i <= a'^2 | ||v - o'||^2 - ||v||^2 |
    + |a'^2 - a^2| ||v||^2. The first difference is ||o'||^2 - 2 v.o' <= 3 V^2, and |a' - a| <= tanh(w/4) (LF-7b).
    """
    old, new = softmax(before)[index], softmax(after)[index]
    left = error(before, after, values, index) / factor
    return at_most_tanh((left - 3 * new**2) / (old + new), growth(before, after))


def paper_bound_holds(before, after, values, index, factor: Fraction = Fraction(1)) -> bool:
    """E_i from eq. 8, 13 and 14: V^2 (r^2 + 2 a' r + (a + a') D), r = 2 a' / (1 - a'), D = max|ds|.

    D is replaced by 2 tanh(D/2), which is smaller and can be compared exactly. w/4 = D/2 for growth = exp(2 D).
    """
    old, new = softmax(before)[index], softmax(after)[index]
    radius = 2 * new / (1 - new)
    left = error(before, after, values, index) / factor
    doubled = largest_change(before, after) ** 2
    return at_most_tanh((left - radius**2 - 2 * new * radius) / (old + new) / 2, doubled)


@pytest.mark.claim("LF-10a")
@many
@given(drifting())
def test_bounds_of_the_paper_combine(drift):
    before, after, values = drift
    assert all(paper_bound_holds(before, after, values, index) for index in range(len(before)))


def worst_error(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of all values, for the weights a = a_t and b = a_{t+1}, with V = 1."""
    stationary = b**2 / (a**2 - b**2)
    x = torch.where((stationary >= 0) & (stationary <= 1), stationary, 1)
    return torch.maximum(b**2 * (x + 1) ** 2 - a**2 * x**2, (a**2).expand_as(x))


@pytest.mark.claim("LF-10a")
def test_combined_bound_rejects_37_percent_of_itself_but_never_comes_within_260_percent():
    """A search over a = a_t and b = a_{t+1} on a grid of logits, with the worst values for each pair.

    With ||v_i|| = x V, E_i is at most b^2 (x + 1)^2 - a^2 x^2 (v_i opposite to o') or a^2 x^2 - b^2 (1 - x)^2 (v_i
    parallel to o'). The second is largest at x = 1. The first is largest at x = b^2 / (a^2 - b^2), or at 1 if that is
    larger. V = 1. The smallest D that changes a to b is half the difference of their logits.
    """
    logit = torch.linspace(-14, 14, 701, dtype=torch.float64)
    a, b = logit.sigmoid()[:, None], logit.sigmoid()[None, :]
    radius = 2 * b / (1 - b)
    bound = radius**2 + 2 * b * radius + (a + b) * (logit[:, None] - logit[None, :]).abs() / 2
    share = (worst_error(a, b) / bound).max().item()
    assert 0.375 < share < 1 / 2.6


@pytest.mark.claim("LF-10b")
@many
@given(drifting())
def test_error_bound_derived(drift):
    before, after, values = drift
    assert all(derived_bound_holds(before, after, values, index) for index in range(len(before)))


@pytest.mark.claim("LF-10b")
@pytest.mark.parametrize("heavy", [Fraction(1001, 1000), Fraction(4), Fraction(10**9)])
def test_error_bound_rejects_99_percent(heavy):
    """The bound is attained if the weight grows and v_i = -o'."""
    before, after, values = [Fraction(1), heavy], [heavy, Fraction(1)], [vector(3, 4), vector(-3, -4)]
    assert derived_bound_holds(before, after, values, 0)
    assert not derived_bound_holds(before, after, values, 0, Fraction(99, 100))


def foreseen(weight: Fraction, spread: Fraction) -> Fraction:
    """The largest value of a weight after scores drift apart by w = log(spread): its logit grows by w."""
    return weight * spread / (1 - weight + weight * spread)


def early_bound_holds(before, after, values, index, factor: Fraction = Fraction(1)) -> bool:
    """LF-10b with a' replaced by its upper bound at step t."""
    old, spread = softmax(before)[index], growth(before, after)
    new = foreseen(old, spread)
    left = error(before, after, values, index) / factor
    return softmax(after)[index] <= new and at_most_tanh((left - 3 * new**2) / (old + new), spread)


@pytest.mark.claim("LF-10c")
@many
@given(drifting())
def test_error_bound_before_the_step(drift):
    before, after, values = drift
    assert all(early_bound_holds(before, after, values, index) for index in range(len(before)))


@pytest.mark.claim("LF-10c")
@pytest.mark.parametrize("heavy", [Fraction(1001, 1000), Fraction(4), Fraction(10**9)])
def test_error_bound_before_the_step_rejects_99_percent(heavy):
    before, after, values = [Fraction(1), heavy], [heavy, Fraction(1)], [vector(3, 4), vector(-3, -4)]
    assert foreseen(softmax(before)[0], growth(before, after)) == softmax(after)[0]
    assert early_bound_holds(before, after, values, 0)
    assert not early_bound_holds(before, after, values, 0, Fraction(99, 100))
    assert attention(after[1:], values[1:]) == scaled(Fraction(-1), values[0])


# ---- LF-10d: the drift of the contribution ---------------------------------------------------------------------------


@pytest.mark.claim("LF-10d")
@many
@given(cache=caches(), data=st.data())
def test_query_drift_is_a_difference_of_squared_weights(cache, data):
    before, values = cache
    after = data.draw(st.lists(masses, min_size=len(before), max_size=len(before)))
    for a, later, value in zip(softmax(before), softmax(after), values, strict=True):
        drift = abs(square(scaled(later, value)) - square(scaled(a, value)))
        assert drift == abs(later**2 - a**2) * square(value)


@pytest.mark.claim("LF-10d")
def test_query_drift_rejects_the_square_of_the_difference():
    value = vector(3, 4)
    drift = abs(square(scaled(Fraction(1, 2), value)) - square(scaled(Fraction(1, 4), value)))
    assert drift != (Fraction(1, 2) - Fraction(1, 4)) ** 2 * square(value)
