"""A sequence's block table in plain Python: blocks of slots, and the live tokens by position (section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .contract import Quantized


@dataclass(eq=False)
class Token:
    """A live token: key and value [Hkv, D] as attention sees them, and where their codes are once there are any."""

    position: int
    key: Tensor
    value: Tensor
    slot: int = -1
    segment: int = -1
    thought: int = -1
    flushed: Flush | None = None
    place: int = -1  # in its flush


@dataclass
class Flush:
    """Tokens that were quantized together, as [Hkv, tokens, D]. group: the id of the scales that their keys share."""

    group: int
    keys: Quantized
    values: Quantized


@dataclass
class Block:
    """An entry of the block table: of each slot the token, and whether one was evicted from it."""

    physical: int
    thought: int
    tokens: list[Token | None]
    evicted: list[bool]


@dataclass
class Row:
    """One sequence."""

    table: dict[int, Block] = field(default_factory=dict)
    tokens: dict[int, Token] = field(default_factory=dict)  # by position
    buffer: list[Token] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)  # first position of each segment

    def in_order(self) -> list[Token]:
        return [self.tokens[position] for position in sorted(self.tokens)]

    def flushes(self) -> dict[int, Flush]:
        """Those of which a token is live, by the id of their scale group."""
        return {token.flushed.group: token.flushed for token in self.tokens.values() if token.flushed}
