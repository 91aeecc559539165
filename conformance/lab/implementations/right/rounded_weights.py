"""LongFlow's decode step with weights in the inputs' dtype before the product with values, as flash attention has them:
the sum that divides the output is that of the weights before they are rounded."""

from __future__ import annotations

import types

import torch
from torch import Tensor

from .... import Capabilities
from .eager import Eager

CAPABILITIES = Capabilities(validates_arguments=False)


class RoundedWeights(Eager):
    def attend(self, logit: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        top = logit.amax(-1, keepdim=True)
        weight = (logit - top.masked_fill(top == -torch.inf, 0)).exp()
        total = weight.sum(-1, keepdim=True)
        total = total.masked_fill(total == 0, 1)
        output = torch.einsum("bhgs,bhsd->bhgd", weight.to(dtype).float(), value)
        return weight / total, output / total


longflow = types.SimpleNamespace(decode_attention=RoundedWeights())
