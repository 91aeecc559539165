"""LongFlow's score, its cost, and the term that it leaves out: eq. 6, 8, 12 and 13, D.1 (claims LF-1 to LF-4).

Arithmetic is exact (see claim_math), except in the tests of the twins. A test named ..._rejects_... shows that a
slightly stronger statement fails, so the claim's own test is not empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtwin.conformance.capacity import MODELS
from kvtwin.conformance.cases.oracle import attend
from kvtwin.conformance.judge.bounds import arithmetic
from kvtwin.conformance.judge.checkers.longflow import linear_score_error
from kvtwin.conformance.papers.claim_math import (
    Counted,
    Vector,
    add_up,
    attention,
    caches,
    combine,
    components,
    effect,
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


def remainder(mass, values, index) -> Vector:
    """R = (o - o^(\\i)) - c (section 3.3), from the definitions."""
    return minus(effect(mass, values, index), scaled(softmax(mass)[index], values[index]))


# ---- LF-1: eq. 6 and its cost ----------------------------------------------------------------------------------------


@pytest.mark.claim("LF-1a")
@many
@given(weight=st.fractions(0, 1), value=st.lists(components, min_size=1, max_size=4))
def test_score_is_weight_times_norm(weight, value):
    assert norm1(scaled(weight, value)) == weight * norm1(value)


@pytest.mark.claim("LF-1a")
def test_score_rejects_negative_weights_and_signed_sums():
    value = vector(1, -1)
    assert norm1(scaled(-HALF, value)) != -HALF * norm1(value)
    assert norm1(scaled(HALF, value)) != HALF * abs(sum(value))


@pytest.mark.claim("LF-1a")
@pytest.mark.parametrize("logits", [[0.0], [0.0] * 4, [1.0, -2.0, 0.5, 3.0, 0.0, -1.0, 2.0]])
def test_twins_score_is_weight_times_norm(longflow, device, logits):
    """Compare with the left side of eq. 6 in float64, divided by D, within the bounds of bounds.py."""
    values = torch.tensor([[(-1.0) ** d * (j + d) for d in range(16)] for j in range(len(logits))])
    case = one_head(logits, values, device)
    score = longflow.decode_attention(**case).score[0].cpu().double()
    weight = torch.tensor(logits, dtype=torch.float64).softmax(0)[:, None]
    left = (weight * values.double()).abs().sum(1) / 16                                # ||a v||_1 / D
    slack = linear_score_error(attend(**case), arithmetic(torch.float32), per_head=False)[0].cpu()
    assert (abs(score - left) <= slack).all()
    assert not (abs(score - left * 0.99) <= slack).any()
    assert not (abs(score - (weight * values.double()).sum(1).abs() / 16) <= slack).any()   # |sum| is not sum ||


@pytest.mark.claim("LF-1d")
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_output_is_the_sum_of_contributions_and_does_not_determine_the_scores(longflow, device, factor):
    """Two tokens with values v and -v and weights of 1/2: the contributions sum to 0 for every v. Scores are L1 norms
    divided by D."""
    case = one_head([0.0, 0.0], factor * torch.stack((torch.ones(16), -torch.ones(16))), device)
    result = longflow.decode_attention(**case)
    assert not bool(result.output.any())
    slack = linear_score_error(attend(**case), arithmetic(torch.float32), per_head=False)[0].cpu()
    score = result.score[0].cpu().double()
    assert ((score - factor / 2).abs() <= slack).all()
    assert not ((score - 2 * factor / 2).abs() <= slack).any()


def decode(query, keys, values, counts) -> tuple[list[list[Counted]], Counted, Counter[str]]:
    """Attention of one head, operation by operation: contributions [n][d], the denominator, and the count so far."""
    scale = Counted(1, counts)
    weight = [(add_up(q * k for q, k in zip(query, key, strict=True)) * scale).exp() for key in keys]
    denominator = add_up(weight)
    contribution = [[p * v for v in value] for p, value in zip(weight, values, strict=True)]
    for column in zip(*contribution, strict=True):
        add_up(column) / denominator                                                   # the output, for its cost
    return contribution, denominator, Counter(counts)


@pytest.mark.claim("LF-1b")
@pytest.mark.parametrize(("n", "d"), [(1, 1), (2, 3), (5, 4), (16, 8)])
def test_score_costs_half_an_attention(n, d):
    counts: Counter[str] = Counter()
    row = [Counted(1, counts)] * d
    contribution, denominator, attention_cost = decode(row, [row] * n, [row] * n, counts)
    assert attention_cost.total() == 4 * n * d + 2 * n - 1
    for vector_ in contribution:
        add_up(abs(x) for x in vector_) / denominator
    extra = counts - attention_cost
    assert extra == Counter(abs=n * d, add=n * (d - 1), divide=n)
    assert extra.total() == 2 * n * d != 0                                             # "no overhead" would be 0
    # 2nd in addition to 4nd and lower terms: together at least 7/5, and in the limit 3/2, of attention's operations
    share = Fraction(extra.total(), attention_cost.total())
    assert Fraction(2 * d, 4 * d + 2) < share < HALF or (n, d) == (1, 1)
    assert 2 * n * d != 2 * n * d - n                                                  # one addition fewer per token


def floats(value: object) -> Iterator[torch.Tensor]:
    """The floating-point tensors of an attribute."""
    for one in value if isinstance(value, tuple) else (value,):
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            yield one


def decoded(state, device, *, poison: bool) -> list[list[float]]:
    """Outputs and tokens in the cache over 8 steps. poison: before each step, NaN in all floating-point tensors of the
    state but keys and values."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(8):
        query, key, value = torch.randn(3, 1, 1, 16, generator=generator).to(device)
        kept = {one.untyped_storage().data_ptr() for one in (state.key, state.value)}
        for one in [one for attribute in vars(state).values() for one in floats(attribute)] if poison else ():
            if one.untyped_storage().data_ptr() not in kept:
                one.fill_(torch.nan)
        output = state.step(query, key, value)
        found.append([*output.flatten().tolist(), *state.positions.flatten().tolist()])
    return found


