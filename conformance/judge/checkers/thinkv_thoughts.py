"""Checker of ThinKV's thoughts: the interval of a step's sparsity, from the tokens that may be below the threshold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ....reference.thinkv import thoughts
from ...cases.contents import OCCUPANCIES
from ...cases.thought_cases import SparsityCase, sparsity_cases
from .. import recorded, stats
from ..bounds import SLACK, UNIT, Arithmetic, Interval, arithmetic, gamma, log_weight_error
from ..compare import JudgeError, fail
from ..fields import field
from ..oracle import oracle
from ..subjects import Subject, aspects


def log_ratios(case: SparsityCase, allowed: Arithmetic) -> Interval:
    """Interval of the log of each token's pooled weight over its KV head's largest, [B, Hkv, S]; -inf in free slots.

    The pooled weight is w_j = max_h a_hj over the group. log a_hj has the error `log_weight_error`, and a maximum of
    numbers within intervals is within the maxima of their ends. The same holds for max_j w_j; the errors of the
    difference add. The comparison adds roundings, relative to the weights or to their logarithms: of the threshold, of
    its product or sum with the maximum, and of the difference. They are added to the ratio: 8 u (1 + |log w_j| +
    |log max|).
    """
    attention = case.attention
    error = log_weight_error(attention, allowed)
    exact = (attention.logit - attention.lse).masked_fill(~attention.seen, 0)             # [B, Hq, 1, S]
    groups = (case.key_value_heads, case.group)
    ends = [
        (exact + side).masked_fill(~attention.seen, -torch.inf)[:, :, 0].unflatten(1, groups).amax(2)
        for side in error
    ]                                                                                     # [B, Hkv, S]
    tops = [end.amax(-1, keepdim=True) for end in ends]
    held = case.occupied[:, None]
    low, high = (end.masked_fill(~held, 0) for end in ends)
    bottom, top = (end.masked_fill(end == -torch.inf, 0) for end in tops)
    margin = 8 * UNIT * (1 + low.abs() + bottom.abs()) * SLACK
    return Interval(
        (low - top - margin).masked_fill(~held, -torch.inf), (high - bottom + margin).masked_fill(~held, -torch.inf)
    )


def share_interval(case: SparsityCase, allowed: Arithmetic | None = None) -> tuple[Interval, Tensor]:
    """Interval of each row's sparsity [B], and the tokens that may be on either side of the threshold [B, Hkv, S].

    Tokens surely below the threshold count; those that may be on either side count or not. The exact count is divided
    by the number of tokens and averaged over KV heads: Hkv + 6 roundings, including four of a division.
    """
    ratio = log_ratios(case, allowed or arithmetic(case.dtype))
    held, cut = case.occupied[:, None], math.log(case.threshold)
    margin = 8 * UNIT * abs(cut)
    surely = held & (ratio.high < cut - margin)
    possibly = held & ~(ratio.low >= cut + margin)
    tokens = case.occupied.sum(-1).clamp_min(1).double() * case.key_value_heads
    low, high = ((count.sum((1, 2)) / tokens) for count in (surely, possibly))
    rounding = gamma(case.key_value_heads + 6) * SLACK
    return Interval(low * (1 - rounding), high * (1 + rounding)), possibly & ~surely


def assert_sparsity_right(actual: Any, case: SparsityCase, *, allowed: Arithmetic | None = None) -> None:
    """actual: `attention_sparsity(**case.inputs)`. A decision is a token's side of the threshold in one KV head."""
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
    decisions = int(case.occupied.sum()) * case.key_value_heads
    stats.decisions(decisions, decisions - int(open_.sum()))
    stats.adjudicated(int(((actual.double() - truth).abs() > truth * gamma(case.key_value_heads + 6) * SLACK).sum()))


def _judge_sparsity(actual: Tensor, case: SparsityCase) -> None:
    with field("sparsity"):
        assert_sparsity_right(actual, case)


#: Whether a token is below the threshold is a decision.
SPARSITY = Subject(
    "attention_sparsity", sparsity_cases, _judge_sparsity, choices=("sparsity",),
    aspects=aspects(extreme=("overflow_88", "extreme_1e4", "many_87", "zero_query"), masked=OCCUPANCIES[1:]),
    recorded=recorded.sparsities,
)


def replay(case: SparsityCase, module: Any) -> Iterator[str]:
    """Judge a saved case again."""
    assert_sparsity_right(module.attention_sparsity(**case.inputs), case)
    yield "sparsity"
