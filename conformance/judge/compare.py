"""The comparators: actual numbers against the truth within a bound, actual evictions against score intervals.

A choice among scores is right if scores within their bounds could have led to it: no evicted token's lower end lies
above a kept token's upper end. Exact ties (ties.py: bitwise equal tokens, or zero values) score the same in any
arithmetic, so there the tie rule decides and the index must be right to the letter; so must everything that masks
decide: free slots, protection, the window.

What counts as a decision, for the plugin's check that a test is not vacuous: of a single victim, the row (is there one
slot only that may be picked?), since of thousands of slots all but two are always clear; of a kept set, each token
whose score had a say. Rows and tokens whose fate masks or cardinality seal are not counted. A choice that differs from
the truth's within the bounds is adjudicated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from . import stats
from .bounds import Interval
from ..cases import failures

#: How a wrong choice is reported: `fail` of the side under test, `_contradict` of the oracle.
Complain = Callable[[str], NoReturn]


class Mismatch(AssertionError):
    """The implementation under test is wrong. The message says where, by how much, and how to replay it."""


class JudgeError(Exception):
    """The judge contradicts itself: the truth is not right by its own bounds, or a bound is no number."""


@dataclass(frozen=True)
class Verdict:
    """What became of each decision row, bool tensors of one shape: was there anything to decide by score, had it one
    answer only, and did the actual choice legally differ from the truth's."""

    scored: Tensor
    decisive: Tensor
    adjudicated: Tensor


def fail(message: str) -> NoReturn:
    """Raise Mismatch; the case in hand is saved and the command that replays it is added."""
    command = failures.save_latest()
    raise Mismatch(message if command is None else f"{message}\n  replay: {command}")


def assert_within(actual: Tensor, truth: Tensor, bound: Tensor, *, what: str = "result") -> float:
    """|actual - truth| <= bound in every element; infinities of the truth must be met exactly, NaN never passes.

    actual: any floating dtype; truth: the oracle's float64; bound: like truth, >= 0. Returns the utilisation, the
    largest error as a fraction of its bound (0 where a bound of 0 is met), which is also recorded in stats.
    """
    if tuple(actual.shape) != tuple(truth.shape):
        fail(f"{what}: expected shape {tuple(truth.shape)}, got {tuple(actual.shape)}")
    if truth.numel() == 0:
        return 0.0
    bound = bound.expand(truth.shape)
    if not bool((bound >= 0).all()):
        raise JudgeError(f"{what}: the bound must be >= 0 everywhere, got {bound.min().item()} at the least")
    if bool(truth.isnan().any()):
        raise JudgeError(f"{what}: the truth is NaN at {_first(truth.isnan())}; the judge compares numbers only")
    actual = actual.double()
    infinite = truth.isinf()
    # inf - inf is NaN: infinities are compared for equality instead.
    error = (actual - truth).abs().masked_fill(infinite & (actual == truth), 0)
    fraction = torch.where(error == 0, 0, error / bound)
    # Not error > bound: NaN compares false. An infinite bound (logits beyond all precision) admits numbers only.
    wrong = ~(error <= bound) | (infinite & (actual != truth)) | (~infinite & ~actual.isfinite())
    if bool(wrong.any()):
        # Not a number first, then the worst by its bound.
        badness = fraction.masked_fill(fraction.isnan(), torch.inf).masked_fill(~wrong, -1)
        at = _unravel(int(badness.argmax()), truth.shape)
        fail(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are beyond their bound; the worst, at {at}:\n"
            f"  actual {actual[at].item()!r}, truth {truth[at].item()!r}\n"
            f"  error {error[at].item():.6g}, bound {bound[at].item():.6g}: "
            f"{fraction[at].item():.4g} times what the arithmetic can lose"
        )
    used = float(fraction.max())
    stats.utilisation(used)
    return used


def assert_same(actual: Tensor, expected: Tensor, *, what: str, where: Tensor | None = None) -> None:
    """Equal to the letter: shape, and every element (of those under the mask `where`, which broadcasts). NaN equals
    NaN: this compares what was copied, not what was computed. Dtypes may differ in precision, values may not."""
    if tuple(actual.shape) != tuple(expected.shape):
        fail(f"{what}: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}")
    if actual.is_floating_point() or expected.is_floating_point():
        actual, expected = actual.double(), expected.double()
        wrong = (actual != expected) & ~(actual.isnan() & expected.isnan())
    else:
        wrong = actual != expected
    if where is not None:
        wrong = wrong & where
    if bool(wrong.any()):
        at = _first(wrong)
        fail(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ; the first, at {at}: "
            f"expected {expected[at].item()!r}, got {actual[at].item()!r}"
        )


