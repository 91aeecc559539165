"""The interpreter's arithmetic depends on the operands alone: not on their place, their layout, the CPU or the BLAS.

Results that are NaN have any sign and payload: `bits` makes one of them all.
"""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from kvtwin.conformance import interpreter
from kvtwin.conformance.interpreter import arithmetic, elementary

INTERPRETED = interpreter.interprets(triton.language.standard)
FLOATS = (np.float16, np.float32, np.float64)
INF, NAN = math.inf, math.nan
WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits(x: Any) -> np.ndarray:
    """The bits of floats, with one NaN."""
    x = np.asarray(x)
    return np.where(np.isnan(x), x.dtype.type(NAN), x).astype(x.dtype).view(WORDS[x.dtype.itemsize])


def same(left: Any, right: Any) -> bool:
    return left.dtype == right.dtype and np.array_equal(bits(left), bits(right))


# Operands and places --------------------------------------------------------------------------------------------------


def numbers(seed: int, dtype: Any, *shape: int, kind: str = "ordinary") -> np.ndarray:
    """Floats that are ordinary, of all magnitudes, or any bits at all: zeros, infinities and NaN among them."""
    draw = np.random.default_rng(seed)
    if kind == "ordinary":
        return draw.standard_normal(shape).astype(dtype)
    if kind == "wide":
        with np.errstate(all="ignore"):
            return (draw.standard_normal(shape) * 2.0 ** draw.integers(-24, 24, shape)).astype(dtype)
    found = draw.integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8).view(dtype)[..., 0]
    special = np.array([0.0, -0.0, INF, -INF, NAN, 1.0], dtype)[draw.integers(0, 6, shape)]
    return np.where(draw.random(shape) < 0.3, special, found)


def laid_out(x: np.ndarray, layout: str) -> np.ndarray:
    """The same array in memory of another order."""
    if layout == "columns":
        return np.asfortranarray(x)
    if layout == "reversed":
        return np.ascontiguousarray(x[..., ::-1])[..., ::-1]
    if layout == "apart":
        room = np.zeros((*x.shape, 3), x.dtype)
        room[..., 1] = x
        return room[..., 1]
    if layout == "unaligned":
        room = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
        room[...] = x
        return room
    return np.ascontiguousarray(x)


LAYOUTS = st.sampled_from(["rows", "columns", "reversed", "apart", "unaligned"])
SEEDS = st.integers(0, 2**32 - 1)
DTYPES = st.sampled_from(FLOATS)
KINDS = st.sampled_from(["ordinary", "wide", "any"])


def dot_agrees(dot: Any, seed: int, dtype: Any, kind: str, m: int, n: int, k: int, layouts: Any, batch: int) -> bool:
    """Whether one row times one column is the same number alone and in a tile."""
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
def test_a_product_does_not_depend_on_where_its_row_and_column_lie(seed, dtype, kind, m, n, k, layouts, batch):
    assert dot_agrees(arithmetic.dot, seed, dtype, kind, m, n, k, layouts, batch)


def blas(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
    """Stands in for a BLAS: adds four rows at a time in another order than the rows that are left over."""
    products = a.astype(dtype)[..., :, :, None] * b.astype(dtype)[..., None, :, :]
    found = np.add.accumulate(products, axis=-2)[..., -1, :]
    whole = a.shape[-2] // 4 * 4
    found[..., :whole, :] = np.add.accumulate(products[..., ::-1, :], axis=-2)[..., :whole, -1, :]
    return found


def test_a_blas_depends_on_where_a_row_lies():
    """The mutant: what the test above is for."""
    verdicts = [dot_agrees(blas, seed, np.float32, "ordinary", 7, 5, 32, ("rows", "rows"), 0) for seed in range(20)]
    assert not all(verdicts), "the placement test must not pass a BLAS"


@given(seed=SEEDS, dtype=DTYPES, m=st.integers(1, 20), n=st.integers(1, 20), k=st.integers(1, 40))
def test_a_product_does_not_depend_on_how_much_is_held_at_a_time(seed, dtype, m, n, k):
    a, b = numbers(seed, dtype, m, k, kind="wide"), numbers(seed + 1, dtype, k, n, kind="wide")
    whole = arithmetic.dot(a, b)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arithmetic, "MOST_PRODUCTS", 2 * k * n)
        assert same(arithmetic.dot(a, b), whole)


