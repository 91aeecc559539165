"""A sequence's block table as Python objects: blocks of slots, and the live tokens by position (section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    each segment."""

    table: dict[int, Block] = field(default_factory=dict)
    tokens: dict[int, Token] = field(default_factory=dict)
    buffer: list[Token] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)

    def in_order(self) -> list[Token]:
        """The live tokens by ascending position."""
        return [self.tokens[position] for position in sorted(self.tokens)]

    def flushes(self) -> dict[int, Flush]:
        """The flushes with live tokens, by the id of their scale group."""
        return {token.flushed.group: token.flushed for token in self.tokens.values() if token.flushed}
