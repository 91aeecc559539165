"""The tiles of programs that cluster the tokens of a segment."""

from __future__ import annotations

import triton

from .._common.launch import INTERPRETED

#: Iterations of k-means.
ITERATIONS = 10
#: The longest segment, whose Gram matrix still fits in registers.
MAX_TOKENS = 128
#: The number of clusters in a tile, unless more are needed.
FEW_CLUSTERS = 64


def tile(tokens: int, most: int, head_dim: int) -> dict[str, int]:
    """Launch options of programs for segments of up to `tokens` tokens that keep at most `most`.

    Nearly always the same, so that few kernels are compiled, and kernels that read keys from different places select
    the same tokens bitwise. In the interpreter tiles are as small as possible.
    """
    if INTERPRETED:
        padded = max(16, triton.next_power_of_2(tokens))
        clusters = min(padded, max(16, triton.next_power_of_2(most)))
        return {"TOKENS": padded, "CLUSTERS": clusters, "CHANNELS": 16, "num_warps": 8}
    clusters, channels = FEW_CLUSTERS if most <= FEW_CLUSTERS else MAX_TOKENS, max(16, triton.next_power_of_2(head_dim))
    return {"TOKENS": MAX_TOKENS, "CLUSTERS": clusters, "CHANNELS": min(64, channels), "num_warps": 8}
