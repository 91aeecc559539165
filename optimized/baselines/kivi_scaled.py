"""KIVI's bfloat16 numbers times 2^-16, which take one operation instead of two, and fewer shifts.

The lowest eight bits of a bfloat16 are an integer times 2^-133: subnormal numbers and those of the least exponent have
the same spacing. So codes are numbers where they lie in these bits, two of 4 bits or four of 2 bits: a code from bit n
on is code * 2^(n - 133). One fused operation multiplies it by the scale times 2^(117 - n) and adds the minimum times
2^-16. The result is exactly that of `pair_of` times 2^-16, unless the scale or the minimum is extreme
(`kivi_kernels.is_extreme`). The attention of a KV head that has such a scale or minimum takes `pair_of`.

Products times 2^-16 may be subnormal float32 numbers. Tensor cores do not round these to zero (tested on an H200), so
a sum of n products loses at most n * 2^-149, and 2^16 times that at the end, less than the bounds of products admit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.launch import PTX
from .kivi_step_kernels import both, lower_of

_PTX = tl.constexpr(PTX)
#: Undoes the factor 2^-16.
UP = tl.constexpr(65536.0)


@triton.jit
def _times(pair, EXPONENT: tl.constexpr):
    """Two bfloat16 in an int32 times 2^EXPONENT."""
    if _PTX:
        BITS: tl.constexpr = (EXPONENT + 127) << 7
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [pair, BITS * 0x10001, 0x80008000 - 2**32],
            dtype=tl.int32, is_pure=True, pack=1,
        )
    else:
        FACTOR: tl.constexpr = 2.0**EXPONENT
        return both(
            lower_of(pair, tl.bfloat16) * FACTOR, lower_of(pair >> 16, tl.bfloat16) * FACTOR, tl.bfloat16
        )


@triton.jit
def scaled_steps(steps, BITS: tl.constexpr):
    """Scales, two bfloat16 in an int32, times 2^(117 - n), for each bit n of a byte at which a code begins."""
    if BITS == 2:
        return _times(steps, 117), _times(steps, 115), _times(steps, 113), _times(steps, 111)
    else:
        return _times(steps, 117), _times(steps, 113)


@triton.jit
def scaled_shifts(shifts):
    """Minima, two bfloat16 in an int32, times 2^-16."""
    return _times(shifts, -16)


@triton.jit
def scaled_pair(half, steps, shifts, NUMBER: tl.constexpr, BITS: tl.constexpr):
    """The numbers of the codes NUMBER in both halves of an int32, times 2^-16: two bfloat16 in an int32. steps:
    `scaled_steps`; shifts: `scaled_shifts`."""
    TOGETHER: tl.constexpr = 8 // BITS
    PLACE: tl.constexpr = NUMBER % TOGETHER
    MASK: tl.constexpr = ((1 << BITS) - 1) * 0x10001 << PLACE * BITS
    codes = (half >> NUMBER // TOGETHER * 8) & MASK
    if _PTX:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [codes, steps[PLACE], shifts],
            dtype=tl.int32, is_pure=True, pack=1,
        )
    else:
        step = steps[PLACE]
        lower = lower_of(codes, tl.bfloat16) * lower_of(step, tl.bfloat16) + lower_of(shifts, tl.bfloat16)
        codes, step, shifts = codes >> 16, step >> 16, shifts >> 16
        upper = lower_of(codes, tl.bfloat16) * lower_of(step, tl.bfloat16) + lower_of(shifts, tl.bfloat16)
        return both(lower, upper, tl.bfloat16)
