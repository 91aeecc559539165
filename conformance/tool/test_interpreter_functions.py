"""The errors of the interpreter's functions, and a hash that shows that every machine computes the same bits."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal, getcontext, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kvtwin.conformance.interpreter import elementary

FLOATS = (np.float16, np.float32, np.float64)
INF, NAN = math.inf, math.nan
PRECISION = 60  # digits of the truth

# Exact values ---------------------------------------------------------------------------------------------------------


def decimal(number: Fraction | int) -> Decimal:
    return Decimal(Fraction(number).numerator) / Decimal(Fraction(number).denominator)


def arctan(inverse: int) -> Decimal:
    total, power, k = Decimal(0), Decimal(1) / inverse, 0
    while abs(power) > Decimal(10) ** -getcontext().prec:
        total += power / (2 * k + 1)
        power /= -inverse * inverse
        k += 1
    return total


def sine(x: Decimal, quarters: int = 0) -> Decimal:
    """sin(x + quarters * pi / 2) for x of any size."""
    with localcontext() as context:
        context.prec += max(0, x.adjusted()) + 20
        half_pi = 2 * (4 * arctan(5) - arctan(239))
        n = (x / half_pi).to_integral_value()
        y, n = x - n * half_pi, (int(n) + quarters) % 4
        total, term, k = Decimal(0), Decimal(1) if n % 2 else y, 0 if n % 2 else 1
        while term and term.adjusted() > -context.prec + (total or term).adjusted():
            total += term
            term *= -y * y / ((k + 1) * (k + 2))
            k += 2
        return +total if n < 2 else -total


def error_function(x: Decimal) -> Decimal:
    if abs(x) > 13:
        return Decimal(1).copy_sign(x)
    with localcontext() as context:
        context.prec += 90  # terms of up to e ** 169 cancel
        pi = 4 * (4 * arctan(5) - arctan(239))
        total, power, k = Decimal(0), x, 0
        while power and power.adjusted() > -context.prec + x.adjusted():
            total += power / (2 * k + 1)
            k += 1
            power *= -x * x / k
        return 2 * total / pi.sqrt()


TRUTHS: dict[str, Callable[[Decimal], Decimal]] = {
    "exp": lambda x: x.exp(),
    "exp2": lambda x: (x * Decimal(2).ln()).exp(),
    "log": lambda x: x.ln(),
    "log2": lambda x: x.ln() / Decimal(2).ln(),
    "sin": sine,
    "cos": lambda x: sine(x, 1),
    "erf": error_function,
    "rsqrt": lambda x: 1 / x.sqrt(),
}


def ulp(number: Decimal, dtype: Any) -> Decimal:
    """The distance between floats near a number."""
    kind = np.finfo(dtype)
    exponent = int((abs(number).ln() / Decimal(2).ln()).to_integral_value("ROUND_FLOOR"))
    exponent += (Decimal(2) ** (exponent + 1) <= abs(number)) - (Decimal(2) ** exponent > abs(number))
    return Decimal(2) ** (max(exponent, kind.minexp) - kind.nmant)


def around(low: float, high: float, count: int = 60) -> np.ndarray:
    """Numbers between low and high: a grid without short binary fractions, and, if 0 is inside, as many towards
    zero."""
    grid = low + (high - low) * (np.arange(count) + math.sqrt(0.5)) / count
    return np.concatenate([grid, grid * 2.0 ** -np.arange(count)]) if low < 0 < high else grid


def positive(dtype: Any) -> np.ndarray:
    """Numbers of all magnitudes, including subnormal ones, and numbers near 1."""
    kind = np.finfo(dtype)
    mantissas = 1 + (np.arange(120) * math.sqrt(0.5)) % 1
    exponents = np.linspace(kind.minexp - kind.nmant, kind.maxexp - 1, 120).round()
    return np.concatenate([mantissas * 2.0**exponents, around(0.5, 2), 1 + around(-1e-4, 1e-4)])


def operands(name: str, dtype: Any) -> np.ndarray:
    kind = np.finfo(dtype)
    if name in ("log", "log2", "rsqrt"):
        found = positive(dtype)
    elif name in ("exp", "exp2"):
        scale = math.log(2) if name == "exp" else 1.0
        low = kind.minexp - kind.nmant
        ends = [around(low - 3, kind.maxexp + 1), around(low - 2, low + 9)]
        found = np.concatenate([around(-1, 1), *(scale * end for end in ends)])
    elif name == "erf":
        found = np.concatenate([around(-7, 7, 150), np.arange(-60, 60) / 16])
    else:
        multiples = np.arange(1, 200, 7) * (math.pi / 2)
        huge = positive(dtype)[60:120]
        found = np.concatenate([around(-9, 9), multiples, around(-9e5, 9e5), huge, -huge])
    with np.errstate(all="ignore"):
        found = found.astype(dtype)
    return found[np.isfinite(found) & (found != 0)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", TRUTHS)
def test_the_error_is_what_the_functions_promise(name, dtype):
    """At most ULPS in float64. Other types are rounded from float64: half an ulp, plus ULPS of float64."""
    bits = np.finfo(dtype).nmant
    bound = Decimal(elementary.ULPS)
    if dtype != np.float64:
        bound = Decimal("0.5") + elementary.ULPS * Decimal(2) ** (bits - 52)
    x = operands(name, dtype)
    found = getattr(elementary, name)(x)
    worst = Decimal(0)
    getcontext().prec = PRECISION
    largest = Decimal(float(np.finfo(dtype).max))
    for operand, actual in zip(x.tolist(), found.tolist(), strict=True):
        truth = TRUTHS[name](Decimal(operand))
        if math.isinf(actual):
            assert abs(truth) >= largest + ulp(largest, dtype) / 2, operand
            continue
        error = abs(Decimal(actual) - truth) / ulp(truth, dtype) if truth else abs(Decimal(actual))
        worst = max(worst, error)
        assert error <= bound, f"{name}({operand!r}) is {actual!r}: {error:.4f} ulp from {truth:.20g}"
    assert worst > Decimal("0.4"), "the operands are too easy: all results were close to a float"


AT = [INF, -INF, NAN, 0.0, -0.0]
SPECIAL = {
    "exp": ([*AT, 1e4, -1e4], [INF, 0.0, NAN, 1.0, 1.0, INF, 0.0]),
    "exp2": ([*AT, 1e4, -1e4, 10.0, -3.0], [INF, 0.0, NAN, 1.0, 1.0, INF, 0.0, 1024.0, 0.125]),
    "log": ([*AT, 1.0, -1.0], [INF, NAN, NAN, -INF, -INF, 0.0, NAN]),
    "log2": ([*AT, 1.0, -1.0, 8.0, 2.0**-14], [INF, NAN, NAN, -INF, -INF, 0.0, NAN, 3.0, -14.0]),
    "sin": (AT, [NAN, NAN, NAN, 0.0, -0.0]),
    "cos": (AT, [NAN, NAN, NAN, 1.0, 1.0]),
    "erf": ([*AT, 50.0, -50.0], [1.0, -1.0, NAN, 0.0, -0.0, 1.0, -1.0]),
    "rsqrt": ([*AT, 4.0, -1.0], [0.0, NAN, NAN, INF, -INF, 0.5, NAN]),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", SPECIAL)
def test_what_has_no_error_is_exact(name, dtype):
    x, expected = (np.array(side, dtype) for side in SPECIAL[name])
    found = getattr(elementary, name)(x)
    assert found.dtype == dtype
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(np.signbit(found[found == 0]), np.signbit(expected[expected == 0]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_powers_of_two_are_exact_both_ways(dtype):
    kind = np.finfo(dtype)
    exponents = np.arange(kind.minexp - kind.nmant, kind.maxexp).astype(dtype)
    powers = np.ldexp(np.ones_like(exponents), exponents.astype(int))
    assert np.array_equal(elementary.exp2(exponents), powers)
    assert np.array_equal(elementary.log2(powers), exponents)


# Every machine --------------------------------------------------------------------------------------------------------

#: Prints hashes of the results of each function, for operands that are made from integers only. With an argument, it
#: also prints whether numpy's matrix product gives equal rows equal results.
SCRIPT = """
import hashlib, json, sys
import numpy as np
from kvtwin.conformance.interpreter import arithmetic, elementary

