"""The interpreter's arithmetic depends on the operands only, and not on their position or memory layout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtwin.conformance.interpreter import arithmetic, elementary
from kvtwin.conformance.tool.interpreter_cases import FLOATS, INF, NAN, bits, laid_out, numbers, same

LAYOUTS = st.sampled_from(["rows", "columns", "reversed", "apart", "unaligned"])
SEEDS = st.integers(0, 2**32 - 1)
DTYPES = st.sampled_from(FLOATS)
KINDS = st.sampled_from(["ordinary", "wide", "any"])


def dot_agrees(dot: Any, seed: int, dtype: Any, kind: str, m: int, n: int, k: int, layouts: Any, batch: int) -> bool:
    """Whether the product of a row and a column is the same number alone and in a tile."""
    a, b = (numbers(seed + i, dtype, max(1, batch), *shape, kind=kind) for i, shape in enumerate(((m, k), (k, n))))
    row, column = a[-1, m // 2], b[-1, :, n // 3]
    a[0, -1], b[0, :, -1] = row, column
    left, right = (laid_out(side if batch else side[0], layout) for side, layout in zip((a, b), layouts, strict=True))
    wide = np.float64 if dtype == np.float64 else np.float32
    found = dot(left, right, dtype=wide)
    alone = dot(row[None], column[:, None], dtype=wide)[0, 0]
    places = [found[0, -1, -1], found[-1, m // 2, n // 3]] if batch else [found[-1, -1], found[m // 2, n // 3]]
    return found.dtype == wide and all(same(place, alone) for place in places)


# Dot ------------------------------------------------------------------------------------------------------------------


@given(
    seed=SEEDS, dtype=DTYPES, kind=KINDS, m=st.integers(1, 40), n=st.integers(1, 40), k=st.integers(1, 70),
    layouts=st.tuples(LAYOUTS, LAYOUTS), batch=st.integers(0, 3),
)  # fmt: skip
def test_a_product_does_not_depend_on_the_places_of_its_row_and_column(seed, dtype, kind, m, n, k, layouts, batch):
    assert dot_agrees(arithmetic.dot, seed, dtype, kind, m, n, k, layouts, batch)


def blas(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
    """Stands in for a BLAS: the summation order of groups of four rows differs from that of the remaining rows."""
    products = a.astype(dtype)[..., :, :, None] * b.astype(dtype)[..., None, :, :]
    found = np.add.accumulate(products, axis=-2)[..., -1, :]
    whole = a.shape[-2] // 4 * 4
    found[..., :whole, :] = np.add.accumulate(products[..., ::-1, :], axis=-2)[..., :whole, -1, :]
    return found


def test_a_blas_depends_on_the_place_of_a_row():
    """The mutant that the test above must detect."""
    verdicts = [dot_agrees(blas, seed, np.float32, "ordinary", 7, 5, 32, ("rows", "rows"), 0) for seed in range(20)]
    assert not all(verdicts), "the placement test must fail for a BLAS"


@given(seed=SEEDS, dtype=DTYPES, m=st.integers(1, 20), n=st.integers(1, 20), k=st.integers(1, 40))
def test_a_product_does_not_depend_on_how_much_is_held_at_a_time(seed, dtype, m, n, k):
    a, b = numbers(seed, dtype, m, k, kind="wide"), numbers(seed + 1, dtype, k, n, kind="wide")
    whole = arithmetic.dot(a, b)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arithmetic, "MOST_PRODUCTS", 2 * k * n)
        assert same(arithmetic.dot(a, b), whole)


@given(seed=SEEDS, dtype=DTYPES, k=st.integers(1, 300))
def test_a_product_is_within_the_error_of_its_sum(seed, dtype, k):
    """There is one rounding per product, one per halving of K in each sum, and the last one."""
    a, b = numbers(seed, dtype, 3, k), numbers(seed + 1, dtype, k, 2)
    exact, sizes = (f(a.astype(np.longdouble)) @ f(b.astype(np.longdouble)) for f in (np.asarray, np.abs))
    wide = np.float64 if dtype == np.float64 else np.float32
    found = arithmetic.dot(a, b, dtype=wide)
    steps = 1 + math.ceil(math.log2(k))
    u = np.longdouble(np.finfo(wide).eps) / 2
    assert (np.abs(found - exact) <= steps * u / (1 - steps * u) * sizes).all()


def test_float16_is_added_in_float32_and_rounded_once():
    a, b = np.full((1, 4096), 1, np.float16), np.full((4096, 1), 1 + 2**-10, np.float16)
    assert arithmetic.dot(a, b, dtype=np.float16)[0, 0] == 4100
    assert arithmetic.dot(a, b, dtype=np.float16).dtype == np.float16
    assert arithmetic.total(b, 0)[0] == 4100


def test_integers_are_exact_and_wrap():
    a, b = np.full((2, 3), 100, np.int8), np.full((3, 2), 100, np.int8)
    assert arithmetic.dot(a, b, dtype=np.int32).tolist() == [[30000] * 2] * 2
    assert arithmetic.dot(a, b).dtype == np.int8
    assert arithmetic.total(a, 1).tolist() == [300, 300]
    assert arithmetic.total(np.array([True, True]), 0) == 2


# Sums -----------------------------------------------------------------------------------------------------------------


def total_agrees(
    total: Any, seed: int, dtype: Any, kind: str, before: list[int], n: int, after: list[int], layout: str
) -> bool:
    """Whether the sum of a row is the same number alone and along an axis of a tile."""
    tile = numbers(seed, dtype, *before, n, *after, kind=kind)
    row = np.random.default_rng(seed).permutation(numbers(seed + 1, dtype, n, kind=kind))
    place = np.random.default_rng(seed + 2)
    index = [[int(place.integers(size)) for size in sizes] for sizes in (before, after)]
    tile[(*index[0], slice(None), *index[1])] = row
    found = total(laid_out(tile, layout), axis=len(before))
    kept = total(laid_out(tile, layout), axis=len(before) - tile.ndim, keepdims=True)
    alone = total(row, axis=0)
    assert kept.shape == (*before, 1, *after)
    return same(np.asarray(found)[(*index[0], *index[1])], alone) and same(kept.reshape(found.shape), found)


SIZES = st.lists(st.sampled_from([1, 2, 3, 16]), max_size=2)


@given(seed=SEEDS, dtype=DTYPES, kind=KINDS, before=SIZES, n=st.integers(1, 130), after=SIZES, layout=LAYOUTS)
def test_a_sum_does_not_depend_on_the_place_of_its_row(seed, dtype, kind, before, n, after, layout):
    assert total_agrees(arithmetic.total, seed, dtype, kind, before, n, after, layout)


def test_numpys_sum_depends_on_the_place_of_a_row():
    """The mutant."""
    verdicts = [total_agrees(np.sum, seed, np.float32, "ordinary", [], 128, [16], "rows") for seed in range(20)]
    assert not all(verdicts), "the placement test must fail for np.sum"


@given(seed=SEEDS, dtype=DTYPES, shape=st.lists(st.sampled_from([1, 2, 3, 8]), min_size=1, max_size=3), layout=LAYOUTS)
def test_the_sum_of_a_tile_is_that_of_its_elements_in_order(seed, dtype, shape, layout):
    tile = numbers(seed, dtype, *shape, kind="wide")
    found = arithmetic.total(laid_out(tile, layout))
    assert same(found, arithmetic.total(tile.ravel(), 0))
    kept = arithmetic.total(laid_out(tile, layout), keepdims=True)
    assert kept.shape == (1,) * len(shape)
    assert same(kept.ravel()[0], found)


@given(seed=SEEDS, dtype=DTYPES, n=st.integers(1, 300))
def test_a_sum_is_within_its_error(seed, dtype, n):
    row = numbers(seed, dtype, n)
    exact, size = (f(row.astype(np.longdouble)).sum() for f in (np.asarray, np.abs))
    wide = np.float64 if dtype == np.float64 else np.float32
    u, last = (np.longdouble(np.finfo(kind).eps) / 2 for kind in (wide, dtype))
    steps = max(1, math.ceil(math.log2(n)))
    bound = steps * u / (1 - steps * u) * size
    assert abs(arithmetic.total(row, 0) - exact) <= bound + (last * (abs(exact) + bound) if dtype == np.float16 else 0)


# Maximum and minimum --------------------------------------------------------------------------------------------------

SIGNED = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN]


def by_ieee(name: str, a: float, b: float) -> float:
    """maximum, minimum, maximumNumber and minimumNumber of IEEE 754-2019."""
    if a != a or b != b:
        return (b if a != a else a) if name.startswith("f") else NAN
    larger, smaller = (a, b) if (a, math.copysign(1, a)) >= (b, math.copysign(1, b)) else (b, a)
    return larger if "max" in name else smaller


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["maximum", "minimum", "fmax", "fmin"])
@pytest.mark.parametrize("layout", ["rows", "columns", "reversed", "apart", "unaligned"])
def test_of_two_zeros_the_positive_one_is_larger(name, dtype, layout):
    a, b = (laid_out(side.astype(dtype), layout) for side in np.meshgrid(SIGNED, SIGNED))
    expected = np.array([[by_ieee(name, x, y) for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)])
    assert same(getattr(arithmetic, name)(a, b), expected.astype(dtype))
    assert same(getattr(arithmetic, name)(a[:1], b[:, :1]), getattr(arithmetic, name)(a, b))


@pytest.mark.parametrize(
    ("name", "of_two"), [("largest", "maximum"), ("smallest", "minimum"), ("nanmax", "fmax"), ("nanmin", "fmin")]
)
@given(seed=SEEDS, dtype=DTYPES, before=SIZES, n=st.integers(1, 40), after=SIZES, layout=LAYOUTS)
def test_an_extreme_is_that_of_its_elements_one_by_one(name, of_two, seed, dtype, before, n, after, layout):
    draw = np.random.default_rng(seed)
    few = np.array(SIGNED, dtype)[:, None][draw.permutation(len(SIGNED))[:draw.integers(1, 5)], 0]
    tile = few[draw.integers(0, len(few), (*before, n, *after))]
    expected = np.moveaxis(tile, len(before), 0)[0]
    for part in np.moveaxis(tile, len(before), 0)[1:]:
        expected = getattr(arithmetic, of_two)(expected, part)
    found = getattr(arithmetic, name)(laid_out(tile, layout), axis=len(before))
    assert same(np.asarray(found), np.asarray(expected))
    kept = getattr(arithmetic, name)(tile, axis=len(before), keepdims=True)
    assert kept.shape == (*before, 1, *after)
    flat = tile.ravel()
    assert same(np.asarray(getattr(arithmetic, name)(tile)), np.asarray(getattr(arithmetic, name)(flat, axis=0)))


def test_clip_is_the_smaller_of_the_larger():
    x = np.array([-0.0, 0.0, -2.0, 5.0, NAN, INF], np.float32)
    found = arithmetic.clip(x, np.float32([0.0] * 6), np.float32([3.0] * 6))
    assert same(found, np.array([0.0, 0.0, 0.0, 3.0, NAN, 3.0], np.float32))


def test_the_extremes_of_integers_are_numpys():
    x = np.array([[3, -1, 0], [7, 7, -9]], np.int64)
    assert arithmetic.nanmax(x, axis=1).tolist() == [3, 7]
    assert arithmetic.smallest(x, axis=0, keepdims=True).tolist() == [[3, -1, -9]]
    assert arithmetic.maximum(x, np.zeros_like(x)).tolist() == [[3, 0, 0], [7, 7, 0]]
    assert arithmetic.maximum(0, x).dtype == np.int64


@pytest.mark.parametrize("name", ["argmax", "argmin", "cumsum", "cumprod"])
@given(seed=SEEDS, dtype=DTYPES, kind=KINDS, m=st.integers(1, 20), n=st.integers(1, 70), layout=LAYOUTS)
def test_numpys_functions_do_not_depend_on_the_place_in_the_array(name, seed, dtype, kind, m, n, layout):
    function = getattr(np, name)
    tile = numbers(seed, dtype, m, n, kind=kind)
    tile[:, n // 2] = tile[:, 0]  # ties
    with np.errstate(all="ignore"):
        alone = [function(np.array(row), axis=0) for row in tile]
        found = [function(laid_out(tile, layout), axis=1), function(laid_out(tile.T, layout), axis=0).T]
    for one in found:
        view = bits if name.startswith("cum") else np.asarray
        assert np.array_equal(view(one), np.array([view(row) for row in alone]))


# Functions ------------------------------------------------------------------------------------------------------------

FUNCTIONS = ["exp", "exp2", "log", "log2", "sin", "cos", "erf", "rsqrt"]


@pytest.mark.parametrize("name", FUNCTIONS)
@given(
    seed=SEEDS, dtype=DTYPES, kind=KINDS, shape=st.lists(st.integers(1, 9), min_size=1, max_size=3), layout=LAYOUTS
)
def test_a_function_does_not_depend_on_the_place_in_the_array(name, seed, dtype, kind, shape, layout):
    function = getattr(elementary, name)
    tile = numbers(seed, dtype, *shape, kind=kind)
    found = function(laid_out(tile, layout))
    alone = [function(np.array([x])) for x in tile.ravel()[:40]]
    assert found.shape == tile.shape
    assert found.dtype == tile.dtype
    assert all(same(one[0], place) for one, place in zip(alone, found.ravel()[:40], strict=True))


# Conversion to integers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64])
@given(seed=SEEDS, dtype=DTYPES, kind=KINDS, n=st.integers(1, 40), layout=LAYOUTS)
def test_a_float_becomes_the_nearest_integer_towards_zero_that_there_is(whole, seed, dtype, kind, n, layout):
    limits = np.iinfo(whole)
    x = numbers(seed, dtype, n, kind=kind)
    with np.errstate(all="ignore"):
        edges = np.array([*SIGNED, limits.max, limits.min, -0.5, limits.max + 1, 65504]).astype(dtype)
        x = np.concatenate([x, edges, x * dtype(2.0 ** (limits.bits - 3))])
    exact = [0 if v != v else v if math.isinf(v) else math.trunc(v) for v in map(float, x)]
    expected = [int(min(max(v, limits.min), limits.max)) for v in exact]
    found = arithmetic.to_integer(laid_out(x, layout), np.dtype(whole))
    assert found.dtype == whole
    assert found.tolist() == expected
