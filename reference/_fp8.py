"""Keys and values that a cache holds as FP8 codes with scales."""

from __future__ import annotations

import torch
from torch import Tensor

from .contract.scales import FP8


def dequantized(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """codes [B, Hkv, S, D] times scale, [] or [Hkv], in `dtype`; None is a scale of 1. Anything but FP8 as it is.

    The codes convert exactly. The product is exact in float64: it has 28 bits.
    """
    if codes.dtype not in FP8:
        return codes
    number = codes.to(dtype)
    return number if scale is None else number * scale.to(dtype).view(1, -1, 1, 1)      # [1, 1 or Hkv, 1, 1]