@pytest.mark.claim("LF-1b")
@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_no_score_is_kept_from_step_to_step(twins, side, device):
    """What section 2.2 calls auxiliary storage. H2O needs it: it sums weights over all steps."""
    sizes = {
        "batch": 1, "query_heads": 1, "key_value_heads": 1, "head_dim": 16, "dtype": torch.float32, "device": device,
    }
    module = getattr(twins, side)
    own, other = module.longflow, module.baselines.h2o
    plain, poisoned = (
        decoded(own.LongFlowState(own.LongFlowConfig(budget=4), **sizes), device, poison=poison)
        for poison in (False, True)
    )
    assert plain == poisoned
    plain, poisoned = (
        decoded(other.H2OState(other.H2OConfig(4, 1, recent=1), **sizes), device, poison=poison)
        for poison in (False, True)
    )
    assert plain != poisoned


@pytest.mark.claim("LF-1b")
@pytest.mark.parametrize(
    ("scores", "share"),
    [
        (torch.zeros(1, 1, dtype=torch.bfloat16), "0.05"),                             # attention.py, for all heads
        (torch.zeros(1, 8, 1), "0.78"),                                                # attention_new.py, groups of 1
        (torch.zeros(1, 32, 1), "3.12"),                                               # and of 4
    ],
)
def test_scores_of_a_step_are_a_small_share_of_the_cache(scores, share):
    """Bytes per token of the tensors that the released kernels allocate, over those of keys and values in bfloat16."""
    cached = MODELS["llama-3.1-8b"].bytes_per_token // MODELS["llama-3.1-8b"].layers
    assert round(100 * Fraction(scores.nbytes, cached), 2) == Fraction(share)


@pytest.mark.claim("LF-1c")
@pytest.mark.parametrize(("n", "d"), [(1, 1), (2, 3), (5, 4), (16, 8)])
def test_cached_norms_make_the_score_one_product_per_token(n, d):
    counts: Counter[str] = Counter()
    row = [Counted((-1) ** i * i, counts) for i in range(d)]
    weight = [Counted(j + 1, counts) for j in range(n)]
    cached = [Counted(norm1(tuple(x.number for x in row)), Counter())] * n
    fast = [p * norm for p, norm in zip(weight, cached, strict=True)]
    assert counts.total() == n and counts.total() != n - 1
    slow = [add_up(abs(p * x) for x in row) for p in weight]
    assert [x.number for x in fast] == [x.number for x in slow]
    # the norm of the new token: d absolute values and d - 1 additions per step
    counts.clear()
    add_up(abs(x) for x in row)
    assert counts.total() == 2 * d - 1


