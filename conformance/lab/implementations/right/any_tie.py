"""LongFlow's decode step by matrix products and topk, which promise no order among equal tokens."""

from __future__ import annotations

import types

import torch
from torch import Tensor

from .... import Capabilities
from ..longflow import INF
from .eager import Eager

CAPABILITIES = Capabilities(ties="any", free_score="any", validates_arguments=False)


class AnyTie(Eager):
    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        return query.float().unflatten(1, (key.shape[1], -1)) @ key.transpose(2, 3)

    def shown(self, score: Tensor, held: Tensor, spared: Tensor, dtype: torch.dtype) -> Tensor:
        return score.masked_fill(spared, INF).masked_fill(~held, 0)

    def lowest(self, rank: Tensor, candidate: Tensor, index: Tensor) -> Tensor:
        # A token whose value is 0 has a rank of -inf. No other slot may look like one.
        order = torch.where(candidate, rank.clamp_min(torch.finfo(rank.dtype).min), INF)
        return order.topk(1, dim=-1, largest=False, sorted=False).indices[..., 0]


longflow = types.SimpleNamespace(decode_attention=AnyTie())
