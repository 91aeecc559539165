"""The average over the heads of a layer of the weights of the newest query and of their logarithms."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..launch import SMALL_TILES, on_device_of
from ..numerics import finite_or_zero, log2_or_minus_inf
from ..operation import operation

BLOCK = 16 if SMALL_TILES else 128


@operation("kvtwin::block_over_heads", mutates_args=("weight", "log_weight"))
def over_heads(weight: Tensor, log_weight: Tensor) -> None:
    """Replace each head's weights by their mean over the heads, and the base-2 logarithms by that of the sum.

    Both [B, Hkv, S] float32, contiguous; 0 and -inf where unoccupied.
    """
    batch, heads, slots = weight.shape
    with on_device_of(weight):
        over_heads_kernel[(batch, triton.cdiv(slots, BLOCK))](
            weight, log_weight, heads, slots, BLOCK=BLOCK, num_warps=1
        )


@triton.jit
def over_heads_kernel(weight, log_weight, heads, slots, BLOCK: tl.constexpr):
    """Program (row, block of slots). Heads are added in their order, so equal columns have equal sums."""
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    holds = slot < slots
    first = tl.program_id(0).to(tl.int64) * heads * slots + slot
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    mean = tl.zeros((BLOCK,), tl.float32)
    for head in range(heads):
        highest = tl.maximum(highest, tl.load(log_weight + first + head * slots, holds, float("-inf")))
        mean += tl.load(weight + first + head * slots, holds, 0.0)
    mean = mean / heads
    shift = finite_or_zero(highest)
    total = tl.zeros((BLOCK,), tl.float32)
    for head in range(heads):
        total += tl.exp2(tl.load(log_weight + first + head * slots, holds, float("-inf")) - shift)
    logarithm = shift + log2_or_minus_inf(total)
    for head in range(heads):
        tl.store(weight + first + head * slots, mean, holds)
        tl.store(log_weight + first + head * slots, logarithm, holds)