# ---- LF-2: eq. 8 and 11 ----------------------------------------------------------------------------------------------


def error_terms(before, after, values, index) -> tuple[Fraction, Fraction, Fraction]:
    """||o' - o'^(\\i)||^2, ||c'||^2 and ||c||^2 of eq. 8, at steps t + 1, t + 1 and t."""
    exact = square(effect(after, values, index))
    return exact, *(square(scaled(softmax(mass)[index], values[index])) for mass in (after, before))


def split(exact: Fraction, middle: Fraction, ours: Fraction) -> tuple[Fraction, Fraction, Fraction]:
    """The error of the score, and its parts from the weights that grow and from the next query (eq. 8)."""
    return abs(exact - ours), abs(exact - middle), abs(middle - ours)


@pytest.mark.claim("LF-2")
@many
@given(cache=caches(), data=st.data())
def test_error_splits_in_two(cache, data):
    before, values = cache
    after = data.draw(st.lists(masses, min_size=len(before), max_size=len(before)))
    error, *parts = split(*error_terms(before, after, values, index=0))
    assert error <= sum(parts)


@pytest.mark.claim("LF-2")
def test_error_split_rejects_either_term_alone():
    values = [vector(1), vector(-1)]
    drifted = error_terms(vector(1, 1), vector(2, 1), values, 0)
    error, *parts = split(*drifted)
    assert error == sum(parts)                                                         # so 0.99 of the sum also fails
    assert error > max(parts)


# ---- LF-3: eq. 12 ----------------------------------------------------------------------------------------------------


def printed_remainder(mass, values, index) -> Vector:
    """Eq. 12: -a / (1 - a) (o - c)."""
    weight = softmax(mass)[index]
    rest = minus(attention(mass, values), scaled(weight, values[index]))
    return scaled(-weight / (1 - weight), rest)


@pytest.mark.claim("LF-3a")
@many
@given(cache=caches())
def test_remainder_of_the_denominator_approximation(cache):
    mass, values = cache
    for index in range(len(mass)):
        assert remainder(mass, values, index) == printed_remainder(mass, values, index)


@pytest.mark.claim("LF-3a")
def test_remainder_rejects_the_wrong_sign_and_a_single_token():
    mass, values = vector(3, 1), [vector(1), vector(2)]
    assert remainder(mass, values, 0) != scaled(Fraction(-1), printed_remainder(mass, values, 0))
    with pytest.raises(ZeroDivisionError):                                             # a = 1: nothing would remain
        printed_remainder(mass[:1], values[:1], 0)


@pytest.mark.claim("LF-3b")
@many
@given(cache=caches())
def test_effect_in_closed_form(cache):
    mass, values = cache
    full = attention(mass, values)
    for index, (weight, value) in enumerate(zip(softmax(mass), values, strict=True)):
        rest = attention(without(mass, index), without(values, index))
        assert remainder(mass, values, index) == scaled(-weight, rest)
        assert effect(mass, values, index) == scaled(weight, minus(value, rest))
        assert effect(mass, values, index) == scaled(weight / (1 - weight), minus(value, full))


@pytest.mark.claim("LF-3b")
def test_effect_rejects_forgetting_the_rescaling():
    mass, values = vector(3, 1), [vector(1), vector(2)]
    assert effect(mass, values, 0) != scaled(Fraction(3, 4), minus(values[0], attention(mass, values)))


@pytest.mark.claim("LF-3c")
@pytest.mark.parametrize(("n", "d"), [(2, 1), (4, 3), (9, 5)])
def test_exact_effects_of_all_tokens_cost_less_than_one_attention(n, d):
    """Given o and the weights: a difference and its squared norm per token, 3d - 1 operations, and 4 for the factor
    a^2 / (1 - a)^2."""
    counts: Counter[str] = Counter()
    mass = [Fraction(j + 1) for j in range(n)]
    values = [vector(*((j * i) % 5 - 2 for i in range(d))) for j in range(n)]
    output = [Counted(x, counts) for x in attention(mass, values)]
    one = Counted(1, counts)
    exact = []
    for weight, value in zip(softmax(mass), values, strict=True):
        counted = Counted(weight, counts)
        factor = counted / (one - counted)
        difference = [Counted(v, counts) - o for v, o in zip(value, output, strict=True)]
        exact.append((factor * factor * add_up(x * x for x in difference)).number)
    assert exact == [square(effect(mass, values, index)) for index in range(n)]
    assert counts.total() == n * (3 * d + 3) != n * (3 * d + 2)
    # An attention with all tokens, and one without each candidate, which is what eq. 4 says.
    row = [Counted(1, Counter())] * d
    whole, one_less = (decode(row, [row] * m, [row] * m, row[0].counts)[2].total() for m in (n, n - 1))
    assert (one_less - whole, whole) == (4 * (n - 1) * d + 2 * (n - 1) - 1, 4 * n * d + 2 * n - 1)
    assert (counts.total() < whole) is (d > 1)
    assert (counts.total() < n * (one_less - whole)) is (n > 2)


