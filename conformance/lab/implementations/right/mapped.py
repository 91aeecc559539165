"""LongFlow's decode step, written for one KV head and mapped over rows and KV heads by torch.vmap."""

from __future__ import annotations

import types

import torch
from torch import Tensor

from .... import Capabilities
from ..longflow import Decode

CAPABILITIES = Capabilities(validates_arguments=False)


def _of_head(query: Tensor, key: Tensor, value: Tensor, held: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """query [G, D]; key, value [S, D]; held [S] bool. Returns output [G, D], and of each query head the scores [G, S]
    and their logarithms."""
    key, value = key.where(held[:, None], 0), value.where(held[:, None], 0)
    logit = (query[:, None] * key).contiguous().sum(-1) * scale  # in the same order for each token
    logit = logit.where(held, -torch.inf)
    top = logit.amax(-1, keepdim=True)
    finite = top.where(top > -torch.inf, 0)
    weight = (logit - finite).exp()
    total = weight.sum(-1, keepdim=True)
    total = total.where(total > 0, 1)
    size = value.abs().contiguous().mean(-1)
    log_score = logit.double() - finite - total.double().log() + size.double().log()
    return (weight / total) @ value, weight / total * size, log_score


of_heads = torch.vmap(torch.vmap(_of_head, in_dims=(0, 0, 0, 0, None)), in_dims=(0, 0, 0, 0, None))


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, *, scale: float | None = None, per_head: bool = False,
    protected: Tensor | None = None, check_finite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    heads = key.shape[1]
    held = occupied if occupied.dim() == 3 else occupied[:, None].expand(-1, heads, -1)
    scale = key.shape[3] ** -0.5 if scale is None else scale
    grouped = query.float().unflatten(1, (heads, -1))
    output, score, log_score = of_heads(grouped, key.float(), value.float(), held, scale)
    over = (2,) if per_head else (1, 2)
    held = held if per_head else held[:, 0]
    spared = torch.zeros_like(held) if protected is None else protected
    shown = Decode().shown(score.mean(over), held, spared, query.dtype)
    slot = Decode().choose(log_score.logsumexp(over), held, spared)
    return output.flatten(1, 2).to(query.dtype), shown, slot


longflow = types.SimpleNamespace(decode_attention=decode_attention)
