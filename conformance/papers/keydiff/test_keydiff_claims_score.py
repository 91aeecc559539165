"""KeyDiff's two scores: clamp, anchors, precision and invariances (claims KD-1, KD-2, KD-5).

Pure mathematics is exact (see claim_geometry). The reference runs in float64 on keys with known, rational cosines. A
test named ..._rejects_... shows that a slightly changed statement fails, so the claim's own test is not empty.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from kvtwin.conformance.papers.claim_geometry import (
    LENGTHS,
    direction_sets,
    kept,
    mean,
    on_sphere,
    row_sums,
    smallest,
    total,
    unit,
    whole_vectors,
)
from kvtwin.conformance.papers.claim_math import Counted, Vector, add_up, dot, many, scaled, square, vector

pytestmark = pytest.mark.kind("claims")

U64, U32 = 2.0**-53, 2.0**-24  # unit roundoffs
ONE = Fraction(1)
CROSS = [vector(1, 0), vector(-1, 0)]                                                  # the anchor is zero


@pytest.fixture(scope="module")
def keydiff(twins):
    return twins.reference.keydiff


def gamma(count: float, u: float = U64) -> float:
    return count * u / (1 - count * u)


def signed_square(left: Vector, right: Vector) -> Fraction:
    """cos |cos|, which is rational and orders as the cosine does. Raises ZeroDivisionError if there is no cosine."""
    product = dot(left, right)
    return product * abs(product) / (square(left) * square(right))


# ---- KD-1: eq. 7 and eq. 8 -------------------------------------------------------------------------------------------

lengths = st.sampled_from([ONE, Fraction(1, 1000), Fraction(1000)]) | st.fractions(Fraction(1, 9), 9)


def long_keys(draw, keys: list[Vector]) -> list[Vector]:
    return [scaled(draw(lengths), key) for key in keys]


@pytest.mark.claim("KD-1a")
@many
@given(keys=direction_sets(), data=st.data())
def test_anchor_ranks_as_the_pairwise_sums(keys, data):
    """r_i = sum_j cos(k_i, k_j) = n mu . k^_i = n ||mu|| cos(mu, k_i)."""
    count, anchor, sums = len(keys), mean(keys), row_sums(keys)
    assume(any(anchor))
    cosines = [signed_square(anchor, key) for key in long_keys(data.draw, keys)]
    assert sums == [count * dot(anchor, key) for key in keys]
    assert [r * abs(r) for r in sums] == [count**2 * square(anchor) * c for c in cosines]
    for budget in range(1, count + 1):
        assert smallest(sums, budget) == smallest(cosines, budget) == kept(keys, budget)


@pytest.mark.claim("KD-1a")
def test_anchor_rejects_a_vanishing_mean_a_zero_key_and_other_keys_only():
    assert row_sums(CROSS) == [0, 0]                                                   # eq. 7 has a value
    with pytest.raises(ZeroDivisionError):
        signed_square(mean(CROSS), CROSS[0])                                           # eq. 8 has none
    with pytest.raises(ZeroDivisionError):
        signed_square(vector(1, 0), vector(0, 0))
    three = [vector(1, 0), vector(0, 1), vector(0, 1)]
    assert row_sums(three) != [2 * dot(mean(three), key) for key in three]             # n - 1 instead of n


def score_error(size: int, dim: int, u: float = U64) -> float:
    """The error bound of sum_j k^_j . k^_i in floating point, per token and divided by n.

    A component of k^ has these relative errors: u for the division by the largest magnitude; for the norm, 2u from the
    two factors of a square, u for the square, d - 1 additions, halved by the root, and u for the root; and u for the
    last division. Together: (d/2 + 4) u. A product of two such components, summed over d and n in any order, has 2 (d/2
    + 4) + d + n units of u, relative to absolute terms that sum to at most n.
    """
    return gamma(2 * dim + size + 8, u)


def cosine_error(size: int, dim: int, length: float) -> float:
    """The error bound of cos(sum, k_i). length = ||sum_j k^_j||.

    The error of the sum is a vector with a norm of at most n gamma(d/2 + 4 + n), which changes the direction by 2 /
    length times as much. Normalising both vectors and multiplying them costs 2 (d/2 + 4) + d.
    """
    return 2 * size * gamma(dim / 2 + size + 4) / length + gamma(2 * dim + 8)


def cache_of(keys: list[tuple[int, ...]], exponents: list[int], device) -> Tensor:
    """Integer vectors times powers of two, as exact float64 keys [1, 1, S, D]."""
    rows = [[math.ldexp(x, exponent) for x in key] for key, exponent in zip(keys, exponents, strict=True)]
    return torch.tensor(rows, dtype=torch.float64, device=device)[None, None]


@st.composite
def whole_caches(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[int]]:
    dim = draw(st.sampled_from(sorted(LENGTHS)))
    keys = draw(st.lists(st.sampled_from(whole_vectors(dim)), min_size=2, max_size=8))
    return keys, draw(st.lists(st.integers(-30, 30), min_size=len(keys), max_size=len(keys)))


def furthest(found: Tensor, expected: list[Fraction]) -> float:
    return max(abs(float(Fraction(x) - y)) for x, y in zip(found.flatten().tolist(), expected, strict=True))


@pytest.mark.claim("KD-1a")
@given(cache=whole_caches(), budget=st.integers(1, 8))
def test_reference_scores_are_the_row_sums(keydiff, device, cache, budget):
    whole, exponents = cache
    keys, key = [unit(v) for v in whole], cache_of(whole, exponents, device)
    size, dim, budget = len(keys), len(keys[0]), min(budget, len(keys))
    sums, slack = row_sums(keys), size * score_error(size, dim)
    assert furthest(keydiff.pairwise_score(key), [-r for r in sums]) <= slack
    length = math.sqrt(square(total(keys)))
    if length:
        cosine = [Fraction(float(r) / length) for r in sums]                           # error 2u, less than the bound
        assert furthest(-keydiff.score(key), cosine) <= cosine_error(size, dim, length)
    stays = keydiff.evict(key, key, budget).kept[0, 0].tolist()
    goes = [index for index in range(size) if index not in stays]
    assert len(set(stays)) == budget
    assert all(sums[i] <= sums[j] + 2 * slack for i in stays for j in goes)


@pytest.mark.claim("KD-1a")
def test_reference_scores_reject_a_thousandth_more_and_the_other_end(keydiff, device):
    whole = [(15, 0, 0), (10, 10, 5), (-2, 5, 14), (2, -5, 14)]
    keys, key = [unit(v) for v in whole], cache_of(whole, [0, 3, -7, 20], device)
    sums, slack = row_sums(keys), 4 * score_error(4, 3)
    assert furthest(keydiff.pairwise_score(key), [-r for r in sums]) <= slack
    assert not furthest(keydiff.pairwise_score(key), [-r * Fraction(1001, 1000) for r in sums]) <= slack
    stays = keydiff.evict(key, key, 2).kept[0, 0].tolist()
    assert tuple(stays) == kept(keys, 2) != smallest([-r for r in sums], 2)            # not the most similar ones


@pytest.mark.claim("KD-1b")
@pytest.mark.parametrize(("n", "d"), [(2, 1), (3, 4), (7, 2), (16, 8)])
def test_row_sums_of_eq_7_take_linear_time(n, d):
    """K^ (K^' 1), evaluated from the right, needs no matrix of cosines and gives the same sums."""
    def counted(counts: Counter[str]) -> list[list[Counted]]:
        return [[Counted((i * j) % 7 - 3, counts) for j in range(d)] for i in range(n)]

    linear: Counter[str] = Counter()
    keys = counted(linear)
    anchor = [add_up(column) for column in zip(*keys, strict=True)]
    sums = [add_up(x * y for x, y in zip(key, anchor, strict=True)) for key in keys]
    quadratic: Counter[str] = Counter()
    keys = counted(quadratic)
    slow = [add_up(add_up(x * y for x, y in zip(key, other, strict=True)) for other in keys) for key in keys]
    assert [s.number for s in sums] == [s.number for s in slow]
    assert linear.total() == 3 * n * d - n - d != 3 * n * d
    assert quadratic.total() == 2 * n * n * d - n
    assert linear.total() < quadratic.total()


# ---- KD-2: clamps, anchors, precision --------------------------------------------------------------------------------

# The cosines with the first axis are +-.8, +-.6 and about -.6. The anchor is tiny and lies on that axis.
X, Y = on_sphere((Fraction(500_001, 1_000_000),))                                      # 1/2 would give (.6, .8)
WIDE = [unit((52, 39)), unit((52, -39)), unit((-52, 39)), unit((-52, -39))]
NARROW = [unit((39, 52)), unit((39, -52)), vector(-X, Y), vector(-X, -Y)]


def clamped(anchor: Vector, key: Vector, floor: Fraction) -> Fraction:
    """mu . k / max(||mu|| ||k||, eps) of A.2.1, times its absolute value, as in signed_square. floor = eps^2."""
    product = dot(anchor, key)
    return product * abs(product) / max(square(anchor) * square(key), floor)


def clamped_apart(anchor: Vector, key: Vector, floor: Fraction) -> Fraction:
    """The same with each norm clamped separately, as in torch."""
    product = dot(anchor, key)
    return product * abs(product) / (max(square(anchor), floor) * max(square(key), floor))


@pytest.mark.claim("KD-2a")
def test_clamped_product_ranks_by_length():
    """With cosines .8 and .6, lengths 1 and 100, and eps ten times the anchor's length, the second ranks as more
    similar."""
    anchor = mean(WIDE + NARROW)
    assert 0 < square(anchor) < Fraction(1, 10**10)
    assert anchor[0] > 0 == anchor[1]
    floor = 100 * square(anchor)
    short, long = WIDE[0], scaled(Fraction(100), NARROW[0])
    assert signed_square(anchor, short) == Fraction(8, 10) ** 2 > signed_square(anchor, long) == Fraction(6, 10) ** 2
    assert clamped(anchor, short, floor) == Fraction(8, 100) ** 2 < clamped(anchor, long, floor) == Fraction(6, 10) ** 2
    assert clamped(anchor, short, square(anchor)) > clamped(anchor, long, square(anchor))   # no effect here


@pytest.mark.claim("KD-2b")
@many
@given(keys=direction_sets(), data=st.data(), floor=st.fractions(0, 2).filter(bool))
def test_ranking_without_division_needs_no_clamp(keys, data, floor):
    """k^ . sum ranks as the cosine does. So do cosines with separately clamped norms, for keys of length eps or
    more."""
    anchor = mean(keys)
    assume(any(anchor))
    scale = math.isqrt(math.ceil(9 * floor)) + 1
    long = [scaled(data.draw(lengths) + scale, key) for key in keys]
    assert all(square(key) >= floor for key in long)
    apart = [clamped_apart(anchor, key, floor) for key in long]
    for budget in range(1, len(keys) + 1):
        assert smallest(apart, budget) == kept(keys, budget)
    assert kept(CROSS, 1) == (1,)                                                      # defined without an anchor


@pytest.mark.claim("KD-2b")
def test_ranking_rejects_keys_shorter_than_the_clamp(keydiff, device):
    anchor, wide, narrow = vector(1, 0), unit((52, 39)), unit((39, 52))
    floor = Fraction(1, 10**16)
    shrunk = scaled(Fraction(1, 10**9), wide)
    assert signed_square(anchor, shrunk) > signed_square(anchor, narrow)
    assert clamped_apart(anchor, shrunk, floor) < clamped_apart(anchor, narrow, floor)
    # The reference has no clamp: a key of any length ranks by its direction.
    keys = [(65, 0), (52, 39), (39, 52)]
    for exponent in (0, -400, 400):
        assert keydiff.evict(*[cache_of(keys, [0, exponent, 0], device)] * 2, 2).kept.tolist() == [[[0, 2]]]


def kept_by_mean(keys: list[Vector], budget: int) -> tuple[int, ...]:
    """The kept tokens with mu(K), the mean of the unnormalised keys, as the anchor."""
    return smallest([signed_square(mean(keys), key) for key in keys], budget)


@pytest.mark.claim("KD-2c")
@many
@given(keys=direction_sets(), length=lengths)
def test_mean_of_keys_of_one_length_is_as_good_an_anchor(keys, length):
    assume(any(mean(keys)))
    for budget in range(1, len(keys) + 1):
        assert kept_by_mean([scaled(length, key) for key in keys], budget) == kept(keys, budget)


@pytest.mark.claim("KD-2c")
def test_mean_of_keys_rejects_keys_of_several_lengths(keydiff, device):
    keys = [vector(1, 0), vector(0, 1), unit((39, 52))]
    long = [scaled(Fraction(100), keys[0]), *keys[1:]]
    assert kept(keys, 2) == (0, 1)
    assert kept_by_mean(long, 2) == (1, 2)
    key = cache_of([(65, 0), (0, 65), (39, 52)], [7, 0, 0], device)
    assert keydiff.evict(key, key, 2).kept.tolist() == [[[0, 1]]]
    assert keydiff.evict(key, key, 2, anchor="mean").kept.tolist() == [[[1, 2]]]


@pytest.mark.claim("KD-2d")
@pytest.mark.parametrize("seed", [0, 1])
def test_bfloat16_scores_of_collinear_keys_are_a_handful_of_numbers(keydiff, device, seed, record_property):
    """2048 bfloat16 keys around one direction, with cosines with the anchor from .98 to .995.

    Between 1/2 and 1, bfloat16 numbers are 2^-8 apart. So even exact cosines, rounded once, give at most range * 2^8 +
    2 distinct scores. In float32 the ranking equals that of float64, except for tokens closer than both errors.
    """
    size, dim, budget = 2048, 64, 512
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, 1, size, dim, generator=generator)
    key = (torch.randn(1, 1, 1, dim, generator=generator) + 0.15 * noise).bfloat16().to(device)
    exact = -keydiff.score(key.double())[0, 0].cpu()
    rounded = exact.bfloat16()
    low, high = exact.min().item(), exact.max().item()
    assert low > 0.97                                                                  # collinear, as appendix C says
    assert rounded.unique().numel() <= (high - low) * 2**8 + 2 < 8
    single = keydiff.score(key)[0, 0].cpu()
    assert single.dtype == torch.float32
    assert single.unique().numel() > size // 2

    length = exact.mean().item()                             # ||mu||: the mean of mu . k^_i = ||mu|| cos_i is ||mu||^2
    sums = size * length * exact
    # Twice the error of the float64 cosines: for the cosines and for their mean.
    slack = size * (score_error(size, dim, U32) + 2 * cosine_error(size, dim, size * length))
    stays = torch.zeros(size, dtype=torch.bool)
    stays[keydiff.evict(key, key, budget).kept[0, 0].cpu()] = True
    assert sums[stays].max() <= sums[~stays].min() + 2 * slack
    cut = sums.sort().values[budget]
    assert ((sums - cut).abs() > 2 * slack).double().mean() >= 0.5                     # most tokens are decided
    best = torch.zeros(size, dtype=torch.bool)
    best[rounded.double().sort(stable=True).indices[:budget]] = True
    assert not sums[best].max() <= sums[~best].min() + 2 * slack
    record_property("share of the exact selection that bfloat16 finds", f"{(best & stays).sum().item() / budget:.2f}")


