"""Device functions that classify a decode step by its attention sparsity, for ThinKV and the EpiKV hybrid with it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pooled_cut(log_total, log_threshold, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """log2 of threshold * the group's largest weight. A head's largest weight is 1 / its denominator."""
    valid = tl.arange(0, ROWS) < GROUP
    return tl.max(tl.where(valid, -log_total, float("-inf")), 0) + log_threshold


@triton.jit
def largest_in_group(logit, row_max, log_total, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """log2 of each token's largest weight within the group: logit [ROWS, BLOCK] -> [BLOCK]."""
    valid = tl.arange(0, ROWS) < GROUP
    # Subtract row_max and log_total one after the other: their sum would lose digits if the maximum is large.
    weight = (logit - row_max[:, None]) - log_total[:, None]
    return tl.max(tl.where(valid[:, None], weight, float("-inf")), 0)


@triton.jit
def below_cut(logit, row_max, log_total, cut, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Which tokens' largest weight within the group is below the cut: logit [ROWS, BLOCK] -> [BLOCK] bool."""
    return largest_in_group(logit, row_max, log_total, GROUP, ROWS) < cut


@triton.jit
def thought_of(sparsity, low, high):
    """The thought type of a sparsity; NaN counts as execution."""
    return tl.where(sparsity >= high, 0, tl.where(sparsity >= low, 2, 1)).to(tl.int64)
