"""Budgets that are outputs: whole numbers that a method derives from real ones, such as the shares of its layers.

Where a real number is truncated, numbers on both sides of a threshold may be right. So a computed budget is judged in
two steps. The real numbers that an implementation reports must be within their bounds. Its budgets must be what the
method's rules make of the reported numbers, with either truncation of those that lie at a threshold. What the budgets
decide, such as the tokens that a layer keeps, is then judged given these budgets.

A budget is decisive if all numbers within their bounds lead to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from .. import stats
from .bounds import Interval
from .choices import Verdict
from .mismatch import fail, first

#: The most combinations of truncations that are tried. Beyond, rows are judged by `most` and `total` alone.
MOST = 4096
#: Of float64 operations, with margin: exponentials and divisions may be wrong by several units in the last place.
ROUNDING = 2.0**-48

Rule = Callable[..., Tensor]


def shares(weights: Interval) -> Interval:
    """Interval of the softmax over the last dimension of numbers in [low, high] [..., L], in float64. If all numbers of
    a row are -inf, the shares are equal."""
    ends = []
    none = (weights.high == -torch.inf).all(-1, keepdim=True)
    for own, others, sign in ((weights.low, weights.high, -1), (weights.high, weights.low, 1)):
        # 1 / (1 + sum over the others of exp(other - own))
        count = own.shape[-1]
        apart = others[..., None, :] - own[..., :, None]
        apart = torch.where(others[..., None, :] == -torch.inf, -torch.inf, apart)
        itself = torch.eye(count, dtype=torch.bool, device=own.device)
        rest = apart.exp().masked_fill(itself, 0).sum(-1)
        size = apart.abs().masked_fill(itself | apart.isinf(), 0).amax(-1) + count + 16
        share = (1 / (1 + rest)).masked_fill(own == -torch.inf, 0 if sign < 0 else 1)
        if sign > 0:  # a layer that surely has none gets nothing, unless no layer has any
            surely = (weights.low > -torch.inf).any(-1, keepdim=True)
            share = share.masked_fill((own == -torch.inf) & surely, 0)
        ends.append((share * (1 + sign * ROUNDING * size)).masked_fill(none, 1 / count))
    return Interval(*ends)


def assert_budgets_right(
    budgets: Tensor, reported: Tensor, allowed: Interval, truth: Tensor, *, total: int, most: Tensor, rule: Rule,
    scored: Tensor, what: str = "budgets",
) -> Verdict:
    """Assert that `budgets` [B, L] int64 follow from the logarithms of weights that are `reported` [B, L] with them.

    Each of L units gets the share of its weight in `total`, truncated; rule(wanted [n, L], row=b) makes budgets [n, L]
    of these. allowed: the interval of the logarithms in any right computation; truth [B, L]: the
    oracle's budgets. most [B]: the largest budget of a row. scored [B] bool: the rows whose budgets depend on weights;
    others are equal to the truth.
    """
    if budgets.dtype != torch.int64 or tuple(budgets.shape) != tuple(truth.shape):
        fail(f"{what}: expected int64 of shape {tuple(truth.shape)}, got {budgets.dtype} of {tuple(budgets.shape)}")
    wrong = ~scored[:, None] & (budgets != truth)
    if bool(wrong.any()):
        at = first(wrong)
        fail(f"{what}: at {at}, where no weight decides, expected {truth[at].item()}, got {budgets[at].item()}")
    exact = shares(Interval(reported.double(), reported.double()))
    own = Interval(*(total * end for end in exact))
    loose = Interval(*(total * end for end in shares(allowed)))
    decisive = torch.zeros_like(scored)
    for row in scored.nonzero()[:, 0].tolist():
        got, found = budgets[row], outcomes(Interval(own.low[row], own.high[row]), total, rule, row)
        if found is None:
            if int(got.min()) < 0 or int(got.max()) > int(most[row]) or int(got.sum()) > total:
                fail(f"{what}: row {row} has {got.tolist()}, of at most {int(most[row])} each and {total} together")
        elif not bool((found == got).all(-1).any()):
            wanted = ", ".join(str(one) for one in found.unique(dim=0)[:4].tolist())
            fail(f"{what}: row {row} has {got.tolist()}, but its weights, of the logarithms {reported[row].tolist()}, "
                 f"give {wanted}")
        possible = outcomes(Interval(loose.low[row], loose.high[row]), total, rule, row)
        decisive[row] = possible is not None and len(possible.unique(dim=0)) == 1
    verdict = Verdict(scored, decisive, scored & (budgets != truth).any(-1))
    stats.decisions(int(scored.sum()), int(decisive.sum()))
    stats.adjudicate(int(verdict.adjudicated.sum()))
    return verdict


def outcomes(quota: Interval, total: int, rule: Rule, row: int) -> Tensor | None:
    """The budgets [n, L] that numbers in `quota` [L], which add up to `total`, may lead to; None if they are too many.
    """
    low = quota.low.clamp(0, total).floor().to(torch.int64).tolist()
    high = quota.high.clamp(0, total).floor().to(torch.int64).tolist()
    count, room = 1, len(low)
    for one, other in zip(low, high, strict=True):
        count *= other - one + 1
        if count > MOST:
            return None
    wanted = [
        one for one in itertools.product(*(range(a, b + 1) for a, b in zip(low, high, strict=True)))
        if total - room <= sum(one) <= total
    ]
    return rule(torch.tensor(wanted, dtype=torch.int64, device=quota.low.device).view(-1, room), row=row)