# ---- KD-5: invariances -----------------------------------------------------------------------------------------------

HALF_TURN = [[1, 2, 2], [2, 1, -2], [2, -2, 1]]                                        # 3 times an orthogonal matrix
SHEAR = [[3, 1, 0], [0, 3, 0], [0, 0, 3]]


def times(matrix: list[list[int]], key: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sum(a * x for a, x in zip(row, key, strict=True)) for row in matrix)


three_dimensional = st.lists(st.sampled_from(whole_vectors(3)), min_size=2, max_size=6)


def off_by(keydiff, device, before: list[tuple[int, ...]], after: list[tuple[int, ...]], exponents=None) -> float:
    """The difference of the reference's pairwise scores of `after` from the exact ones of `before`, in units of the
    bound."""
    exact = [-r for r in row_sums([unit(v) for v in before])]
    found = keydiff.pairwise_score(cache_of(after, exponents or [0] * len(after), device))
    return furthest(found, exact) / (len(before) * score_error(len(before), 3))


@pytest.mark.claim("KD-5a")
@given(keys=three_dimensional, data=st.data())
def test_scores_follow_a_permutation_of_the_tokens(keydiff, device, keys, data):
    order = data.draw(st.permutations(range(len(keys))))
    moved = [keys[index] for index in order]
    assert row_sums([unit(v) for v in moved]) == [row_sums([unit(v) for v in keys])[index] for index in order]
    assert off_by(keydiff, device, moved, moved) <= 1


