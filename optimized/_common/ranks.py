"""Ranks of torch.distributed that hold different heads of the same sequences and decide together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...reference._validate_ranks import ProcessGroup


class Ranks:
    """A process group, with the number of heads that each of its ranks contributes. All ranks construct it at the same
    time."""

    def __init__(self, process_group: ProcessGroup, heads: int, device: torch.device) -> None:
        distributed = torch.distributed
        self._group, self._size = process_group, distributed.get_world_size(process_group)
        counts = torch.empty(self._size, 1, dtype=torch.int64, device=device)
        distributed.all_gather(list(counts), torch.tensor([heads], device=device), group=process_group)
        self._heads: list[int] = counts.flatten().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self                                                     # torch cannot copy a process group

    def gather(self, tensor: Tensor) -> Tensor:
        """The heads of all ranks, in the order of the ranks: [B, H, ...], with this rank's heads, to [B, sum H, ...].

        Does not synchronize with the host.
        """
        most = max(self._heads)
        if tensor.shape[1] < most:                                      # the ranks send tensors of the same size
            rest = tensor.new_zeros(tensor.shape[0], most - tensor.shape[1], *tensor.shape[2:])
            tensor = torch.cat((tensor, rest), 1)
        every = tensor.new_empty(self._size, *tensor.shape)
        torch.distributed.all_gather(list(every), tensor.contiguous(), group=self._group)
        return torch.cat([part[:, :count] for part, count in zip(every, self._heads, strict=True)], 1)


def ranks_of(process_group: ProcessGroup | None, heads: int, device: torch.device) -> Ranks | None:
    return None if process_group is None else Ranks(process_group, heads, device)
