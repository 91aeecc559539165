"""LongFlow's decode step and StreamingLLM's choice in numpy, on the CPU: tensors of a GPU are copied."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .... import Capabilities

CAPABILITIES = Capabilities(max_batch=8, max_slots=2048, validates_arguments=False)  # more would take seconds


def _array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().double().numpy()


def _sum_of_exp(logit: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """A finite maximum, and the sum of exp(logit - maximum)."""
    top = logit.max(axis=axes, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    return top, np.exp(logit - top).sum(axis=axes, keepdims=True)


@np.errstate(all="ignore")  # infinite logits, and NaN in other rows
def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None = None, per_head: bool = False,
    protected: Tensor | None = None, check_finite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, _, head_dim = key.shape
    mask = occupied.cpu().numpy()
    held = np.broadcast_to(mask if mask.ndim == 3 else mask[:, None], key.shape[:3])              # [B, Hkv, S]
    k, v = (np.where(held[..., None], _array(tensor), 0) for tensor in (key, value))
    q = _array(query).reshape(batch, heads, -1, 1, head_dim)
    logit = (q * k[:, :, None]).sum(-1) * (head_dim**-0.5 if scale is None else scale)            # [B, Hkv, G, S]
    logit = np.where(held[:, :, None], logit, -np.inf)
    top, total = _sum_of_exp(logit, (3,))
    total = np.where(total == 0, 1, total)
    weight = np.exp(logit - top) / total
    output = (weight[..., None] * v[:, :, None]).sum(3).reshape(query.shape)

    size, axes = np.abs(v).mean(-1)[:, :, None], (2,) if per_head else (1, 2)
    score = (weight * size).mean(axes)
    log_score = logit - top - np.log(total) + np.log(size)
    most, sums = _sum_of_exp(log_score, axes)
    rank = (np.log(sums) + most).squeeze(axes).astype(np.float32)  # rounded, so that equal tokens tie
    held = held if per_head else held[:, 0]
    spared = np.zeros_like(held) if protected is None else protected.cpu().numpy() & held
    score = np.where(held, np.where(spared, np.inf, score), -np.inf).astype(np.float32)
    slot = _victim(rank, held, spared)
    found = [torch.from_numpy(one).to(query.device) for one in (output, score, slot)]
    return found[0].to(query.dtype), found[1], found[2]


def _victim(rank: Any, held: Any, spared: Any) -> Any:
    """The first free slot, else the first of those with the lowest rank, else 0."""
    candidate = held & ~spared
    lowest = np.where(candidate, rank, np.inf).min(-1, keepdims=True)
    first = (candidate & (rank == lowest)).argmax(-1)
    return np.where(held.all(-1), first, (~held).argmax(-1)).astype(np.int64)


def keep(positions: Tensor, budget: int, *, sinks: int = 4) -> Tensor:
    given = positions.cpu().numpy()
    held = given >= 0
    free = (~held).sum(-1, keepdims=True)
    place = given.argsort(-1, kind="stable").argsort(-1, kind="stable") - free                    # tokens from 0
    count = held.sum(-1, keepdims=True)
    kept = held & ((place < sinks) | (place >= count - (budget - sinks)))
    return torch.from_numpy(kept).to(positions.device)


longflow = types.SimpleNamespace(decode_attention=decode_attention)
streaming_llm = types.SimpleNamespace(keep=keep)
