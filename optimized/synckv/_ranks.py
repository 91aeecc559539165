"""The R-heads of a layer whose KV heads are on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...reference.contract.ranks import ProcessGroup, gathered
from ...reference.contract.synckv.types import HeadClusters
from .._common.ranks import Ranks


class Representatives:
    """Where the R-heads are: the rank of each, and its place among those of its rank. Every `replicas` ranks in a row
    hold the same KV heads, each with a part of their query heads. All ranks construct it at the same time."""

    def __init__(
        self, process_group: ProcessGroup, clusters: HeadClusters, first: int, heads: int, replicas: int,
        device: torch.device,
    ) -> None:
        spans = [range(start, start + count) for start, count in gathered((first, heads), process_group)]
        held = [(rank, head) for rank, span in enumerate(spans) for head in clusters.representatives if head in span]
        own = sum(head in range(first, first + heads) for head in clusters.representatives)
        self._ranks, self._replicas = Ranks(process_group, own, device), replicas
        places = [
            [place for place, (_, one) in enumerate(held) if one == head][copy]
            for copy in range(replicas) for head in clusters.representatives
        ]
        with torch.inference_mode(False):
            self._places = torch.tensor(places, device=device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Representatives:
        return self                                                     # torch cannot copy a process group

    def largest(self, tensor: Tensor) -> Tensor:
        """[B, R-heads of this rank, S] to [B, N_r, S], by cluster: the largest of the numbers that an R-head's ranks
        have. Does not synchronize with the host."""
        every = self._ranks.gather(tensor).index_select(1, self._places)
        return every if self._replicas == 1 else every.unflatten(1, (self._replicas, -1)).amax(1)
