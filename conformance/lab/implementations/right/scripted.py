"""LongFlow's decode step with attention in TorchScript."""

from __future__ import annotations

import types
import warnings
from typing import Any

import torch
from torch import Tensor

from .... import Capabilities
from .eager import Eager

CAPABILITIES = Capabilities(validates_arguments=False)
jit: Any = torch.jit  # whose types lack some of its functions


def _attend(logit: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.softmax(logit, -1)
    weight = torch.where(torch.isnan(weight), torch.zeros_like(weight), weight)
    return weight, torch.matmul(weight, value)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch deprecates TorchScript, which people still have
    attend = jit.script(_attend)


class Scripted(Eager):
    def attend(self, logit: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # Without what TorchScript learns from the first calls: others would have other bits.
        with jit.optimized_execution(False):
            weight, output = attend(logit, value)
        return weight, output


longflow = types.SimpleNamespace(decode_attention=Scripted())
