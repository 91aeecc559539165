"""Device functions that return the same, correctly rounded bits on a GPU and in Triton's CPU interpreter, unless their
docstring says otherwise."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import INTERPRETED, PTX

_INTERPRETED = tl.constexpr(INTERPRETED)
_PTX = tl.constexpr(PTX)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def float32(x):
    """x in float32, exactly. Uses integer arithmetic in the interpreter, which converts subnormal bfloat16 wrongly."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


# `tl.div_rn` and `tl.sqrt_rn` branch for unusual operands, and so do `/` and `tl.sqrt` of float64, so lanes of a warp
# can diverge. With Triton 3.6, lanes of large kernels may not have reconverged when the warp stores a matrix, which is
# then an illegal memory access. (LagKV's ranks divide so. They have no matrices, which `compile_only` checks.) The
# functions below compute in float64 without branches. The approximate reciprocal (of the root) has a relative error of
# about 2^-19. Two Newton steps reduce it to float64's precision, and a last correction leaves about 2^-53. A quotient
# or root of float32 numbers that float64 cannot represent differs from all numbers halfway between two float32 by at
# least 2^-49 (quotients) or 2^-51 (roots) of its size. Infinities, NaN, and roots of zero, for which Newton steps give
# NaN, come from the approximation, and so does the sign of a quotient, which Newton steps lose for zeros.


@triton.jit
def divided(x, y):
    """x / y of float32 tensors that broadcast against each other, rounded to float32, subnormal or not: the bits of
    `tl.div_rn`, except those of NaN."""
    if _PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .f64 x, y, r, e, q, rough;
            .reg .pred p;
            cvt.f64.f32 x, $1;
            cvt.f64.f32 y, $2;
            rcp.approx.ftz.f64 r, y;
            mul.rn.f64 rough, x, r;
            neg.f64 y, y;
            fma.rn.f64 e, y, r, 0d3FF0000000000000;
            fma.rn.f64 r, e, r, r;
            fma.rn.f64 e, y, r, 0d3FF0000000000000;
            fma.rn.f64 r, e, r, r;
            mul.rn.f64 q, x, r;
            fma.rn.f64 e, y, q, x;
            fma.rn.f64 q, e, r, q;
            testp.finite.f64 p, q;
            selp.f64 q, q, rough, p;
            copysign.f64 q, rough, q;
            cvt.rn.f32.f64 $0, q;
            }""", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1,
        )
    else:
        return tl.div_rn(x, y)


@triton.jit
def root(x):
    """The square root of a float32 tensor, rounded to float32: the bits of `tl.sqrt_rn`, except those of NaN, which the
    root of a negative number is."""
    if _PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .f64 x, r, e, h, q;
            .reg .f32 f;
            .reg .pred p;
            cvt.f64.f32 x, $1;
            rsqrt.approx.ftz.f64 r, x;
            mul.rn.f64 h, r, 0d3FE0000000000000;
            mul.rn.f64 q, x, r;
            neg.f64 e, q;
            fma.rn.f64 e, e, h, 0d3FE0000000000000;
            fma.rn.f64 h, h, e, h;
            fma.rn.f64 q, q, e, q;
            neg.f64 e, q;
            fma.rn.f64 e, e, h, 0d3FE0000000000000;
            fma.rn.f64 h, h, e, h;
            fma.rn.f64 q, q, e, q;
            neg.f64 e, q;
            fma.rn.f64 e, e, q, x;
            fma.rn.f64 q, e, h, q;
            testp.normal.f64 p, q;
            sqrt.approx.f32 f, $1;
            cvt.rn.f32.f64 $0, q;
            selp.f32 $0, $0, f, p;
            }""", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )
    else:
        return tl.sqrt_rn(x)


