"""Device functions of an online softmax in base 2: one tile's update, and the merge of a row's splits.

Each query has a running maximum `top` and the sum of `exp2(logit - top)` over the tokens so far; -inf and 0 while there
are none. A maximum of +-inf is not subtracted (`finite_or_zero`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import finite_or_zero, log2_or_minus_inf, sum_of_products


@triton.jit
def raise_maximum(top, highest):
    """The maximum after a tile whose largest logits are `highest`, what is subtracted from that tile's logits, and the
    factor for all that was summed before."""
    new_top = tl.maximum(top, highest)
    shift = finite_or_zero(new_top)
    return new_top, shift, tl.exp2(top - shift)


@triton.jit
def weigh(logit, top, highest):
    """The weights of a tile whose largest logits are `highest`, the new maximum, and the factor for what was summed
    before. logit [ROWS, BLOCK]."""
    new_top = tl.maximum(top, highest)
    shift = finite_or_zero(new_top)
    p = tl.exp2(logit - shift[:, None])
    return p, new_top, tl.exp2(top - shift)


@triton.jit
def weigh_tile(logit, top, weight_sum):
    """The same, with the new sum: weights, maximum, sum, factor."""
    p, new_top, rescale = weigh(logit, top, tl.max(logit, 1))
    return p, new_top, weight_sum * rescale + tl.sum(p, 1), rescale


@triton.jit
def merge_sums(tops, weight_sums, part, there, CACHE: tl.constexpr = ".cg"):
    """Finite maxima and sums [ROWS] of softmaxes whose splits lie at `part` [ROWS, SPLITS], where they are `there`.

    CACHE: the loads' cache modifier. Parts that other programs of the same launch have written need ".cg".
    """
    split_top = tl.load(tops + part, mask=there, other=float("-inf"), cache_modifier=CACHE)
    split_sum = tl.load(weight_sums + part, mask=there, other=0.0, cache_modifier=CACHE)
    top = finite_or_zero(tl.max(split_top, 1))
    return top, sum_of_products(split_sum, tl.exp2(split_top - top[:, None]), 1)


@triton.jit
def merge_outputs(
    partial, tops, part, splits, top, total, real, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
    CACHE: tl.constexpr = ".cg",
):
    """Attention outputs [ROWS, D_PAD] of `real` rows from the splits whose first lies at `part` [ROWS], one after the
    other; 0 where `total` is."""
    d = tl.arange(0, D_PAD)
    mask = real[:, None] & (d < HEAD_DIM)[None, :]
    acc = tl.zeros([part.shape[0], D_PAD], tl.float32)
    for split in range(splits):
        share = tl.exp2(tl.load(tops + part + split, mask=real, other=float("-inf"), cache_modifier=CACHE) - top)
        acc += share[:, None] * tl.load(
            partial + (part + split)[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0, cache_modifier=CACHE
        )
    return divide(acc, total)


@triton.jit
def divide(acc, total):
    """acc [ROWS, D] / total [ROWS], 0 where the total is 0: there are no tokens."""
    empty = (total == 0.0)[:, None]
    return tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total[:, None]))


@triton.jit
def denominators(tops, weight_sums, flat, splits, GROUP: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr):
    """Of a KV head's softmaxes: the maxima, and log2 of the sums of what the maxima were subtracted from, [ROWS].

    Rows beyond GROUP, and rows without tokens, have 0 and -inf.
    """
    g = tl.arange(0, ROWS)
    i = tl.arange(0, SPLITS)
    part = (flat * GROUP + g)[:, None] * splits + i[None, :]
    there = (g < GROUP)[:, None] & (i < splits)[None, :]
    top, total = merge_sums(tops, weight_sums, part, there)
    return top, log2_or_minus_inf(total)