@pytest.mark.claim("LF-3d")
@many
@given(cache=caches())
def test_weights_without_a_token(cache):
    mass, _ = cache
    for index, weight in enumerate(softmax(mass)):
        left = [a / (1 - weight) for a in without(softmax(mass), index)]
        assert left == softmax(without(mass, index))


@pytest.mark.claim("LF-3d")
def test_weights_without_a_token_reject_other_factors():
    mass = vector(3, 1, 2)
    for wrong in (Fraction(1), 1 + softmax(mass)[0]):
        assert [a * wrong for a in softmax(mass)[1:]] != softmax(mass[1:])


@pytest.mark.claim("LF-3e")
@many
@given(cache=caches())
def test_effect_with_one_denominator_is_the_contribution(cache):
    mass, values = cache
    total = sum(mass)
    full = combine([m / total for m in mass], values)
    for index, (weight, value) in enumerate(zip(softmax(mass), values, strict=True)):
        rest = combine([m / total for m in without(mass, index)], without(values, index))
        assert minus(full, rest) == scaled(weight, value)


@pytest.mark.claim("LF-3e")
def test_effect_with_one_denominator_rejects_two():
    mass, values = vector(3, 1), [vector(1), vector(2)]
    assert effect(mass, values, 0) != scaled(softmax(mass)[0], values[0])


# ---- LF-4: eq. 13 ----------------------------------------------------------------------------------------------------


def remainder_within(mass, values, index, bound: Callable[[Fraction], Fraction]) -> bool:
    """Whether ||R|| <= bound(a) V, in squares."""
    largest = max(map(square, values))
    return square(remainder(mass, values, index)) <= bound(softmax(mass)[index]) ** 2 * largest


@pytest.mark.claim("LF-4a")
@many
@given(cache=caches())
def test_remainder_bounds_of_the_paper(cache):
    mass, values = cache
    chain = (lambda a: a, lambda a: a * (1 + a) / (1 - a), lambda a: 2 * a / (1 - a))
    assert square(attention(mass, values)) <= max(map(square, values))                 # ||o|| <= V
    for index, weight in enumerate(softmax(mass)):
        assert remainder_within(mass, values, index, chain[1])
        assert remainder_within(mass, values, index, chain[2])
        assert all(small(weight) <= large(weight) for small, large in pairwise(chain))
        assert chain[2](weight) / chain[0](weight) == 2 / (1 - weight) > 2             # the factor by which it is loose


@pytest.mark.claim("LF-4a")
def test_remainder_bounds_reject_less_than_half():
    mass, values = vector(1, 1000), [vector(-1), vector(1)]
    assert not remainder_within(mass, values, 0, lambda a: Fraction(49, 100) * 2 * a / (1 - a))
    assert not remainder_within(mass, values, 0, lambda a: Fraction(99, 100) * a * (1 + a) / (1 - a))


@pytest.mark.claim("LF-4b")
@many
@given(cache=caches())
def test_remainder_is_at_most_the_weight_times_the_largest_value(cache):
    mass, values = cache
    assert all(remainder_within(mass, values, index, lambda a: a) for index in range(len(mass)))


@pytest.mark.claim("LF-4b")
@pytest.mark.parametrize("mass", [vector(1, 1, 1), vector(1, 10**6, 1), vector(10**6, 1, 1)])
def test_remainder_rejects_99_percent_when_the_others_agree(mass):
    values = [vector(0, 0), vector(3, 4), vector(3, 4)]
    assert remainder_within(mass, values, 0, lambda a: a)
    assert not remainder_within(mass, values, 0, lambda a: Fraction(99, 100) * a)
