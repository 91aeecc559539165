"""Kernels for KV heads on several ranks: the sparsity from the weights of all ranks, and segments that shrink by the
sum of the ranks' Gram matrices, in the order of the ranks.

Gram matrices of a row's segments lie one behind the other: grams [B, rows, tau]. A segment's begins at row `first`, and
has as many rows and columns as the segment has tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.numerics import divided
from .._common.scratch import row_of
from ._eviction_kernels import add_gram, centred, representatives, whole_gram
from ._mean_kernels import FREE, below_mean
from ._paged_attention_kernels import heads_with_sparsity
from ._paging_kernels import COUNTS, LIVE
from ._shrink_kernels import PLANS, gram_of_segment, one_of, shrinking, slots_of


@triton.jit(do_not_specialize=["heads", "slots"])
def sparsity_kernel(
    pooled, sums, counts, buffered, sparsity_mask, sparsity, log_threshold, threshold, heads, slots,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, HAS_SPARSITY_MASK: tl.constexpr, OF_MEAN: tl.constexpr,
):
    """Program b: the sparsity of a row, NaN if it is not requested. pooled [B, heads, padded slots]: what
    `finish_kernel` stored with OF_RANKS, of the KV heads of all ranks. sums [B, heads]: scratch."""
    b = tl.program_id(0).to(tl.int64)
    share = float("nan")
    if heads_with_sparsity(sparsity_mask, b, 1, HAS_SPARSITY_MASK) > 0:
        counts += b * COUNTS
        waiting = tl.load(buffered + b).to(tl.int32)
        places = (tl.load(counts) + tl.load(counts + 1) + tl.load(counts + 2)) * BLOCK + waiting
        live = tl.load(counts + LIVE) + tl.load(counts + LIVE + 1) + tl.load(counts + LIVE + 2) + waiting
        length = row_of(slots)
        pooled += b * heads * length
        count = tl.zeros([], tl.int32)
        if OF_MEAN:
            sums += b * heads
            for head in range(0, heads):
                total = tl.zeros([CHUNK], tl.float32)
                for start in range(0, places, CHUNK):
                    s = start + tl.arange(0, CHUNK)
                    weight = tl.load(pooled + head * length + s, mask=s < places, other=FREE)
                    total += tl.where(weight == FREE, 0.0, weight)
                tl.store(sums + head, tl.sum(total, 0))
            tl.debug_barrier()
            count = below_mean(pooled, sums, length, heads, places, threshold, CHUNK)
            tokens = live
        else:
            for head in range(0, heads):
                largest = tl.full([CHUNK], float("-inf"), tl.float32)
                for start in range(0, places, CHUNK):
                    s = start + tl.arange(0, CHUNK)
                    x = tl.load(pooled + head * length + s, mask=s < places, other=float("inf"))
                    largest = tl.maximum(largest, tl.where(x == float("inf"), float("-inf"), x))
                cut = tl.max(largest, 0) + log_threshold
                below = tl.zeros([CHUNK], tl.int32)
                for start in range(0, places, CHUNK):
                    s = start + tl.arange(0, CHUNK)
                    x = tl.load(pooled + head * length + s, mask=s < places, other=float("inf"))
                    below += (x < cut).to(tl.int32)
                count += tl.sum(below, 0)
            tokens = live * heads
        share = divided(count.to(tl.float32), tl.maximum(tokens, 1).to(tl.float32))
    tl.store(sparsity + b, share)


@triton.jit(do_not_specialize=["heads", "slots", "entries", "groups", "segments", "tau", "rows"])
def gram_kernel(
    grams, first, sizes, planned, block_thoughts, token_segments, positions, slot_groups, physical, words, key_scales,
    chunk_scales, scratch, heads, slots, entries, groups, segments, tau, rows, row_words, base_0, base_1, base_2,
    OF_T: tl.constexpr, OF_E: tl.constexpr, OF_R: tl.constexpr,
    FORMAT_0: tl.constexpr, FORMAT_1: tl.constexpr, FORMAT_2: tl.constexpr,
    LANES_0: tl.constexpr, LANES_1: tl.constexpr, LANES_2: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr, SLOTS: tl.constexpr,
):
    """grams [B, rows, tau]: the Gram matrices of this rank's keys, of the segments that `shrink_kernel` would shrink.
    first [B, M]: where each begins."""
    b = tl.program_id(0).to(tl.int64)
    mine = scratch + (b * tl.num_programs(1) + tl.program_id(1)) * tau
    for start in range(0, segments, PLANS):
        numbers, _, places, count = shrinking(sizes, planned, b, segments, start)
        for i in range(tl.program_id(1), count, tl.num_programs(1)):
            m = one_of(numbers, places == i)
            slot = slots_of(token_segments, positions, mine, b, m, slots, entries * BLOCK, tau, SLOTS, TOKENS)
            gram = gram_of_segment(
                slot, block_thoughts, slot_groups, physical, words, key_scales, chunk_scales, b, heads, slots, entries,
                groups, row_words, base_0, base_1, base_2, OF_T, OF_E, OF_R, FORMAT_0, FORMAT_1, FORMAT_2, LANES_0,
                LANES_1, LANES_2, GROUP, BLOCK, HEAD_DIM, CHANNELS, TOKENS,
            )
            place = tl.arange(0, TOKENS)
            holds = slot >= 0
            row = tl.load(first + b * segments + m) + place
            tl.store(
                grams + (b * rows + row)[:, None] * tau + place[None, :], gram,
                mask=(holds & (row < rows))[:, None] & holds[None, :],
            )


@triton.jit
def _summed(grams, row, holds, tau, rows, stride, ranks, step, TOKENS: tl.constexpr):
    """The sum of the Gram matrices of the ranks 0, step, 2 step and so on, which have different KV heads."""
    place = tl.arange(0, TOKENS)
    mask = (holds & (row < rows))[:, None] & holds[None, :]
    total = tl.zeros([TOKENS, TOKENS], tl.float32)
    for rank in range(0, ranks, step):
        total += tl.load(grams + rank * stride + row[:, None] * tau + place[None, :], mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["batch", "slots", "entries", "segments", "tau", "rows", "ranks", "step"])
def shrink_by_grams_kernel(
    gone, grams, first, sizes, planned, token_segments, positions, scratch, batch, slots, entries, segments, tau, rows,
    ranks, step,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, CLUSTERS: tl.constexpr, ITERATIONS: tl.constexpr, SLOTS: tl.constexpr,
):
    """`shrink_kernel` with the Gram matrices of all ranks, grams [ranks, B, rows, tau]."""
    b = tl.program_id(0).to(tl.int64)
    mine = scratch + (b * tl.num_programs(1) + tl.program_id(1)) * tau
    for start in range(0, segments, PLANS):
        numbers, keeps, places, count = shrinking(sizes, planned, b, segments, start)
        for i in range(tl.program_id(1), count, tl.num_programs(1)):
            m, keep = one_of(numbers, places == i), one_of(keeps, places == i)
            slot = slots_of(token_segments, positions, mine, b, m, slots, entries * BLOCK, tau, SLOTS, TOKENS)
            holds = slot >= 0
            row = tl.load(first + b * segments + m) + tl.arange(0, TOKENS)
            stride = batch.to(tl.int64) * rows * tau
            gram = _summed(grams + b * rows * tau, row, holds, tau, rows, stride, ranks, step, TOKENS)
            size = tl.sum(holds.to(tl.int32), 0)
            most = tl.maximum(keep, 1).to(tl.int32)                    # k-means needs a cluster
            kept = representatives(gram, holds, size, most, mine, TOKENS, CLUSTERS, ITERATIONS, False)
            tl.store(gone + b * slots + slot, holds & ((kept == 0) | (keep == 0)), mask=holds)


@triton.jit(do_not_specialize=["heads", "length"])
def segment_gram_kernel(key, gram, heads, length, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr):
    """gram [length, length] of a segment's keys [heads, length, D], float32."""
    token = tl.arange(0, TOKENS)
    holds = token < length
    leading = tl.zeros([TOKENS, TOKENS], tl.float32)
    rest = tl.zeros([TOKENS, TOKENS], tl.float32)
    for h in range(heads):
        for start in range(0, HEAD_DIM, CHANNELS):
            d = start + tl.arange(0, CHANNELS)
            x = tl.load(
                key + (h * length + token[:, None]).to(tl.int64) * HEAD_DIM + d[None, :],
                mask=holds[:, None] & (d < HEAD_DIM)[None, :], other=0.0,
            )
            leading, rest = add_gram(leading, rest, centred(x, holds, length))
    whole = whole_gram(leading, rest)
    tl.store(gram + token[:, None] * length + token[None, :], whole, mask=holds[:, None] & holds[None, :])


@triton.jit(do_not_specialize=["length", "keep", "ranks", "step"])
def segment_choice_kernel(
    grams, indices, assignments, length, keep, ranks, step,
    TOKENS: tl.constexpr, CLUSTERS: tl.constexpr, ITERATIONS: tl.constexpr,
):
    """The tokens that represent a segment, by its Gram matrices of all ranks [ranks, length, length]."""
    token = tl.arange(0, TOKENS)
    holds = token < length
    gram = _summed(grams, token, holds, length, length, length * length, ranks, step, TOKENS)
    kept = representatives(gram, holds, length, keep, assignments, TOKENS, CLUSTERS, ITERATIONS, True)
    tl.store(indices + tl.cumsum(kept.to(tl.int32), 0) - 1, token.to(tl.int64), mask=kept)
