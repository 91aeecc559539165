"""What was compared, how much of it differs, and which reading explains that."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...cases import oracle
from ...judge import bounds


@dataclass
class Count:
    """How many of the judged decisions or numbers differ."""

    judged: int = 0
    differ: int = 0

    def add(self, theirs: Tensor, ours: Tensor) -> None:
        """Tensors of one shape, element by element; NaN equals NaN. ValueError for different shapes."""
        if theirs.shape != ours.shape:
            raise ValueError(f"theirs and ours differ in shape: {tuple(theirs.shape)} and {tuple(ours.shape)}")
        same = theirs == ours
        if theirs.is_floating_point():
            same |= theirs.isnan() & ours.isnan()
        self.judged += same.numel()
        self.differ += int((~same).sum())


@dataclass
class Kept(Count):
    """Tokens that stay or go. At each eviction, of either cache, the tokens that were in either before it, and new
    ones, count."""

    _held: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.bool), repr=False)

    def add_held(self, theirs: Tensor, ours: Tensor, first: int, end: int) -> None:
        """theirs, ours [..., T] bool: what the caches hold after the block of tokens `first` to end - 1; first = 0
        begins a new sequence."""
        token = torch.arange(theirs.shape[-1])
        before = (token >= first) & (token < end)
        before = before | self._held if first else before.expand(theirs.shape)
        if (before & ~(theirs & ours)).any():
            self.add(theirs[before], ours[before])
        self._held = theirs | ours


class Outputs(Count):
    """Outputs of attention differ if they are further apart than float32 arithmetic can lose. The authors' softmax is
    float32, whatever the inputs are; ours is float64 here, the truth."""

    def add_attention(
        self, theirs: Tensor, ours: Tensor, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor
    ) -> None:
        """theirs, ours [B, Hq, Q, D]: what the queries [B, Hq, Q, D] get from the occupied slots of key and value."""
        attention = oracle.attend(query, key, value, occupied)
        bound = bounds.output_error(attention, bounds.arithmetic(torch.float32))
        self.add((theirs - ours).abs() <= bound, torch.ones_like(ours, dtype=torch.bool))

    def add_step(self, state: Any, block: Sequence[Tensor], theirs: Tensor) -> None:
        """Let a block state do a step with the query, key and value of `block`, [B, H, 1, D], and compare its output
        with theirs, [B, 1, Hq D]."""
        query = block[0]
        ours = state.step(*(tensor[:, :, 0] for tensor in block))[:, :, None]
        seen = copy.copy(state)                                      # as the query saw it, before the eviction
        for name in ("key", "value", "positions", "occupied"):
            setattr(seen, name, state._before[name])
        end = state.config.capacity + 1
        asks, keys = seen._compared(query, end)
        occupied = seen.occupied[..., :end]
        self.add_attention(theirs.view(ours.shape), ours, asks, keys, seen.value[:, :, :end], occupied)


@dataclass(frozen=True)
class Comparison:
    """One line of the table.

    what: what was compared, and with which options of ours. unit: "decisions", a token (or page) that is kept or not,
    or "numbers". plain: with our defaults, or as `what` says. readings: those that explain what differs,
    "method.id"; under: the count with both sides under these readings, of which nothing may differ. how: the options
    that give the readings, or how the comparison brings both sides under them.
    """

    what: str
    unit: str
    plain: Count
    readings: tuple[str, ...] = ()
    under: Count = field(default_factory=Count)
    how: str = ""

    def fault(self, known: set[str]) -> str:
        """Why this comparison fails, or ""; `known`: the readings that there are, "method.id"."""
        unknown = [name for name in self.readings if name not in known]
        if not self.plain.judged or (self.readings and not self.under.judged):
            return "nothing was compared"
        if unknown:
            return f"no such reading: {', '.join(unknown)}"
        if self.plain.differ and not self.readings:
            return "no reading explains the difference"
        if self.under.differ:
            return f"{self.under.differ:,} of {self.under.judged:,} differ under the reading, too"
        return ""


def held(key: Tensor, of: Tensor) -> Tensor:
    """The tokens that a cache has: key [B, H, n, D] of the cache, `of` [B, H, T, D] of all tokens -> [B, H, T] bool.

    Keys of different tokens must differ.
    """
    return (key[:, :, :, None] == of[:, :, None]).all(-1).any(2)


def at_positions(positions: Tensor, total: int) -> Tensor:
    """positions [..., S] int64, -1 for none -> the tokens among them, [..., total] bool."""
    return (positions[..., :, None] == torch.arange(total)).any(-2)
