"""A model of the paged cache: a list of tokens, and the conditions that the cache's tables must meet.

A `Sequence` has no slots. Its tokens have a position, a thought type, a segment, and their key and value, which are
quantized together with the other tokens of the buffer. `check` compares a cache's tables with it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from torch import Tensor

from ...reference.contract.thinkv.config import ThinKVConfig
from ...reference.contract.thinkv.types import Thought
from ...reference.thinkv import dequantize, quantize


@dataclass(eq=False)
class Listed:
    """A token: key and value [Hkv, D] float32, as attention uses them. thought None: the token is in the buffer."""

    position: int
    key: Tensor
    value: Tensor
    thought: int | None = None
    segment: int = -1


@dataclass
class Sequence:
    """The live tokens of one row. most: the peak number of quantized tokens of each thought type."""

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
        """Quantize the buffer: keys by channel, values by token."""
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
        """Evict quantized tokens by position."""
        self.tokens = [token for token in self.tokens if token.thought is None or token.position not in positions]

    def live(self, thought: int) -> int:
        return sum(token.thought == thought for token in self.tokens)

    def copy(self) -> Sequence:
        tokens = [Listed(**vars(token)) for token in self.tokens]
        return Sequence(self.config, tokens, self.most.copy())

    def in_order(self) -> tuple[list[int], Tensor, Tensor]:
        """Positions, keys and values [Hkv, n, D], the oldest first. There must be at least one token."""
        tokens = sorted(self.tokens, key=lambda token: token.position)
        return (
            [token.position for token in tokens], torch.stack([token.key for token in tokens], 1),
            torch.stack([token.value for token in tokens], 1),
        )

    def check(self, cache: Any, row: int) -> None:
        """Assert that a row's tables hold exactly these tokens, once each, and use no more blocks than allowed."""
        config, size = self.config, self.config.block
        names = ("positions", "occupied", "segments", "thoughts", "groups", "evicted", "block_thoughts", "physical")
        table = {name: getattr(cache, name)[row].tolist() for name in names}
        buffer = config.blocks * size
        slot_of = {p: slot for slot, p in enumerate(table["positions"]) if p >= 0}
        assert sorted(p for p in table["positions"] if p >= 0) == sorted(token.position for token in self.tokens), (
            "a live token is missing or stored twice"
        )
        assert table["occupied"] == [p >= 0 for p in table["positions"]]
        for token in self.quantized:
            slot = slot_of[token.position]
            assert slot < buffer, "a quantized token is in the buffer"
            assert (table["thoughts"][slot], table["segments"][slot]) == (token.thought, token.segment)
            assert table["block_thoughts"][slot // size] == token.thought, "one type per block"
            assert table["groups"][slot] >= 0
            assert not table["evicted"][slot], "a live token is marked as evicted"
        assert [slot_of[token.position] - buffer for token in self.waiting] == list(range(len(self.waiting)))
        assert int(cache.buffered[row]) == len(self.waiting)
        free = [slot for slot, p in enumerate(table["positions"]) if p < 0]
        assert all(table[name][slot] == -1 for name in ("segments", "thoughts", "groups") for slot in free)

        used = [entry for entry, thought in enumerate(table["block_thoughts"]) if thought >= 0]
        filled = Counter(slot_of[token.position] // size for token in self.quantized)
        assert sorted(filled) == used, "a block without tokens is in use, or one with tokens is free"
        assert [entry for entry, block in enumerate(table["physical"]) if block >= 0] == used
        pools = Counter((config.format_of(table["block_thoughts"][e]), table["physical"][e]) for e in used)
        assert all(count == 1 for count in pools.values()), "a physical block is used twice"
        marked = {slot // size for slot, gone in enumerate(table["evicted"]) if gone}
        assert marked <= set(used), "a slot of a free block is marked as evicted"
        assert len({table["groups"][slot_of[token.position]] for token in self.quantized}) <= len(self.quantized)
        for thought in Thought:
            blocks = sum(table["block_thoughts"][entry] == thought for entry in used)
            assert blocks * size < self.most[thought] + 2 * size, f"type {thought}: more than its peak and 2 blocks"
            assert blocks <= ceil(self.most[thought] / size), f"type {thought}: more blocks than its peak fills"

    def blocks_after(self, cache: Any, row: int, thought: int) -> int:
        """The number of blocks of a row after a flush of the buffer, which first fills free slots of its type."""
        thoughts = cache.block_thoughts[row]
        holes = int((thoughts == thought).sum()) * self.config.block - self.live(thought)
        opened = ceil(max(0, len(self.waiting) - holes) / self.config.block)
        return int((thoughts >= 0).sum()) + opened
