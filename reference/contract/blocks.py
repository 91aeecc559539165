"""Base classes of the configs of block caches, and a check that several of them share."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import MethodConfig
from .arguments import check_integer, check_softcap


@dataclass(frozen=True)
class BlockConfig(MethodConfig):
    """budget: the largest number of tokens that a KV head of a row keeps. block_size: the largest number of tokens that
    arrive between two evictions. softcap: every logit x = scale * query . key becomes softcap * tanh(x / softcap),
    before the mask; None: no cap. Weights and scores are computed from the capped logits."""

    block_size: int = 128
    softcap: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("block_size", self.block_size, minimum=1)
        check_softcap("softcap", self.softcap)

    @property
    def capacity(self) -> int:
        """The largest number of tokens that a KV head of a row holds between calls; with more, it evicts down to the
        budget. Equal to the budget unless the method evicts less often."""
        return self.budget


class IntervalConfig(BlockConfig):
    """Base class of configs with a field `interval`: a KV head of a row evicts down to its budget when it has at least
    budget + interval tokens; with 1, whenever it has more than the budget."""

    interval: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("interval", self.interval, minimum=1)

    @property
    def capacity(self) -> int:
        """The largest number of tokens that a KV head holds between calls: budget + interval - 1."""
        return self.budget + self.interval - 1


def check_protected(recent: object, sinks: object, budget: int) -> None:
    """The numbers of newest and of first tokens that are protected must fit in the budget together."""
    first = check_integer("sinks", sinks, minimum=0)
    newest = budget // 2 if recent is None else check_integer("recent", recent, minimum=0)
    if newest > budget or (first > 0 and newest == budget):
        raise ValueError(f"recent must be {'less than' if first else 'at most'} budget = {budget}, got {newest}")
    if newest + first > budget:
        raise ValueError(f"recent + sinks must be at most budget = {budget}, got {newest} + {first}")
