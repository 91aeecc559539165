"""LongFlow's decode step with slots first. Its results are not contiguous, and are attributes of an object."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .... import Capabilities
from ..longflow import SlotsFirst

CAPABILITIES = Capabilities(validates_arguments=False)


@dataclass
class Step:
    slot: Tensor
    score: Tensor
    output: Tensor


class Strided(SlotsFirst):
    def __call__(self, *args: Any, **options: Any) -> Any:
        output, score, slot = super().__call__(*args, **options)
        gaps = torch.empty(*score.shape, 3, device=score.device)
        gaps[..., 1] = score
        return Step(slot, gaps[..., 1], output.transpose(1, 2).contiguous().transpose(1, 2))


longflow = types.SimpleNamespace(decode_attention=Strided())