def assert_eviction_right(
    slot: Tensor, truth: Tensor, scores: Interval, *, occupied: Tensor, protected: Tensor | None = None,
    tie: Tensor | None = None, what: str = "slot",
) -> Verdict:
    """`slot` [B] (or [B, Hkv]) int64 is a right choice of the next slot to overwrite, one per row of `occupied`.

    truth: the oracle's choice. scores: intervals of the scores that rank, like occupied. tie: `ties.tie_classes`.
    The lowest free slot if there is one; else among unprotected slots one that could score lowest, and of an exact tie
    the lowest index; the lowest index where all are protected.
    """
    if slot.dtype != torch.int64 or tuple(slot.shape) != tuple(occupied.shape[:-1]):
        fail(f"{what}: expected int64 of shape {tuple(occupied.shape[:-1])}, got {slot.dtype} of {tuple(slot.shape)}")
    slots = occupied.shape[-1]
    out = (slot < 0) | (slot >= slots)
    if bool(out.any()):
        at = _first(out)
        fail(f"{what}: row {at} picks slot {slot[at].item()}, which is not in 0..{slots - 1}")
    index = torch.arange(slots, device=slot.device).expand(occupied.shape)
    free = ~occupied
    candidates = occupied if protected is None else occupied & ~protected
    sealed = free.any(-1) | ~candidates.any(-1)
    forced = torch.where(free.any(-1), index.where(free, slots).amin(-1), 0)
    wrong = sealed & (slot != forced)
    if bool(wrong.any()):
        at = _first(wrong)
        why = "the lowest free slot" if bool(free[at].any()) else "the lowest index, since all are protected"
        fail(f"{what}: row {at} must pick slot {forced[at].item()}, {why}, got slot {slot[at].item()}"
             f"\n  free slots: {_indices(free[at])}")
    tie = index if tie is None else tie
    _check_victims(slot, scores, candidates, tie, sealed, what, fail)
    # The oracle's own last digit may order equal tokens; the tie rule orders them here.
    truth = torch.where(sealed, truth, _lowest_member(truth, candidates, tie))
    _check_victims(truth, scores, candidates, tie, sealed, f"the oracle's {what}", _contradict)

    low, high = (end.masked_fill(~candidates, torch.inf) for end in scores)
    in_class = tie == tie.gather(-1, truth[..., None])
    rivals = low.masked_fill(in_class, torch.inf).amin(-1)
    clear = high.gather(-1, truth[..., None])[..., 0] < rivals
    alone = (candidates & ~in_class).sum(-1) == 0
    comparable = ~_not_numbers(scores, candidates).any(-1)
    scored = ~sealed & (candidates.sum(-1) > 1) & comparable
    verdict = Verdict(scored, scored & (clear | alone), scored & (slot != truth))
    stats.decisions(int(verdict.scored.sum()), int(verdict.decisive.sum()))
    stats.adjudicated(int(verdict.adjudicated.sum()))
    return verdict


def _not_numbers(scores: Interval, candidates: Tensor) -> Tensor:
    """Candidates without a score: where inputs were not finite, nothing is known of their order."""
    return candidates & (scores.low.isnan() | scores.high.isnan())


def _lowest_member(slot: Tensor, candidates: Tensor, tie: Tensor) -> Tensor:
    """The lowest candidate that ties with `slot`, like slot."""
    index = torch.arange(tie.shape[-1], device=tie.device).expand(tie.shape)
    in_class = candidates & (tie == tie.gather(-1, slot[..., None]))
    return index.where(in_class, tie.shape[-1]).amin(-1)


def _check_victims(
    slot: Tensor, scores: Interval, candidates: Tensor, tie: Tensor, sealed: Tensor, what: str, complain: Complain
) -> None:
    """Of unsealed rows: the victim is a candidate, the lowest of its tie, and could score lowest."""
    at_slot = slot[..., None]
    taken = candidates.gather(-1, at_slot)[..., 0]
    wrong = ~sealed & ~taken
    if bool(wrong.any()):
        at = _first(wrong)
        complain(f"{what}: row {at} picks slot {slot[at].item()}, which is protected, "
                 f"while these are not: {_indices(candidates[at])}")
    lowest = _lowest_member(slot, candidates, tie)
    wrong = ~sealed & (lowest != slot)
    if bool(wrong.any()):
        at = _first(wrong)
        equal = _indices(candidates[at] & (tie[at] == tie[at][slot[at]]))
        complain(
            f"{what}: row {at} picks slot {slot[at].item()}, but slot {lowest[at].item()} holds an equal token, and "
            f"ties go to the lowest index\n  equal tokens: {equal}"
        )
    low = scores.low.gather(-1, at_slot)[..., 0]
    rivals = scores.high.masked_fill(~candidates, torch.inf)
    wrong = ~sealed & (low > rivals.amin(-1)) & ~_not_numbers(scores, candidates).any(-1)
    if bool(wrong.any()):
        at = _first(wrong)
        better = int(rivals[at].argmin())
        complain(
            f"{what}: row {at} picks slot {slot[at].item()}, whose score is in {_interval(scores, at, slot[at])}, "
            f"but slot {better} scores less: {_interval(scores, at, better)}"
        )


