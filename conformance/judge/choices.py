"""Comparators of choices: what is evicted and kept, against intervals of scores.

A choice by score is right if some scores within their bounds lead to it: no evicted token's lower end lies above a kept
token's upper end. Exact ties (ties.py: bitwise equal tokens, or zero values) score the same in any arithmetic, so the
tie rule decides there and the indices must be exactly right. Whatever masks decide must be exactly right too: free
slots, protection, the window.

Decisions are counted for the plugin's check that a test is not vacuous. For a single victim, a decision is a row, and
it is decisive if only one slot is right: of thousands of slots, all but two are always clear. For a kept set, a
decision is a token that competes by score. Rows and tokens that masks or the budget alone decide are not counted. A
choice that differs from the truth's within the bounds is an adjudicated tie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from .. import capabilities, stats
from .bounds import Interval
from .mismatch import Fail, fail, fail_choice, fail_oracle, fail_tie, first, unravel
from .ties import members_chosen, rank_in_class


@dataclass(frozen=True)
class Verdict:
    """The verdict on each row of decisions, bool tensors of one shape.

    scored: scores had something to decide. decisive: only one answer was right. adjudicated: the choice differs from
    the truth's within the bounds.
    """

    scored: Tensor
    decisive: Tensor
    adjudicated: Tensor


def any_of_equals() -> bool:
    """True if the implementation under test declares that any of equal tokens may be evicted first."""
    return capabilities.current().ties == "any"


def undecided() -> Verdict:
    """The verdict if no choice was judged."""
    nothing = torch.zeros(0, dtype=torch.bool)
    return Verdict(nothing, nothing, nothing)


def assert_eviction_right(
    slot: Tensor, truth: Tensor, scores: Interval, *, occupied: Tensor, protected: Tensor | None = None,
    tie: Tensor | None = None, what: str = "slot",
) -> Verdict:
    """Assert that `slot` [B] (or [B, Hkv]) int64 is a right choice of the next slot to overwrite in each row.

    truth: the oracle's choice. scores: intervals of the scores that rank, like occupied. tie: `ties.tie_classes`.
    The right choice is the lowest free slot, if there is one. Otherwise it is an unprotected slot whose score can be
    the lowest; the lowest index in an exact tie; index 0 if every slot is protected.
    """
    if slot.dtype != torch.int64 or tuple(slot.shape) != tuple(occupied.shape[:-1]):
        fail(f"{what}: expected int64 of shape {tuple(occupied.shape[:-1])}, got {slot.dtype} of {tuple(slot.shape)}")
    slots = occupied.shape[-1]
    out = (slot < 0) | (slot >= slots)
    if bool(out.any()):
        at = first(out)
        fail(f"{what}: row {at} picks slot {slot[at].item()}, which is not in 0..{slots - 1}")
    index = torch.arange(slots, device=slot.device).expand(occupied.shape)
    free = ~occupied
    candidates = occupied if protected is None else occupied & ~protected
    forced = free.any(-1) | ~candidates.any(-1)                          # rows whose slot does not depend on scores
    expected = torch.where(free.any(-1), index.where(free, slots).amin(-1), 0)
    wrong = forced & (slot != expected)
    if bool(wrong.any()):
        at = first(wrong)
        why = "the lowest free slot" if bool(free[at].any()) else "the lowest index, since all are protected"
        fail(f"{what}: row {at} must pick slot {expected[at].item()}, {why}, got slot {slot[at].item()}"
             f"\n  free slots: {indices(free[at])}", wrong=int(wrong.sum()))
    tie = index if tie is None or any_of_equals() else tie
    illegal = _check_victims(slot, scores, candidates, tie, forced, what, fail)
    # float64 rounding may order equal tokens in the oracle; apply the tie rule to its choice.
    truth = torch.where(forced, truth, _lowest_member(truth, candidates, tie))
    _check_victims(truth, scores, candidates, tie, forced, f"the oracle's {what}", fail_oracle)

    low, high = (end.masked_fill(~candidates, torch.inf) for end in scores)
    in_class = tie == tie.gather(-1, truth[..., None])
    rivals = low.masked_fill(in_class, torch.inf).amin(-1)
    clear = high.gather(-1, truth[..., None])[..., 0] < rivals
    alone = (candidates & ~in_class).sum(-1) == 0
    comparable = ~_not_numbers(scores, candidates).any(-1)
    scored = ~forced & (candidates.sum(-1) > 1) & comparable
    verdict = Verdict(scored, scored & (clear | alone), scored & (slot != truth) & ~illegal)
    stats.decisions(int(verdict.scored.sum()), int(verdict.decisive.sum()))
    stats.adjudicate(int(verdict.adjudicated.sum()))
    return verdict


def _not_numbers(scores: Interval, candidates: Tensor) -> Tensor:
    """Candidates whose score is NaN because inputs were not finite; their order is unknown."""
    return candidates & (scores.low.isnan() | scores.high.isnan())


def _lowest_member(slot: Tensor, candidates: Tensor, tie: Tensor) -> Tensor:
    """The lowest candidate that ties with `slot`, like slot."""
    index = torch.arange(tie.shape[-1], device=tie.device).expand(tie.shape)
    in_class = candidates & (tie == tie.gather(-1, slot[..., None]))
    return index.where(in_class, tie.shape[-1]).amin(-1)


def _check_victims(
    slot: Tensor, scores: Interval, candidates: Tensor, tie: Tensor, forced: Tensor, what: str, fail: Fail
) -> Tensor:
    """In rows that are not `forced`, the victim is a candidate, the lowest of its tie, and can score lowest. Returns
    the rows in which it cannot, if they are counted (`mismatch.counting`)."""
    at_slot = slot[..., None]
    is_candidate = candidates.gather(-1, at_slot)[..., 0]
    wrong = ~forced & ~is_candidate
    if bool(wrong.any()):
        at = first(wrong)
        fail(f"{what}: row {at} picks slot {slot[at].item()}, which is protected, "
             f"while these are not: {indices(candidates[at])}", wrong=int(wrong.sum()))
    lowest = _lowest_member(slot, candidates, tie)
    wrong = ~forced & (lowest != slot)
    if bool(wrong.any()):
        at = first(wrong)
        equal = indices(candidates[at] & (tie[at] == tie[at][slot[at]]))
        fail_tie(
            f"{what}: row {at} picks slot {slot[at].item()}, but slot {lowest[at].item()} holds an equal token, and "
            f"ties go to the lowest index\n  equal tokens: {equal}", fail, wrong=int(wrong.sum())
        )
    low = scores.low.gather(-1, at_slot)[..., 0]
    rivals = scores.high.masked_fill(~candidates, torch.inf)
    wrong = ~forced & (low > rivals.amin(-1)) & ~_not_numbers(scores, candidates).any(-1)
    if bool(wrong.any()):
        at = first(wrong)
        better = int(rivals[at].argmin())
        fail_choice(
            f"{what}: row {at} picks slot {slot[at].item()}, whose score is in {_interval(scores, at, slot[at])}, "
            f"but slot {better} scores less: {_interval(scores, at, better)}", fail, int(wrong.sum()),
        )
    return wrong


class Priority(IntEnum):
    """Of a token in `assert_kept_right`: tokens of a higher one are kept before those of a lower one."""

    UNOCCUPIED, OTHER, WINDOW, PROTECTED, PROTECTED_IN_WINDOW = range(5)


#: Priorities of tokens, the highest first, with their names in messages.
PRIORITIES = (
    (Priority.PROTECTED_IN_WINDOW, "protected tokens of the window"), (Priority.PROTECTED, "protected tokens"),
    (Priority.WINDOW, "tokens of the window"), (Priority.OTHER, "other tokens"),
)
#: Those whose tokens are kept by age, the newest first; the others by score.
BY_AGE = (Priority.PROTECTED_IN_WINDOW, Priority.WINDOW)


def assert_kept_right(
    kept: Tensor, truth: Tensor, scores: Interval, *, occupied: Tensor, protected: Tensor | None, window: int,
    tie: Tensor | None = None, what: str = "kept",
) -> Verdict:
    """Assert that `kept` [..., N] int64 is a right choice of N of the T tokens in `occupied` [..., T].

    The indices ascend, are unique, in range and of occupied tokens; rows with fewer than N tokens end with -1. Tokens
    are kept in this order: protected tokens of the window (the newest first), other protected tokens by score, other
    tokens of the window (the last `window` of T; the newest first), the rest by score. In a tie the lowest index is
    evicted. scores, tie: like occupied.
    """
    if kept.dtype != torch.int64 or tuple(kept.shape) != tuple(truth.shape):
        fail(f"{what}: expected int64 of shape {tuple(truth.shape)}, got {kept.dtype} of {tuple(kept.shape)}")
    tokens, count = occupied.shape[-1], kept.shape[-1]
    index = torch.arange(tokens, device=kept.device)
    tie = index.expand(occupied.shape) if tie is None or any_of_equals() else tie
    protected = torch.zeros_like(occupied) if protected is None else protected & occupied
    in_window = index >= tokens - window
    priority = torch.full(occupied.shape, Priority.UNOCCUPIED, device=kept.device)
    for members, level in (
        (occupied, Priority.OTHER), (occupied & in_window, Priority.WINDOW), (protected, Priority.PROTECTED),
        (protected & in_window, Priority.PROTECTED_IN_WINDOW),
    ):
        priority.masked_fill_(members, level)
    rows = {
        name: tensor.expand(occupied.shape[:-1] + tensor.shape[-1:]).flatten(0, -2) for name, tensor in
        (("kept", kept), ("truth", truth), ("low", scores.low), ("high", scores.high), ("tie", tie),
         ("priority", priority))
    }
    kept, truth, tie, priority = (rows[name] for name in ("kept", "truth", "tie", "priority"))
    scores, outer = Interval(rows["low"], rows["high"]), occupied.shape[:-1]
    keep_mask = _keep_mask(kept, priority > 0, outer, what, fail)
    expected = _keep_mask(truth, priority > 0, outer, f"the oracle's {what}", fail_oracle)
    contested, right = _check_rows(keep_mask, priority, scores, tie, count, outer, what, fail)
    expected = _by_tie_rule(expected, contested, tie)
    _check_rows(expected, priority, scores, tie, count, outer, f"the oracle's {what}", fail_oracle)
    sure = contested & _decisive(scores, contested, (expected & contested).sum(-1, keepdim=True), tie)
    scored = contested.any(-1)
    verdict = Verdict(*(fact.view(outer) for fact in (
        scored, scored & (sure == contested).all(-1), scored & (keep_mask != expected).any(-1) & right
    )))
    stats.decisions(int(contested.sum()), int(sure.sum()))
    stats.adjudicate(int(verdict.adjudicated.sum()))
    return verdict


def _row(what: str, row: int, outer: torch.Size) -> str:
    return f"{what}, row {unravel(row, outer)}"


def _keep_mask(kept: Tensor, occupied: Tensor, outer: torch.Size, what: str, fail: Fail) -> Tensor:
    """Check the form of kept [R, N] and return it as masks [R, T]."""
    tokens, count = occupied.shape[-1], kept.shape[-1]
    given = torch.arange(count, device=kept.device) < occupied.sum(-1, keepdim=True)
    wrong = (given & ((kept < 0) | (kept >= tokens)) | (~given & (kept != -1))).any(-1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        fail(f"{_row(what, row, outer)}: expected {int(given[row].sum())} tokens of 0..{tokens - 1}, then -1, "
             f"got {kept[row].tolist()}")
    wrong = (given[:, 1:] & (kept[:, 1:] <= kept[:, :-1])).any(-1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        fail(f"{_row(what, row, outer)}: tokens must ascend and be unique, got {kept[row].tolist()}")
    keep_mask = torch.zeros(len(kept), tokens + 1, dtype=torch.bool, device=kept.device)
    keep_mask = keep_mask.scatter(-1, kept.where(given, tokens), True)[:, :tokens]
    wrong = (keep_mask & ~occupied).any(-1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        fail(f"{_row(what, row, outer)}: keeps tokens {indices(keep_mask[row] & ~occupied[row])}, which are padding")
    return keep_mask


def _check_rows(
    keep_mask: Tensor, priority: Tensor, scores: Interval, tie: Tensor, count: int, outer: torch.Size, what: str,
    fail: Fail,
) -> tuple[Tensor, Tensor]:
    """Check the choices [R, T]. Returns the tokens that compete by score, and the rows whose choice scores allow."""
    remaining = torch.full(priority.shape[:1], count, device=priority.device)
    by_score = torch.zeros_like(keep_mask)
    for level, name in PRIORITIES:
        members = priority == level
        size = members.sum(-1)
        fits, none = size <= remaining, (size > remaining) & (remaining == 0)
        wrong = fits & (members & ~keep_mask).any(-1)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            fail(f"{_row(what, row, outer)}: {name} {indices(members[row] & ~keep_mask[row])} are evicted, although "
                 f"the budget has room for them")
        wrong = none & (members & keep_mask).any(-1)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            fail(f"{_row(what, row, outer)}: {name} {indices(members[row] & keep_mask[row])} are kept before tokens "
                 f"of higher priority")
        cut = members & ~(fits | none)[:, None]
        if level in BY_AGE:
            newer = members.flip(-1).cumsum(-1).flip(-1)                                  # itself and those after
            newest = cut & (newer <= remaining[:, None])
            wrong = (cut & (keep_mask != newest)).any(-1)
            if bool(wrong.any()):
                row = int(wrong.nonzero()[0])
                fail(f"{_row(what, row, outer)}: of the {name} the newest must be kept: expected "
                     f"{indices(newest[row])}, got {indices(members[row] & keep_mask[row])}")
        else:
            by_score |= cut
        remaining = (remaining - size).clamp_min(0)
    return by_score, check_partition(
        keep_mask & by_score, by_score & ~keep_mask, scores, tie, lambda row: _row(what, row, outer), fail
    )


def check_partition(
    kept: Tensor, evicted: Tensor, scores: Interval, tie: Tensor, what: Callable[[int], str], fail: Fail
) -> Tensor:
    """Check tokens [R, T] that compete by score: no evicted one surely scores above a kept one; in a tie the lowest go
    first. Returns the rows [R] for which that is so of the scores, if wrong choices are counted (`mismatch.counting`).
    what: names a row."""
    low, high = scores.low.masked_fill(~evicted, -torch.inf), scores.high.masked_fill(~kept, torch.inf)
    wrong = low.amax(-1) > high.amin(-1)
    for row in wrong.nonzero()[:, 0].tolist():
        victim, keeper = int(low[row].argmax()), int(high[row].argmin())
        fail_choice(
            f"{what(row)}: token {victim} is evicted with a score in {_interval(scores, (row,), victim)}, "
            f"but token {keeper} is kept with {_interval(scores, (row,), keeper)}", fail
        )
    tokens = tie.shape[-1]
    index = torch.arange(tokens, device=tie.device).expand(tie.shape)
    # The lowest kept and the highest evicted token of each class.
    first = index.new_full(tie.shape, tokens).scatter_reduce(-1, tie, index.where(kept, tokens), "amin")
    last = index.new_full(tie.shape, -1).scatter_reduce(-1, tie, index.where(evicted, -1), "amax")
    late = first < last
    if bool(late.any()):
        row, at = late.nonzero()[0].tolist()
        fail_tie(
            f"{what(row)}: token {first[row, at].item()} is kept and token {last[row, at].item()} evicted; they score "
            f"the same by construction, so the lower index must be evicted first", fail
        )
    return ~wrong


def _by_tie_rule(expected: Tensor, contested: Tensor, tie: Tensor) -> Tensor:
    """The oracle's choice [R, T] with the highest tokens of each class of equal ones kept, as many as it keeps."""
    later = members_chosen(tie, contested) - rank_in_class(tie, contested)                # itself and those after
    return torch.where(contested, later <= members_chosen(tie, expected & contested), expected)


