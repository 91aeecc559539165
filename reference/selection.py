"""Who goes and who stays: the two selections that every method uses, with ties decided by index."""

from __future__ import annotations

import torch
from torch import Tensor

from .contract import check_integer, check_tensor


def victims(score: Tensor, count: int) -> Tensor:
    """The `count` slots to evict along the last dimension: lowest score first, ties to the lowest index.

    score [..., S]; returns [..., count] int64 in the order of eviction. NaN ranks lowest, like -inf.
    """
    return _ranked(score, count, descending=False)


def top_k(score: Tensor, k: int) -> Tensor:
    """The `k` best along the last dimension: highest score first, ties to the lowest index. NaN ranks lowest.

    score [..., S]; returns [..., k] int64 in the order of rank.
    """
    return _ranked(score, k, descending=True)


def kept_after(score: Tensor, count: int) -> Tensor:
    """What `victims(score, S - count)` leaves: [..., count] int64, ascending."""
    slots = score.shape[-1]
    stays = torch.ones_like(score, dtype=torch.bool).scatter(-1, victims(score, slots - count), False)
    index = torch.arange(slots, device=score.device).expand(score.shape)
    return index[stays].view(*score.shape[:-1], count)


def _ranked(score: Tensor, count: int, *, descending: bool) -> Tensor:
    if not isinstance(score, Tensor):
        raise TypeError(f"score must be a torch.Tensor [..., S], got {type(score).__name__}")
    check_tensor("score", score, dims=max(score.dim(), 1), layout="[..., S]")
    check_integer("count", count, minimum=0)
    if count > score.shape[-1]:
        raise ValueError(f"count must be at most S = {score.shape[-1]}, got {count}")
    if score.is_floating_point():
        score = score.masked_fill(score.isnan(), -torch.inf)
    # stable=True is the tie rule: equal scores keep their order of index.
    return score.sort(dim=-1, descending=descending, stable=True).indices[..., :count]