def assert_kept_right(
    kept: Tensor, truth: Tensor, scores: Interval, *, occupied: Tensor, protected: Tensor | None, window: int,
    tie: Tensor | None = None, what: str = "kept",
) -> Verdict:
    """`kept` [..., N] int64 is a right choice of N of the T tokens in `occupied` [..., T], as SnapKV compresses.

    Ascending, unique, in range, occupied tokens only, -1 at the end of rows that have fewer. Preferred in this order:
    protected tokens of the window (the newest first), other protected ones by score, tokens of the window (the last
    `window` of T, the newest first), the rest by score; ties: the lowest index goes. scores, tie: like occupied.
    """
    if kept.dtype != torch.int64 or tuple(kept.shape) != tuple(truth.shape):
        fail(f"{what}: expected int64 of shape {tuple(truth.shape)}, got {kept.dtype} of {tuple(kept.shape)}")
    tokens, count = occupied.shape[-1], kept.shape[-1]
    index = torch.arange(tokens, device=kept.device)
    tie = index.expand(occupied.shape) if tie is None else tie
    shielded = torch.zeros_like(occupied) if protected is None else protected & occupied
    recent = index >= tokens - window
    grade = torch.where(occupied, 1 + recent.long() + 2 * shielded, 0).flatten(0, -2)     # [rows, T]
    flat = {
        name: tensor.expand(occupied.shape[:-1] + tensor.shape[-1:]).flatten(0, -2) for name, tensor in
        (("kept", kept), ("truth", truth), ("low", scores.low), ("high", scores.high), ("tie", tie))
    }
    facts = torch.zeros(3, len(grade), dtype=torch.bool, device=kept.device)
    total = decisive = 0
    for row in range(len(grade)):
        at = _unravel(row, occupied.shape[:-1])
        one = {name: tensor[row] for name, tensor in flat.items()}
        stays = _membership(one["kept"], grade[row] > 0, f"{what}, row {at}", fail)
        right = _membership(one["truth"], grade[row] > 0, f"the oracle's {what}, row {at}", _contradict)
        ends = Interval(one["low"], one["high"])
        contested = _check_row(stays, grade[row], ends, one["tie"], count, f"{what}, row {at}", fail)
        if contested is not None:
            right = _by_tie_rule(right, contested, one["tie"])
        _check_row(right, grade[row], ends, one["tie"], count, f"the oracle's {what}, row {at}", _contradict)
        if contested is not None:
            sure = _sure(ends, contested, int((right & contested).sum()), one["tie"])
            total, decisive = total + int(contested.sum()), decisive + int(sure.sum())
            facts[:, row] = torch.stack([contested.any(), sure.sum() == contested.sum(), (stays != right).any()])
    stats.decisions(total, decisive)
    stats.adjudicated(int(facts[2].sum()))
    return Verdict(*(fact.view(occupied.shape[:-1]) for fact in facts))


def _membership(kept: Tensor, occupied: Tensor, what: str, complain: Complain) -> Tensor:
    """kept [N] as a mask [T], after its form is checked."""
    tokens, expected = len(occupied), min(len(kept), int(occupied.sum()))
    held = kept[:expected]
    if bool((kept[expected:] != -1).any()) or bool((held < 0).any()) or bool((held >= tokens).any()):
        complain(f"{what}: expected {expected} tokens of 0..{tokens - 1}, then -1, got {kept.tolist()}")
    if bool((held.diff() <= 0).any()):
        complain(f"{what}: tokens must ascend and be unique, got {kept.tolist()}")
    stays = torch.zeros_like(occupied).index_fill(0, held, True)
    if bool((stays & ~occupied).any()):
        complain(f"{what}: keeps tokens {_indices(stays & ~occupied)}, which are padding")
    return stays


