"""Floats of all kinds and memory layouts for tests of the interpreter's arithmetic, and comparisons by bits.

A NaN result may have any sign and payload, so `bits` replaces every NaN by the same NaN.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

FLOATS = (np.float16, np.float32, np.float64)
INF, NAN = math.inf, math.nan
WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits(x: Any) -> np.ndarray[Any, Any]:
    """The bits of floats. All NaNs have the same bits."""
    x = np.asarray(x)
    return np.where(np.isnan(x), x.dtype.type(NAN), x).astype(x.dtype).view(WORDS[x.dtype.itemsize])


def same(left: Any, right: Any) -> bool:
    """Whether two arrays have the same type and the same bits."""
    return left.dtype == right.dtype and np.array_equal(bits(left), bits(right))


def numbers(seed: int, dtype: Any, *shape: int, kind: str = "ordinary") -> np.ndarray[Any, Any]:
    """Random floats. kind: "ordinary", "wide" (of all magnitudes), or any bits, with zeros, infinities and NaN."""
    draw = np.random.default_rng(seed)
    if kind == "ordinary":
        return draw.standard_normal(shape).astype(dtype)
    if kind == "wide":
        with np.errstate(all="ignore"):
            return (draw.standard_normal(shape) * 2.0 ** draw.integers(-24, 24, shape)).astype(dtype)
    found = draw.integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8).view(dtype)[..., 0]
    special = np.array([0.0, -0.0, INF, -INF, NAN, 1.0], dtype)[draw.integers(0, 6, shape)]
    return np.where(draw.random(shape) < 0.3, special, found)


def laid_out(x: np.ndarray[Any, Any], layout: str) -> np.ndarray[Any, Any]:
    """The same array in another memory layout."""
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
