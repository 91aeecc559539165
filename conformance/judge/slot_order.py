"""The convention slot_order = "any": a state may hold its tokens in other slots than the reference.

Lockstep then reads the state under test through `InOrder`, with its slots in the order of the reference's, by the
positions of their tokens. So a cache that appends each token is compared like one that overwrites the evicted one:
which tokens it holds, their keys, values and scores, and which token goes next.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .mismatch import fail

#: Attributes by slot, [B, S] or [B, Hkv, S], with an axis D at the end or without, and what a free slot has.
BY_SLOT = {"occupied": False, "positions": -1, "score": -torch.inf, "thoughts": -1, "key": 0.0, "value": 0.0}
#: In place of a free slot's position.
FREE = torch.iinfo(torch.int64).max


class InOrder:
    """The tested state with its slots in the reference's order, at each access. All else is the state's own.

    The k-th oldest token of a row (of a head) is in the slot in which the reference has its k-th oldest token. So if
    both hold the same tokens, each is in the reference's slot. Free slots are in the remaining ones; the state may have
    more or fewer of them than the reference. If `next_slot` is a free slot, or the one behind the last, it is the
    lowest free one here.
    """

    def __init__(self, tested: Any, reference: Any) -> None:
        self._tested, self._reference = tested, reference

    def __getattr__(self, name: str) -> Any:
        if name == "next_slot":
            return self._next_slot()
        value = getattr(self._tested, name)
        if name not in BY_SLOT or value is None or self._source() is None:
            return value
        return self._gathered(value, BY_SLOT[name])

    def _source(self) -> Tensor | None:
        """The tested state's slot of each slot of the reference, -1: none; None if their rows or heads differ."""
        mine, theirs = self._tested.positions, self._reference.positions
        if mine.shape[:-1] != theirs.shape[:-1] or mine.shape != self._tested.occupied.shape:
            return None
        mine = mine.where(self._tested.occupied | (mine >= 0), FREE)                              # free slots last
        theirs = theirs.where(theirs >= 0, FREE)
        order, places = (one.sort(dim=-1, stable=True).indices for one in (mine, theirs))
        count, slots = mine.shape[-1], theirs.shape[-1]
        beyond = order[..., slots:]
        if bool((mine.gather(-1, beyond) < FREE).any()):
            most = int((mine < FREE).sum(-1).max())
            fail(f"occupied: expected at most {slots} tokens, got {most}")
        order = order[..., :slots]
        if count < slots:
            order = torch.cat((order, torch.full((*order.shape[:-1], slots - count), -1, device=order.device)), -1)
        return torch.empty_like(order).scatter(-1, places, order)

    def _gathered(self, value: Tensor, empty: float) -> Tensor:
        """value by the tested state's slots -> by the reference's slots."""
        source = self._source()
        assert source is not None
        if value.dim() == 4:
            source = source[:, None] if source.dim() == 2 else source
            source = source.expand(-1, value.shape[1], -1)[..., None].expand(-1, -1, -1, value.shape[3])
        axis = 2 if value.dim() == 4 else value.dim() - 1
        if value.shape[axis] == 0:
            return value.new_full(source.shape, empty)
        return value.gather(axis, source.clamp_min(0)).masked_fill(source < 0, empty)

    def _next_slot(self) -> Tensor:
        chosen, source = self._tested.next_slot, self._source()
        if source is None or chosen.dtype != torch.int64 or chosen.shape != source.shape[:-1]:
            return chosen
        taken, slots = self._gathered(self._tested.occupied, False), source.shape[-1]
        index = torch.arange(slots, device=source.device)
        found = index.where(source == chosen[..., None], slots).amin(-1)                          # `slots`: not found
        occupied = self._tested.occupied
        exists = (chosen >= 0) & (chosen < occupied.shape[-1])
        if occupied.shape[-1] == 0:
            return index.where(~taken, slots).amin(-1)
        free = (chosen == occupied.shape[-1]) | exists & ~occupied.gather(
            -1, chosen.clamp(0, occupied.shape[-1] - 1)[..., None]
        )[..., 0]
        lowest = index.where(~taken, slots).amin(-1)
        return torch.where(free, lowest, found)
