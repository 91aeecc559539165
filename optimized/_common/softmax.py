"""Device functions that merge the softmaxes of a row's splits."""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import finite_or_zero, log2_or_minus_inf, sum_of_products


@triton.jit
def denominators(tops, weight_sums, flat, splits, GROUP: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr):
    """Of a KV head's softmaxes: the maxima, and log2 of the sums of what the maxima were subtracted from, [ROWS].

    Rows beyond GROUP, and rows without tokens, have 0 and -inf.
    """
    g = tl.arange(0, ROWS)
    i = tl.arange(0, SPLITS)
    part = (flat * GROUP + g)[:, None] * splits + i[None, :]
    there = (g < GROUP)[:, None] & (i < splits)[None, :]
    split_top = tl.load(tops + part, mask=there, other=float("-inf"), cache_modifier=".cg")
    split_sum = tl.load(weight_sums + part, mask=there, other=0.0, cache_modifier=".cg")
    top = finite_or_zero(tl.max(split_top, 1))
    return top, log2_or_minus_inf(sum_of_products(split_sum, tl.exp2(split_top - top[:, None]), 1))
