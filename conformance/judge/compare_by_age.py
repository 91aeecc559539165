"""Comparator for block states: unprotected tokens are evicted by score, then protected ones by age. Takes all rows at
once.

choices.py defines right, decisive and adjudicated choices.
"""

from __future__ import annotations

from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from .. import stats
from .bounds import Interval
from .choices import Verdict, any_of_equals, check_partition, indices
from .mismatch import Fail, fail, fail_choice, fail_oracle, first, is_counting, message_of


def assert_kept_by_age_right(
    keep_mask: Tensor, truth: Tensor, scores: Interval, *, occupied: Tensor, protected: Tensor, age: Tensor,
    budget: int, over_budget: Tensor | None = None, tie: Tensor | None = None, what: str = "kept",
) -> Verdict:
    """Assert that `keep_mask` [..., S] bool is a right choice of the slots in `occupied` [..., S] to keep.

    Rows in `over_budget` [...] bool keep `budget` slots, other rows keep all of them; the default is the rows with more
    than `budget` occupied slots. Unprotected tokens are evicted first, by score, ties to the lowest slot; then
    protected ones, those with the lowest `age` (int64, a token's position) first. truth: the oracle's choice. scores,
    tie: like occupied.
    """
    index = torch.arange(occupied.shape[-1], device=occupied.device)
    tie = index.expand(occupied.shape) if tie is None or any_of_equals() else tie
    over_budget = occupied.sum(-1) > budget if over_budget is None else over_budget
    given = (occupied, protected, age, tie, *scores)
    expected, unprotected = truth, occupied & ~protected
    contested = unprotected & (over_budget & ((protected & occupied).sum(-1) < budget))[..., None]
    same = (tie[..., :, None] == tie[..., None, :]) & contested[..., :, None] & contested[..., None, :]
    # float64 rounding may order equal tokens in the oracle: keep as many of each class, but the highest ones.
    quota = (same & expected[..., None, :]).sum(-1)
    expected = torch.where(contested, (same & (index >= index[:, None])).sum(-1) <= quota, expected)
    illegal = torch.zeros_like(over_budget)
    for kept, name, raise_error in ((keep_mask, what, fail), (expected, f"the oracle's {what}", fail_oracle)):
        wrong = ~_right_rows(kept, *given, budget, over_budget)
        if bool(wrong.any()):
            counted = over_budget & (kept.sum(-1) == budget) & ~(kept & ~occupied).any(-1)
            counts = is_counting(raise_error) and not bool((wrong & ~counted).any())
            at = first(wrong)
            row_occupied, row_protected, ages, ties, row_low, row_high = (tensor[at] for tensor in given)
            allowed = budget if bool(over_budget[at]) else int(row_occupied.sum())
            explain = partial(
                _explain, kept[at], row_occupied, row_protected, ages, ties, row_low, row_high, allowed,
                f"{name}, row {at}",
            )
            if not counts:
                explain(raise_error)
            illegal = wrong
            fail_choice(message_of(explain), raise_error, int(wrong.sum()))

    low, high = scores
    below = (high[..., None, :] < low[..., :, None]) & contested[..., None, :] | same & (index < index[:, None])
    above = (low[..., None, :] > high[..., :, None]) & contested[..., None, :] | same & (index > index[:, None])
    count = (expected & contested).sum(-1, keepdim=True)
    sure = (below.sum(-1) >= contested.sum(-1, keepdim=True) - count) | (above.sum(-1) >= count)
    sure = (sure & contested).sum(-1)
    verdict = Verdict(
        contested.any(-1), contested.any(-1) & (sure == contested.sum(-1)),
        over_budget & (keep_mask != expected).any(-1) & ~illegal,
    )
    stats.decisions(int(contested.sum()), int(sure.sum()))
    stats.adjudicate(int(verdict.adjudicated.sum()))
    return verdict


def _newest(age: Tensor, among: Tensor, count: int) -> Tensor:
    """The `count` highest ages of each row, bool like `among`."""
    place = age.masked_fill(~among, -1).sort(dim=-1, descending=True).indices[..., :count]
    return torch.zeros_like(among).scatter(-1, place, True) & among


def _check_cut(
    keep_mask: Tensor, unprotected: Tensor, tie: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor]:
    """Two checks per row: no evicted token surely scores above a kept one; in a tie the lowest slots are evicted."""
    kept, evicted, slots = keep_mask & unprotected, unprotected & ~keep_mask, keep_mask.shape[-1]
    by_score = low.masked_fill(~evicted, -torch.inf).amax(-1) <= high.masked_fill(~kept, torch.inf).amin(-1)
    index = torch.arange(slots, device=tie.device).expand(tie.shape)
    first = torch.full_like(tie, slots).scatter_reduce(-1, tie, index.where(kept, slots), "amin")
    last = torch.full_like(tie, -1).scatter_reduce(-1, tie, index.where(evicted, -1), "amax")
    return by_score, (first > last).all(-1)


def _right_rows(
    keep_mask: Tensor, occupied: Tensor, protected: Tensor, age: Tensor, tie: Tensor, low: Tensor, high: Tensor,
    budget: int, over_budget: Tensor,
) -> Tensor:
    """The rows whose choice is right, [...] bool."""
    protected, unprotected = protected & occupied, occupied & ~protected
    remaining = budget - protected.sum(-1)
    by_age = (keep_mask == _newest(age, protected, budget)).all(-1)
    in_bounds, by_tie_rule = _check_cut(keep_mask, unprotected, tie, low, high)
    by_score = ~(protected & ~keep_mask).any(-1) & in_bounds & by_tie_rule
    right = torch.where(remaining <= 0, by_age, by_score)
    right = right & (keep_mask.sum(-1) == budget) & ~(keep_mask & ~occupied).any(-1)
    return torch.where(over_budget, right, (keep_mask == occupied).all(-1))


def _explain(
    keep_mask: Tensor, occupied: Tensor, protected: Tensor, age: Tensor, tie: Tensor, low: Tensor, high: Tensor,
    budget: int, what: str, fail: Fail,
) -> NoReturn:
    """Raise the error for one wrong row [S]."""
    count = int(occupied.sum())
    if count <= budget and bool((occupied & ~keep_mask).any()):
        fail(f"{what}: slots {indices(occupied & ~keep_mask)} are evicted, although the budget has room for them")
    if int(keep_mask.sum()) != min(budget, count):
        fail(f"{what}: expected {budget} of {count} tokens to be kept, got {int(keep_mask.sum())}: "
             f"{indices(keep_mask)}")
    protected, unprotected = protected & occupied, occupied & ~protected
    if int(protected.sum()) >= budget:
        newest = indices(_newest(age, protected, budget))
        fail(f"{what}: the newest protected tokens must be kept: expected slots {newest}, got {indices(keep_mask)}")
    if bool((protected & ~keep_mask).any()):
        fail(f"{what}: protected slots {indices(protected & ~keep_mask)} are evicted before unprotected ones")
    check_partition(
        (keep_mask & unprotected)[None], (unprotected & ~keep_mask)[None], Interval(low[None], high[None]), tie[None],
        lambda row: what, fail,
    )
    fail(f"{what}: scores are not numbers, of tokens in slots {indices(occupied)}")
