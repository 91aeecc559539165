"""Bounds of attention over keys and values that an implementation reconstructs from codes.

A method that quantizes stores, for some elements, a code with a scale and a minimum. The truth is attention over the
exact numbers code * scale + minimum, in float64. An implementation computes them in float32, and may round the result
to the type of its products.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...reference import attention as eager
from ..cases.oracle import attend
from .bounds import (
    FLUSH,
    SLACK,
    TINY,
    UNITS,
    Arithmetic,
    arithmetic,
    gamma,
    output_error,
    weight_error,
)


def element_error(exact: Tensor, minimum: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of numbers exact = code * scale + minimum, float64, that are computed in float32 and cast to `dtype`.

    The product and the sum round, fused or not: gamma(2) (|code scale| + |minimum|), where code * scale is exact -
    minimum. Each may flush to 0: 2 FLUSH. The cast rounds the computed number (u, and TINY for subnormal numbers).
    """
    computed = gamma(2) * ((exact - minimum).abs() + minimum.abs()) + 2 * FLUSH
    if dtype == torch.float32:
        return computed * SLACK
    return (computed + UNITS[dtype] * (exact.abs() + computed) + TINY[dtype]) * SLACK


def group_error(scale: Tensor, levels: int, dtype: torch.dtype) -> Tensor:
    """The error of quantization itself, |code * scale + minimum - x|, for the stored scale of each group.

    scale = (max - min) / levels is computed with two roundings to float32 and one to `dtype` (u, and TINY): a code of
    levels stands for min + levels scale, which may miss max by levels (scale h + TINY), 1 + h = (1 + u) (1 + gamma(2)).
    (x - min) / scale is computed with two roundings, at most gamma(2) levels (1 + h), and rounded to a code: 1/2.
    Together scale (1/2 + levels (h + gamma(2) (1 + h))) + levels TINY.
    """
    unit, tiny = UNITS[dtype], TINY[dtype]
    grown = (1 + unit) * (1 + gamma(2)) - 1
    return (scale * (0.5 + levels * (grown + gamma(2) * (1 + grown))) + levels * tiny) * SLACK


def decode_output(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, key_error: Tensor, value_error: Tensor, *,
    scale: float | None, allowed: Arithmetic | None = None,
) -> Tensor:
    """Bound of the output [B, Hq, D] of queries [B, Hq, D] over keys and values [B, Hkv, S, D] float64.

    key_error, value_error: the largest errors of their elements, 0 where they are stored unchanged. A logit is off
    by up to |scale| sum_d |q_d| e_jd; its rounding is bounded for keys of the size |k_jd| + e_jd. The output is off by
    sum_j p_j e_jd, where p_j is the weight with its error, its cast and its share of the sum's roundings, as in
    `bounds.output_error`. Its own rounding grows in proportion.
    """
    attention = attend(query, key, value, occupied, scale=scale)
    q = query.double().abs()[:, :, None]
    off = eager.logits(q, key_error, occupied, scale=abs(attention.scale)).masked_fill(~attention.seen, 0)
    wide = replace(attention, dot=attention.dot + off, rotation=off)
    allowed = allowed or arithmetic(query.dtype)
    unit = 0.0 if allowed.weight_dtype == torch.float32 else UNITS[allowed.weight_dtype]
    sums = gamma(allowed.dot * wide.count)
    weight = (wide.weight + weight_error(wide, allowed).absolute) * (1 + unit) * (1 + sums)
    if allowed.weight_dtype == torch.float16:
        weight = weight + TINY[torch.float16] * wide.seen
    errors = eager.per_query_head(eager.zero_unoccupied(value_error, occupied), query.shape[1])
    more = (weight @ errors) * (1 + UNITS[query.dtype]) * SLACK
    return (output_error(wide, allowed) + more)[:, :, 0]
