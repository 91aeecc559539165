"""A paged cache told as a list of tokens: what a sequence holds, and what any table that holds it must look like.

A `Sequence` knows nothing of slots: its tokens have positions, a thought type, a segment, and the numbers that are left
of them once the tokens that waited together are quantized. `check` holds a table against it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from torch import Tensor

from ...reference.thinkv import dequantize, quantize
from ...reference.thinkv.contract import ThinKVConfig
from ...reference.thinkv.types import Thought


@dataclass(eq=False)
class Listed:
    """A token: key and value [Hkv, D] float32, exactly as attention is to see them. thought None: it waits."""

    position: int
    key: Tensor
    value: Tensor
    thought: int | None = None
    segment: int = -1


@dataclass
class Sequence:
    """The live tokens of one row. most: of each thought type the most quantized ones that there ever were."""

    config: ThinKVConfig
    tokens: list[Listed] = field(default_factory=list)
    most: Counter[int] = field(default_factory=Counter)

    @property
    def waiting(self) -> list[Listed]:
        return [token for token in self.tokens if token.thought is None]

    @property
    def quantized(self) -> list[Listed]:
        return [token for token in self.tokens if token.thought is not None]

    def append(self, position: int, key: Tensor, value: Tensor) -> None:
        self.tokens.append(Listed(position, key.float(), value.float()))

    def flush(self, thought: int, segment: int) -> None:
        """All that wait are quantized together: keys by channel, values by token."""
        waiting, fmt = self.waiting, self.config.format_of(thought)
        if not waiting:
            return
        keys, values = (
            dequantize(quantize(torch.stack(numbers, 1), fmt, axis=axis, group=self.config.group), torch.float32)
            for axis, numbers in ((-2, [token.key for token in waiting]), (-1, [token.value for token in waiting]))
        )                                                                              # [Hkv, n, D]
        for place, token in enumerate(waiting):
            token.key, token.value, token.thought, token.segment = keys[:, place], values[:, place], thought, segment
        self.most[thought] = max(self.most[thought], self.live(thought))

    def evict(self, positions: set[int]) -> None:
        """Of the quantized ones."""
        self.tokens = [token for token in self.tokens if token.thought is None or token.position not in positions]

    def live(self, thought: int) -> int:
        return sum(token.thought == thought for token in self.tokens)

    def copy(self) -> Sequence:
        tokens = [Listed(**vars(token)) for token in self.tokens]
        return Sequence(self.config, tokens, self.most.copy())

    def in_order(self) -> tuple[list[int], Tensor, Tensor]:
        """Positions, keys and values [Hkv, n, D], the oldest first; there is at least one."""
        tokens = sorted(self.tokens, key=lambda token: token.position)
        return (
            [token.position for token in tokens], torch.stack([token.key for token in tokens], 1),
            torch.stack([token.value for token in tokens], 1),
        )

    def check(self, cache: Any, row: int) -> None:
        """The tables of a row hold these tokens, each once, and nothing else; and are no larger than they may be."""
        config, size = self.config, self.config.block
        names = ("positions", "occupied", "segments", "thoughts", "groups", "evicted", "block_thoughts", "physical")
        table = {name: getattr(cache, name)[row].tolist() for name in names}
        buffer = config.blocks * size
        held = {p: slot for slot, p in enumerate(table["positions"]) if p >= 0}
        assert sorted(p for p in table["positions"] if p >= 0) == sorted(token.position for token in self.tokens), (
            "a live token was lost or doubled"
        )
        assert table["occupied"] == [p >= 0 for p in table["positions"]]
        for token in self.quantized:
            slot = held[token.position]
            assert slot < buffer, "a quantized token lies in the buffer"
            assert (table["thoughts"][slot], table["segments"][slot]) == (token.thought, token.segment)
            assert table["block_thoughts"][slot // size] == token.thought, "one type per block"
            assert table["groups"][slot] >= 0
            assert not table["evicted"][slot], "a live token is marked as evicted"
        assert [held[token.position] - buffer for token in self.waiting] == list(range(len(self.waiting)))
        assert int(cache.buffered[row]) == len(self.waiting)
        free = [slot for slot, p in enumerate(table["positions"]) if p < 0]
        assert all(table[name][slot] == -1 for name in ("segments", "thoughts", "groups") for slot in free)

        used = [entry for entry, thought in enumerate(table["block_thoughts"]) if thought >= 0]
        filled = Counter(held[token.position] // size for token in self.quantized)
        assert sorted(filled) == used, "a block without tokens is held, or one with tokens is free"
        assert [entry for entry, block in enumerate(table["physical"]) if block >= 0] == used
        pools = Counter((config.format_of(table["block_thoughts"][e]), table["physical"][e]) for e in used)
        assert all(count == 1 for count in pools.values()), "a physical block is used twice"
        marked = {slot // size for slot, gone in enumerate(table["evicted"]) if gone}
        assert marked <= set(used), "a mark in a free block"
        assert len({table["groups"][held[token.position]] for token in self.quantized}) <= len(self.quantized)
        for thought in Thought:
            blocks = sum(table["block_thoughts"][entry] == thought for entry in used)
            assert blocks * size < self.most[thought] + 2 * size, f"type {thought}: more than its peak and 2 blocks"
            assert blocks <= ceil(self.most[thought] / size), f"type {thought}: more blocks than its peak fills"

    def blocks_after(self, cache: Any, row: int, thought: int) -> int:
        """How many blocks a row has after a flush of what waits: free slots of that type's blocks are used first."""
        thoughts = cache.block_thoughts[row]
        holes = int((thoughts == thought).sum()) * self.config.block - self.live(thought)
        opened = ceil(max(0, len(self.waiting) - holes) / self.config.block)
        return int((thoughts >= 0).sum()) + opened
