"""Device functions that give the same, correctly rounded bits compiled for a GPU and in Triton's CPU interpreter, but
for those that say otherwise."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import INTERPRETED, PTX

_INTERPRETED = tl.constexpr(INTERPRETED)
_PTX = tl.constexpr(PTX)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def float32(x):
    """x in float32, exactly. The interpreter gets bfloat16's subnormal numbers wrong: there it is done by hand."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 -> dtype, to nearest even. The interpreter truncates float32 to bfloat16, so there it is done by hand."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def round_output(x, dtype: tl.constexpr):
    """`round_to` of a weighted mean. Weights that were rounded before their product with values may carry the mean
    beyond the largest value, and in float16 a finite number must not become infinite for that. (In bfloat16 the sum
    of such products overflows float32 before.)"""
    if dtype == tl.float16:
        x = tl.where((x > 65504.0) & (x < float("inf")), 65504.0, x)
        x = tl.where((x < -65504.0) & (x > float("-inf")), -65504.0, x)
    return round_to(x, dtype)


@triton.jit
def dot(a, b):
    """a @ b accumulated in float32 without tf32. The interpreter's dot on bfloat16 returns garbage: upcast there."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def of_any_width(mask):
    """mask [N] as it is, read from bytes, for the loads of a `dot`'s operands.

    The compiler takes the narrowest load that an operand hangs on for its width, that of its mask too, and with it
    another order of additions: logits of equal keys would differ between a loop with such a mask and one without. It
    does not look through a reduction.
    """
    return tl.max(mask.to(tl.int32)[:, None], 1) != 0


@triton.jit
def sum_of_products(a, b, AXIS: tl.constexpr):
    """The sum of a * b along an axis, float32, the same number in every lane that holds it.

    Where a lane holds one product, a sum in float32 is not: the compiler fuses that product, unrounded, with the
    addition of the neighbour's, rounded, and the neighbour does the reverse. Equals that are scaled by such a sum, each
    in its lane, no longer tie. Products of float32 are exact in float64: it does not matter there what is fused.
    """
    return tl.sum(a.to(tl.float64) * b.to(tl.float64), AXIS).to(tl.float32)


@triton.jit
def finite_or_zero(x):
    """+-inf -> 0: the shift of exponentials that are all zero, or of which one is infinite whatever the shift."""
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)


@triton.jit
def log2_or_minus_inf(x):
    """log2 of x >= 0, -inf at 0; NaN stays NaN."""
    zero = x == 0.0
    return tl.where(zero, float("-inf"), tl.log2(tl.where(zero, 1.0, x)))


@triton.jit
def fast_log2(x):
    """log2 of x >= 0 to 2^-22, absolute for results within [-1, 1], else relative; -inf at 0. A GPU's bits
    are not the interpreter's."""
    if _PTX:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return log2_or_minus_inf(x)


@triton.jit
def without_sign_of_zero(x):
    """x, -0 as +0. Adding +0 does not do it: fused with the product before, it leaves one that vanishes its sign."""
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def sortable(x):
    """float32 -> int32 in the same order; -0 equals +0, NaN ranks as -inf."""
    x = without_sign_of_zero(tl.where(x == x, x, float("-inf")))
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def row_norms(x, ROWS: tl.constexpr):
    """||x||_1 of the rows of x [N, D], ROWS times, [ROWS, N]: laid out as the products of ROWS queries with N keys are,
    and, of 16-bit types, by tensor cores, which have the time."""
    if _INTERPRETED:
        x = float32(x)
    return dot(tl.full([ROWS, x.shape[1]], 1.0, x.dtype), tl.trans(tl.abs(x)))