@pytest.mark.claim("KD-5a")
def test_permutation_rejects_scores_that_stay_in_place(keydiff, device):
    keys = [(15, 0, 0), (10, 10, 5), (-2, 5, 14)]
    assert off_by(keydiff, device, keys, keys) <= 1
    assert not off_by(keydiff, device, keys, keys[::-1]) <= 1


@pytest.mark.claim("KD-5b")
@given(keys=three_dimensional, data=st.data())
def test_scores_ignore_the_length_of_every_key(keydiff, device, keys, data):
    exponents = data.draw(st.lists(st.integers(-300, 300), min_size=len(keys), max_size=len(keys)))
    assert off_by(keydiff, device, keys, keys, exponents) <= 1
    same = keydiff.score(cache_of(keys, [0] * len(keys), device))
    assert torch.equal(keydiff.score(cache_of(keys, exponents, device)), same)         # powers of two: exact


@pytest.mark.claim("KD-5b")
def test_lengths_reject_a_negative_factor_and_a_shift(keydiff, device):
    keys = [(15, 0, 0), (10, 10, 5), (-2, 5, 14)]
    assert not off_by(keydiff, device, keys, [(-15, 0, 0), *keys[1:]]) <= 1
    assert not off_by(keydiff, device, keys, [(x + 1, y, z) for x, y, z in keys]) <= 1
    assert not keydiff.score(cache_of(keys, [3, 0, 0], device), similarity="dot").equal(
        keydiff.score(cache_of(keys, [0, 0, 0], device), similarity="dot")
    )


