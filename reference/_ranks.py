"""Ranks of torch.distributed that hold different heads of the same sequences and decide together.

Each rank gathers what all of them contribute to a decision, in the order of the ranks, and computes the decision from
it. So all ranks decide alike, and as one rank with all heads would.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._validate_ranks import ProcessGroup, gathered


def of_all_ranks(tensor: Tensor, dim: int, process_group: ProcessGroup | None) -> Tensor:
    """The tensors of all ranks, one behind the other along `dim`, where they may have different sizes."""
    if process_group is None:
        return tensor
    return torch.cat([part.to(tensor.device) for part in gathered(tensor.cpu(), process_group)], dim)
