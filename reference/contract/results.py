"""Results that functions of several methods return."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttendResult(NamedTuple):
    """Attention of a block of queries and the attention that each key received.

    output [B, Hq, Q, D] in query's dtype. received [B, Hkv, S] float32 (float64 for float64 inputs), 0 where
    unoccupied: the attention weights of each key, aggregated over the queries as the method defines.
    """

    output: Tensor
    received: Tensor


class CompressResult(NamedTuple):
    """A compressed prompt.

    key, value: [B, Hkv, N, D], zero where kept is -1. kept: the indices of the kept tokens in the prompt, ascending, -1
    at the end of rows with fewer tokens: [B, N] int64 if all heads keep the same tokens, else [B, Hkv, N].
    """

    key: Tensor
    value: Tensor
    kept: Tensor
