"""The relative entropy of a layer's attention, from its logits and normalisers (see `_attend_kernels`), for the hybrid
"segment_hs" with segments_by="entropy". Semantics: `kvtwin.reference.epikv.hybrids.relative_entropy`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .._common.launch import SMALL_TILES, on_device_of
from .._common.operation import operation


@operation("kvtwin::epikv_add_entropy", mutates_args=("entropy",))
def add_entropy(
    logits: Tensor, normalisers: Tensor, occupied: Tensor, slot: Tensor, decoded: Tensor, entropy: Tensor, tau: int,
    first: bool,
) -> None:
    """Add a layer's relative entropy to `entropy` [B] in rows where a segment begins. The first layer of a step
    overwrites it. logits [B, Hq, S]; normalisers [B, Hq, 2]; occupied [B, S]; slot [B]: that of the new token;
    decoded [B]: the steps so far."""
    batch, heads, slots = logits.shape
    # In the interpreter few, so that tests cover several.
    rows, block = (2, 8) if SMALL_TILES else (16, min(256, max(16, triton.next_power_of_2(slots))))
    with on_device_of(logits):
        entropy_kernel[(batch,)](
            logits, normalisers, occupied, slot, decoded, entropy, slots, heads, tau,
            ROWS=rows, BLOCK=block, FIRST=first, num_warps=4,
        )


@triton.jit
def thought_of_entropy(entropy, low, high):
    """The thought type of a relative entropy; NaN counts as execution."""
    return tl.where(entropy < low, 0, tl.where(entropy < high, 2, 1)).to(tl.int64)


@triton.jit(do_not_specialize=["slots", "heads", "tau"])
def entropy_kernel(
    logits, normalisers, occupied, slot, decoded, entropy, slots, heads, tau,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr,
):
    """Program: one row, over all query heads, ROWS at a time. Returns at once if no segment begins.

    With the largest logit m and the sum l of 2 ^ (logit - m), the entropy in bits is log2(l) + sum p (m - logit) / l.
    All of its terms are at least 0, so nothing cancels."""
    b = tl.program_id(0).to(tl.int64)
    if tl.load(decoded + b) % tau == 0:
        newest = tl.load(slot + b)
        num_tokens = tl.zeros([BLOCK], tl.int32)
        for start in range(0, slots, BLOCK):
            s = start + tl.arange(0, BLOCK)
            holds = (tl.load(occupied + b * slots + s, mask=s < slots, other=0) != 0) | (s == newest)
            num_tokens += (holds & (s < slots)).to(tl.int32)
        tokens = tl.sum(num_tokens, 0)
        total = 0.0
        for group in range(0, heads, ROWS):
            g = group + tl.arange(0, ROWS)
            head = b * heads + g
            row_max = tl.load(normalisers + head * 2, mask=g < heads, other=0.0)
            weight_sum = tl.load(normalisers + head * 2 + 1, mask=g < heads, other=1.0)
            terms = tl.zeros([ROWS, BLOCK], tl.float32)
            for start in range(0, slots, BLOCK):
                s = start + tl.arange(0, BLOCK)
                inside = (g < heads)[:, None] & (s < slots)[None, :]
                logit = tl.load(logits + head[:, None] * slots + s[None, :], mask=inside, other=float("-inf"))
                below = tl.where(logit == float("-inf"), 0.0, row_max[:, None] - logit)
                terms += tl.exp2(-below) * below
            total += tl.sum(tl.log2(weight_sum) + tl.sum(terms, 1) / weight_sum, 0)
        # A single token has no entropy.
        found = tl.where(tokens > 1, total / (heads * tl.log2(tl.maximum(tokens, 2).to(tl.float32))), 0.0)
        if not FIRST:
            found += tl.load(entropy + b)
        tl.store(entropy + b, found)
