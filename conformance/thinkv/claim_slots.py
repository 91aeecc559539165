"""A model of ThinKV's slots without their contents: the blocks that a sequence of thoughts uses, and how full they
are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


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
        for of in (0, 1, 2):
            tokens = sum(token is not None for kind_, slots in self.table if kind_ == of for token in slots)
            self.most[of] = max(self.most[of], tokens)
            self.blocks[of] = max(self.blocks[of], sum(kind_ == of for kind_, _ in self.table))

    def shrink(self, segment: int, keep: int) -> None:
        """Keep `keep` evenly spaced tokens of the segment."""
        held = self.segments[segment]
        stays = {i * len(held) // keep for i in range(keep)} if keep < len(held) else set(range(len(held)))
        for i, (slots, place) in enumerate(held):
            if i not in stays:
                slots[place] = None
        self.segments[segment] = [one for i, one in enumerate(held) if i in stays]
        self.table = [entry for entry in self.table if any(token is not None for token in entry[1])]

    @property
    def allocated(self) -> int:
        return self.size * len(self.table)

    @property
    def live(self) -> int:
        return sum(len(held) for held in self.segments.values())


def decoded(
    kinds: list[int], *, shared: bool = False, budget: int = 1024, tau: int = 128
) -> tuple[Blocks, float, float]:
    """Simulate segments of these types with ThinKV's annealing. Returns the blocks, the ratio of peak allocation to
    peak live tokens, and the largest ratio of the two at one moment."""
    blocks, levels, schedule = Blocks(shared=shared), [0] * len(kinds), (64, 32, 16, 8, 4)
    most_allocated = most_live = 0
    ratio = 0.0

    def select(segment: int) -> None:
        levels[segment] += 1
        blocks.shrink(segment, min(len(blocks.segments[segment]), schedule[min(levels[segment], 5) - 1]))

    for now, kind in enumerate(kinds):
        for _ in range(tau // 16):
            blocks.put(now, kind, 16)
            most_allocated, most_live = max(most_allocated, blocks.allocated), max(most_live, blocks.live)
            while blocks.live > budget:
                above = [one for one in range(now) if len(blocks.segments[one]) > schedule[-1]]
                if not above:
                    break
                select(min(above, key=lambda one: (kinds[one], one)))
            ratio = max(ratio, blocks.allocated / blocks.live)
        if kind == 0:
            for segment in range(now):
                select(segment)
            ratio = max(ratio, blocks.allocated / blocks.live)
    return blocks, most_allocated / most_live, ratio
