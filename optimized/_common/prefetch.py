"""A request for memory that a program will read later."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import PTX

_PTX = tl.constexpr(PTX)
#: The bytes of a line of the L2 cache.
LINE = tl.constexpr(128)


@triton.jit
def prefetch(pointers):
    """Start to load the lines that contain these pointers, of valid memory, into the L2 cache, without waiting. Has no
    effect where kernels are not PTX."""
    if _PTX:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False,
            pack=1,
        )