def words(salt, count):
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt << 32)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return z ^ (z >> np.uint64(31))

def floats(salt, dtype, *shape, spread=None):
    # spread: how many binades there are on either side of 1; None: any bits
    kind = np.finfo(dtype)
    width = np.dtype(dtype).itemsize * 8
    z = words(salt, int(np.prod(shape))) >> np.uint64(64 - width)
    if spread is not None:
        fraction, exponent = z & np.uint64((1 << kind.nmant) - 1), (z >> np.uint64(kind.nmant)) % np.uint64(2 * spread)
        biased = exponent + np.uint64(kind.maxexp - 1 - spread)
        z = fraction | (biased << np.uint64(kind.nmant)) | (z >> np.uint64(width - 1) << np.uint64(width - 1))
    return z.astype(f"uint{width}").view(dtype).reshape(shape)

def digest(*results):
    state = hashlib.sha256()
    for x in results:
        x = np.ascontiguousarray(x)
        if x.dtype.kind == "f":
            x = np.where(np.isnan(x), x.dtype.type(np.nan), x)
        state.update(f"{x.dtype.name}{x.shape}".encode() + x.tobytes())
    return state.hexdigest()[:16]

FLOATS = (np.float16, np.float32, np.float64)
found = {}
for name in ("exp", "exp2", "log", "log2", "sin", "cos", "erf", "rsqrt"):
    function = getattr(elementary, name)
    found[name] = digest(*(function(floats(1, d, 3001, spread=s)) for d in FLOATS for s in (8, None)))
