"""Products of one row with a matrix, fused with the norm, the activation or the residual, in one launch each.

At batch 1 these products dominate a decode step. cuBLAS takes 1.2 to 2 times as long as reading the matrix at copy
bandwidth, and needs separate launches for norm, activation and residual. Several rows use cuBLAS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: The matrix elements per row that a program loads at a time, and its number of rows if rows are longer than that.
BLOCK, ROWS = 4096, 4


def one_row(
    x: Tensor, weight: Tensor, *, norm: bool = False, gated: bool = False, residual: Tensor | None = None
) -> Tensor:
    """x [1, K] times weight [K, N], a transposed contiguous matrix -> [1, N] in x's dtype. Sums are in float32.

    norm: apply RMSNorm to x first; its weights are assumed to be part of the matrix. gated: the first half of the N
    results are gates; return silu(gate) * rest, [1, N / 2]. residual [1, N]: is added to the result.
    """
    inner, columns = weight.shape
    if x.shape != (1, inner) or not x.is_contiguous() or not weight.t().is_contiguous():
        raise ValueError(
            f"x must be a contiguous row of {inner} and weight a transposed contiguous matrix, got x of shape "
            f"{tuple(x.shape)} and strides {x.stride()}, weight of strides {weight.stride()}"
        )
    count = columns // 2 if gated else columns
    if residual is not None and not (residual.shape == (1, count) and residual.is_contiguous()):
        raise ValueError(
            f"residual must be a contiguous row of {count}, got shape {tuple(residual.shape)} and strides "
            f"{residual.stride()}"
        )
    out = torch.empty(1, count, dtype=x.dtype, device=x.device)
    whole = inner <= BLOCK
    rows = 1 if whole else ROWS
    block = triton.next_power_of_2(inner) if whole else BLOCK // 2
    _one_row_kernel[(triton.cdiv(count, rows),)](
        x, weight, out, residual, inner, count, NORM=norm, GATED=gated, ADD=residual is not None, ROWS=rows,
        BLOCK=block, WHOLE=whole, MASKED=inner % block != 0 or count % rows != 0,
    )
    return out


@triton.jit
def _one_row_kernel(
    x, weight, out, residual, inner, count,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr, MASKED: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = weight + n.to(tl.int64)[:, None] * inner
    second = weight + (n.to(tl.int64) + count)[:, None] * inner
    product = tl.zeros([ROWS, BLOCK], tl.float32)
    other = tl.zeros([ROWS, BLOCK], tl.float32)
    square = tl.zeros([BLOCK], tl.float32)
    for start in range(0, BLOCK if WHOLE else inner, BLOCK):
        k = start + tl.arange(0, BLOCK)
        if MASKED:
            there = (n < count)[:, None] & (k < inner)[None, :]
            w = tl.load(first + k[None, :], mask=there, other=0.0)
            a = tl.load(x + k, mask=k < inner, other=0.0).to(tl.float32)
        else:
            w, a = tl.load(first + k[None, :]), tl.load(x + k).to(tl.float32)
        if NORM:
            square += a * a
        product += w.to(tl.float32) * a[None, :]
        if GATED:
            w = tl.load(second + k[None, :], mask=there, other=0.0) if MASKED else tl.load(second + k[None, :])
            other += w.to(tl.float32) * a[None, :]
    found, rest = tl.sum(product, 1), tl.sum(other, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(square, 0) / inner + 1e-6)
        found, rest = found * scale, rest * scale
    if GATED:
        found = found / (1 + tl.exp(-found)) * rest
    if ADD:
        found += tl.load(residual + n, mask=n < count, other=0.0).to(tl.float32)
    tl.store(out + n, found, mask=n < count)
