"""Checks of a process group: the ranks of torch.distributed that hold different heads of the same sequences."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .arguments import check_integer

if TYPE_CHECKING or torch.distributed.is_available():
    from torch.distributed import ProcessGroup as ProcessGroup
else:
    ProcessGroup = Any


class Shared:
    """A process group, or None, which a state shares with its copies: torch cannot copy one."""

    def __init__(self, process_group: ProcessGroup | None) -> None:
        self.process_group = process_group

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self


def check_process_group(process_group: object, **facts: Any) -> None:
    """Check a process group of this rank, or None. `facts`, by name, must be the same on all of its ranks, which must
    all call this at the same time. TypeError or ValueError, the latter on all ranks if facts differ."""
    if process_group is None:
        return
    if not torch.distributed.is_available() or not isinstance(process_group, ProcessGroup):
        raise TypeError(
            f"process_group must be a torch.distributed.ProcessGroup or None, got {type(process_group).__name__}"
        )
    seen = gathered(facts, process_group)
    for name, value in facts.items():
        for rank, other in enumerate(seen):
            if other[name] != seen[0][name]:
                raise ValueError(
                    f"{name} must be the same on all ranks of process_group, got {seen[0][name]} on its rank 0 and "
                    f"{other[name]} on its rank {rank} (here: {value})"
                )


def check_heads(process_group: ProcessGroup | None, replicas: int, key_value_heads: int, **facts: Any) -> None:
    """`check_process_group`, and that `replicas` is a number of ranks in a row that can hold the same KV heads."""
    if replicas != 1:
        facts["key_value_heads"] = key_value_heads
    check_process_group(process_group, replicas=replicas, **facts)
    check_integer("replicas", replicas, minimum=1)
    if process_group is None and replicas != 1:
        raise ValueError(f"replicas must be 1 without a process_group, got {replicas}")
    ranks = 1 if process_group is None else torch.distributed.get_world_size(process_group)
    if ranks % replicas:
        raise ValueError(f"replicas must divide the number of ranks, which is {ranks}, got {replicas}")


def heads_of_ranks(process_group: ProcessGroup | None, replicas: int, key_value_heads: int) -> tuple[int, int]:
    """The number of this rank's first KV head, and the number of KV heads of all ranks, for the heads that this rank
    holds."""
    if process_group is None:
        return 0, key_value_heads
    counts = gathered(key_value_heads, process_group)[::replicas]
    return sum(counts[:torch.distributed.get_rank(process_group) // replicas]), sum(counts)


def check_shared_heads(
    process_group: ProcessGroup | None, shared_heads: bool, query_window: Tensor, key: Tensor, occupied: Tensor,
    **facts: Any,
) -> None:
    """Check the process group of a function that scores the tokens of a prompt, query_window [B, Hq, W, D] and key
    [B, Hkv, T, D]: its ranks may differ in their heads only. occupied [B, T]; facts: further arguments."""
    if process_group is None:
        return
    if not shared_heads:
        raise ValueError("process_group needs shared_heads=True: otherwise each KV head has scores of its own")
    check_process_group(
        process_group, batch=key.shape[0], tokens=key.shape[2], window=query_window.shape[2], head_dim=key.shape[3],
        dtype=key.dtype, query_heads_per_key_value_head=query_window.shape[1] // key.shape[1],
        occupied=digest(occupied), **facts,
    )


def digest(mask: Tensor | None) -> str | None:
    """A hash of a mask, the same for equal masks; None for None."""
    return None if mask is None else hashlib.sha256(mask.cpu().numpy().tobytes()).hexdigest()[:16]


def gathered(one: Any, process_group: ProcessGroup) -> list[Any]:
    """An object of each rank, in the order of the ranks. Every rank of the group must call this."""
    found: list[Any] = [None] * torch.distributed.get_world_size(process_group)
    torch.distributed.all_gather_object(found, one, process_group)
    return found