found["dot"] = digest(*(
    arithmetic.dot(floats(2, d, m, k, spread=6), floats(3, d, k, n, spread=6), dtype=to)
    for d, to in ((np.float16, np.float32), (np.float32, np.float32), (np.float64, np.float64))
    for m, k, n in ((1, 16, 1), (16, 64, 16), (7, 33, 19), (64, 128, 5))
))
found["sum"] = digest(*(
    arithmetic.total(floats(4, d, 5, n, 3, spread=6), axis=axis)
    for d in FLOATS for n in (1, 16, 37) for axis in (0, 1, None)
))
for name in ("maximum", "minimum", "fmax", "fmin"):
    found[name] = digest(*(getattr(arithmetic, name)(floats(5, d, 999), floats(6, d, 999)) for d in FLOATS))
for name in ("largest", "smallest", "nanmax", "nanmin"):
    found[name] = digest(*(getattr(arithmetic, name)(floats(7, d, 9, 9), axis=axis) for d in FLOATS for axis in (0, 1)))
found["to_integer"] = digest(*(
    arithmetic.to_integer(floats(8, d, 999, spread=s), np.dtype(w)) for d in FLOATS for s in (12, None)
    for w in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
))
if len(sys.argv) > 1:
    a, b = floats(9, np.float32, 37, 64, spread=4), floats(10, np.float32, 64, 16, spread=4)
    a[[20, 36]] = a[3]
    rows = (a @ b)[[3, 20, 36]].view(np.uint32)
    found["matmul gives equal rows equal results"] = bool((rows == rows[0]).all())
print(json.dumps(found))
"""
#: The output on every machine. It changes only if the arithmetic changes.
GOLDEN = {
    "exp": "f084ef1765f32190", "exp2": "c87594708ec9e3b9", "log": "3fe2894426456cb7", "log2": "83ac20b60e2be592",
    "sin": "207a2f27329645fc", "cos": "79536a1d14b32558", "erf": "3229520fc5517a4b", "rsqrt": "6e559b33864ddf27",
    "dot": "6350b15cd37f1663", "sum": "92653e1783ae951c", "maximum": "a4471ee8332592ac",
    "minimum": "e431687fed286e91", "fmax": "7767dca6c3ed55be", "fmin": "f99601ec76d12d30",
    "largest": "0f8890084ae4aabd", "smallest": "4aaa91cf5edfecab", "nanmax": "fa638733c4afdb8f",
    "nanmin": "db80add41160d5e2", "to_integer": "2058f66aae853134",
}  # fmt: skip


def computed(*arguments: str, **variables: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, **variables},
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def numpys_cpu() -> Any:
    try:
        from numpy._core import _multiarray_umath as numpys
    except ImportError:  # numpy 1.26
        from numpy.core import _multiarray_umath as numpys
    return numpys


def openblas_for(core: str) -> bool:
    """Whether numpy uses OpenBLAS, and this CPU can run its kernels of that name."""
    features = numpys_cpu().__cpu_features__
    needed = {"Haswell": ("AVX2", "FMA3"), "Zen": ("AVX2", "FMA3"), "SkylakeX": ("AVX512F",)}
    return features.get("SSE3", False) and all(features.get(name, False) for name in needed.get(core, ()))


def test_every_machine_computes_the_same_bits():
    assert computed() == GOLDEN


def test_numpy_without_vector_instructions_computes_the_same_bits():
    numpys = numpys_cpu()
    off = [name for name in numpys.__cpu_dispatch__ if numpys.__cpu_features__.get(name)]
    if not off:
        pytest.skip("numpy uses nothing beyond its baseline on this CPU")
    assert computed(NPY_DISABLE_CPU_FEATURES=" ".join(off)) == GOLDEN


@pytest.mark.parametrize("core", ["Haswell", "Zen", "SkylakeX", "Nehalem", "Prescott"])
def test_the_blas_kernels_of_every_cpu_compute_the_same_bits(core):
    if not openblas_for(core):
        pytest.skip(f"this CPU cannot run OpenBLAS's kernels for {core}")
    found = computed("and numpy", OPENBLAS_CORETYPE=core)
    equal = found.pop("matmul gives equal rows equal results")
    assert found == GOLDEN
    if core in ("Haswell", "Zen") and "openblas" in str(np.__config__.CONFIG["Build Dependencies"]["blas"]["name"]):
        assert not equal, "these kernels no longer give equal rows unequal results, so the test is empty"


def test_threads_make_no_difference():
    assert computed(OMP_NUM_THREADS="2", OPENBLAS_NUM_THREADS="2") == GOLDEN
