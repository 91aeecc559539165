"""Ranks of torch.distributed that hold different heads of the same sequences and decide together.

Each rank gathers what all of them contribute to a decision, in the order of the ranks, and computes the decision from
it. So all ranks decide alike, and as one rank with all heads would.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .contract.ranks import ProcessGroup, gathered


class Heads:
    """The KV heads of the ranks of `process_group`, of which every `replicas` in a row hold the same ones, each with a
    part of their query heads. None: one rank holds all heads."""

    def __init__(self, process_group: ProcessGroup | None, replicas: int = 1) -> None:
        self.process_group, self._replicas = process_group, replicas

    def __deepcopy__(self, memo: dict[int, Any]) -> Heads:
        return self                                                     # torch cannot copy a process group

    def once(self, tensor: Tensor) -> Tensor:
        """What each KV head has, the same on all ranks that hold it: [B, Hkv, ...] of this rank -> [B, H, ...]."""
        return self._copies(tensor)[:, :, 0].flatten(1, 2)

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest number of each KV head among the ranks that hold it: [B, Hkv, ...] of this rank -> [B, H, ...].
        """
        return self._copies(tensor).amax(2).flatten(1, 2)

    def _copies(self, tensor: Tensor) -> Tensor:
        """[B, Hkv, ...] of this rank to those of all ranks, [B, groups of ranks, replicas, KV heads per rank, ...]."""
        every = of_all_ranks(tensor, 1, self.process_group)
        if self._replicas == 1:
            return every[:, None, None]
        return every.unflatten(1, (-1, self._replicas, tensor.shape[1]))


def of_all_ranks(tensor: Tensor, dim: int, process_group: ProcessGroup | None) -> Tensor:
    """The tensors of all ranks, one behind the other along `dim`, where they may have different sizes."""
    if process_group is None:
        return tensor
    return torch.cat([part.to(tensor.device) for part in gathered(tensor.cpu(), process_group)], dim)
