"""LongFlow's decode step in plain eager PyTorch, in float32 as most people would write it."""

from __future__ import annotations

import types

import torch
from torch import Tensor

from .... import Capabilities
from ..longflow import Decode

CAPABILITIES = Capabilities(validates_arguments=False)


class Eager(Decode):
    """Keys, values, logits and weights are float32. The rank of a slot is computed from float32 logits."""

    def read(self, key: Tensor, value: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        free = ~held[..., None]
        return key.float().masked_fill(free, 0), value.float().masked_fill(free, 0)

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        return super().logits(query.float(), key)

    def softmax(self, logit: Tensor) -> Tensor:
        return torch.softmax(logit, -1).nan_to_num(0)  # NaN in rows without tokens

    def scores(self, logit: Tensor, weight: Tensor, size: Tensor, heads: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        # Logarithms of float32 numbers in float64: PyTorch takes those of the last slots, one by one, another way.
        _, rank = super().scores(logit.double(), weight, size.double(), heads)
        return (weight * size).mean(heads), rank


longflow = types.SimpleNamespace(decode_attention=Eager())
