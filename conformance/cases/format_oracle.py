"""ThinKV's number formats in exact rational arithmetic, one group and one element at a time.

Both sides are tested against this. Where the semantics specify float32 (a division, fp8's scale), `float32` rounds the
exact number; nothing else is rounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import isinf, isnan
from typing import NamedTuple

LARGEST = Fraction(2**24 - 1) * 2**104  # of float32
BITS = {"fp8": 8, "nvfp4": 4, "ternary": 2, "int4": 4, "int2": 2}


def floating(code: int, exponent_bits: int, mantissa_bits: int) -> Fraction:
    """The value of an unsigned IEEE-like number with bias 2^(exponent_bits - 1) - 1."""
    exponent, mantissa = divmod(code, 1 << mantissa_bits)
    bias = (1 << exponent_bits - 1) - 1
    hidden = (1 << mantissa_bits) if exponent else 0
    return Fraction(hidden + mantissa) * Fraction(2) ** (max(exponent, 1) - bias - mantissa_bits)


E4M3 = [floating(code, 4, 3) for code in range(127)]  # 127 is NaN
E2M1 = [floating(code, 2, 1) for code in range(8)]
INT4 = [Fraction(n) for n in range(8)]
SIGNS = [Fraction(0), Fraction(1)]
MAGNITUDES = {"fp8": E4M3, "nvfp4": E2M1, "ternary": SIGNS, "int4": INT4, "int2": SIGNS}


def midpoints(values: Sequence[Fraction]) -> list[Fraction]:
    return [(low + high) / 2 for low, high in pairwise(values)]


def float32(x: Fraction) -> Fraction:
    """The float32 nearest to x >= 0, ties to even; no infinity."""
    if x == 0:
        return x
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    if x < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return round(x / unit) * unit  # Python rounds halves to even


def nearest(ratio: Fraction, values: Sequence[Fraction]) -> int:
    """The index of the value nearest to ratio; halfway, the even index."""
    above = min(bisect_left(values, ratio), len(values) - 1)
    return min((max(above - 1, 0), above), key=lambda index: (abs(values[index] - ratio), index % 2))


class Group(NamedTuple):
    """One quantized group. scale: the stored scale; step: the scale times the second scale; codes: ints."""

    scale: Fraction
    step: Fraction
    codes: list[int]

    def values(self, fmt: str) -> list[Fraction]:
        """The exact values of the codes."""
        half = 1 << BITS[fmt] - 1
        return [(-1 if code & half else 1) * MAGNITUDES[fmt][code % half] * self.step for code in self.codes]


def magnitude(x: float) -> Fraction:
    if isnan(x):
        return Fraction(0)
    return LARGEST if isinf(x) else min(abs(Fraction(x)), LARGEST)


def quantize(group: Sequence[float], fmt: str, rule: str = "amax", second: Fraction | None = None) -> Group:
    """Quantize one group of float32 numbers. second: the scale of the whole tensor, see `tensor_scale`."""
    values = MAGNITUDES[fmt]
    sizes = [magnitude(x) for x in group]
    amax = max(sizes)
    if fmt == "fp8":
        scale = float32(amax / values[-1])
        step = scale
    elif second is not None:
        scale = E4M3[nearest(float32(amax / float32(6 * second)), E4M3)] if second else Fraction(0)
        step = float32(scale * second)
    elif rule == "mse":
        scale = step = least_squares(sizes, amax)
    else:
        scale = step = E4M3[nearest(amax / values[-1], E4M3)]  # rounding to float32 first would not change it
    codes = []
    for x, size in zip(group, sizes, strict=True):
        ratio = size / step if step else Fraction(0)
        if fmt == "fp8" or second is not None:
            ratio = float32(ratio)
        index = nearest(ratio, values)
        codes.append(index | (1 << BITS[fmt] - 1 if index and x < 0 else 0))
    return Group(scale, step, codes)


def tensor_scale(elements: Sequence[float]) -> Fraction:
    return float32(max(map(magnitude, elements)) / 2688)


def least_squares(sizes: Sequence[Fraction], amax: Fraction) -> Fraction:
    """The scale of rule "mse", with the sum of squares in float64."""
    best, least = Fraction(0), float("inf")
    for k in range(16, 7, -1):
        scale = E4M3[nearest(float32(amax * k / 16), E4M3)]
        error = 0.0
        for size in sizes:
            off = float(float32(abs(size - (scale if size > scale / 2 else 0))))
            error += off * off
        if error < least:
            best, least = scale, error
    return best
