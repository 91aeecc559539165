"""Device functions that classify a decode step by the sparsity of its attention: ThinKV's, and of its EpiKV hybrid."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pooled_cut(log_total, log_threshold, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """log2 of threshold * the largest weight of a group: its heads' largest weights are 1 / their denominators."""
    real = tl.arange(0, ROWS) < GROUP
    return tl.max(tl.where(real, -log_total, float("-inf")), 0) + log_threshold


@triton.jit
def below_cut(logit, top, log_total, cut, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Which tokens' weights, the largest of the group's, lie below the cut: logit [ROWS, BLOCK] -> [BLOCK]."""
    real = tl.arange(0, ROWS) < GROUP
    # The denominator's two parts leave one by one, so that no digits of a large maximum are lost.
    weight = (logit - top[:, None]) - log_total[:, None]
    return tl.max(tl.where(real[:, None], weight, float("-inf")), 0) < cut


@triton.jit
def thought_of(sparsity, low, high):
    """The thought type of a sparsity; NaN is execution."""
    return tl.where(sparsity >= high, 0, tl.where(sparsity >= low, 2, 1)).to(tl.int64)
