"""Random eviction, the control: a pseudo-random score per position, equal in all rows, heads and layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import INF
from ..blocks import BlockConfig, BlockState, Chunk
from ..contract.arguments import check_integer, check_positions

__all__ = ["RandomConfig", "RandomState", "score"]

_LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class RandomConfig(BlockConfig):
    """Configuration of a random cache.

    budget, block_size: see `BlockConfig`. seed: an int from 0 to 2^32 - 1. Raises TypeError or ValueError for invalid
    arguments.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)


def check_seed(seed: object) -> None:
    """An int from 0 to 2^32 - 1."""
    if check_integer("seed", seed, minimum=0) > _LARGEST_SEED:
        raise ValueError(f"seed must be at most 2^32 - 1, got {seed}")


def score(positions: Tensor, *, seed: int) -> Tensor:
    """The top 24 bits of splitmix64(seed * 2^32 + position), which float32 represents exactly.

    positions [..., S] int64 below 2^32, -1 = no token. Returns [..., S] float32, -inf where there is no token.
    TypeError or ValueError for invalid arguments.
    """
    check_positions(positions)
    check_seed(seed)
    bits = _shifted(_splitmix64(positions + _signed(seed << 32)), 40)
    return bits.to(torch.float32).masked_fill(positions < 0, -INF)


def _splitmix64(x: Tensor) -> Tensor:
    """One output of the generator by Steele, Lea and Flood (2014) for the state x, in wrapping int64 arithmetic."""
    z = x + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical shift of x to the right: zeros enter at the left, whatever the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    """The int64 with the same 64 bits as the unsigned x."""
    return (x + 2**63) % 2**64 - 2**63


class RandomState(BlockState):
    """A cache that evicts at random, see `BlockState`. `score` is that of the function `score`."""

    Config = RandomConfig

    def _observe(self, chunk: Chunk) -> None:
        self.score.copy_(score(self.positions, seed=self.config.seed))

    def _rank(self) -> tuple[Tensor, Tensor]:
        return self.score, torch.zeros_like(self.occupied)
