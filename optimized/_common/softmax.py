"""Device functions of an online softmax in base 2: the update by one tile, and the merge of a row's splits.

Each query has a running maximum `row_max` and a running sum of `exp2(logit - row_max)`. Without tokens they are -inf
and 0. A maximum of +-inf is not subtracted (`finite_or_zero`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import LOG2_E, finite_or_zero, float32, log2_or_minus_inf, round_output, sum_of_products


@triton.jit
def begin(sink_logits, head, there, ROWS: tl.constexpr):
    """The maxima and sums of ROWS queries before the first tile. sink_logits: None, or those of attention sinks, which
    the softmaxes of the query heads `head` [ROWS] begin with, if `there`."""
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.full([ROWS], 0.0, tl.float32)
    if sink_logits is not None:
        row_max = float32(tl.load(sink_logits + head, mask=there, other=float("-inf"))) * LOG2_E
        weight_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    return row_max, weight_sum


@triton.jit
def raise_maximum(row_max, highest):
    """The new maximum after a tile whose largest logits are `highest`, the shift to subtract from the tile's logits,
    and the factor that rescales the earlier sums."""
    new_max = tl.maximum(row_max, highest)
    shift = finite_or_zero(new_max)
    return new_max, shift, tl.exp2(row_max - shift)


@triton.jit
def weigh(logit, row_max, highest):
    """logit [ROWS, BLOCK], a tile whose largest logits are `highest`: its weights, the new maximum, and the factor that
    rescales the earlier sums."""
    # Not by `raise_maximum`: with the factor before the weights, some attention kernels need more registers.
    new_max = tl.maximum(row_max, highest)
    shift = finite_or_zero(new_max)
    p = tl.exp2(logit - shift[:, None])
    return p, new_max, tl.exp2(row_max - shift)


@triton.jit
def weigh_tile(logit, row_max, weight_sum):
    """`weigh` of a tile and its largest logits, with the new sum: weights, maximum, sum [ROWS], factor."""
    p, new_max, rescale = weigh(logit, row_max, tl.max(logit, 1))
    return p, new_max, weight_sum * rescale + tl.sum(p, 1), rescale


@triton.jit
def weigh_columns(row_max, weight_sum, logit, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """`weigh_tile` of a tile [TOKENS, HEADS], a query in each column. weight_sum [HEADS, HEADS]: sums of every HEADS-th
    token, so that no lane needs those of others."""
    new_max, shift, rescale = raise_maximum(row_max, tl.max(logit, 0))
    p = tl.exp2(logit - shift[None, :])
    sums = tl.sum(tl.reshape(p, (TOKENS // HEADS, HEADS, HEADS)), 0)
    return p, new_max, weight_sum * rescale[None, :] + sums, rescale


@triton.jit
def _load_part(pointer, mask, other, SAME_LAUNCH: tl.constexpr):
    # Not by a modifier as an argument: Triton 3.6 refuses a str as an argument's default.
    if SAME_LAUNCH:
        loaded = tl.load(pointer, mask=mask, other=other, cache_modifier=".cg")
    else:
        loaded = tl.load(pointer, mask=mask, other=other)
    return loaded


@triton.jit
def merge_sums(row_maxima, weight_sums, part, there, SAME_LAUNCH: tl.constexpr = True):
    """Merge the maxima and sums of splits at `part` [ROWS, SPLITS], where `there` is True: finite maxima, sums [ROWS].

    SAME_LAUNCH: other programs of this launch wrote the parts, so the L1 cache may hold older ones.
    """
    split_max = _load_part(row_maxima + part, there, float("-inf"), SAME_LAUNCH)
    split_sum = _load_part(weight_sums + part, there, 0.0, SAME_LAUNCH)
    row_max = finite_or_zero(tl.max(split_max, 1))
    return row_max, sum_of_products(split_sum, tl.exp2(split_max - row_max[:, None]), 1)


@triton.jit
def merge_outputs(
    partial, row_maxima, part, splits, row_max, total, valid, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
    SAME_LAUNCH: tl.constexpr = True, TOGETHER: tl.constexpr = 1,
):
    """Attention outputs [ROWS, D_PAD] of the `valid` rows, merged one split at a time; 0 where `total` is 0.

    `part` [ROWS]: the index of each row's first split. TOGETHER: the splits that are loaded at a time.
    """
    d = tl.arange(0, D_PAD)
    mask = valid[:, None] & (d < HEAD_DIM)[None, :]
    acc = tl.zeros([part.shape[0], D_PAD], tl.float32)
    for first in range(0, splits, TOGETHER):
        for near in tl.static_range(TOGETHER):
            split, there, loads = first + near, valid, mask
            if TOGETHER > 1:
                there, loads = valid & (split < splits), mask & (split < splits)
            share = tl.exp2(_load_part(row_maxima + part + split, there, float("-inf"), SAME_LAUNCH) - row_max)
            at = (part + split)[:, None] * HEAD_DIM + d[None, :]
            acc += share[:, None] * _load_part(partial + at, loads, 0.0, SAME_LAUNCH)
    return divide(acc, total)


#: Splits that `merge_head` loads at a time: 64 one after another took 19 us on an H200, with one row.
_TOGETHER = tl.constexpr(16)


@triton.jit
def merge_head(
    partial, row_maxima, weight_sums, output, splits, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr
):
    """Program: a query head. Stores its attention output, merged from those of its splits in an earlier launch."""
    head = tl.program_id(0).to(tl.int64)
    i, d = tl.arange(0, SPLITS), tl.arange(0, D_PAD)
    part = head * splits + tl.zeros([1], tl.int64)
    row_max, total = merge_sums(row_maxima, weight_sums, part[:, None] + i[None, :], (i < splits)[None, :], False)
    result = merge_outputs(
        partial, row_maxima, part, splits, row_max, total, part >= 0, HEAD_DIM, D_PAD, False, _TOGETHER
    )
    at = output + head * HEAD_DIM + d[None, :]
    tl.store(at, round_output(result, output.dtype.element_ty), mask=(d < HEAD_DIM)[None, :])


@triton.jit
def divide(acc, total):
    """acc [ROWS, D] / total [ROWS], and 0 where the total is 0 (no tokens)."""
    empty = (total == 0.0)[:, None]
    return tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total[:, None]))


@triton.jit
def denominators(
    row_maxima, weight_sums, batch_head, splits, GROUP: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr
):
    """The maxima of a KV head's softmaxes, and log2 of their sums relative to these maxima, both [ROWS].

    They are 0 and -inf for rows beyond GROUP and for rows without tokens.
    """
    g = tl.arange(0, ROWS)
    i = tl.arange(0, SPLITS)
    part = (batch_head * GROUP + g)[:, None] * splits + i[None, :]
    there = (g < GROUP)[:, None] & (i < splits)[None, :]
    row_max, total = merge_sums(row_maxima, weight_sums, part, there)
    return row_max, log2_or_minus_inf(total)
