"""Random eviction, the control: a fixed pseudo-random score per position, the same in every row, head and layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import INF
from ..blocks import BlockConfig, BlockState, Piece, check_positions
from ..contract import check_integer

__all__ = ["RandomConfig", "RandomState", "score"]

_LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class RandomConfig(BlockConfig):
    """budget, block_size: see `BlockConfig`. seed: an int from 0 to 2^32 - 1."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)


def check_seed(seed: object) -> None:
    if check_integer("seed", seed, minimum=0) > _LARGEST_SEED:
        raise ValueError(f"seed must be at most 2^32 - 1, got {seed}")


def score(positions: Tensor, *, seed: int) -> Tensor:
    """The top 24 bits of splitmix64(seed * 2^32 + position), exact in float32; -inf where there is no token.

    positions [..., S] int64 below 2^32, -1 = none. Returns [..., S] float32.
    """
    check_positions(positions)
    check_seed(seed)
    bits = _shifted(_splitmix64(positions + _signed(seed << 32)), 40)
    return bits.to(torch.float32).masked_fill(positions < 0, -INF)


def _splitmix64(x: Tensor) -> Tensor:
    """Steele, Lea and Flood's generator: one output for the state x; int64 arithmetic wraps around."""
    z = x + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """x >> by, without the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    """The int64 of the same 64 bits."""
    return (x + 2**63) % 2**64 - 2**63


class RandomState(BlockState):
    """A cache that evicts at random, reproducibly. `score` is that of `score`."""

    Config = RandomConfig

    def _observe(self, piece: Piece) -> None:
        self.score.copy_(score(self.positions, seed=self.config.seed))

    def _rank(self) -> tuple[Tensor, Tensor]:
        return self.score, torch.zeros_like(self.occupied)
