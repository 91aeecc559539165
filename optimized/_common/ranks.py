"""Ranks of torch.distributed that hold different heads of the same sequences and decide together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...reference.contract.ranks import ProcessGroup


class Ranks:
    """A process group, with the number of heads that each of its ranks contributes. Every `replicas` ranks in a row
    hold the same KV heads. All ranks construct it at the same time. No method synchronizes with the host."""

    def __init__(self, process_group: ProcessGroup, heads: int, device: torch.device, replicas: int = 1) -> None:
        distributed = torch.distributed
        self._group, self._size = process_group, distributed.get_world_size(process_group)
        self.replicas = replicas
        counts = torch.empty(self._size, 1, dtype=torch.int64, device=device)
        distributed.all_gather(list(counts), torch.tensor([heads], device=device), group=process_group)
        self._heads: list[int] = counts.flatten().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self                                                     # torch cannot copy a process group

    def each(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, which have the same shape, in the order of the ranks: [ranks, *shape]."""
        every = tensor.new_empty(self._size, *tensor.shape)
        # Straight into its place: with a list of outputs, NCCL receives into memory of its own and copies.
        distributed = torch.distributed
        # The older name, of which newer versions of torch warn.
        gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        gather(every.flatten(0, 1), tensor.contiguous(), group=self._group)
        return every

    def gather(self, tensor: Tensor) -> Tensor:
        """The heads of all ranks, in the order of the ranks: [B, H, ...], with this rank's heads, to [B, sum H, ...].
        """
        most = max(self._heads)
        if tensor.shape[1] < most:                                      # the ranks send tensors of the same size
            rest = tensor.new_zeros(tensor.shape[0], most - tensor.shape[1], *tensor.shape[2:])
            tensor = torch.cat((tensor, rest), 1)
        every = self.each(tensor)
        if min(self._heads) == most:
            return every.transpose(0, 1).flatten(1, 2).contiguous()     # of one row without a copy
        return torch.cat([part[:, :count] for part, count in zip(every, self._heads, strict=True)], 1)

    def largest(self, tensor: Tensor) -> Tensor:
        """`gather`, with each KV head once: the largest of the numbers that its ranks have."""
        every = self.gather(tensor)
        if self.replicas == 1:
            return every
        return every.unflatten(1, (-1, self.replicas, self._heads[0])).amax(2).flatten(1, 2)


def ranks_of(process_group: ProcessGroup | None, heads: int, device: torch.device, replicas: int = 1) -> Ranks | None:
    return None if process_group is None else Ranks(process_group, heads, device, replicas)
