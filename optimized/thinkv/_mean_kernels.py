"""Device functions for the sparsity of the weights that are averaged over KV heads (ThinKV C.2).

Each KV head stores the weight of every place, the largest in its group of query heads, and the sum over all places.
Free places have the weight FREE, in all heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

FREE = tl.constexpr(-1.0)


@triton.jit
def pooled_weight(log_weight):
    """The weight of a place, from its logarithm in base 2, which is +inf for a free place."""
    return tl.where(log_weight == float("inf"), FREE, tl.exp2(log_weight))


@triton.jit
def _summed(pooled, sums, length, heads, places, start, CHUNK: tl.constexpr):
    """The normalized weights of the places from `start` on, summed over KV heads, FREE for free ones: [CHUNK]."""
    s = start + tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.float32)
    for head in range(0, heads):
        # Programs of the same launch may have stored them, so the L1 cache may hold older numbers.
        weight = tl.load(pooled + head * length + s, mask=s < places, other=FREE, cache_modifier=".cg")
        weight_sum = tl.load(sums + head, cache_modifier=".cg")
        total = tl.where(weight == FREE, FREE, total + weight / weight_sum)
    return total


@triton.jit
def below_mean(pooled, sums, length, heads, places, threshold, CHUNK: tl.constexpr):
    """The number of tokens with less than `threshold` times the largest weight, summed over the KV heads of a row.

    pooled [heads, length]: the weights of each head; sums [heads]. Sums are compared instead of means.
    """
    largest = tl.zeros([CHUNK], tl.float32)
    for start in range(0, places, CHUNK):
        largest = tl.maximum(largest, _summed(pooled, sums, length, heads, places, start, CHUNK))
    cut = threshold * tl.max(largest, 0)
    below = tl.zeros([CHUNK], tl.int32)
    for start in range(0, places, CHUNK):
        total = _summed(pooled, sums, length, heads, places, start, CHUNK)
        below += ((total != FREE) & (total < cut)).to(tl.int32)
    return tl.sum(below, 0)
