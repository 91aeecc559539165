"""Arithmetic for the interpreter that depends on the operands only: the same bits on every CPU, anywhere in a tile.

Triton's interpreter computes with numpy, and some numpy results depend on more than their operands. The summation order
of a matrix product depends on the BLAS, on the CPU, and on the position of a row in its matrix. The order of a sum
depends on the memory layout and on dimensions of size 1. The instruction set of the CPU decides the sign of
max(+0, -0), the integer that NaN is converted to, and the last bits of exponentials and logarithms (elementary.py). A
verdict on a kernel must not depend on any of this: equal tokens must get equal scores, wherever they are in a tile.

`install` gives the interpreter its own copy of the numpy module, in which the functions in REPLACED replace numpy's.
They use only operations that IEEE 754 or integer arithmetic defines bit by bit. NaN results may have any sign and
payload.

The rest of what the interpreter computes needs no replacement. IEEE 754 defines elementwise + - * / sqrt, fmod, floor,
ceil, comparisons and casts between floating types. It also defines `fma`, which rounds once or twice depending on the
version of Triton. argmin and argmax return the first of equal elements, whatever the sign of a zero, or the first NaN.
cumsum and cumprod proceed along the axis one element at a time. A reduction or a scan by any other function calls that
function in Python, one element at a time. Integer arithmetic is exact in any order.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import numpy as np

from . import elementary
from .elementary import bare, quiet
from .internals import digest, lookup

Array = np.ndarray[Any, Any]

#: The number of products that a dot keeps in memory at a time. They fit into the CPU's cache.
MOST_PRODUCTS = 1 << 18
#: The integer type for the bits of floats, by their size in bytes.
BITS: dict[int, np.dtype[Any]] = {2: np.dtype(np.int16), 4: np.dtype(np.int32), 8: np.dtype(np.int64)}


def is_float(x: Any) -> bool:
    return x.dtype.kind == "f"


# Sums -----------------------------------------------------------------------------------------------------------------


@quiet
def dot(a: Array, b: Array, dtype: Any = None) -> Array:
    """a [..., M, K] @ b [..., K, N]. Products are rounded, then added in an order that depends on K only.

    float16 products are added in float32, and the sum is rounded once. Integers use np.matmul, which calls no BLAS for
    them.
    """
    kind = np.dtype(np.result_type(a, b) if dtype is None else dtype)
    if kind.kind != "f":
        return np.matmul(a, b, dtype=dtype)
    wide = np.dtype(np.float32) if kind == np.float16 else kind
    a, b = (side.astype(kind, copy=False).astype(wide, copy=False) for side in (a, b))
    if a.shape[-2] > b.shape[-1]:  # numpy is fast along the last axis, so make the longer axis the last one
        found = _dot(np.swapaxes(b, -1, -2), np.swapaxes(a, -1, -2))
        return np.swapaxes(found, -1, -2).astype(kind, copy=False)
    return _dot(a, b).astype(kind, copy=False)


def _dot(a: Array, b: Array) -> Array:
    a, b = _first(a, a.ndim - 1), _first(b, b.ndim - 2)  # [K, ..., M], [K, ..., N]
    rows = max(1, MOST_PRODUCTS // b.size)
    found = [_of_rows(a[..., first:first + rows], b) for first in range(0, a.shape[-1], rows)]
    return found[0] if len(found) == 1 else np.concatenate(found, axis=-2)


def _first(x: Array, axis: int) -> Array:
    """Move an axis to the front."""
    if axis == 0:
        return x
    return x.T if x.ndim == 2 else np.moveaxis(x, axis, 0)


def _of_rows(a: Array, b: Array) -> Array:
    products = np.empty((*a.shape, b.shape[-1]), a.dtype)  # the sums run along the first axis
    return _folded(np.multiply(a[..., None], b[..., None, :], out=products))


def _folded(x: Array) -> Array:
    """Sum over the first axis: add the second half to the first until one row is left. Overwrites x."""
    n = len(x)
    while n > 1:
        half = n // 2
        first = x[:half]
        np.add(first, x[half:2 * half], out=first)
        if n % 2:
            x[half] = x[n - 1]
        n -= half
    return x[0].copy()  # not a view, which would keep all of x


@quiet
def total(x: Array, axis: int | None = None, keepdims: bool = False) -> Any:
    """np.sum, in an order that depends on the length of the axis only. float16 is added in float32 and rounded once."""
    if not is_float(x):
        return np.add.reduce(x, axis=axis, keepdims=keepdims)  # type: ignore[call-overload]  # numpy's are for literals
    rest = x.astype(np.float32) if x.dtype == np.float16 else x
    if axis is None:
        rest, shape = rest.ravel(), [1] * x.ndim
    else:
        axis %= x.ndim
        shape = [*x.shape[:axis], 1, *x.shape[axis + 1:]]
        rest = _first(rest, axis)
    n = len(rest)
    while n > 1:
        half = n // 2
        added = rest[:half] + rest[half:2 * half]
        rest = np.concatenate([added, rest[n - 1:]]) if n % 2 else added
        n -= half
    found = rest[0].astype(x.dtype)  # a copy, even if there was only one element
    return found.reshape(shape) if keepdims else found


# Maximum and minimum --------------------------------------------------------------------------------------------------


def _choice(ufunc: np.ufunc, of_signs: np.ufunc) -> Callable[[Array, Array], Array]:
    """An elementwise maximum or minimum. of_signs: combines the bits of two zeros into those of the result."""

    @quiet
    def choose(a: Array, b: Array) -> Array:
        found: Array = ufunc(a, b)
        if np.count_nonzero(found) == found.size or not is_float(found):
            return found
        bits = BITS[found.dtype.itemsize]
        zeros = of_signs(a.view(bits), b.view(bits)).view(found.dtype)
        return np.where((a == 0) & (b == 0), zeros, found)

    return choose


def _extreme(ufunc: np.ufunc, of_signs: np.ufunc) -> Callable[..., Any]:
    """The maximum or minimum along an axis."""

    @quiet
    def reduce(x: Array, axis: int | None = None, keepdims: bool = False) -> Any:
        found = ufunc.reduce(x, axis=axis, keepdims=keepdims)
        if np.count_nonzero(found) == found.size or not is_float(x):
            return found
        bits = BITS[x.dtype.itemsize]
        signs = np.where(x == 0, x.view(bits), bits.type(of_signs.identity))
        zeros = of_signs.reduce(signs, axis=axis, keepdims=keepdims).view(x.dtype)
        return np.where(found == 0, zeros, found)

    return reduce


#: +0 is larger than -0. These return NaN if one operand is NaN.
maximum, largest = (make(np.maximum, np.bitwise_and) for make in (_choice, _extreme))
minimum, smallest = (make(np.minimum, np.bitwise_or) for make in (_choice, _extreme))
#: If one operand is NaN, these return the other one.
fmax, nanmax = (make(np.fmax, np.bitwise_and) for make in (_choice, _extreme))
fmin, nanmin = (make(np.fmin, np.bitwise_or) for make in (_choice, _extreme))


@quiet
def clip(x: Array, low: Array, high: Array) -> Array:
    """np.clip of three arrays."""
    return bare(minimum)(bare(maximum)(x, low), high)


# Conversion to integers -----------------------------------------------------------------------------------------------


@quiet
def to_integer(x: Array, dtype: np.dtype[Any]) -> Array:
    """Convert floats to integers, rounding towards zero. As on a GPU, values saturate and NaN becomes 0."""
    limits = np.iinfo(dtype)
    low, high = float(limits.min), float(limits.max + 1)  # powers of 2, or 0
    whole = np.trunc(x.astype(np.float32) if x.dtype == np.float16 else x)
    inside = (whole >= low) & (whole < high)
    if inside.all():
        return whole.astype(dtype)
    found = np.where(inside, whole, 0.0).astype(dtype)
    return np.where(whole >= high, dtype.type(limits.max), np.where(whole < low, dtype.type(limits.min), found))


def cast(x: Array, dtype: np.dtype[Any]) -> Array:
    """``x.astype(dtype)``, with a defined result for all floats."""
    return to_integer(x, dtype) if x.dtype.kind == "f" and dtype.kind in "iu" else x.astype(dtype)


# Installation ---------------------------------------------------------------------------------------------------------

#: The replacements of numpy's functions, by name.
REPLACED: dict[str, Callable[..., Any]] = {
    "matmul": dot, "sum": total, "maximum": maximum, "minimum": minimum, "fmax": fmax, "fmin": fmin, "max": largest,
    "min": smallest, "nanmax": nanmax, "nanmin": nanmin, "clip": clip,
    "exp": elementary.exp, "exp2": elementary.exp2, "log": elementary.log, "log2": elementary.log2,
    "sin": elementary.sin, "cos": elementary.cos,
}  # fmt: skip
#: The other numpy names that the interpreters of triton 3.6 to 3.9 use: types, and functions whose results depend on
#: their operands only. (vectorize calls Python functions: erf, which is replaced, and a product of integers.)
EXACT = frozenset("""
    abs add any arange argmax argmin array asarray ascontiguousarray bitwise_and bitwise_or bitwise_xor bool_
    broadcast_arrays broadcast_to ceil concatenate cumprod cumsum divide dtype empty equal expand_dims flip float16
    float32 float64 floating floor fmod frombuffer full full_like greater greater_equal histogram iinfo int16 int32
    int64 int8 issubdtype left_shift less less_equal logical_and logical_not moveaxis multiply nanargmax nanargmin
    ndarray ndindex negative not_equal ones ones_like repeat right_shift set_printoptions signedinteger sqrt stack
    subtract swapaxes take_along_axis transpose uint16 uint32 uint64 uint8 unravel_index unsignedinteger vectorize where
    zeros zeros_like