@given(seed=SEEDS, dtype=DTYPES, k=st.integers(1, 300))
def test_a_product_is_within_the_error_of_its_sum(seed, dtype, k):
    """Of each product one rounding, of each sum one for each halving of K, and the last one."""
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
    """Whether the sum of one row is the same number alone and along an axis of a tile."""
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
def test_a_sum_does_not_depend_on_where_its_row_lies(seed, dtype, kind, before, n, after, layout):
    assert total_agrees(arithmetic.total, seed, dtype, kind, before, n, after, layout)


def test_numpys_sum_depends_on_where_a_row_lies():
    """The mutant."""
    verdicts = [total_agrees(np.sum, seed, np.float32, "ordinary", [], 128, [16], "rows") for seed in range(20)]
    assert not all(verdicts), "the placement test must not pass np.sum"


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


# The larger and the smaller -------------------------------------------------------------------------------------------

SIGNED = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN]


def by_ieee(name: str, a: float, b: float) -> float:
    """maximum and minimum of IEEE 754-2019, and maximumNumber and minimumNumber."""
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
def test_what_is_left_to_numpy_does_not_depend_on_the_place_either(name, seed, dtype, kind, m, n, layout):
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
def test_a_function_does_not_depend_on_where_its_operand_lies(name, seed, dtype, kind, shape, layout):
    function = getattr(elementary, name)
    tile = numbers(seed, dtype, *shape, kind=kind)
    found = function(laid_out(tile, layout))
    alone = [function(np.array([x])) for x in tile.ravel()[:40]]
    assert found.shape == tile.shape
    assert found.dtype == tile.dtype
    assert all(same(one[0], place) for one, place in zip(alone, found.ravel()[:40], strict=True))


# Integers of floats ---------------------------------------------------------------------------------------------------


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


# In the interpreter ---------------------------------------------------------------------------------------------------


