"""The comparator of what block states keep: unprotected by rank, then protected by age. All rows are taken at once.

See compare.py for what is right, what is decisive, and what is adjudicated.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from . import stats
from .bounds import Interval
from .compare import Complain, Verdict, _check_cut, _contradict, _first, _indices, fail


def assert_stays_right(
    stays: Tensor, truth: Tensor, scores: Interval, *, occupied: Tensor, protected: Tensor, age: Tensor, room: int,
    crowded: Tensor | None = None, tie: Tensor | None = None, what: str = "kept",
) -> Verdict:
    """`stays` [..., S] bool is a right choice of `room` of the slots in `occupied` [..., S], as block states evict, in
    rows that are `crowded` [...] bool, and of the others all of them. Default: those that have more are crowded.

    The unprotected go first, by score, ties to the lowest slot; then the protected, those of the lowest `age` (int64,
    a token's position) first. truth: the oracle's choice. scores, tie: like occupied.
    """
    index = torch.arange(occupied.shape[-1], device=occupied.device)
    tie = index.expand(occupied.shape) if tie is None else tie
    crowded = occupied.sum(-1) > room if crowded is None else crowded
    given = (occupied, protected, age, tie, *scores)
    right, others = truth, occupied & ~protected
    contested = others & (crowded & ((protected & occupied).sum(-1) < room))[..., None]
    same = (tie[..., :, None] == tie[..., None, :]) & contested[..., :, None] & contested[..., None, :]
    # The oracle's own last digit may order equal tokens: of each class as many stay, but the highest of them.
    quota = (same & right[..., None, :]).sum(-1)
    right = torch.where(contested, (same & (index >= index[:, None])).sum(-1) <= quota, right)
    for kept, name, complain in ((stays, what, fail), (right, f"the oracle's {what}", _contradict)):
        wrong = ~_stays_well(kept, *given, room, crowded)
        if bool(wrong.any()):
            at = _first(wrong)
            holds, shielded, ages, ties, low, high = (tensor[at] for tensor in given)
            stay = room if bool(crowded[at]) else int(holds.sum())
            _explain_stays(kept[at], holds, shielded, ages, ties, low, high, stay, f"{name}, row {at}", complain)

    low, high = scores
    below = (high[..., None, :] < low[..., :, None]) & contested[..., None, :] | same & (index < index[:, None])
    above = (low[..., None, :] > high[..., :, None]) & contested[..., None, :] | same & (index > index[:, None])
    kept = (right & contested).sum(-1, keepdim=True)
    sure = (below.sum(-1) >= contested.sum(-1, keepdim=True) - kept) | (above.sum(-1) >= kept)
    sure = (sure & contested).sum(-1)
    verdict = Verdict(
        contested.any(-1), contested.any(-1) & (sure == contested.sum(-1)), crowded & (stays != right).any(-1)
    )
    stats.decisions(int(contested.sum()), int(sure.sum()))
    stats.adjudicated(int(verdict.adjudicated.sum()))
    return verdict


def _newest(age: Tensor, among: Tensor, room: int) -> Tensor:
    """The `room` highest ages of each row, bool like `among`."""
    place = age.masked_fill(~among, -1).sort(dim=-1, descending=True).indices[..., :room]
    return torch.zeros_like(among).scatter(-1, place, True) & among


def _cut(stays: Tensor, others: Tensor, tie: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row: does nobody gone lie surely above one held, and are the lowest of equal ones gone?"""
    held, gone, slots = stays & others, others & ~stays, stays.shape[-1]
    fits = low.masked_fill(~gone, -torch.inf).amax(-1) <= high.masked_fill(~held, torch.inf).amin(-1)
    index = torch.arange(slots, device=tie.device).expand(tie.shape)
    first = torch.full_like(tie, slots).scatter_reduce(-1, tie, index.where(held, slots), "amin")
    last = torch.full_like(tie, -1).scatter_reduce(-1, tie, index.where(gone, -1), "amax")
    return fits, (first > last).all(-1)


def _stays_well(
    stays: Tensor, occupied: Tensor, protected: Tensor, age: Tensor, tie: Tensor, low: Tensor, high: Tensor, room: int,
    crowded: Tensor,
) -> Tensor:
    """Which rows are partitioned rightly, [...]."""
    shielded, others = protected & occupied, occupied & ~protected
    spare = room - shielded.sum(-1)
    by_age = (stays == _newest(age, shielded, room)).all(-1)
    fits, ordered = _cut(stays, others, tie, low, high)
    by_score = ~(shielded & ~stays).any(-1) & fits & ordered
    chosen = torch.where(spare <= 0, by_age, by_score) & (stays.sum(-1) == room) & ~(stays & ~occupied).any(-1)
    return torch.where(crowded, chosen, (stays == occupied).all(-1))


def _explain_stays(
    stays: Tensor, occupied: Tensor, protected: Tensor, age: Tensor, tie: Tensor, low: Tensor, high: Tensor,
    room: int, what: str, complain: Complain,
) -> NoReturn:
    """Say what is wrong with one row [S]."""
    count = int(occupied.sum())
    if count <= room and bool((occupied & ~stays).any()):
        complain(f"{what}: slots {_indices(occupied & ~stays)} are evicted, though there is room for them")
    if int(stays.sum()) != min(room, count):
        complain(f"{what}: {room} of {count} tokens must stay, got {int(stays.sum())}: {_indices(stays)}")
    shielded, others = protected & occupied, occupied & ~protected
    if int(shielded.sum()) >= room:
        newest = _indices(_newest(age, shielded, room))
        complain(f"{what}: the newest protected tokens must stay, in slots {newest}, got {_indices(stays)}")
    if bool((shielded & ~stays).any()):
        complain(f"{what}: protected slots {_indices(shielded & ~stays)} are evicted before unprotected ones")
    _check_cut(stays & others, others & ~stays, Interval(low, high), tie, what, complain)
    complain(f"{what}: scores are not numbers, of tokens in slots {_indices(occupied)}")