""".split())  # noqa: SIM905
#: The methods that are replaced, with the first digits of the SHA-256 of their sources.
SOURCES = {
    "InterpreterBuilder.cast_impl": "b221bbb79664",
    "InterpreterBuilder.create_rsqrt": "b5d679bd6fbf",
    "InterpreterBuilder.create_erf": "2e056dcbd539",
}


def problems(interpreter: ModuleType) -> list[str]:
    """The reasons why some arithmetic may still depend on the CPU after `install`, one line each."""
    try:
        source = inspect.getsource(interpreter)
    except (TypeError, OSError):
        return ["its interpreter has no source"]
    used = set(re.findall(r"\bnp\.(\w+)", source))
    found = [f"its interpreter uses numpy.{name}" for name in sorted(used - REPLACED.keys() - EXACT)]
    return found + [
        f"{name} has another source" for name, known in SOURCES.items() if digest(lookup(interpreter, name)) != known
    ]


def install(interpreter: ModuleType) -> None:
    """Replace the interpreter's arithmetic with this module's. Call this once per interpreter module."""
    ours = ModuleType("numpy")
    vars(ours).update({**vars(np), **{name: bare(function) for name, function in REPLACED.items()}})
    interpreter.np = ours  # type: ignore[attr-defined]
    executor = interpreter.GridExecutor
    executor.__call__ = quiet(executor.__call__)
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    casts = builder.cast_impl

    @wraps(casts)
    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        # numpy stores bfloat16 and float8 as integers, so the Triton type decides.
        if src.data.dtype.kind == "f" and dst_type.scalar.is_int():
            return handle(cast(src.data, interpreter._get_np_dtype(dst_type)), dst_type.scalar)
        return casts(self, src, dst_type)

    def unary(name: str, function: Callable[[Array], Array]) -> None:
        original = getattr(builder, name)
        setattr(builder, name, wraps(original)(lambda self, arg: self.unary_op(arg, bare(function))))

    builder.cast_impl = cast_impl
    unary("create_rsqrt", elementary.rsqrt)
    unary("create_erf", elementary.erf)