def _decisive(scores: Interval, contested: Tensor, kept: Tensor, tie: Tensor) -> Tensor:
    """The contested tokens [R, T] whose status is certain: enough others surely score below them, or above.

    `kept` [R, 1] of the contested tokens are kept. Within a class of equal tokens the index decides, so its lower
    (higher) members count as surely below (above).
    """
    rank, members = rank_in_class(tie, contested), members_chosen(tie, contested)
    below, above = clear_of(scores, contested)
    return (below + rank >= contested.sum(-1, keepdim=True) - kept) | (above + members - 1 - rank >= kept)


def clear_of(scores: Interval, contested: Tensor) -> tuple[Tensor, Tensor]:
    """How many contested tokens surely score below each token, and above it: two tensors like contested [..., T]."""
    low, high = (end.contiguous() for end in scores)
    # Scores may be -inf; two of them are equal, and < does not order them.
    below = torch.searchsorted(high.masked_fill(~contested, torch.inf).sort(-1).values, low)
    above = contested.shape[-1] - torch.searchsorted(
        low.masked_fill(~contested, -torch.inf).sort(-1).values, high, right=True
    )
    return below, above


def _interval(scores: Interval, at: tuple[int, ...], slot: Tensor | int) -> str:
    place = (*at, int(slot))
    return f"[{scores.low[place].item():.9g}, {scores.high[place].item():.9g}]"


def indices(mask: Tensor) -> list[int]:
    return mask.nonzero()[:, 0].tolist()
