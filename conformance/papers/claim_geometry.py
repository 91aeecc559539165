"""Exact arithmetic for claims about directions, and KeyDiff on such directions.

Directions are unit vectors with rational components: integer vectors of one length, which can tie and cancel exactly,
or stereographic projections of rational points, which can be arbitrarily close. Their cosines are rational, so claims
about cosines, and about the kept tokens, are checked without rounding and without slack.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations, product

from hypothesis import strategies as st

from .claim_math import Vector, combine, dot, scaled, square, vector

LENGTHS = {2: 65, 3: 15, 4: 6}  # of the integer vectors in each dimension, of which there are 36, 150 and 312


def on_sphere(point: Vector) -> Vector:
    """The inverse stereographic projection of a point. It reaches every rational unit vector but -e1."""
    length = square(point)
    return ((1 - length) / (1 + length), *scaled(2 / (1 + length), point))


@cache
def whole_vectors(dim: int) -> tuple[tuple[int, ...], ...]:
    """All integer vectors of length LENGTHS[dim]."""
    length = LENGTHS[dim]
    return tuple(v for v in product(range(-length, length + 1), repeat=dim) if sum(x * x for x in v) == length**2)


def unit(whole: Sequence[int]) -> Vector:
    """The direction of an integer vector."""
    return scaled(Fraction(1, LENGTHS[len(whole)]), vector(*whole))


def directions(dim: int) -> st.SearchStrategy[Vector]:
    coordinate = st.fractions(-3, 3, max_denominator=20) | st.sampled_from([Fraction(1, 2**12), Fraction(-1, 2**12)])
    return st.sampled_from(whole_vectors(dim)).map(unit) | st.tuples(*[coordinate] * (dim - 1)).map(on_sphere)


@st.composite
def direction_sets(draw: st.DrawFn, min_size: int = 2, max_size: int = 6) -> list[Vector]:
    """The normalised keys of a cache."""
    dim = draw(st.sampled_from(sorted(LENGTHS)))
    return draw(st.lists(directions(dim), min_size=min_size, max_size=max_size))


# ---- KeyDiff ---------------------------------------------------------------------------------------------------------


def total(keys: Sequence[Vector]) -> Vector:
    return combine([Fraction(1)] * len(keys), keys)


def mean(keys: Sequence[Vector]) -> Vector:
    return scaled(Fraction(1, len(keys)), total(keys))


def row_sums(keys: Sequence[Vector]) -> list[Fraction]:
    """CosSim(K) 1 (eq. 7) of normalised keys."""
    return [sum((dot(key, other) for other in keys), Fraction(0)) for key in keys]


def smallest(values: Sequence[Fraction], count: int) -> tuple[int, ...]:
    """The `count` indices kept, ascending, if the largest value is evicted first (the lowest index in a tie)."""
    evicted = sorted(range(len(values)), key=lambda index: (-values[index], index))
    return tuple(sorted(evicted[len(values) - count:]))


def kept(keys: Sequence[Vector], budget: int) -> tuple[int, ...]:
    """The keys that KeyDiff keeps of normalised keys (eq. 8): those with the lowest cosines with the anchor."""
    anchor = total(keys)
    return smallest([dot(key, anchor) for key in keys], budget)


def chosen(keys: Sequence[Vector], indices: Sequence[int]) -> list[Vector]:
    return [keys[index] for index in indices]


def similarity(keys: Sequence[Vector]) -> Fraction:
    """The objective of eq. 9: the sum of all pairwise cosines, including each key with itself."""
    return sum(row_sums(keys), Fraction(0))


def least_similarity(keys: Sequence[Vector], budget: int) -> Fraction:
    """The optimum of eq. 9 over all subsets, with similarity(S) = ||sum of S||^2 (KD-4a)."""
    return min(square(total(subset)) for subset in combinations(keys, budget))