@triton.jit
def from_fp8(bits, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """The numbers of FP8 codes (uint8) in float32, float16 or bfloat16, exactly, NaN and infinity included.

    FORMAT: "e5m2"; "e4m3"; or "e4m3_native", for GPUs that convert it in one instruction (see `fp8_format`). All FP8
    numbers are float16 numbers. Those of E5M2 have the upper half of their bits. The bits of E4M3, shifted, are 2^-8
    times the number, subnormal or not.
    """
    if FORMAT == "e5m2":
        number = (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif FORMAT == "e4m3_native":
        number = bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        wide = bits.to(tl.uint16)
        number = ((wide & 0x80) << 8 | (wide & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0
        number = tl.where((wide & 0x7F) == 0x7F, float("nan"), number).to(tl.float16)
    if dtype == tl.float16:
        return number
    return round_to(number.to(tl.float32), dtype)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 -> dtype, to nearest even. Uses integer arithmetic in the interpreter, which truncates to bfloat16."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def round_output(x, dtype: tl.constexpr):
    """`round_to` for a weighted mean. Weights rounded before their product with the values may carry the mean beyond
    the largest value. In float16, this must not turn a finite mean into infinity. (In bfloat16, the sum of the products
    overflows float32 first.)"""
    if dtype == tl.float16:
        x = tl.where((x > 65504.0) & (x < float("inf")), 65504.0, x)
        x = tl.where((x < -65504.0) & (x > float("-inf")), -65504.0, x)
    return round_to(x, dtype)


@triton.jit
def previous_done(DEPENDENT: tl.constexpr):
    """With DEPENDENT, wait until the previous launch has ended, then let the next one start. Every program calls it.
    Before it, nothing may be written, and nothing read that the previous launch writes. All such kernels wait before
    they let the next one start, so that all launches before the previous one have ended in any case."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def dot(a, b):
    """a @ b, accumulated in float32 without tf32. The interpreter's bfloat16 dot returns garbage, so upcast there."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def multiply(a, b):
    """a * b, float32, rounded before a further operation.

    For logits from which their maximum is subtracted: fused into one operation with the subtraction, the largest logit
    gives the rounding error of its product instead of 0, and exp2 of that is infinite for logits beyond 2^32.
    """
    if _PTX:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return a * b


@triton.jit
def scaled_logit(product, scale, softcap):
    """product * scale; with a softcap, softcap * tanh(product * scale), see `logit_factors`. Like `multiply`, every
    place where it is inlined rounds alike."""
    logit = multiply(product, scale)
    if softcap is not None:
        logit = multiply(tanh(logit), softcap)
    return logit


@triton.jit
def tanh(x):
    """tanh of float32 with a relative error of 12 * 2^-24: see `TANH` in the suite's bounds. The GPU and the
    interpreter return different bits.

    Without branches, unlike CUDA's: lanes that diverge are the danger that the comment above `divided` describes. Below
    1/2, Lambert's continued fraction, cut after 9, which is off by less than 2^-32 there.
    """
    size = tl.abs(x)
    square = multiply(size, size)
    small = size < 0.5
    above = multiply(size, tl.fma(square + 105.0, square, 945.0))
    below = tl.fma(tl.fma(square, 15.0, 420.0), square, 945.0)
    gone = tl.exp2(multiply(size, -2.8853900817779268))                # e^(-2 size)
    found = tl.where(small, above, 1.0 - gone) / tl.where(small, below, 1.0 + gone)
    return tl.where(x < 0.0, -found, found)


def logit_factors(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """What `scaled_logit` multiplies by, for logits in base 2."""
    return (scale * LOG2_E.value, None) if softcap is None else (scale / softcap, softcap * LOG2_E.value)


@triton.jit
def of_any_width(mask):
    """mask [N] unchanged, for masks that are read from bytes and guard the loads of a `dot`'s operands.

    The compiler derives the order of a dot's additions from the narrowest load that feeds an operand, including its
    mask. Logits of equal keys would differ between a loop with a byte mask and one without. The compiler does not look
    through a reduction, so this function hides the load.
    """
    return tl.max(mask.to(tl.int32)[:, None], 1) != 0


@triton.jit
def sum_of_products(a, b, AXIS: tl.constexpr):
    """The sum of a * b along an axis in float32. Every lane that holds the sum has the same bits.

    Float32 does not guarantee this where a lane holds one product: the compiler fuses that product, unrounded, with
    the neighbour's rounded product, and the neighbour does the reverse. Equal tokens scaled by such sums in different
    lanes would not tie. Products of float32 are exact in float64, so fusion does not matter.
    """
    return tl.sum(a.to(tl.float64) * b.to(tl.float64), AXIS).to(tl.float32)


@triton.jit
def finite_or_zero(x):
    """Map +-inf to 0: used as the shift of exponentials that are all zero, or one of which is infinite anyway."""
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)


@triton.jit
def log2_or_minus_inf(x):
    """log2 of x >= 0; -inf at 0, NaN for NaN."""
    zero = x == 0.0
    return tl.where(zero, float("-inf"), tl.log2(tl.where(zero, 1.0, x)))


@triton.jit
def fast_log2(x):
    """log2 of x >= 0 with an error of 2^-22, absolute for results within [-1, 1] and relative otherwise; -inf at 0.
    The GPU and the interpreter return different bits."""
    if _PTX:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return log2_or_minus_inf(x)


@triton.jit
def without_sign_of_zero(x):
    """x with -0 replaced by +0. Adding +0 fails: fused with a preceding product that underflows, it keeps the sign."""
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def sortable(x):
    """float32 -> int32 in the same order; -0 equals +0, NaN ranks as -inf."""
    x = without_sign_of_zero(tl.where(x == x, x, float("-inf")))
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def row_norms(x, ROWS: tl.constexpr):
    """||x||_1 of the rows of x [N, D], repeated ROWS times: [ROWS, N], in the layout of ROWS queries times N keys.
    A dot, so that 16-bit types use tensor cores, which are not the bottleneck."""
    if _INTERPRETED:
        x = float32(x)
    return dot(tl.full([ROWS, x.shape[1]], 1.0, x.dtype), tl.trans(tl.abs(x)))
