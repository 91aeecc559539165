"""exp, exp2, log, log2, sin, cos, erf and rsqrt: the same bits for the same operand, at any position and on every CPU.

numpy computes these functions in vector loops that differ between CPUs, and uses the C library for the elements left
over, so one number may have two results within an array. The functions here use only elementwise operations that
IEEE 754 or integer arithmetic defines bit by bit: + - * / sqrt, comparisons, rounding to an integer, conversions and
bit shifts.

Every function is computed in float64 with an error of at most ULPS: half an ulp from the last operation, up to half an
ulp from the table entry or the largest summand, and little from the smaller terms. (Measured: 1.4 for erf and rsqrt,
1.0 for the others.) float16 and float32 results are rounded once from float64, which adds half an ulp; in float32, the
error in float64 is ULPS * 2 ** -29 of an ulp. NaN results may have any sign and payload.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from math import factorial, isqrt
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Function = Callable[[Array], Array]

ULPS = 2  # the largest error in float64, in units of the last place
BITS = 320  # fractional bits of the fixed-point integers that represent constants
FLOAT64 = np.dtype(np.float64)
INF = np.inf
BIAS, MANTISSA = 1023, 52  # of float64


def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` without numpy's warnings. `bare` returns it without this: inside of a launch, which silences numpy
    once, for all of its operations."""

    @wraps(function)
    def silent(*arguments: Any, **named: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*arguments, **named)

    return silent


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that `quiet` was given. Any other function is returned as it is."""
    return getattr(function, "__wrapped__", function)


def _float64(core: Function, narrow: Function | None = None) -> Function:
    """Extend a function of float64 arrays to all floating types.

    narrow: a faster function of float64 arrays with the same results for float16 and float32.
    """
    of_others = narrow or core

    def function(x: Array) -> Array:
        return core(x) if x.dtype == FLOAT64 else of_others(x.astype(FLOAT64)).astype(x.dtype)

    function.__name__, function.__doc__ = core.__name__, core.__doc__
    return quiet(function)


# Constants: fixed-point integers with BITS fractional bits -----------------------------------------------------------

_ONE = 1 << BITS
_LN2 = sum(_ONE // (k << k) for k in range(1, BITS + 8))


def _rounded(number: int) -> float:
    return number / _ONE  # Python's division of integers rounds correctly


def _in_two(number: int, bits: int) -> tuple[float, float]:
    """A constant as the sum of two floats. The first has `bits` significant bits."""
    cut = number.bit_length() - bits
    return _rounded(number >> cut << cut), _rounded(number - (number >> cut << cut))


def _inverse_tangent(inverse: int, one: int) -> int:
    """arctan(1 / inverse), from its Taylor series."""
    total, power, k = 0, one // inverse, 0
    while power:
        total += (-power if k % 2 else power) // (2 * k + 1)
        power //= inverse * inverse
        k += 1
    return total


@cache
def _pi(bits: int = BITS) -> int:
    """pi, by Machin's formula."""
    one = 1 << bits + 16
    return 4 * (4 * _inverse_tangent(5, one) - _inverse_tangent(239, one)) >> 16


# Exponentials: x = a multiple of 1 / STEPS, looked up in a table, + a rest, computed by a series ---------------------

LOG_STEPS = 10
STEPS = 1 << LOG_STEPS
_ROOT = _ONE << 1
for _ in range(LOG_STEPS):
    _ROOT = isqrt(_ROOT << BITS)
_POWERS = [_ONE]
while len(_POWERS) < STEPS:
    _POWERS.append(_POWERS[-1] * _ROOT >> BITS)
TABLE = np.array([_rounded(power) for power in _POWERS])  # 2 ** (j / STEPS)
TABLE_BITS = TABLE.view(np.int64)
#: Adding and subtracting _SHIFT rounds a float64 to a multiple of 1 / STEPS; _SHIFT_WHOLE rounds it to an integer. The
#: last bits of the sum hold the number of that multiple.
_SHIFT, _SHIFT_WHOLE = 1.5 * 2.0 ** (MANTISSA - LOG_STEPS), 1.5 * 2.0**MANTISSA
_SHIFT_BITS, _SHIFT_WHOLE_BITS = (int(np.array(shift).view(np.int64)) for shift in (_SHIFT, _SHIFT_WHOLE))
_LN2_FLOAT = _rounded(_LN2)
_STEP_HIGH, _STEP_LOW = (part / STEPS for part in _in_two(_LN2, MANTISSA - 21))
_STEPS_PER_UNIT = STEPS / _LN2_FLOAT


def _exp2(most: float, power: Callable[[Array, Array], Array]) -> Function:
    """2 ** x, and 0 or inf beyond `most`."""

    def exp2(x: Array) -> Array:
        """2 ** x."""
        x = np.minimum(np.maximum(x, -most), most)
        shifted = x + _SHIFT
        rest = x - (shifted - _SHIFT)
        return power(shifted.view(np.int64) - _SHIFT_BITS, rest * _LN2_FLOAT)

    return exp2


