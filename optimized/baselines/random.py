"""Random eviction on the GPU: attention, and a pseudo-random score that each token gets on arrival."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.baselines.random import RandomConfig
from ...reference.contract.arguments import check_positions
from .._common.block_cache.state import Block, BlockState, Policy

__all__ = ["RandomConfig", "RandomState", "score"]


def score(positions: Tensor, *, seed: int) -> Tensor:
    """The top 24 bits of splitmix64(seed * 2^32 + position), exact in float32; -inf where there is no token.

    positions [..., S] int64 below 2^32, -1 = none. Returns [..., S] float32.
    """
    check_positions(positions)
    RandomConfig(1, seed=seed)  # checks seed
    z = positions + _offset(seed)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z ^= _shifted(z, 31)
    return _shifted(z, 40).to(torch.float32).masked_fill(positions < 0, -torch.inf)


def _offset(seed: int) -> int:
    """The generator's first addition, without the position."""
    return _signed((seed << 32) + 0x9E3779B97F4A7C15)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical shift of x to the right: zeros enter at the left, whatever the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    """The int64 with the lowest 64 bits of x."""
    return (x + 2**63) % 2**64 - 2**63


class RandomState(BlockState):
    """A cache that evicts at random, reproducibly. `score` is that of the function `score`."""

    Config = RandomConfig
    _rule = "random"
    _library_attends = True
    _chooses_early = True

    def _make_policy(self) -> Policy:
        return Policy(offset=_offset(self.config.seed))

    def _update(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        return self.score[..., :block.end], None