@pytest.mark.claim("KD-5c")
@given(keys=three_dimensional, signs=st.tuples(*[st.sampled_from([1, -1])] * 3), axes=st.permutations(range(3)))
def test_scores_ignore_an_orthogonal_map_of_all_keys(keydiff, device, keys, signs, axes):
    turned = [tuple(signs[i] * times(HALF_TURN, key)[axes[i]] for i in range(3)) for key in keys]
    assert off_by(keydiff, device, keys, turned) <= 1


@pytest.mark.claim("KD-5c")
def test_orthogonal_map_rejects_a_shear(keydiff, device):
    keys = [(15, 0, 0), (10, 10, 5), (-2, 5, 14)]
    assert off_by(keydiff, device, keys, [times(HALF_TURN, key) for key in keys]) <= 1
    assert not off_by(keydiff, device, keys, [times(SHEAR, key) for key in keys]) <= 1


def rotary(position: int, key: tuple[int, int]) -> tuple[int, int]:
    """The rotary embedding of one pair of channels: 5^position times the rotation by position * arctan(4/3)."""
    x, y = key
    for _ in range(position):
        x, y = 3 * x - 4 * y, 4 * x + 3 * y
    return x, y


@pytest.mark.claim("KD-5d")
def test_rotary_embedding_changes_the_kept_tokens(keydiff, device):
    """Tokens at positions 0, 2, 3, 4 with keys (1, 0), (1, 0), (-1, 0), (1, 0). The third is the least similar before
    the embedding, but not after it."""
    positions, plain = [0, 2, 3, 4], [(65, 0), (65, 0), (-65, 0), (65, 0)]
    turned = [rotary(p, key) for p, key in zip(positions, plain, strict=True)]

    def stay(keys: list[tuple[int, int]]) -> list[int]:
        key = cache_of(keys, [0] * len(keys), device)
        return keydiff.evict(key, key, 1).kept.flatten().tolist()

    assert stay(plain) == [2]
    assert stay(turned) != [2]
    assert stay([rotary(1, key) for key in plain]) == stay(plain)                     # the same rotation for all: KD-5c
