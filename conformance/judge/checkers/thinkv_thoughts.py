"""Checker of ThinKV's thoughts: the interval of a step's sparsity, from the tokens that may be below the threshold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ....reference.thinkv import thoughts
from ... import stats
from ...cases.contents import OCCUPANCIES
from ...cases.oracle import oracle
from ...cases.thought_cases import SparsityCase, sparsity_cases
from .. import recorded
from ..bounds import FLUSH, SLACK, UNIT, Arithmetic, Interval, arithmetic, gamma, log_weight_error
from ..compare import JudgeError, fail
from ..fields import field
from ..subjects import Subject, properties


def log_pooled(case: SparsityCase, allowed: Arithmetic) -> list[Tensor]:
    """Ends of the interval of the log of each token's pooled weight, [B, Hkv, S]; -inf in free slots.

    The pooled weight is w_j = max_h a_hj over the group. log a_hj has the error `log_weight_error`, and a maximum of
    numbers within intervals is within the maxima of their ends.
    """
    attention = case.attention
    error = log_weight_error(attention, allowed)
    exact = (attention.logit - attention.lse).masked_fill(~attention.seen, 0)             # [B, Hq, 1, S]
    groups = (case.key_value_heads, case.group)
    return [
        (exact + side).masked_fill(~attention.seen, -torch.inf)[:, :, 0].unflatten(1, groups).amax(2)
        for side in error
    ]


def log_ratios(case: SparsityCase, allowed: Arithmetic) -> Interval:
    """Interval of the log of each token's pooled weight over its KV head's largest, [B, Hkv, S]; -inf in free slots.

    `log_pooled` also bounds max_j w_j; the errors of the difference add. The comparison adds roundings, relative to the
    weights or to their logarithms: of the threshold, of its product or sum with the maximum, and of the difference.
    They are added to the ratio: 8 u (1 + |log w_j| + |log max|).
    """
    ends = log_pooled(case, allowed)                                                      # [B, Hkv, S]
    largest = [end.amax(-1, keepdim=True) for end in ends]
    occupied = case.occupied[:, None]
    low, high = (end.masked_fill(~occupied, 0) for end in ends)
    bottom, top = (end.masked_fill(end == -torch.inf, 0) for end in largest)
    margin = 8 * UNIT * (1 + low.abs() + bottom.abs()) * SLACK
    return Interval(
        (low - top - margin).masked_fill(~occupied, -torch.inf),
        (high - bottom + margin).masked_fill(~occupied, -torch.inf)
    )


def mean_weights(case: SparsityCase, allowed: Arithmetic) -> Interval:
    """Interval of each token's weight averaged over KV heads, [B, 1, S]; 0 in free slots.

    A normalised weight w_j / sum_k w_k rises with w_j and falls with all others, so it is largest with w_j at its upper
    end and the others at their lower ends, and the reverse. Roundings are relative: the logarithm and its exponential,
    8 u (1 + |log w_j|); the sum over S tokens; the division, 4 u, also by a constant; the sum over Hkv heads. Underflow
    adds at most 2^-126 for the weight and the ratio each, since the sum of all weights is at least 1 up to rounding:
    4 2^-126.
    """
    occupied, ends = case.occupied[:, None], log_pooled(case, allowed)
    low, high = (
        (end + side * 8 * UNIT * (1 + end.masked_fill(~occupied, 0).abs())).exp().masked_fill(~occupied, 0)
        for side, end in zip((-1, 1), ends, strict=True)
    )
    others = [end.sum(-1, keepdim=True) - end for end in (low, high)]                     # [B, Hkv, S]
    least = low / (low + others[1].clamp_min(0)).where(occupied & (low > 0), 1)
    most = high / (high + others[0].clamp_min(0)).where(occupied & (high > 0), 1)
    rounding = gamma(occupied.shape[-1] + case.key_value_heads + 16) * SLACK
    least, most = (share.mean(1, keepdim=True) for share in (least, most))
    return Interval((least * (1 - rounding) - 4 * FLUSH).clamp_min(0), most * (1 + rounding) + 4 * FLUSH)


def sides(case: SparsityCase, allowed: Arithmetic) -> tuple[Tensor, Tensor]:
    """The tokens that are surely, and possibly, below the threshold: [B, Hkv, S], or [B, 1, S] for the mean's sparsity.
    """
    occupied = case.occupied[:, None]
    if case.sparsity_of == "mean":
        weight = mean_weights(case, allowed)
        low, high = (case.threshold * end.amax(-1, keepdim=True) for end in weight)
        margin = 8 * UNIT * SLACK                                         # of the threshold and of its product
        surely = weight.high < low * (1 - margin) - FLUSH
        return occupied & surely, occupied & ~(weight.low >= high * (1 + margin) + FLUSH)
    ratio, cut = log_ratios(case, allowed), math.log(case.threshold)
    margin = 8 * UNIT * abs(cut)
    return occupied & (ratio.high < cut - margin), occupied & ~(ratio.low >= cut + margin)


def share_interval(case: SparsityCase, allowed: Arithmetic | None = None) -> tuple[Interval, Tensor]:
    """Interval of each row's sparsity [B], and the tokens that may be on either side of the threshold, as in `sides`.

    Tokens surely below the threshold count; those that may be on either side count or not. The exact count is divided
    by the number of tokens and averaged over KV heads: Hkv + 6 roundings, including four of a division.
    """
    surely, possibly = sides(case, allowed or arithmetic(case.dtype))
    tokens = case.occupied.sum(-1).clamp_min(1).double() * surely.shape[1]
    low, high = ((count.sum((1, 2)) / tokens) for count in (surely, possibly))
    rounding = gamma(case.key_value_heads + 6) * SLACK
    return Interval(low * (1 - rounding), high * (1 + rounding)), possibly & ~surely


def assert_sparsity_right(actual: Any, case: SparsityCase, *, allowed: Arithmetic | None = None) -> None:
    """actual: `attention_sparsity(**case.inputs)`. A decision is a token's side of the threshold, in one KV head or
    in the mean."""
    truth = oracle(thoughts.attention_sparsity, case)
    interval, open_ = share_interval(case, allowed)
    if bool(((truth < interval.low) | (truth > interval.high)).any()):
        raise JudgeError(f"sparsity: the oracle's {truth.tolist()} is outside {[end.tolist() for end in interval]}")
    if actual.dtype != torch.float32 or tuple(actual.shape) != tuple(truth.shape):
        fail(f"sparsity: expected float32 of shape {tuple(truth.shape)}, got {actual.dtype} of {tuple(actual.shape)}")
    wrong = ~((actual.double() >= interval.low) & (actual.double() <= interval.high))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        fail(
            f"sparsity: row {row}: expected {interval.low[row].item()!r} to {interval.high[row].item()!r} "
            f"(float64: {truth[row].item()!r}), got {actual[row].item()!r}"
        )
    decisions = int(case.occupied.sum()) * open_.shape[1]
    stats.decisions(decisions, decisions - int(open_.sum()))
    stats.adjudicate(int(((actual.double() - truth).abs() > truth * gamma(case.key_value_heads + 6) * SLACK).sum()))


def _judge_sparsity(actual: Tensor, case: SparsityCase) -> None:
    with field("sparsity"):
        assert_sparsity_right(actual, case)


#: Whether a token is below the threshold is a decision.
SPARSITY = Subject(
    "attention_sparsity", sparsity_cases, _judge_sparsity, choices=("sparsity",),
    properties=properties(extreme=("overflow_88", "extreme_1e4", "many_87", "zero_query"), masked=OCCUPANCIES[1:]),
    recorded=recorded.sparsities,
)


def replay(case: SparsityCase, module: Any) -> Iterator[str]:
    """Judge a saved case again."""
    assert_sparsity_right(module.attention_sparsity(**case.inputs), case)
    yield "sparsity"
