"""A request for memory that a program will read later."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import PTX

_PTX = tl.constexpr(PTX)
#: The bytes that one pointer brings.
LINE = tl.constexpr(128)


@triton.jit
def prefetch(pointers):
    """Move the lines of LINE bytes at the pointers, which must be valid, into the L2 cache, and do not wait. Without
    effect where kernels have no PTX."""
    if _PTX:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False,
            pack=1,
        )