def _exp(most: float, power: Callable[[Array, Array], Array]) -> Function:
    """e ** x, and 0 or inf beyond `most`."""

    def exp(x: Array) -> Array:
        """e ** x."""
        x = np.minimum(np.maximum(x, -most), most)
        shifted = x * _STEPS_PER_UNIT + _SHIFT_WHOLE
        steps = shifted - _SHIFT_WHOLE
        rest = (x - steps * _STEP_HIGH) - steps * _STEP_LOW  # the first product is exact
        return power(shifted.view(np.int64) - _SHIFT_WHOLE_BITS, rest)

    return exp


def _power(steps: Array, rest: Array) -> Array:
    """2 ** (steps / STEPS) * e ** rest, for |rest| up to ln(2) / (2 * STEPS)."""
    begin = TABLE.take(steps & (STEPS - 1))
    whole = steps >> LOG_STEPS
    half = whole >> 1  # two factors, so that the first product neither overflows nor loses bits
    return (begin + begin * _series(rest)) * _two_to_the(half) * _two_to_the(whole - half)


def _normal_power(steps: Array, rest: Array) -> Array:
    """The same, if the result is neither subnormal nor infinite: the power of 2 is added to the exponents."""
    begin = (TABLE_BITS.take(steps & (STEPS - 1)) + (steps >> LOG_STEPS << MANTISSA)).view(FLOAT64)
    return begin + begin * _series(rest)


def _series(rest: Array) -> Array:
    """e ** rest - 1."""
    return rest * (1.0 + rest * (1 / 2 + rest * (1 / 6 + rest * (1 / 24))))


def _two_to_the(n: Array) -> Array:
    return (n + BIAS << MANTISSA).view(FLOAT64)


#: float16 and float32 results are 0 or inf beyond 2 ** 200 and e ** 200, which float64 can represent.
exp2 = _float64(_exp2(1100.0, _power), _exp2(200.0, _normal_power))
exp = _float64(_exp(800.0, _power), _exp(200.0, _normal_power))


# Logarithms: x = 2 ** k * (1 + f), 1 + f between sqrt(1/2) and sqrt(2) -----------------------------------------------

