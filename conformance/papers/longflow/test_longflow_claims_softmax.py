"""The change of softmax weights when scores drift: Lemma 1, eq. 9, 14, D.2 (claims LF-7, LF-8, LF-11).

Arithmetic is exact on masses x = exp(s) (see claim_math). Where floats are used, their slack is derived. A test named
..._rejects_... shows that a slightly stronger statement fails, so the claim's own test is not empty.

Proof of LF-7, which Lemma 1 only cites. For a set A of tokens, logit a(A) = LSE_A(s) - LSE_Ac(s). Each LSE changes by a
number between min ds and max ds, so the logit changes by at most w = max ds - min ds. The logistic function is steepest
at 0, so |da(A)| <= tanh(w/4). And w <= 2 max|ds|, and ||da||_1 = 2 max_A |da(A)|.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import chain, combinations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtwin.conformance.papers.claim_math import (
    at_most_tanh,
    growth,
    largest_change,
    many,
    masses,
    norm1,
    softmax,
    vector,
)

pytestmark = pytest.mark.kind("claims")

U = 2.0**-53
ONE = Fraction(1)


@st.composite
def drifts(draw: st.DrawFn) -> tuple[list[Fraction], list[Fraction]]:
    """The masses of one set of tokens at two steps. Drifts are as large as the scores, or 1e-6 of that."""
    size = draw(st.integers(2, 6))
    before = draw(st.lists(masses, min_size=size, max_size=size))
    if draw(st.booleans()):
        return before, draw(st.lists(masses, min_size=size, max_size=size))
    small = st.integers(-1000, 1000).map(lambda step: 1 + Fraction(step, 10**9))
    return before, [mass * draw(small) for mass in before]


def weight_change(before, after) -> list[Fraction]:
    return [b - a for a, b in zip(softmax(before), softmax(after), strict=True)]


def subsets(size: int):
    return chain.from_iterable(combinations(range(size), count) for count in range(size + 1))


# The extreme case of every bound: two tokens swap their scores +-D/2. Here exp(D) = 1 + 2^-10.
STEP = ONE + Fraction(1, 2**10)
SWAP = vector(1, STEP), vector(STEP, 1)


# ---- LF-7: Lemma 1 ---------------------------------------------------------------------------------------------------


def lemma_1_holds(before: list[float], after: list[float], factor: float = 1) -> bool:
    """||softmax(s') - softmax(s)||_1 <= max|ds| in float64.

    Slack: each computed weight has a relative error of (range + n + 4) u: range u for the rounding of s - max s, which
    exp magnifies, 2 u for exp, n u for the sum of n terms, and u for the division. The difference adds one more u. The
    weights sum to 1, so both steps together cost at most 2 (largest range + n + 5) u. The right side costs at most
    |ds| u <= 2 range u.
    """
    def weights(score: list[float]) -> list[float]:
        powers = [math.exp(s - max(score)) for s in score]
        return [p / sum(powers) for p in powers]

    moved = sum(abs(b - a) for a, b in zip(weights(before), weights(after), strict=True))
    drift = max(abs(b - a) for a, b in zip(before, after, strict=True))
    spread = max(max(s) - min(s) for s in (before, after)) + drift
    return moved <= factor * drift + 4 * (spread + len(before) + 8) * U


scores = st.floats(-40, 40) | st.floats(-1e-3, 1e-3)


@pytest.mark.claim("LF-7a")
@many
@given(st.lists(st.tuples(scores, scores), min_size=1, max_size=8))
def test_softmax_is_1_lipschitz_from_max_to_sum(pairs):
    before, after = map(list, zip(*pairs, strict=True))
    assert lemma_1_holds(before, after)


@pytest.mark.claim("LF-7a")
@pytest.mark.parametrize("drift", [1e-3, 1e-2, 0.1])
def test_lipschitz_constant_rejects_099(drift):
    """2 tanh(D/2) > 0.99 D up to D = 0.34."""
    swap = [-drift / 2, drift / 2], [drift / 2, -drift / 2]
    assert lemma_1_holds(*swap)
    assert not lemma_1_holds(*swap, factor=0.99)


@pytest.mark.claim("LF-7b")
@many
@given(drifts())
def test_weights_move_at_most_by_tanh(drift):
    before, after = drift
    change = weight_change(before, after)
    for subset in subsets(len(change)):
        assert at_most_tanh(abs(sum(change[i] for i in subset)), growth(before, after))
    # ||da||_1 = 2 max_A |da(A)|: the sum over the tokens whose weight grows
    assert at_most_tanh(norm1(tuple(change)) / 2, growth(before, after))


@pytest.mark.claim("LF-7b")
def test_weights_reject_tanh_of_a_smaller_drift():
    (change, _), spread = weight_change(*SWAP), growth(*SWAP)
    assert at_most_tanh(change, spread) and at_most_tanh(-change, spread)
    assert (1 + abs(change)) ** 2 == spread * (1 - abs(change)) ** 2                    # attained
    # exp(0.99 w) < 1 + 0.991 (exp(w) - 1), by convexity and as exp(w) < 1.01 here
    assert spread < Fraction(101, 100)
    assert not at_most_tanh(abs(change), 1 + Fraction(991, 1000) * (spread - 1))


@pytest.mark.claim("LF-7c")
@many
@given(drifts())
def test_single_weight_moves_at_most_by_half_the_largest_drift(drift):
    """|da_i| <= tanh(D/2) for D = max|ds|, as w <= 2 D in tanh(w/4). tanh x <= x gives D/2."""
    before, after = drift
    largest = largest_change(before, after)
    assert growth(before, after) <= largest**2
    assert all(at_most_tanh(abs(change), largest**2) for change in weight_change(before, after))


@pytest.mark.claim("LF-7c")
def test_single_weight_rejects_099_of_half_the_drift():
    """D = log(STEP) < STEP - 1."""
    assert max(weight_change(*SWAP)) > Fraction(99, 100) * (STEP - 1) / 2


@pytest.mark.claim("LF-7d")
@many
@given(drifts())
def test_weights_grow_at_most_by_the_spread_of_the_drift(drift):
    before, after = drift
    spread = growth(before, after)
    for a, b in zip(softmax(before), softmax(after), strict=True):
        assert a / spread <= b <= a * spread


@pytest.mark.claim("LF-7d")
def test_weights_reject_less_growth():
    before, after = vector(1, 10**9), vector(3, 10**9)
    assert softmax(after)[0] / softmax(before)[0] > Fraction(99, 100) * growth(before, after)


# ---- LF-8: eq. 9 between steps, where the tokens differ --------------------------------------------------------------


@pytest.mark.claim("LF-8a")
def test_new_token_moves_the_weights_without_any_drift():
    before, after = vector(1), vector(1, 2**29)                                        # scores 0, then 0 and 20.1
    drift = largest_change(before, after[:1])
    assert drift == 1                                                                  # max|ds| = 0 on common tokens
    moved = abs(softmax(after)[0] - softmax(before)[0])
    assert moved == 1 - Fraction(1, 1 + 2**29)
    assert not at_most_tanh(moved, drift**2)
    # no factor could repair eq. 9: its right side is 0
    same = abs(softmax(before)[0] - softmax(before)[0])
    assert at_most_tanh(same, drift**2)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Fraction], list[Fraction], Fraction, Fraction]:
    """Masses of the common tokens at t and t + 1, of the token evicted in between (t), and of the new one (t + 1)."""
    return *draw(drifts()), draw(masses | st.just(Fraction(0))), draw(masses | st.just(Fraction(0)))


def step_change_within(before, after, evicted, new, *, inner: Fraction = ONE, outer: Fraction = ONE) -> bool:
    """|da_i| <= (1 - beta) tanh(w/4) + |beta - eps| q_i, for every common token i.

    Proof: a_i = (1 - eps) q_i and a'_i = (1 - beta) q'_i, so da_i = (1 - beta) (q'_i - q_i) + (eps - beta) q_i, and
    LF-7 bounds q' - q. `inner` and `outer` scale the two terms.
    """
    common = softmax(before)
    old, now = softmax([*before, evicted]), softmax([*after, new])
    eps, beta = old[-1], now[-1]
    return all(
        at_most_tanh((abs(b - a) - outer * abs(beta - eps) * q) / (1 - beta) / inner, growth(before, after))
        for a, b, q in zip(old[:-1], now[:-1], common, strict=True)
    )


@pytest.mark.claim("LF-8b")
@many
@given(steps())
def test_weights_between_steps(step):
    assert step_change_within(*step)


@pytest.mark.claim("LF-8b")
@pytest.mark.parametrize(("evicted", "new"), [(0, 0), (0, 2), (1, 3)])
def test_weights_between_steps_reject_99_percent_of_either_term(evicted, new):
    """Attained by a token that loses weight both to the other common token and to the new one."""
    step = *SWAP, Fraction(evicted), Fraction(new)
    assert step_change_within(*step)
    assert not step_change_within(*step, inner=Fraction(99, 100))
    assert new == 0 or not step_change_within(*step, outer=Fraction(99, 100))


# ---- LF-11: the proof of Lemma 1 -------------------------------------------------------------------------------------


def path(target: list[float], points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(s) and its derivative in tau, J(s) target, along s = tau target for tau in `points` [P]. Both [P, n]."""
    direction = torch.tensor(target, dtype=torch.float64)
    weight = (points[:, None] * direction).softmax(-1)
    return weight, weight * (direction - (weight * direction).sum(-1, keepdim=True))


def least_residual(target: list[float], intervals: int = 4096) -> tuple[float, float]:
    """A lower and an upper bound on the minimum over the segment of ||softmax(target) - softmax(0) - J(c) target||_1.

    Between grid points, the derivative J(s(tau)) target changes by at most half an interval times the 1-norm of d/dtau
    (a_i (t_i - mean)) = a_i ((t_i - mean)^2 - variance), which is at most 2 variance <= range^2 / 2 (Popoviciu).
    Rounding: n values of size <= range, each with a relative error of (range + n + 8) u, on both sides.
    """
    points = torch.linspace(0, 1, intervals + 1, dtype=torch.float64)
    weight, slope = path(target, points)
    residual = (weight[-1] - weight[0] - slope).abs().sum(-1).min().item()
    span = max(target) - min(target)
    between = 0.5 / intervals * span**2 / 2
    rounding = 4 * (span + len(target) + 8) * U * span * len(target)
    return residual - between - rounding, residual + rounding


@pytest.mark.claim("LF-11a")
def test_mean_value_theorem_fails_for_three_tokens():
    lower, _ = least_residual([0.0, 4.0, 8.0])
    assert lower > 0.29                                                                # no point c on the segment works
    _, upper = least_residual([0.0, 8.0])
    assert upper < 0.01                                                                # two tokens: one dimension


@pytest.mark.claim("LF-11b")
@pytest.mark.parametrize("target", [[0.0, 4.0, 8.0], [0.0, 8.0], [0.5, -1.0, 2.0, 2.0]])
def test_integral_form_replaces_the_mean_value_theorem(target):
    """softmax(s') - softmax(s) = integral of J(s + tau ds) ds, by the midpoint rule.

    The error of the rule is at most h^2 / 24 max ||f''||_1 for the slope f = a (t - mean). With x = t - mean, f'' = a
    (x^3 - 3 x var - mu3), so ||f''||_1 <= E|x|^3 + 3 E|x| var + |mu3| <= r^3 (1/4 + 3/8 + 1/4) for range r.
    """
    intervals = 4096
    _, slope = path(target, (torch.arange(intervals, dtype=torch.float64) + 0.5) / intervals)
    ends, _ = path(target, torch.tensor([0.0, 1.0], dtype=torch.float64))
    span = max(target) - min(target)
    slack = span**3 * 7 / 8 / 24 / intervals**2 + 4 * (span + len(target) + 8) * U * span * len(target)
    change = ends[1] - ends[0]
    assert (slope.mean(0) - change).abs().sum() <= slack
    assert (slope.mean(0) * 0.99 - change).abs().sum() > slack


def jacobian(mass) -> list[list[Fraction]]:
    weight = softmax(mass)
    return [[w * ((i == j) - v) for j, v in enumerate(weight)] for i, w in enumerate(weight)]


def column_norm(matrix) -> Fraction:
    """The norm from the 1-norm to the 1-norm: the largest column sum of absolute values."""
    return max(sum(map(abs, column)) for column in zip(*matrix, strict=True))


def max_to_sum_norm(matrix) -> Fraction:
    """The norm from the max-norm to the 1-norm, which is attained at a vector of signs."""
    signs = product((-1, 1), repeat=len(matrix))
    return max(sum(abs(sum(a * s for a, s in zip(row, sign, strict=True))) for row in matrix) for sign in signs)


few_masses = st.lists(masses, min_size=2, max_size=5)


@pytest.mark.claim("LF-11c")
@many
@given(mass=few_masses, step=st.sampled_from([Fraction(1), Fraction(-1, 2), Fraction(1, 10**9)]))
def test_jacobian_is_the_derivative(mass, step):
    """If s_j grows by log(1 + h), softmax changes by h / (1 + h a_j) times column j of J, for any h. As h goes to 0,
    both h and log(1 + h) / h go to their limits, so J is the derivative."""
    before, matrix = softmax(mass), jacobian(mass)
    for j, weight in enumerate(before):
        moved = [m * (1 + step) if i == j else m for i, m in enumerate(mass)]
        change = [b - a for a, b in zip(before, softmax(moved), strict=True)]
        assert change == [step / (1 + step * weight) * row[j] for row in matrix]
        assert change != [step * row[j] for row in matrix]


@pytest.mark.claim("LF-11c")
@many
@given(few_masses)
def test_column_sums_of_the_jacobian(mass):
    assert column_norm(jacobian(mass)) == max(2 * w * (1 - w) for w in softmax(mass)) <= Fraction(1, 2)


@pytest.mark.claim("LF-11c")
def test_column_sums_reject_less_than_one_half():
    assert column_norm(jacobian(vector(1, 1))) > Fraction(99, 100) / 2


@pytest.mark.claim("LF-11d")
@pytest.mark.parametrize("tokens", [2, 3, 10])
def test_one_is_tighter_than_one_half_if_several_scores_drift(tokens):
    """Bounds on ||a' - a||_1 for a drift of the scores: half of its sum, by the column sums, and its largest entry."""
    def bounds(drift: list[int]) -> tuple[Fraction, Fraction]:
        return Fraction(sum(map(abs, drift)), 2), Fraction(max(map(abs, drift)))

    half, largest = bounds([(-1) ** j for j in range(tokens)])
    assert half == tokens * largest / 2
    assert (half > largest) is (tokens > 2)
    half, largest = bounds([1, *[0] * (tokens - 1)])                                   # a single score drifts
    assert half < largest
    even = jacobian(vector(1, 1))                                                      # the constants themselves
    assert column_norm(even) == Fraction(1, 2) < 1 == max_to_sum_norm(even)


@pytest.mark.claim("LF-11e")
@many
@given(few_masses)
def test_max_to_sum_norm_is_the_larger_one(mass):
    weight, matrix = softmax(mass), jacobian(mass)
    heaps = [sum((weight[i] for i in subset), Fraction(0)) for subset in subsets(len(weight))]
    assert max_to_sum_norm(matrix) == max(4 * heap * (1 - heap) for heap in heaps) <= 1
    assert max_to_sum_norm(matrix) >= 2 * column_norm(matrix)


@pytest.mark.claim("LF-11e")
def test_max_to_sum_norm_rejects_less_than_one():
    assert max_to_sum_norm(jacobian(vector(1, 2, 3))) > Fraction(99, 100)
    assert not max_to_sum_norm(jacobian(vector(1, 1))) >= Fraction(201, 100) * column_norm(jacobian(vector(1, 1)))
