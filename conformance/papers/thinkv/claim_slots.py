"""ThinKV's slots: the blocks that a sequence of thoughts uses, and how full they are.

`Blocks` is a model without the tokens' contents. `CachedBlocks` is a `PagedCache`, which holds real tokens. `decoded`
runs ThinKV's annealing on either.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

SCHEDULE = (64, 32, 16, 8, 4)


@dataclass
class Blocks:
    """Blocks with their thought type, and the segment of the token in each slot. shared: any type may use a free
    slot."""

    size: int = 8
    shared: bool = False
    table: list[tuple[int, list[int | None]]] = field(default_factory=list)
    segments: dict[int, list[tuple[list[int | None], int]]] = field(default_factory=dict)
    most: Counter[int] = field(default_factory=Counter)
    blocks: Counter[int] = field(default_factory=Counter)

    def put(self, segment: int, kind: int, count: int) -> None:
        places = [
            (slots, place) for of, slots in self.table if self.shared or of == kind
            for place, token in enumerate(slots) if token is None
        ]
        while len(places) < count:
            self.table.append((kind, [None] * self.size))
            places += [(self.table[-1][1], place) for place in range(self.size)]
        for slots, place in places[:count]:
            slots[place] = segment
        self.segments.setdefault(segment, []).extend(places[:count])
        count_peaks(self)

    def shrink(self, segment: int, keep: int) -> None:
        """Keep `keep` evenly spaced tokens of the segment."""
        held = self.segments[segment]
        stays = spread(len(held), keep)
        for i, (slots, place) in enumerate(held):
            if i not in stays:
                slots[place] = None
        self.segments[segment] = [one for i, one in enumerate(held) if i in stays]
        self.table = [entry for entry in self.table if any(token is not None for token in entry[1])]

    def per_type(self) -> list[tuple[int, int]]:
        """(blocks, tokens) of each thought type."""
        slots = [[entry for of, entry in self.table if of == kind] for kind in (0, 1, 2)]
        return [(len(own), sum(token is not None for entry in own for token in entry)) for own in slots]


class CachedBlocks:
    """The same with a `PagedCache` of an implementation of ThinKV, for one row with one KV head."""

    def __init__(self, module: Any, kinds: list[int], device: Any, *, tau: int, group: int, size: int) -> None:
        config = module.ThinKVConfig(tau=tau, group=group, block=size, max_tokens=tau * len(kinds))
        self.cache = module.PagedCache(
            config, batch=1, key_value_heads=1, head_dim=16, dtype=torch.float32, device=device
        )
        self.size, self.device = size, device
        self.segments: dict[int, list[int]] = {}
        self.most: Counter[int] = Counter()
        self.blocks: Counter[int] = Counter()
        self.seen = 0

    def put(self, segment: int, kind: int, count: int) -> None:
        token = torch.ones(1, 1, 16, device=self.device)
        for _ in range(count):
            self.cache.append(token, token, torch.tensor([self.seen], device=self.device))
            self.segments.setdefault(segment, []).append(self.seen)
            self.seen += 1
        self.cache.flush(*(torch.tensor([x], device=self.device) for x in (True, kind, segment)))
        count_peaks(self)

    def shrink(self, segment: int, keep: int) -> None:
        held = self.segments[segment]
        stays = spread(len(held), keep)
        goes = torch.tensor([one for i, one in enumerate(held) if i not in stays], device=self.device)
        self.cache.evict(torch.isin(self.cache.positions, goes))
        self.segments[segment] = [one for i, one in enumerate(held) if i in stays]

    def per_type(self) -> list[tuple[int, int]]:
        table = self.cache.block_table(0)
        own = [[entry.filled for entry in table if entry.thought == kind] for kind in (0, 1, 2)]
        return [(len(filled), sum(filled)) for filled in own]


def spread(size: int, keep: int) -> set[int]:
    """`keep` evenly spaced indices of `size`."""
    return {i * size // keep for i in range(keep)} if keep < size else set(range(size))


def count_peaks(store: Blocks | CachedBlocks) -> None:
    """Update the largest numbers of tokens and blocks that each type has had."""
    for kind, (blocks, tokens) in enumerate(store.per_type()):
        store.most[kind] = max(store.most[kind], tokens)
        store.blocks[kind] = max(store.blocks[kind], blocks)


def decoded(
    kinds: list[int], store: Blocks | CachedBlocks | None = None, *, budget: int = 1024, tau: int = 128,
    group: int = 16, schedule: tuple[int, ...] = SCHEDULE,
) -> tuple[list[list[tuple[int, int]]], float, float]:
    """Decode segments of these types with ThinKV's annealing. Returns (blocks, tokens) of each type after each group,
    the ratio of peak allocation to peak live tokens, and the largest ratio of the two at one moment."""
    store = Blocks() if store is None else store
    levels, history = [0] * len(kinds), []
    most_allocated = most_live = 0
    ratio = 0.0

    def live() -> int:
        return sum(map(len, store.segments.values()))

    def allocated() -> int:
        return store.size * sum(blocks for blocks, _ in store.per_type())

    def select(segment: int) -> None:
        levels[segment] += 1
        store.shrink(segment, min(len(store.segments[segment]), schedule[min(levels[segment], len(schedule)) - 1]))

    for now, kind in enumerate(kinds):
        for _ in range(tau // group):
            store.put(now, kind, group)
            history.append(store.per_type())
            most_allocated, most_live = max(most_allocated, allocated()), max(most_live, live())
            while live() > budget:
                above = [one for one in range(now) if len(store.segments[one]) > schedule[-1]]
                if not above:
                    break
                select(min(above, key=lambda one: (kinds[one], one)))
            ratio = max(ratio, allocated() / live())
        if kind == 0:
            for segment in range(now):
                select(segment)
            ratio = max(ratio, allocated() / live())
    return history, most_allocated / most_live, ratio