_TINY = 2.0**-1022
_SQRT_HALF = int(np.array(0.5**0.5).view(np.int64))
_LN2_HIGH, _LN2_LOW = _in_two(_LN2, 32)
_LOG2E_HIGH, _LOG2E_LOW = _in_two((_ONE << BITS) // _LN2, 32)
_INVERSE_TANGENT = [2 / (2 * k + 1) for k in range(1, 12)]  # coefficients of the inverse hyperbolic tangent


def _mantissa(x: Array) -> tuple[Array, Array, Array, Array]:
    """k, f, f ** 2 / 2 and log(1 + f) - f + f ** 2 / 2. The results are undefined where x is not a positive number."""
    small = x < _TINY
    subnormal = bool(small.any())
    if subnormal:
        x = np.where(small, x * 2.0**54, x)
    bits = x.view(np.int64)
    k = bits - _SQRT_HALF >> MANTISSA
    f = (bits - (k << MANTISSA)).view(FLOAT64) - 1.0
    s = f / (2.0 + f)
    squared = s * s
    series = _horner(_INVERSE_TANGENT, squared) * squared
    half = 0.5 * f * f
    return (k - 54 * small if subnormal else k).astype(FLOAT64), f, half, s * (half + series)


def _horner(coefficients: list[Any], x: Array) -> Array:
    """The value at x of the polynomial with these coefficients, the constant term first."""
    total = coefficients[-1] * x + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        total *= x
        total += coefficient
    return total


def _at_the_ends(x: Array, found: Array) -> Array:
    """The logarithms of x: `found` for positive finite numbers, and the special values for all others."""
    right = (x > 0.0) & (x < INF)
    if not right.all():
        ends = np.where(x == 0.0, -INF, np.where(x > 0.0, INF, np.nan))
        found = np.where(right, found, ends)
    return found


@_float64
def log(x: Array) -> Array:
    """The natural logarithm."""
    k, f, half, rest = _mantissa(x)
    return _at_the_ends(x, k * _LN2_HIGH - ((half - (rest + k * _LN2_LOW)) - f))


@_float64
def log2(x: Array) -> Array:
    """The logarithm to base 2, exact for powers of 2."""
    k, f, half, rest = _mantissa(x)
    high = ((f - half).view(np.int64) & -(1 << 32)).view(FLOAT64)  # 21 bits: its product is exact
    low = (f - high) - half + rest
    product = high * _LOG2E_HIGH
    total = k + product
    return _at_the_ends(x, (low + high) * _LOG2E_LOW + low * _LOG2E_HIGH + ((k - total) + product) + total)


# Sine and cosine: x = n * pi / 2 + y + rest, |y| up to pi / 4, |rest| less than y's last bit -------------------------

_LONG = 1300  # fractional bits of pi: enough for the largest float64
_HALF_PI = _pi() >> 1
_HALF_PI_1 = _in_two(_HALF_PI, 33)[0]
_HALF_PI_2, _HALF_PI_3 = _in_two(_HALF_PI - int(_HALF_PI_1 * 2**33) * (_ONE >> 33), 33)
_FEW, _NEAR = 2.0**20, 2.0**-40  # the fast reduction needs |x| < _FEW, and |y| >= _NEAR unless n is 0
_SINE = [(-1) ** k / factorial(2 * k + 1) for k in range(1, 9)]  # of (sin(y) - y) / y ** 3
_COSINE = [(-1) ** k / factorial(2 * k) for k in range(2, 10)]  # of (cos(y) - 1 + y ** 2 / 2) / y ** 4


@_float64
def sin(x: Array) -> Array:
    """The sine, for arguments of any size."""
    return np.where(x == 0.0, x, _turned(x, 0))


@_float64
def cos(x: Array) -> Array:
    """The cosine, for arguments of any size."""
    return _turned(x, 1)


def _turned(x: Array, quarters: int) -> Array:
    """sin(x + quarters * pi / 2)."""
    n, y, rest = _reduced(x)
    z = y * y
    half = 0.5 * z
    near = 1.0 - half
    sine = y + (y * z * _horner(_SINE, z) + (rest - half * rest))
    cosine = near + (((1.0 - near) - half) + (z * z * _horner(_COSINE, z) - y * rest))
    n = n + quarters
    found = np.where(n & 1, cosine, sine)
    found = np.where(n & 2, -found, found)
    return np.where(np.abs(x) < INF, found, np.nan)


def _reduced(x: Array) -> tuple[Array, Array, Array]:
    """n modulo 4, y and rest. They are undefined where x is not finite."""
    fast = np.abs(x) < _FEW
    inside = np.where(fast, x, 0.0)
    n = np.rint(inside * (2 / np.pi))
    t = inside - n * _HALF_PI_1                     # both exact
    w = n * _HALF_PI_2                              # exact
    s = t - w
    back = s - t
    low = ((t - (s - back)) - (w + back)) - n * _HALF_PI_3
    y = s + low
    rest = (s - y) + low
    turns = n.astype(np.int64) & 3
    slow = ~fast & (np.abs(x) < INF) | (np.abs(y) < _NEAR) & (n != 0.0)
    if slow.any():
        turns, y, rest = (np.array(part) for part in (turns, y, rest))
        for place in zip(*np.nonzero(np.atleast_1d(slow)), strict=True):
            where = place if slow.ndim else ()
            turns[where], y[where], rest[where] = _reduced_exactly(float(x[where]))
    return turns, y, rest


def _reduced_exactly(x: float) -> tuple[int, float, float]:
    """The same in integer arithmetic, for |x| >= 1/2."""
    quarter = _pi(_LONG) >> 1
    numerator, denominator = x.as_integer_ratio()
    number = (numerator << _LONG) // denominator
    n = (2 * number + quarter) // (2 * quarter)
    number -= n * quarter
    y = number / (1 << _LONG)
    numerator, denominator = y.as_integer_ratio()
    return n & 3, y, (number - (numerator << _LONG) // denominator) / (1 << _LONG)


# The error function: the Taylor series about the nearest multiple of 1 / CENTRES -------------------------------------

CENTRES, LAST = 8, 6  # erf(6) rounds to 1
_TERMS = 15


@_float64
def erf(x: Array) -> Array:
    """The error function."""
    size = np.minimum(np.abs(x), LAST)
    nearest = np.rint(size * CENTRES)
    centre = np.where(nearest == nearest, nearest, 0.0).astype(np.int64)
    series = _horner([terms.take(centre) for terms in _error_series()], size - nearest / CENTRES)
    return np.copysign(np.minimum(series, 1.0), x)


@cache
def _error_series() -> Array:
    """The coefficients of erf(c + h) as a polynomial in h: [terms, centres]."""
    root = isqrt(_pi(2 * BITS))
    columns = []
    for j in range(CENTRES * LAST + 1):
        c = j * _ONE // CENTRES
        square, power, term, total, k = c * c >> BITS, _ONE, c, 0, 0
        bell = 0  # e ** -c ** 2
        while power or term:
            total += term // (2 * k + 1)
            bell += power
            k += 1
            power, term = (-(number * square >> BITS) // k for number in (power, term))
        slope = (2 * bell << BITS) // root
        terms = [(2 * total << BITS) // root, slope]
        for n in range(_TERMS - 2):  # from the differential equation (erf')' = -2 x erf'
            before = terms[-2] * n if n else 0
            terms.append(-2 * ((c * (n + 1) * terms[-1] >> BITS) + before) // ((n + 2) * (n + 1)))
        columns.append([_rounded(term) for term in terms])
    return np.array(columns).T.copy()


@_float64
def rsqrt(x: Array) -> Array:
    """1 / sqrt(x)."""
    return 1.0 / np.sqrt(x)
