"""The tiles, the number of programs and the constant of kernels that plan and cluster segments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._common.launch import INTERPRETED, cdiv, multiprocessors, next_power_of_2

#: Iterations of k-means.
ITERATIONS = 10
#: The longest segment, whose Gram matrix still fits in registers.
MAX_TOKENS = 128
#: The most programs that share a row's segments, and how often those of all rows fill the multiprocessors, with one
#: program on each at a time.
ROW_PROGRAMS, PROGRAMS = 8, 4
#: The number of clusters in a tile, unless more are needed.
FEW_CLUSTERS = 64


def tile(tokens: int, most: int, head_dim: int) -> dict[str, int]:
    """Launch options of programs for segments of up to `tokens` tokens that keep at most `most`.

    Nearly always the same, so that few kernels are compiled, and kernels that read keys from different places select
    the same tokens bitwise. In the interpreter tiles are as small as possible.
    """
    if INTERPRETED:
        padded = max(16, next_power_of_2(tokens))
        clusters = min(padded, max(16, next_power_of_2(most)))
        return {"TOKENS": padded, "CLUSTERS": clusters, "CHANNELS": 16, "num_warps": 8}
    clusters, channels = FEW_CLUSTERS if most <= FEW_CLUSTERS else MAX_TOKENS, max(16, next_power_of_2(head_dim))
    return {"TOKENS": MAX_TOKENS, "CLUSTERS": clusters, "CHANNELS": min(64, channels), "num_warps": 8}


def programs(batch: int, segments: int, device: torch.device) -> int:
    """The number of programs that share a row's segments. Only one runs on a multiprocessor at a time, so with many
    rows even programs that find nothing to do take time."""
    if INTERPRETED:
        return 1
    return min(ROW_PROGRAMS, segments, max(1, cdiv(PROGRAMS * multiprocessors(device), batch)))


def packed_retention(retention: Sequence[int]) -> int:
    """The sizes as one constant, 64 bits each. Beyond int64 they limit no segment."""
    return sum(min(keep, 2**63 - 1) << 64 * number for number, keep in enumerate(retention))
