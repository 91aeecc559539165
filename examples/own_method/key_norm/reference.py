"""The reference: after each block, keep the tokens with the smallest key norms, and the newest tokens.

Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (2024), found that tokens with
small keys receive more attention. `recent`, which protects the newest tokens, is an addition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtwin.reference.blocks import BlockConfig, BlockState, Chunk

__all__ = ["KeyNormConfig", "KeyNormState"]


@dataclass(frozen=True)
class KeyNormConfig(BlockConfig):
    """budget, block_size: see `BlockConfig`. recent: the number of newest tokens that are protected, an int from 0 to
    budget. Raises TypeError or ValueError for invalid arguments."""

    recent: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.recent, int) or isinstance(self.recent, bool):
            raise TypeError(f"recent must be an int, got {type(self.recent).__name__}")
        if not 0 <= self.recent <= self.budget:
            raise ValueError(f"recent must be from 0 to budget = {self.budget}, got {self.recent}")


class KeyNormState(BlockState):
    """A cache of tokens with small keys, see `BlockState`. `score` is -||k||; the lowest is evicted first."""

    Config = KeyNormConfig

    def _observe(self, chunk: Chunk) -> None:
        norm = self.key.to(self.score.dtype).square().sum(-1).sqrt()    # [B, Hkv, S]
        self.score.copy_((-norm).masked_fill(~self.occupied, -torch.inf))

    def _rank(self) -> tuple[Tensor, Tensor]:
        return self.score, self._newest(self.config.recent)
