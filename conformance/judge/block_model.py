"""A model of the block cache with plain lists, for the stateful tests.

A `Head` is one KV head of one row: a list of slots with tokens as objects that hold their key, value and score. It uses
no tensors of slots, masks, sorting networks or scatters. Numbers are float64, so its choices equal the reference's
unless two scores differ by float64 rounding only.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Vector = list[float]


@dataclass
class Token:
    """A token and its score so far."""

    position: int
    key: Vector
    value: Vector
    score: float = 0.0


@dataclass
class Head:
    """The `capacity` slots of one KV head of one row. config: the method's; sinks: the logits of the
    group's attention sinks. Subclasses, in the checkers, have the
    method's rules."""

    config: Any
    scale: float
    sinks: list[float] | None = None
    slots: list[Token | None] = field(default_factory=list)
    seen: int = 0
    # (position, the group's queries) of the last config.observers tokens, None for padding.
    window: deque[tuple[int, list[Vector]] | None] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.slots = [None] * self.config.capacity
        self.window = deque(maxlen=getattr(self.config, "observers", 1))

    @property
    def tokens(self) -> list[Token]:
        """The cached tokens in slot order."""
        return [token for token in self.slots if token is not None]

    def positions(self, slots: int) -> list[int]:
        """The positions as a state returns them: [S], -1 = free."""
        shown = [-1 if token is None else token.position for token in self.slots]
        return shown + [-1] * (slots - len(shown))

    def scores(self, slots: int) -> list[float]:
        """The scores as a state returns them, -inf for free slots."""
        shown = [-math.inf if token is None else token.score for token in self.slots]
        return shown + [-math.inf] * (slots - len(shown))

    def take(self, queries: list[list[Vector]], keys: list[Vector], values: list[Vector], valid: list[bool],
             keep: set[int] | None = None) -> None:
        """Add a block. queries[i]: the queries of the group for token i. keep: the positions to keep, where near ties
        allow several choices; None: choose by the method's rule."""
        numbers = range(self.seen, self.seen + len(valid))
        fresh = [
            Token(number, key, value) if there else None
            for number, key, value, there in zip(numbers, keys, values, valid, strict=True)
        ]
        self.seen += len(valid)
        self.slots += fresh
        for number, group, there in zip(numbers, queries, valid, strict=True):
            if there:
                self.observe(number, group)
            self.window.append((number, group) if there else None)
        over_budget = len(self.tokens) > self.config.capacity
        self.finish(over_budget, numbers)
        victims = self._victims() if over_budget else []
        if keep is not None:
            victims = [token for token in self.tokens if token.position not in keep]
        evicted = {token.position for token in victims}
        kept = [None if token is None or token.position in evicted else token for token in self.slots]
        count = sum(token is not None for token in kept)
        # Kept tokens below slot `count` stay in their slots; the others fill the free slots there.
        self.slots, rest = kept[:count] + [None] * (self.config.capacity - count), kept[count:]
        for token in rest:
            if token is not None:
                self.slots[self.slots.index(None)] = token

    def weights(self, group: list[Vector], upto: int) -> dict[int, float]:
        """Each token's weight by position, averaged over the group's queries. They attend up to `upto`."""
        mean: dict[int, float] = {}
        for number, query in enumerate(group):
            logits = {
                token.position: self.logit(query, token.key) for token in self.tokens if token.position <= upto
            }
            everything = [*logits.values(), *([] if self.sinks is None else [self.sinks[number]])]
            row_max = max(everything)
            total = math.fsum(math.exp(logit - row_max) for logit in everything)
            for position, logit in logits.items():
                mean[position] = mean.get(position, 0.0) + math.exp(logit - row_max) / total / len(group)
        return mean

    def logit(self, query: Vector, key: Vector) -> float:
        """The logit of a query and a key."""
        product, cap = self.scale * math.fsum(q * k for q, k in zip(query, key, strict=True)), self.config.softcap
        return product if cap is None else cap * math.tanh(product / cap)

    def _victims(self) -> list[Token]:
        """The tokens to evict. sorted() is stable, so equal tokens remain in slot order."""
        tokens = self.tokens
        protected = self.protected([token.position for token in tokens])
        by_rank = sorted((token for token in tokens if token.position not in protected), key=self.rank)
        by_age = sorted((token for token in tokens if token.position in protected), key=lambda token: token.position)
        return (by_rank + by_age)[:max(0, len(tokens) - self.config.budget)]

    # The rules of a method

    def observe(self, number: int, group: list[Vector]) -> None:
        """Update the scores with the queries of token `number`."""

    def finish(self, over_budget: bool, arrived: range) -> None:
        """Recompute scores after a block of the tokens `arrived`."""

    def rank(self, token: Token) -> float:
        """The token with the lowest rank is evicted first."""
        return token.score

    def protected(self, positions: list[int]) -> set[int]:
        """The positions that are evicted last, the oldest of them first."""
        ordered = sorted(positions)
        return set(ordered[len(ordered) - min(len(ordered), getattr(self.config, "protected", 0)):])


def splitmix64(state: int) -> int:
    """Steele, Lea and Flood's generator with Python integers."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return z ^ z >> 31


def vectors(tensor: Tensor) -> list[Any]:
    """Convert a tensor to nested lists of floats."""
    return tensor.double().tolist()
