"""Eviction and top-k selection along the last dimension. Ties go to the lowest index; NaN ranks lowest."""

from __future__ import annotations

import torch
from torch import Tensor

from .contract.arguments import check_integer, check_tensor
from .contract.scales import FP8


def victims(score: Tensor, count: int) -> Tensor:
    """The `count` slots with the lowest scores, in the order of eviction: score [..., S] -> [..., count] int64."""
    return _ranked(score, count, descending=False)


def top_k(score: Tensor, k: int) -> Tensor:
    """The `k` slots with the highest scores, best first: score [..., S] -> [..., k] int64."""
    return _ranked(score, k, descending=True)


def order(score: Tensor) -> Tensor:
    """The rank of each element, 0 for the lowest score: [..., S] -> [..., S] int64. The inverse of `victims`."""
    slots = score.shape[-1]
    index = torch.arange(slots, device=score.device).expand(score.shape)
    return torch.empty_like(index).scatter(-1, victims(score, slots), index)


def kept_after(score: Tensor, count: int) -> Tensor:
    """The `count` slots that remain when `victims` evicts the others: [..., S] -> [..., count] int64, ascending."""
    slots = score.shape[-1]
    keep = torch.ones_like(score, dtype=torch.bool).scatter(-1, victims(score, slots - count), False)
    index = torch.arange(slots, device=score.device).expand(score.shape)
    return index[keep].view(*score.shape[:-1], count)


def kept_tokens(rank: Tensor, occupied: Tensor, count: int) -> Tensor:
    """`kept_after` without unoccupied slots: [..., count] int64, ascending, -1 at the end of rows with fewer tokens.

    rank, occupied [..., S]; unoccupied slots must have the lowest ranks.
    """
    kept = kept_after(rank, count)
    holds = occupied.gather(-1, kept)
    places = (~holds).to(torch.int8).sort(dim=-1, stable=True).indices                  # slots without a token go last
    return kept.masked_fill(~holds, -1).gather(-1, places)


def gather_tokens(tensor: Tensor, kept: Tensor) -> Tensor:
    """tensor [B, Hkv, T, D] at the indices kept [B, N] or [B, Hkv, N]: [B, Hkv, N, D], zero where kept is -1."""
    if tensor.dtype in FP8:  # torch gathers no FP8 numbers; the code 0 is zero
        return gather_tokens(tensor.view(torch.uint8), kept).view(tensor.dtype)
    index = kept if kept.dim() == 3 else kept[:, None].expand(-1, tensor.shape[1], -1)
    index = index[..., None].expand(-1, -1, -1, tensor.shape[-1])
    return tensor.gather(2, index.clamp_min(0)).masked_fill(index < 0, 0)


def _ranked(score: Tensor, count: int, *, descending: bool) -> Tensor:
    if not isinstance(score, Tensor):
        raise TypeError(f"score must be a torch.Tensor [..., S], got {type(score).__name__}")
    check_tensor("score", score, dims=max(score.dim(), 1), layout="[..., S]")
    check_integer("count", count, minimum=0)
    if count > score.shape[-1]:
        raise ValueError(f"count must be at most S = {score.shape[-1]}, got {count}")
    if score.is_floating_point():
        score = score.masked_fill(score.isnan(), -torch.inf)
    # A stable sort keeps equal scores in the order of their indices.
    return score.sort(dim=-1, descending=descending, stable=True).indices[..., :count]
