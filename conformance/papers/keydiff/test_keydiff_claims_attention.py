"""Attention weight and alignment: theorem C.1, its proof, and the conclusions from it (claims KD-10, KD-11, KD-15).

Symbols: w is the weight of k* among n other keys; R = sqrt(M) is larger than the lengths of all keys; ||q|| = 1. Let
g = logit(w) + log n = k*.q - log mean exp(k_i.q), which can be any number in +-2R. Then the left side of theorem C.1 is
log(1 + (e^g - 1) / (n + 1)) / (2M) - 1, which has no cancellation. Since k_i.q can be any number in +-R, keys are given
by their dot products with q, and k* by its length and cosine. A test named ..._rejects_... shows that a slightly
changed statement fails, so the claim's own test is not empty.

Proof of KD-10c. Let t = 1 + cos. As k_i.q >= -R, g <= R t if cos >= 0. If k* is the longest key, the same holds with
its length instead of R. (e^g + n) / (n + 1) falls with n, so the left side is at most L(t) / (2M) - 1, where L(t) =
log((e^(R t) + 1) / 2). L is convex and L(0) = 0, so L(t) / t is largest at t = 2. The theorem then says L(2) <= 4M,
which is R + log cosh R <= 4 R^2. This is false below one root and true above it, as the difference is convex and 0 at
0.

Proof of KD-10d. mean exp(k_i.q) >= e^-R, so g <= k*.q + R. And k*.q <= R cos if it is not negative.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvtwin.conformance.papers.claim_geometry import direction_sets, kept, mean, smallest, unit
from kvtwin.conformance.papers.claim_math import dot, many, masses, scaled, softmax, vector

pytestmark = pytest.mark.kind("claims")

U = 2.0**-53
ONE = Fraction(1)
plenty = settings(max_examples=10 * settings().max_examples)                           # cheap: a few floats each
THRESHOLD = 0.0814                                                                     # the root of KD-10c, rounded up


def weight_of(product: float, others: list[float]) -> float:
    """The attention weight of k*, in float64, from k*.q and the k_i.q."""
    return float(torch.tensor([product, *others], dtype=torch.float64).softmax(0)[0])


def logit(weight: float) -> float:
    return math.log(weight) - math.log1p(-weight)


def slack_of(weight: float, n: int, longest: float) -> float:
    """An error bound of logit(w) + log n. Softmax weights of n + 1 logits in +-R have a relative error of (n + 2R + 8)
    u, which logit divides by 1 - w. The two logarithms and their sums add 4 (2R + 2 log n) u."""
    return ((n + 2 * longest + 8) / (1 - weight) + 8 * (longest + math.log(n + 1))) * U


def excess(product: float, others: list[float]) -> float:
    """g, computed from k*.q and the k_i.q."""
    highest = max(others)
    powers = [math.exp(x - highest) for x in others]
    return product - (highest + math.log(sum(powers) / len(powers)))


def printed_bound(g: float, n: int, bound: float) -> float:
    """The left side of theorem C.1; `bound` is M."""
    return math.log1p(math.expm1(g) / (n + 1)) / (2 * bound) - 1


# ---- KD-10: theorem C.1 ----------------------------------------------------------------------------------------------

bounds = st.fractions(Fraction(1, 10**6), 10**6).filter(bool)
counts = st.integers(1, 50)


@pytest.mark.claim("KD-10a")
@given(mass=masses, others=st.lists(masses, min_size=1, max_size=6))
def test_printed_bound_in_exact_arithmetic(mass, others):
    """(log(n / (n + 1)) - log(1 - w)) / (2M) - 1 > -1 iff w > 1 / (n + 1) iff e^g > 1. `ratio` is e^g."""
    n, weight = len(others), softmax([mass, *others])[0]
    ratio = mass * n / sum(others)
    assert Fraction(n, n + 1) / (1 - weight) == 1 + (ratio - 1) / (n + 1)              # as in printed_bound
    assert (weight > Fraction(1, n + 1)) is (ratio > 1)


@pytest.mark.claim("KD-10a")
@given(bound=bounds, n=counts)
def test_theorem_fails_for_every_bound_and_any_number_of_keys(bound, n):
    """k* = -y/2 q and k_i = -y q with y < R. k* is opposite to q (cos = -1), but has more than 1 / (n + 1) of the
    weight."""
    longest = bound / (bound + 1)
    assert longest**2 < bound
    g = -longest / 2 - (-longest)
    assert g > 0
    assert printed_bound(float(g), n, float(bound)) > -1
    # If k* is the longer one, it has less than that, and the theorem is right.
    assert printed_bound(float(-g), n, float(bound)) < -1


@pytest.mark.claim("KD-10a")
def test_theorem_fails_by_much():
    g = -0.1 - -0.9
    assert 0.68 < 1 / (1 + math.exp(-g)) < 0.70                                        # n = 1: the weight
    assert printed_bound(g, 1, 1.0) > -0.77


@pytest.mark.claim("KD-10b")
def test_theorem_needs_the_length_of_the_query():
    """k* = .9 q^ and k_1 = -.9 q^ with M = 1 and cos = 1. The theorem is right for ||q|| = 1, wrong for ||q|| = 10, and
    right again for M = ||q||^2."""
    for length, bound, right in [(1, 1, True), (10, 1, False), (10, 100, True)]:
        g = excess(0.9 * length, [-0.9 * length])
        assert (printed_bound(g, 1, bound) <= 1) is right


@pytest.mark.claim("KD-10b")
@given(length=st.floats(0.1, 10), g=st.floats(0, 1), n=counts)
def test_theorem_with_the_query_in_the_bound_rejects_the_bound_of_the_keys(length, g, n):
    """With cos = 1 and keys up to length R, g <= 2 R ||q||. So M must be (R ||q||)^2; no M of the keys alone
    suffices."""
    keys = math.sqrt(THRESHOLD) / min(length, 1)
    reach = 2 * keys * length * g
    assert printed_bound(reach, n, (keys * length) ** 2) <= 1
    assert not printed_bound(2 * keys * 10, 1, keys**2) <= 1


shares = st.just(-1.0) | st.floats(-1, 1)                                              # k.q as a share of the length


def difference(bound: float) -> float:
    """4 R^2 - R - log cosh R. It is not negative iff theorem C.1 is right for cos >= 0."""
    length = math.sqrt(bound)
    return 4 * bound - length - math.log(math.cosh(length))


@pytest.mark.claim("KD-10c")
def test_threshold_lies_at_00813():
    assert difference(0.08131) < 0 < difference(0.08133)
    assert difference(1e-9) < 0 < difference(1e3)


@pytest.mark.claim("KD-10c")
@plenty
@given(
    bound=st.just(THRESHOLD) | st.floats(THRESHOLD, 1) | st.floats(1, 100),
    cosine=st.sampled_from([-999, -500, 0, 1000]) | st.integers(-999, 1000),
    length=st.just(1.0) | st.floats(0, 1),
    share=st.lists(shares, min_size=1, max_size=4),
)
def test_theorem_holds_above_the_threshold_for_cosines_that_are_not_negative(bound, cosine, length, share):
    """Or for any cosine, if k* is the longest key. At THRESHOLD the two sides differ by at least 4e-4 (1 + cos), and
    cosines are multiples of 1/1000, so the difference is far above rounding errors (1e-13)."""
    longest, cosine = math.sqrt(bound), cosine / 1000
    own = longest * length
    reach = longest if cosine >= 0 else own
    assert printed_bound(excess(own * cosine, [reach * x for x in share]), len(share), bound) <= cosine


@pytest.mark.claim("KD-10c")
@pytest.mark.parametrize("bound", [0.0813, 0.05, 1e-3, 1e-6])
def test_theorem_rejects_any_bound_below_the_threshold(bound):
    """k* = R q and k_1 = -R q, with lengths a millionth below R. cos = 1, and the left side is larger."""
    length = math.sqrt(bound) * (1 - 1e-6)
    assert printed_bound(2 * length, 1, bound) > 1
    assert not printed_bound(2 * length, 1, THRESHOLD) > 1
    # Above the threshold, it rejects a negative cosine with a longer other key: k* of length .1, k_1 = -.9 q, M = 1.
    assert printed_bound(excess(-0.9 * 0.1, [-0.9]), 1, 1.0) > -0.9


def corrected_holds(length: float, cosine: float, others: list[float], longest: float, more: float = 0) -> bool:
    """Whether k*.q >= g - R, and cos >= g / R - 1 + more if g >= R, where R = longest.

    Slack: the error of x_i - max is 2R u, so the relative error of exp is (2R + 2) u. The mean adds n u, and its
    logarithm 2 log n u <= n u. A product and sums of up to R, R, 2R and 3R follow: (9 R + 2n + 2) u in all. A quotient
    of up to 2 and a difference of up to 1 add 3 u to the second inequality.
    """
    slack = (9 * longest + 2 * len(others) + 2) * U
    product = length * cosine
    g = excess(product, others)
    surely = g >= longest + slack
    forced = g / longest - 1 + more
    return product >= g - longest - slack and (not surely or cosine >= forced - slack / longest - 3 * U)


@pytest.mark.claim("KD-10d")
@many
@given(data=st.data(), longest=st.floats(0.01, 30), cosine=st.floats(-1, 1), n=st.integers(1, 6))
def test_weight_bounds_the_product_and_the_cosine(data, longest, cosine, n):
    others = [longest * data.draw(shares) for _ in range(n)]
    assert corrected_holds(longest * data.draw(st.floats(0, 1) | st.just(1.0)), cosine, others, longest)


@pytest.mark.claim("KD-10d")
@given(longest=st.floats(0.01, 30), cosine=st.floats(0.01, 1), n=st.integers(1, 6))
def test_weight_rejects_99_percent_of_the_longest_and_a_larger_cosine(longest, cosine, n):
    """With all k_i = -R q and ||k*|| = R, both are equalities. So a smaller R fails, and so does a cosine larger by
    1/1000."""
    others = [-longest] * n
    assert corrected_holds(longest, cosine, others, longest)
    assert not corrected_holds(longest, cosine, others, 0.99 * longest)
    assert not corrected_holds(longest, cosine, others, longest, more=0.001)
    # If g < R, the cosine may be -1: k* = -e q, k_i = -(g + e) q.
    small = longest / 1000
    assert excess(-small, [-longest] * n) > 0.99 * longest                             # for g up to R


@pytest.mark.claim("KD-10e")
@given(bound=st.fractions(1, 100), share=st.fractions(-1, 1))
def test_products_stay_below_the_bound_from_one_on(bound, share):
    """|k.q| <= ||k|| < R <= M, in squares, for k = share * R q."""
    assert product(1, share) ** 2 * bound <= bound**2


@pytest.mark.claim("KD-10e")
def test_products_reject_a_bound_below_one():
    bound, found = Fraction(1, 4), product(Fraction(2, 5), -1)
    assert found**2 < bound
    assert not found >= -bound


def product(length: Fraction, cosine: Fraction) -> Fraction:
    """k . q of a key of this length, for ||q|| = 1."""
    return length * cosine


@pytest.mark.claim("KD-10f")
@given(length=st.fractions(0, 9), bound=st.fractions(1, 100), cosine=st.fractions(0, 1))
def test_product_is_at_most_bound_times_cosine_for_cosines_that_are_not_negative(length, bound, cosine):
    assume(length**2 < bound)
    assert product(length, cosine) <= product(bound, cosine)


@pytest.mark.claim("KD-10f")
def test_product_rejects_a_negative_cosine_and_a_bound_below_one():
    assert not product(Fraction(1, 10), -1) <= product(1, -1)                          # the short key of KD-10a
    assert not product(Fraction(2, 5), 1) <= product(Fraction(1, 4), 1)


@pytest.mark.claim("KD-10g")
@given(length=st.fractions(0, 9), bound=st.fractions(0, 100), cosine=st.fractions(0, 1))
def test_product_is_at_least_minus_bound_times_cosine_for_cosines_that_are_not_negative(length, bound, cosine):
    assert product(length, cosine) >= -product(bound, cosine)


@pytest.mark.claim("KD-10g")
@given(length=st.fractions(0, 9), bound=st.fractions(Fraction(1, 100), 100), cosine=st.fractions(-1, Fraction(-1, 100)))
def test_product_rejects_every_negative_cosine_as_a_lower_bound(length, bound, cosine):
    assert not product(length, cosine) >= -product(bound, cosine)
    assert not product(Fraction(1, 2), -1) >= -product(1, -1)                          # k* = -q / 2, M = 1


# ---- KD-11: collinearity ---------------------------------------------------------------------------------------------


@pytest.mark.claim("KD-11a")
def test_heavy_key_may_be_orthogonal_to_the_query():
    """R = 15, 1000 keys k_i = -R q, and k* = R r with r.q = 0. k* has 99.97 % of the weight and cosine 0."""
    n, longest = 1000, 15.0
    weight = 1 / (1 + n * math.exp(-longest))
    assert weight > 0.999
    assert excess(0.0, [-longest] * 5) == longest
    assert printed_bound(longest, n, longest**2) < -0.97                               # the bound of the theorem
    # For w = .99, g is below R, so even k* = (g - R) q is possible, which is opposite to q.
    opposite = logit(0.99) + math.log(n) - longest
    assert -3.50 < opposite < -3.49
    # The slack is one of logit(w), whose derivative is 1 / (w (1 - w)).
    error = abs(weight_of(opposite, [-longest] * n) - 0.99)
    assert error <= slack_of(0.99, n, longest) * 0.99 * (1 - 0.99)
    # With shorter keys, collinearity is forced: the same weight with R = 6 needs a cosine above .9.
    assert (math.log(0.99 / 0.01) + math.log(n)) / 6 - 1 > 0.9


@pytest.mark.claim("KD-11b")
@given(longest=st.floats(0.01, 300), share=st.floats(-1, 1), n=counts)
def test_printed_bound_is_not_positive_from_a_bound_of_one_on(longest, share, n):
    """g <= 2R, and log((e^g + n) / (n + 1)) is below g by at least the smaller of g / 4 and 1/2. So the left side is
    below 1 / R - 1 by more than 1e-6, which is far above rounding errors."""
    left = printed_bound(2 * longest * share, n, longest**2)
    assert left < 1 / longest - 1
    assert left < 0 or longest < 1


@pytest.mark.claim("KD-11b")
def test_printed_bound_rejects_99_percent_of_its_limit_and_a_bound_below_one():
    assert not printed_bound(200.0, 1, 100.0**2) + 1 <= 0.99 / 100
    assert not printed_bound(1.0, 1, 0.25) <= 0


def forced(weight: float, n: int, longest: float) -> float | None:
    """The largest cosine that a weight among n keys of length R or less forces. None if it forces none."""
    reach = (logit(weight) + math.log(n)) / longest
    return reach - 1 if reach >= 1 else None


@pytest.mark.claim("KD-11c")
@many
@given(
    data=st.data(), longest=st.floats(0.1, 8), length=st.floats(0, 1) | st.just(1.0),
    cosine=st.floats(-1, 1) | st.just(-1.0), n=st.integers(1, 20),
)
def test_weights_force_cosines(data, longest, length, cosine, n):
    """The attention weight of any k* forces at most the cosine that k* has. Near g = R, rounding decides."""
    others = data.draw(st.just([-longest] * n) | st.lists(shares.map(lambda x: longest * x), min_size=n, max_size=n))
    weight = weight_of(longest * length * cosine, others)
    slack = slack_of(weight, n, longest) / longest
    found = forced(weight, n, longest)
    assert found is None or found <= cosine + slack or abs(found) <= slack


@pytest.mark.claim("KD-11c")
@given(longest=st.floats(0.1, 8), share=st.floats(0.01, 1.99), n=st.integers(1, 20))
def test_no_weight_forces_a_larger_cosine(longest, share, n):
    """Among keys k_i = -R q, a k* of length R or less has the weight with g = share * R and just the cosine that this
    weight forces, or the cosine -1 if it forces none."""
    product = longest * (share - 1)
    weight = weight_of(product, [-longest] * n)
    slack = slack_of(weight, n, longest) / longest
    assert abs(logit(weight) + math.log(n) - share * longest) <= slack * longest
    found = forced(weight, n, longest)
    if share >= 1 + slack:
        assert found is not None and abs(found - product / longest) <= slack           # k* has length R
        assert not found >= product / longest + 0.001                                  # so it forces no more
    elif share <= 1 - slack:
        assert found is None and abs(product) <= longest                               # k* = -|product| q, cosine -1


# ---- KD-15: attention from keys alone --------------------------------------------------------------------------------


@pytest.mark.claim("KD-15a")
@given(keys=direction_sets())
def test_opposite_queries_rank_the_same_keys_in_opposite_order(keys):
    """The key with the largest weight for one query has the smallest for the other. So no ranking that depends on keys
    only agrees with both."""
    assume(any(mean(keys)))
    query = scaled(-ONE, mean(keys))
    logits = [dot(query, key) for key in keys]
    opposite = [dot(scaled(-ONE, query), key) for key in keys]
    assert opposite == [-x for x in logits]
    first = kept(keys, 1)[0]
    assert logits[first] == max(logits)
    assert opposite[first] == min(opposite)
    assert opposite[first] < max(opposite) or len(set(logits)) == 1


@pytest.mark.claim("KD-15b")
@many
@given(keys=direction_sets(), factor=st.fractions(0, 100).filter(bool), length=st.fractions(0, 100).filter(bool))
def test_keydiff_ranks_by_attention_of_a_query_opposite_to_the_anchor(keys, factor, length):
    """For q = -c mu and keys of one length, the logits are -c ||k|| mu . k^_i."""
    logits = [dot(scaled(-factor, mean(keys)), scaled(length, key)) for key in keys]
    for budget in range(1, len(keys) + 1):
        assert smallest([-x for x in logits], budget) == kept(keys, budget)


@pytest.mark.claim("KD-15b")
def test_ranking_by_attention_rejects_another_query_and_keys_of_several_lengths():
    keys = [unit((65, 0)), unit((39, 52)), unit((-39, 52))]
    query = scaled(-ONE, mean(keys))
    assert smallest([-dot(query, key) for key in keys], 1) == kept(keys, 1)
    for other in (mean(keys), vector(1, 0)):
        assert smallest([-dot(other, key) for key in keys], 1) != kept(keys, 1)
    apart = [vector(-1, 0), unit((-39, 52)), *[vector(1, 0)] * 3]                      # both have positive logits
    query = scaled(-ONE, mean(apart))
    lengths = [1, 10, 1, 1, 1]
    logits = [dot(query, scaled(Fraction(x), key)) for x, key in zip(lengths, apart, strict=True)]
    assert min(logits[:2]) > 0
    assert smallest([-x for x in logits], 1) == (1,) != kept(apart, 1)
