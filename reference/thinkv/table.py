"""A sequence's block table as Python objects: blocks of slots, and the live tokens by position (section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..contract.thinkv.types import Quantized


@dataclass(eq=False)
class Token:
    """A live token: key and value [Hkv, D] as attention reads them, and the place of its codes once it is quantized."""

    position: int
    key: Tensor
    value: Tensor
    slot: int = -1
    segment: int = -1
    thought: int = -1
    flushed: Flush | None = None
    place: int = -1  # the index in its flush


@dataclass
class Flush:
    """Tokens that were quantized together, [Hkv, tokens, D]. group: the id of the scales that their keys share."""

    group: int
    keys: Quantized
    values: Quantized


@dataclass
class Block:
    """An entry of the block table. tokens, evicted: for each slot its token, and whether its last token was evicted."""

    physical: int
    thought: int
    tokens: list[Token | None]
    evicted: list[bool]


@dataclass
class Row:
    """The cache of one sequence. table: blocks by entry; tokens: live tokens by position; starts: the first position of
    each segment. quantized: the quantized ones of `in_order`, and their keys and values; None after they changed."""

    table: dict[int, Block] = field(default_factory=dict)
    tokens: dict[int, Token] = field(default_factory=dict)
    buffer: list[Token] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)
    quantized: tuple[list[Token], Tensor] | None = None

    def in_order(self, dtype: torch.dtype) -> tuple[list[Token], Tensor]:
        """The live tokens, at least one, by ascending position, and their keys and values [2, Hkv, n, D] in `dtype`."""
        if self.quantized is None:
            found = sorted((token for token in self.tokens.values() if token.flushed), key=_position)
            self.quantized = found, _vectors(found, torch.float32) if found else torch.empty(0)
        (found, vectors), waiting = self.quantized, sorted(self.buffer, key=_position)
        if not waiting:
            return found, vectors.to(dtype)
        if not found:
            return waiting, _vectors(waiting, dtype)
        both, vectors = [*found, *waiting], torch.cat([vectors.to(dtype), _vectors(waiting, dtype)], 2)
        if found[-1].position > waiting[0].position:
            order = sorted(range(len(both)), key=lambda place: both[place].position)
            both, vectors = [both[place] for place in order], vectors[:, :, order]
        return both, vectors

    def flushes(self) -> dict[int, Flush]:
        """The flushes with live tokens, by the id of their scale group."""
        return {token.flushed.group: token.flushed for token in self.tokens.values() if token.flushed}


def _position(token: Token) -> int:
    return token.position


def _vectors(tokens: list[Token], dtype: torch.dtype) -> Tensor:
    """Keys and values, [2, Hkv, n, D]."""
    both = [torch.stack(one, 1) for one in ([token.key for token in tokens], [token.value for token in tokens])]
    return torch.stack(both).to(dtype)
