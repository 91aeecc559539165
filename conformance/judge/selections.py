"""Selections that lose nothing: some units of a cache are read in this step, and all of them stay for the next one.

A unit is a token, a page, or anything else that has a score. An eviction is judged by what it keeps
(`choices.assert_kept_right`), of equal tokens the last; a selection by what it reads, of equal units the first. All
rows are judged at once, since a step selects for each query head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import stats
from .bounds import Interval
from .choices import Verdict, any_of_equals, clear_of
from .mismatch import Fail, fail, fail_choice, fail_oracle, fail_tie, first
from .ties import members_chosen, rank_in_class


def assert_selected_right(
    selected: Tensor, truth: Tensor, scores: Interval, *, candidates: Tensor, forced: Tensor | None = None,
    tie: Tensor | None = None, what: str = "selected",
) -> Verdict:
    """Assert that `selected` [..., N] int64 is a right choice of N of the U units among `candidates` [..., U] bool.

    The indices ascend, are unique, in range and of candidates; rows with fewer than N candidates select all of them,
    and end with -1. Candidates that are `forced`, at most N, are selected whatever they score. No other candidate that
    is not selected surely scores above one that is. In a tie the lowest index is selected. truth: the oracle's choice,
    like selected. scores, tie (`ties.tie_classes`): like candidates. Units whose score is NaN may rank anywhere.
    """
    if selected.dtype != torch.int64 or tuple(selected.shape) != tuple(truth.shape):
        fail(f"{what}: expected int64 of shape {tuple(truth.shape)}, got {selected.dtype} of {tuple(selected.shape)}")
    units = candidates.shape[-1]
    forced = torch.zeros_like(candidates) if forced is None else forced & candidates
    tie = torch.arange(units, device=selected.device) if tie is None or any_of_equals() else tie
    tie = tie.expand(candidates.shape)
    scores = Interval(scores.low.nan_to_num(-torch.inf, torch.inf, -torch.inf),
                      scores.high.nan_to_num(torch.inf, torch.inf, -torch.inf))  # fmt: skip
    chosen = _mask_of(selected, candidates, forced, what, fail)
    expected = _mask_of(truth, candidates, forced, f"the oracle's {what}", fail_oracle)
    contested = candidates & ~forced
    # Float64 may order equal units otherwise.
    rank = rank_in_class(tie, contested)
    expected = torch.where(contested, rank < members_chosen(tie, expected & contested), expected)
    _check(expected, scores, contested, tie, f"the oracle's {what}", fail_oracle)
    right = _check(chosen, scores, contested, tie, what, fail)
    contested = contested & (contested & ~expected).any(-1, keepdim=True)
    sure = contested & _decisive(scores, contested, (expected & contested).sum(-1, keepdim=True), tie)
    scored = contested.any(-1)
    verdict = Verdict(scored, scored & ~(contested & ~sure).any(-1), (chosen != expected).any(-1) & scored & right)
    stats.decisions(int(contested.sum()), int(sure.sum()))
    stats.adjudicate(int(verdict.adjudicated.sum()))
    return verdict


def _mask_of(selected: Tensor, candidates: Tensor, forced: Tensor, what: str, fail: Fail) -> Tensor:
    """The selected units [..., U] bool. Fails unless they are as many as they must be, in order, and candidates, with
    the forced ones among them."""
    units, given = candidates.shape[-1], selected >= 0
    wrong = (selected < -1) | (selected >= units)
    if bool(wrong.any()):
        at = first(wrong)
        fail(f"{what}: {selected[at].item()} at {at} is not in 0..{units - 1}, nor -1")
    wrong = given[..., 1:] & (selected[..., 1:] <= selected[..., :-1]) | given[..., 1:] & ~given[..., :-1]
    if bool(wrong.any()):
        at = first(wrong)[:-1]
        fail(f"{what}: row {at} does not ascend, or has -1 before an index: {selected[at].tolist()}")
    mask = torch.zeros(*candidates.shape[:-1], units + 1, dtype=torch.bool, device=selected.device)
    mask = mask.scatter(-1, selected.where(given, units), True)[..., :units]
    for wrong, why in ((mask & ~candidates, "is not a candidate"), (forced & ~mask, "must be selected")):
        if bool(wrong.any()):
            at = first(wrong)
            fail(f"{what}: unit {at[-1]} of row {at[:-1]} {why}; selected: {selected[at[:-1]].tolist()}")
    most = candidates.sum(-1).clamp_max(selected.shape[-1])
    wrong = mask.sum(-1) != most
    if bool(wrong.any()):
        at = first(wrong)
        fail(f"{what}: row {at} has {mask[at].sum().item()} units, expected {most[at].item()}")
    return mask


def _check(chosen: Tensor, scores: Interval, contested: Tensor, tie: Tensor, what: str, fail: Fail) -> Tensor:
    """Check the units that compete by score. Returns the rows that are right by the scores."""
    low = scores.low.masked_fill(~contested | chosen, -torch.inf)          # of units that are not selected
    high = scores.high.masked_fill(~contested | ~chosen, torch.inf)        # of units that are
    wrong = low.amax(-1) > high.amin(-1)
    if bool(wrong.any()):
        at = first(wrong)
        better, worse = int(low[at].argmax()), int(high[at].argmin())
        fail_choice(
            f"{what}: row {at} selects unit {worse}, whose score is in {_ends(scores, at, worse)}, "
            f"but not unit {better} with {_ends(scores, at, better)}", fail, int(wrong.sum()),
        )
    rank = rank_in_class(tie, contested)
    late = contested & chosen & (rank >= members_chosen(tie, chosen & contested))
    if bool(late.any()):
        at = first(late)
        fail_tie(
            f"{what}: row {at[:-1]} selects unit {at[-1]}, but not a lower one that scores the same by construction; "
            "the lower index must be selected first", fail, wrong=int(late.any(-1).sum())
        )
    return ~wrong


def _ends(scores: Interval, at: tuple[int, ...], unit: int) -> str:
    return f"[{scores.low[(*at, unit)].item():.9g}, {scores.high[(*at, unit)].item():.9g}]"


def _decisive(scores: Interval, contested: Tensor, wanted: Tensor, tie: Tensor) -> Tensor:
    """The units [..., U] whose status is certain, if `wanted` [..., 1] of the contested are selected: enough others
    surely score below them, or above. Within a class of equal units the index decides."""
    rank, members = rank_in_class(tie, contested), members_chosen(tie, contested)
    below, above = clear_of(scores, contested)
    return (below + members - 1 - rank >= contested.sum(-1, keepdim=True) - wanted) | (above + rank >= wanted)
