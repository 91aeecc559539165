"""LongFlow's decode step with an online softmax that walks the tiles from the last to the first."""

from __future__ import annotations

import types

import torch
from torch import Tensor

from .... import Capabilities
from .eager import Eager

CAPABILITIES = Capabilities(validates_arguments=False)
TILE = 32


class Descending(Eager):
    def attend(self, logit: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        top = torch.full_like(logit[..., 0], -torch.inf)
        total = torch.zeros_like(top)
        output = torch.zeros(*top.shape, value.shape[-1], device=value.device)
        for tile, values in reversed([*zip(logit.split(TILE, -1), value.split(TILE, 2), strict=True)]):
            higher = torch.maximum(top, tile.amax(-1))
            finite = higher.masked_fill(higher == -torch.inf, 0)
            old, weight = (top - finite).exp(), (tile - finite[..., None]).exp()
            total = total * old + weight.sum(-1)
            output = output * old[..., None] + torch.einsum("bhgs,bhsd->bhgd", weight, values)
            top = higher
        total = total.masked_fill(total == 0, 1)
        finite = top.masked_fill(top == -torch.inf, 0)
        return (logit - finite[..., None]).exp() / total[..., None], output / total[..., None]


longflow = types.SimpleNamespace(decode_attention=Descending())
