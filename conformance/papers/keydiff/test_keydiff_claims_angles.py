"""The geometry of appendix C: lemma C.2, theorem C.3 and the remark after it (claims KD-12, KD-13).

Arithmetic is exact (see claim_geometry): a = cos(mean key, q), b = cos(k*, q), c = cos(mean key, k*) of rational unit
vectors. A test named ..._rejects_... shows that a slightly changed statement fails, so the claim's own test is not
empty.

Proof of KD-12c. The components of the two keys orthogonal to q have lengths sqrt(1 - a^2) and sqrt(1 - b^2), and their
dot product is c - a b. The claim is the Cauchy-Schwarz inequality, with equality if the components are collinear.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvtwin.conformance.papers.claim_geometry import LENGTHS, directions, on_sphere, unit
from kvtwin.conformance.papers.claim_math import Vector, components, dot, many, minus, scaled, square, vector

pytestmark = pytest.mark.kind("claims")

ONE, HALF = Fraction(1), Fraction(1, 2)
Q = vector(1, 0)


@st.composite
def triples(draw: st.DrawFn) -> tuple[Vector, Vector, Vector]:
    """q, the mean key and k*, as unit vectors."""
    dim = draw(st.sampled_from(sorted(LENGTHS)))
    return draw(st.tuples(*[directions(dim)] * 3))


def cosines(q: Vector, average: Vector, key: Vector) -> tuple[Fraction, Fraction, Fraction]:
    """(a, b, c)."""
    return dot(average, q), dot(key, q), dot(average, key)


def printed_bound(a: Fraction, b: Fraction) -> Fraction:
    """The right side of theorem C.3."""
    return 1 + a * b - a * a / 2 - b * b / 2


# ---- KD-12: lemma C.2, theorem C.3 -----------------------------------------------------------------------------------


def reflection(normal: Vector) -> list[Vector]:
    """An orthonormal basis: the unit vectors, reflected."""
    dim = len(normal)
    axes = [tuple(Fraction(int(i == j)) for j in range(dim)) for i in range(dim)]
    return [minus(axis, scaled(2 * dot(axis, normal) / square(normal), normal)) for axis in axes]


def squared_cosines(basis: list[Vector], y: Vector) -> Fraction:
    return sum((dot(x, y) ** 2 / (square(x) * square(y)) for x in basis), Fraction(0))


@pytest.mark.claim("KD-12a")
@many
@given(data=st.data(), dim=st.integers(1, 5))
def test_squared_cosines_with_a_basis_add_up_to_one(data, dim):
    normal, y = data.draw(st.tuples(*[st.tuples(*[components] * dim)] * 2))
    assume(any(normal) and any(y))
    basis = reflection(normal)
    assert all(dot(x, z) == (x is z) for x in basis for z in basis)
    assert squared_cosines(basis, y) == 1


@pytest.mark.claim("KD-12a")
def test_squared_cosines_reject_a_zero_vector_and_bases_that_are_not_orthonormal():
    basis = reflection(vector(1, 2, 3))
    with pytest.raises(ZeroDivisionError):
        squared_cosines(basis, vector(0, 0, 0))
    assert squared_cosines(basis[:2], vector(1, 1, 1)) != 1
    assert squared_cosines([vector(1, 0), vector(1, 1)], vector(1, 0)) != 1


@pytest.mark.claim("KD-12b")
@many
@given(triple=triples())
def test_theorem_holds_for_cosines_of_all_signs(triple):
    a, b, c = cosines(*triple)
    assert c <= printed_bound(a, b) == 1 - (a - b) ** 2 / 2


@pytest.mark.claim("KD-12b")
def test_theorem_rejects_99_percent_where_the_cosines_are_opposite():
    a, b, c = cosines(Q, unit((-39, 52)), unit((39, 52)))
    assert a == -b < 0
    assert c == printed_bound(a, b)
    assert not c <= Fraction(99, 100) * printed_bound(a, b)


def within(a: Fraction, b: Fraction, c: Fraction, factor: Fraction = ONE) -> bool:
    """Whether |c - a b| <= factor sqrt(1 - a^2) sqrt(1 - b^2), in squares."""
    return (c - a * b) ** 2 <= factor**2 * (1 - a * a) * (1 - b * b)


@pytest.mark.claim("KD-12c")
@many
@given(triple=triples())
def test_cosine_lies_within_the_spherical_bound(triple):
    """This bound is at most that of theorem C.3, and lower by at most 1/2. With p = 1 - a^2 and q = 1 - b^2, it is
    lower by (p + q) / 2 - sqrt(p q), and p + q - 1 <= p q for p and q up to 1."""
    a, b, c = cosines(*triple)
    assert within(a, b, c)
    p, q = 1 - a * a, 1 - b * b
    assert printed_bound(a, b) - a * b == (p + q) / 2
    assert ((p + q) / 2) ** 2 >= p * q
    assert p + q <= 1 or ((p + q - 1) / 2) ** 2 <= p * q
    if len(triple[0]) == 2:
        assert (c - a * b) ** 2 == p * q                                               # always attained in the plane


@pytest.mark.claim("KD-12c")
def test_spherical_bound_rejects_99_percent_in_the_plane():
    for key in (unit((39, 52)), unit((39, -52))):
        assert within(*cosines(Q, unit((-25, 60)), key))
        assert not within(*cosines(Q, unit((-25, 60)), key), Fraction(99, 100))
    assert printed_bound(-ONE, Fraction(0)) == HALF                                    # the spherical bound is 0 here


@pytest.mark.claim("KD-12d")
@many
@given(triple=triples())
def test_cosine_is_negative_outside_of_the_circle(triple):
    """For a < 0 < b, the spherical bound is negative iff a^2 + b^2 > 1. The bound of theorem C.3 is negative iff b - a
    > sqrt 2, which implies a^2 + b^2 > 1."""
    q, average, key = triple
    average = scaled(ONE if dot(average, q) <= 0 else -ONE, average)
    key = scaled(ONE if dot(key, q) >= 0 else -ONE, key)
    a, b, c = cosines(q, average, key)
    outside = a * a + b * b > 1
    assert (a * a * b * b > (1 - a * a) * (1 - b * b)) is outside                      # |a b| above the root
    if outside and a < 0 < b:
        assert c < 0
    assert (printed_bound(a, b) < 0) is ((b - a) ** 2 > 2)
    assert outside or not (b - a) ** 2 > 2


@pytest.mark.claim("KD-12d")
def test_negative_cosine_rejects_the_circle_itself_and_says_more_than_the_theorem():
    a, b, c = cosines(Q, unit((-39, 52)), unit((52, 39)))
    assert a * a + b * b == 1
    assert c == 0                                                                      # not negative
    # Shares of the square -a, b in (0, 1), by counting cells: 1 - pi / 4 = .215 and (2 - sqrt 2)^2 / 2 = .172.
    side = 400
    cells = [(i, j) for i in range(side) for j in range(side)]
    circle_at_least = sum(i * i + j * j > side**2 for i, j in cells) / side**2
    theorem_at_most = sum((i + j + 2) ** 2 > 2 * side**2 for i, j in cells) / side**2
    assert 0.21 < circle_at_least < 1 - 3.14159 / 4
    assert (2 - 1.41422) ** 2 / 2 < theorem_at_most < 0.175


def spread(first: Vector, second: Vector, *, literal: bool) -> Fraction:
    """The line of the proof after Young's inequality, in the basis of the unit vectors, of which q is the first: a b
    plus half the sum of a_i^2 + b_i^2 over the others, or, as printed (literal), of a_q^2 + b_q^2."""
    a, b = first[0], second[0]
    terms = [(a, b)] * (len(first) - 1) if literal else list(zip(first[1:], second[1:], strict=True))
    return a * b + sum((x * x + y * y for x, y in terms), Fraction(0)) / 2


@pytest.mark.claim("KD-12e")
def test_printed_proof_has_a_wrong_index():
    third = Fraction(1, 3)
    average, key = vector(-third, 2 * third, 2 * third), vector(third, 2 * third, 2 * third)
    assert dot(average, key) == Fraction(7, 9) > spread(average, key, literal=True) == Fraction(1, 9)
    assert dot(average, key) == spread(average, key, literal=False)                   # with the right index it is sharp


@pytest.mark.claim("KD-12f")
@many
@given(triple=triples())
def test_corrected_line_of_the_proof_leads_to_the_theorem(triple):
    _, average, key = triple
    line = spread(average, key, literal=False)
    assert dot(average, key) <= line == printed_bound(average[0], key[0])


@pytest.mark.claim("KD-12f")
def test_corrected_line_rejects_less_than_half_of_the_squares():
    key = unit((39, 52))
    average = vector(-key[0], key[1])
    less = average[0] * key[0] + Fraction(49, 100) * (average[1] ** 2 + key[1] ** 2)
    assert not dot(average, key) <= less


# ---- KD-13: the remark -----------------------------------------------------------------------------------------------

positive = st.fractions(0, 1).filter(bool)


@pytest.mark.claim("KD-13a")
@given(b=positive)
def test_bound_does_not_go_to_minus_one_half(b):
    """At a = -1 it is 1/2 - b - b^2 / 2. This is -1/2 only if b^2 + 2b = 2, which is b = sqrt 3 - 1."""
    limit = printed_bound(-ONE, b)
    assert limit == HALF - b - b * b / 2
    assert limit != -HALF
    assert (limit < -HALF) is ((b + 1) ** 2 > 3)


@pytest.mark.claim("KD-13a")
def test_limit_depends_on_the_other_cosine():
    assert printed_bound(-ONE, ONE) == -1
    assert printed_bound(-ONE, Fraction(1, 1000)) > Fraction(49, 100)
    assert printed_bound(-ONE, Fraction(732, 1000)) > -HALF > printed_bound(-ONE, Fraction(733, 1000))


@pytest.mark.claim("KD-13b")
@given(first=positive, second=positive, b=positive)
def test_bound_falls_with_the_cosine_of_the_mean_and_stays_below_one(first, second, b):
    low, high = sorted([-first, -second])
    assert printed_bound(low, b) <= printed_bound(high, b) < 1
    assert (printed_bound(low, b) < printed_bound(high, b)) is (low < high)


@pytest.mark.claim("KD-13b")
def test_bound_rejects_cosines_above_the_keys_and_99_percent_of_one():
    b = HALF
    assert not printed_bound(b, b) <= printed_bound(Fraction(9, 10), b)                # needs a < b
    assert not printed_bound(Fraction(-1, 100), Fraction(1, 100)) < Fraction(99, 100)


@pytest.mark.claim("KD-13c")
@many
@given(triple=triples())
def test_cosine_goes_to_the_opposite_of_the_keys(triple):
    """With a = -1, the mean key is -q and c = -b. The bound is larger by (1 - b^2) / 2."""
    q, _, key = triple
    a, b, c = cosines(q, scaled(-ONE, q), key)
    assert (a, c) == (-1, -b)
    assert printed_bound(a, b) - c == (1 - b * b) / 2 >= 0
    assert -1 <= printed_bound(a, b) < HALF or b <= 0


@pytest.mark.claim("KD-13c")
def test_limit_rejects_the_bound():
    _, b, c = cosines(Q, vector(-1, 0), unit((39, 52)))
    assert c == -b == Fraction(-3, 5) != printed_bound(-ONE, b) == Fraction(-28, 100)


@pytest.mark.claim("KD-13d")
def test_smaller_cosine_of_the_mean_with_the_query_does_not_mean_a_smaller_one_with_the_key():
    key = unit((39, 52))
    a, b, c = cosines(Q, unit((-39, -52)), key)
    smaller_a, same_b, larger_c = cosines(Q, unit((-52, 39)), key)
    assert 0 > a > smaller_a
    assert b == same_b > 0
    assert c == -1 < larger_c == 0
    # The difference can be large. With b = .2, cos = .749 is possible at a = -.5, and cos = -.995 at a = -.1.
    b = Fraction(1, 5)
    assert within(-HALF, b, Fraction(748, 1000))
    assert within(Fraction(-1, 10), b, Fraction(-994, 1000))
    assert not within(-HALF, b, Fraction(749, 1000))


def upper_half(point: Fraction) -> Vector:
    x, y = on_sphere((point,))
    return vector(x, abs(y))


@pytest.mark.claim("KD-13d")
@pytest.mark.claim("KD-13e")
@many
@given(points=st.tuples(*[st.fractions(-9, 9, max_denominator=99)] * 3))
def test_largest_possible_cosine_falls_with_the_cosine_of_the_mean(points):
    """In the upper half of the plane, c is a b + sqrt(1 - a^2) sqrt(1 - b^2), the largest value for a and b
    (KD-12c)."""
    low, high, key = sorted(map(upper_half, points))
    assert dot(low, key) - low[0] * key[0] == low[1] * key[1] >= 0
    assert dot(low, key) <= dot(high, key)
    assert (dot(low, key) < dot(high, key)) is (low[0] < high[0])


@pytest.mark.claim("KD-13e")
def test_largest_cosine_rejects_the_smallest_one():
    """The smallest cosine, a b - sqrt(1 - a^2) sqrt(1 - b^2), falls to -1 at a = -b and then rises."""
    key = unit((25, 60))
    means = [unit((-60, -25)), unit((-25, -60)), unit((-16, -63))]
    assert [dot(m, key) for m in means] != sorted(dot(m, key) for m in means)
    assert dot(means[1], key) == -1


@pytest.mark.claim("KD-13f")
def test_key_further_from_the_mean_need_not_be_nearer_to_the_query():
    """Two keys of one length. The first is opposite to the mean. The second is orthogonal to it, but has more
    weight."""
    average, far, near = unit((-39, 52)), unit((39, -52)), unit((52, 39))
    assert dot(average, far) == -1 < dot(average, near) == 0
    assert dot(far, Q) == Fraction(3, 5) < dot(near, Q) == Fraction(4, 5)
    assert dot(unit((-65, 0)), far) > dot(unit((-65, 0)), near)                      # true if the mean is opposite to q


@pytest.mark.claim("KD-13g")
@many
@given(triple=triples())
def test_cosine_with_the_mean_bounds_the_one_with_the_query_on_both_sides(triple):
    """|b - a c| <= sqrt(1 - a^2) sqrt(1 - c^2). At a = -1, b = -c."""
    q, average, key = triple
    a, b, c = cosines(q, average, key)
    assert within(a, c, b)
    opposite = cosines(q, scaled(-ONE, q), key)
    assert opposite[1] == -opposite[2]


@pytest.mark.claim("KD-13g")
def test_bound_on_the_query_rejects_99_percent_in_the_plane():
    a, b, c = cosines(Q, unit((-39, 52)), unit((52, 39)))
    assert within(a, c, b)
    assert not within(a, c, b, Fraction(99, 100))