def test_a_numpy_function_that_nobody_looked_at_is_a_doubt(monkeypatch, tmp_path):
    (tmp_path / "another_interpreter.py").write_text("def dot(a, b):\n    return np.einsum('ij,jk', a, b)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import another_interpreter

    found = arithmetic.problems(another_interpreter)
    assert found[0] == "its interpreter uses numpy.einsum"
    assert found[1:] == [f"{name} has another source" for name in arithmetic.SOURCES]
    assert arithmetic.problems(SimpleNamespace()) == ["its interpreter has no source"]
    line = str(interpreter.Prepared("plain", "9.0", (), tuple(found)))
    assert line == (
        "plain (KVTWIN_INTERPRETER=plain); results may depend on this CPU: its interpreter uses numpy.einsum "
        "(and 3 more)"
    )


if INTERPRETED:

    def test_this_triton_leaves_no_doubt():
        assert arithmetic.problems(sys.modules[interpreter.MODULE]) == []

    def test_the_interpreter_has_these_functions_for_numpys():
        its = sys.modules[interpreter.MODULE].np
        replaced = {name for name in vars(np) if getattr(its, name) is not getattr(np, name)}
        assert replaced == {
            "matmul", "sum", "maximum", "minimum", "fmax", "fmin", "max", "min", "nanmax", "nanmin", "clip", "exp",
            "exp2", "log", "log2", "sin", "cos",
        }  # fmt: skip
        assert not [name for name in replaced if getattr(its, name).__module__.startswith("numpy")]

    @triton.jit
    def _everything(a, b, floats, wholes, ROWS: tl.constexpr, INNER: tl.constexpr):
        row, inner = tl.arange(0, ROWS), tl.arange(0, INNER)
        x = tl.load(a + row[:, None] * INNER + inner[None, :])
        y = tl.load(b + inner[:, None] * ROWS + row[None, :])
        out = floats + row
        tl.store(out + 0 * ROWS, tl.sum(x, 1))
        tl.store(out + 1 * ROWS, tl.sum(y, 0))
        tl.store(out + 2 * ROWS, tl.sum(x) + row * 0.0)
        tl.store(out + 3 * ROWS, tl.max(x, 1))
        tl.store(out + 4 * ROWS, tl.min(x, 1))
        first = tl.load(a + row * INNER)
        second = tl.load(a + row * INNER + 1)
        tl.store(out + 5 * ROWS, tl.exp2(first))
        tl.store(out + 6 * ROWS, tl.exp(first))
        tl.store(out + 7 * ROWS, tl.log2(tl.abs(first)))
        tl.store(out + 8 * ROWS, tl.log(tl.abs(first)))
        tl.store(out + 9 * ROWS, tl.sin(first))
        tl.store(out + 10 * ROWS, tl.cos(first))
        tl.store(out + 11 * ROWS, tl.erf(first))
        tl.store(out + 12 * ROWS, tl.rsqrt(tl.abs(first)))
        tl.store(out + 13 * ROWS, tl.maximum(first, second))
        tl.store(out + 14 * ROWS, tl.minimum(first, second))
        tl.store(out + 15 * ROWS, tl.clamp(first, second, tl.abs(second)))
        tl.store(wholes + row, (first * 1e9).to(tl.int32))
        product = tl.dot(x, y, input_precision="ieee")
        tl.store(floats + 16 * ROWS + row[:, None] * ROWS + row[None, :], product)

    @pytest.mark.parametrize("rows", [16, 32])
    @pytest.mark.parametrize("times", [1, 3])  # recorded, then played
    def test_kernels_compute_with_this_arithmetic(rows, times):
        inner = 64
        a, b = numbers(rows, np.float32, rows, inner), numbers(rows + 1, np.float32, inner, rows)
        a[:4, :2] = [[0.0, -0.0], [-0.0, 0.0], [-0.0, -0.0], [NAN, 1.0]]
        for _ in range(times):
            floats, wholes = torch.zeros(16 * rows + rows * rows), torch.zeros(rows, dtype=torch.int32)
            _everything[(1,)](torch.from_numpy(a), torch.from_numpy(b), floats, wholes, ROWS=rows, INNER=inner)
        whole = np.zeros(rows, np.float32) + arithmetic.total(a)
        first, second = a[:, 0].copy(), a[:, 1].copy()
        fmax, fmin = (getattr(sys.modules[interpreter.MODULE].np, name) for name in _extremes_of_this_triton())
        low, high = second, np.abs(second)
        expected = [
            arithmetic.total(a, 1), arithmetic.total(b, 0), whole, arithmetic.nanmax(a, 1), arithmetic.nanmin(a, 1),
            elementary.exp2(first), elementary.exp(first), elementary.log2(np.abs(first)),
            elementary.log(np.abs(first)), elementary.sin(first), elementary.cos(first), elementary.erf(first),
            elementary.rsqrt(np.abs(first)), fmax(first, second), fmin(first, second), fmin(fmax(first, low), high),
        ]
        for line, (found, right) in enumerate(zip(floats[:16 * rows].numpy().reshape(16, rows), expected, strict=True)):
            assert same(found, right), line
        zeros = np.zeros((rows, rows), np.float32)
        assert same(floats[16 * rows:].numpy().reshape(rows, rows), arithmetic.dot(a, b, dtype=np.float32) + zeros)
        assert wholes.tolist() == arithmetic.to_integer(first * np.float32(1e9), np.dtype(np.int32)).tolist()

    def _extremes_of_this_triton():
        """What tl.maximum and tl.minimum of floats are: from triton 3.8 on, a number is larger than NaN."""
        builder = sys.modules[interpreter.MODULE].InterpreterBuilder
        names = builder.create_maxnumf.__code__.co_names + builder.create_minnumf.__code__.co_names
        return [name for name in names if name in ("maximum", "minimum", "fmax", "fmin")]