def _check_row(
    stays: Tensor, grade: Tensor, scores: Interval, tie: Tensor, count: int, what: str, complain: Complain
) -> Tensor | None:
    """One row's partition [T]; returns which tokens the scores had to decide about, None if none."""
    room, contested = count, None
    for level, name in ((4, "protected tokens of the window"), (3, "protected tokens"), (2, "tokens of the window"),
                        (1, "other tokens")):
        members = grade == level
        size = int(members.sum())
        if size <= room:
            if bool((members & ~stays).any()):
                complain(f"{what}: {name} {_indices(members & ~stays)} are evicted, though there is room for them")
        elif room == 0:
            if bool((members & stays).any()):
                complain(f"{what}: {name} {_indices(members & stays)} are kept before those that go first")
        elif level in (4, 2):
            newest = _indices(members)[-room:]
            if _indices(members & stays) != newest:
                complain(f"{what}: of the {name} the newest must stay, {newest}, got {_indices(members & stays)}")
        else:
            _check_cut(stays & members, members & ~stays, scores, tie, what, complain)
            contested = members
        room = max(0, room - size)
    return contested


def _check_cut(held: Tensor, gone: Tensor, scores: Interval, tie: Tensor, what: str, complain: Complain) -> None:
    """Tokens that scores divide: no one gone lies surely above one held; of equal ones the lowest are gone."""
    low, high = scores.low.masked_fill(~gone, -torch.inf), scores.high.masked_fill(~held, torch.inf)
    if bool(low.max() > high.min()):
        evicted, keeper = int(low.argmax()), int(high.argmin())
        complain(
            f"{what}: token {evicted} is evicted with a score in {_interval(scores, (), evicted)}, "
            f"but token {keeper} is kept with {_interval(scores, (), keeper)}"
        )
    index = torch.arange(len(tie), device=tie.device)
    # The lowest kept and the highest evicted token of each class.
    first = index.new_full(tie.shape, len(tie)).scatter_reduce(0, tie, index.where(held, len(tie)), "amin")
    last = index.new_full(tie.shape, -1).scatter_reduce(0, tie, index.where(gone, -1), "amax")
    if bool((first < last).any()):
        at = int((first < last).nonzero()[0])
        complain(
            f"{what}: token {first[at].item()} is kept and token {last[at].item()} evicted; they score the same by "
            f"construction, so the lower index must go first"
        )


def _by_tie_rule(right: Tensor, contested: Tensor, tie: Tensor) -> Tensor:
    """The oracle's partition [T] with as many kept of each class of equal tokens, but the highest of them."""
    kinds, members = tie[contested].unique(return_inverse=True)
    stays = right[contested]
    quota = stays.new_zeros(len(kinds), dtype=torch.int64).index_add(0, members, stays.long())
    of_kind = members[:, None] == torch.arange(len(kinds), device=tie.device)             # [n, kinds]
    later = of_kind.long().flip(0).cumsum(0).flip(0).gather(1, members[:, None])[:, 0]    # itself and those after
    return right.masked_scatter(contested, later <= quota[members])


def _sure(scores: Interval, contested: Tensor, room: int, tie: Tensor) -> Tensor:
    """Which contested tokens have one possible fate, [T]: enough others surely below them, or surely above.

    Within a class of equal tokens the index decides, so its lower (higher) members count as surely below (above).
    """
    place = contested.nonzero()[:, 0]
    low, high, kind = scores.low[place], scores.high[place], tie[place]
    gone = len(place) - room
    # Scores can be -inf: two of them are equal, not ordered, which < says.
    below, above = torch.searchsorted(high.sort().values, low), len(place) - torch.searchsorted(
        low.sort().values, high, right=True
    )
    equal = kind[:, None] == kind[None, :]
    below = below + (equal & (place[:, None] > place[None, :])).sum(1)
    above = above + (equal & (place[:, None] < place[None, :])).sum(1)
    return torch.zeros_like(contested).index_put((place,), (below >= gone) | (above >= room))


def gathered(tensor: Tensor, kept: Tensor) -> Tensor:
    """tensor [B, Hkv, T, D] at kept [B, N] or [B, Hkv, N]; -1 gives zeros."""
    batch, heads, _, head_dim = tensor.shape
    index = (kept if kept.dim() == 3 else kept[:, None]).expand(batch, heads, -1)
    rows = tensor.gather(2, index.clamp_min(0)[..., None].expand(-1, -1, -1, head_dim))
    return rows.masked_fill(index[..., None] < 0, 0)


def _contradict(message: str) -> NoReturn:
    raise JudgeError(f"the judge contradicts itself: {message}")


def _interval(scores: Interval, at: tuple[int, ...], slot: Tensor | int) -> str:
    place = (*at, int(slot))
    return f"[{scores.low[place].item():.9g}, {scores.high[place].item():.9g}]"


def _indices(mask: Tensor) -> list[int]:
    return mask.nonzero()[:, 0].tolist()


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())


def _unravel(flat: int, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    place = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        place.append(at)
    return tuple(reversed(place))
