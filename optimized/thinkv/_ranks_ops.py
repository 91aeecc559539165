"""The operations of a ThinKV cache whose KV heads are on several ranks. Between two of them, the ranks gather."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from .._common.launch import SMALL_TILES, on_device_of
from .._common.operation import operation
from . import _paging_ops as ops
from ._ranks_kernels import (
    gram_kernel,
    segment_choice_kernel,
    segment_gram_kernel,
    shrink_by_grams_kernel,
    sparsity_kernel,
)
from ._tiles import ITERATIONS, programs, tile


@operation("kvtwin::thinkv_sparsity_of_ranks", mutates_args=())
def sparsity(
    pooled: Tensor, counts: Tensor, buffered: Tensor, sparsity_mask: Tensor | None, block: int, slots: int,
    threshold: float, of_mean: bool,
) -> Tensor:
    """The sparsity [B] by what attention stored, of the KV heads of all ranks: pooled [B, H, padded slots]."""
    batch, heads = pooled.shape[:2]
    found = torch.empty(batch, dtype=torch.float32, device=pooled.device)
    sums = torch.empty(batch, heads, dtype=torch.float32, device=pooled.device)
    mask = counts if sparsity_mask is None else sparsity_mask.contiguous()
    with on_device_of(pooled):
        sparsity_kernel[(batch,)](
            pooled.contiguous(), sums, counts, buffered, mask, found, math.log2(threshold), threshold, heads, slots,
            BLOCK=block, CHUNK=16 if SMALL_TILES else 512, HAS_SPARSITY_MASK=sparsity_mask is not None,
            OF_MEAN=of_mean, num_warps=4,
        )
    return found


@sparsity.register_fake
def _(pooled: Tensor) -> Tensor:
    return pooled.new_empty(pooled.shape[:1])


@operation("kvtwin::thinkv_grams", mutates_args=())
def grams(
    sizes: Tensor, planned: Tensor, first: Tensor, block_thoughts: Tensor, segments: Tensor, positions: Tensor,
    slot_groups: Tensor, physical: Tensor, pool: Tensor, key_scales: Tensor, chunk_scales: Tensor, formats: str,
    block: int, group: int, tau: int, head_dim: int, most: int, rows: int,
) -> Tensor:
    """This rank's Gram matrices of the segments that shrink, [B, rows, tau] float32: see `gram_kernel`."""
    (batch, number), (slots, entries) = sizes.shape, (positions.shape[1], physical.shape[1])
    groups, heads = key_scales.shape[1:3]
    found = torch.zeros(batch, rows, tau, dtype=torch.float32, device=positions.device)
    row_programs = programs(batch, number, positions.device)
    scratch = torch.empty(batch, row_programs, tau, dtype=torch.int64, device=positions.device)
    layout = ops.layout(formats, block, group, heads, head_dim, entries)
    shape = tile(tau, most, head_dim)
    with on_device_of(positions):
        gram_kernel[(batch, row_programs)](
            found, first, sizes, planned, block_thoughts, segments, positions, slot_groups, physical, pool,
            key_scales.view(torch.uint8), chunk_scales, scratch, heads, slots, entries, groups, number, tau, rows,
            layout.row_words, *layout.base, **layout.constants, GROUP=group, BLOCK=block, HEAD_DIM=head_dim,
            SLOTS=_slots_at_once(slots), CHANNELS=shape["CHANNELS"], TOKENS=shape["TOKENS"],
            num_warps=shape["num_warps"], num_stages=1,
        )
    return found


@grams.register_fake
def _(sizes: Tensor, positions: Tensor, tau: int, rows: int) -> Tensor:
    return torch.empty(len(sizes), rows, tau, dtype=torch.float32, device=positions.device)


@operation("kvtwin::thinkv_shrink_by_grams", mutates_args=())
def shrink(
    every: Tensor, sizes: Tensor, planned: Tensor, first: Tensor, segments: Tensor, positions: Tensor,
    physical: Tensor, block: int, head_dim: int, most: int, replicas: int,
) -> Tensor:
    """The slots to evict, [B, S] bool, by the Gram matrices of all ranks, every [ranks, B, rows, tau]."""
    (batch, number), (slots, entries) = sizes.shape, (positions.shape[1], physical.shape[1])
    ranks, _, rows, tau = every.shape
    gone = torch.zeros(positions.shape, dtype=torch.bool, device=positions.device)
    row_programs = programs(batch, number, positions.device)
    scratch = torch.empty(batch, row_programs, tau, dtype=torch.int64, device=positions.device)
    shape = tile(tau, most, head_dim)
    with on_device_of(positions):
        shrink_by_grams_kernel[(batch, row_programs)](
            gone, every, first, sizes, planned, segments, positions, scratch, batch, slots, entries, number, tau, rows,
            ranks, replicas, BLOCK=block, TOKENS=shape["TOKENS"], CLUSTERS=shape["CLUSTERS"], ITERATIONS=ITERATIONS,
            SLOTS=_slots_at_once(slots), num_warps=shape["num_warps"], num_stages=1,
        )
    return gone


@shrink.register_fake
def _(positions: Tensor) -> Tensor:
    return positions.new_empty(positions.shape, dtype=torch.bool)


def _slots_at_once(slots: int) -> int:
    return 8 if SMALL_TILES else min(1024, max(16, triton.next_power_of_2(slots)))


@operation("kvtwin::thinkv_segment_gram", mutates_args=())
def segment_gram(key: Tensor, keep: int) -> Tensor:
    """The Gram matrix [L, L] of a segment's keys [H, L, D], float32 and contiguous."""
    heads, length, head_dim = key.shape
    gram = torch.empty(length, length, dtype=torch.float32, device=key.device)
    shape = tile(length, keep, head_dim)
    with on_device_of(key):
        segment_gram_kernel[(1,)](
            key, gram, heads, length, HEAD_DIM=head_dim, CHANNELS=shape["CHANNELS"], TOKENS=shape["TOKENS"],
            num_warps=shape["num_warps"],
        )
    return gram


@segment_gram.register_fake
def _(key: Tensor) -> Tensor:
    return key.new_empty(key.shape[1], key.shape[1])


@operation("kvtwin::thinkv_segment_choice", mutates_args=())
def segment_choice(every: Tensor, keep: int, head_dim: int, replicas: int) -> tuple[Tensor, Tensor]:
    """Indices and assignments of a segment, by its Gram matrices of all ranks, every [ranks, L, L]; keep < L."""
    ranks, length, _ = every.shape
    indices = torch.empty(keep, dtype=torch.int64, device=every.device)
    assignments = torch.empty(ITERATIONS, length, dtype=torch.int64, device=every.device)
    shape = tile(length, keep, head_dim)
    with on_device_of(every):
        segment_choice_kernel[(1,)](
            every, indices, assignments, length, keep, ranks, replicas, TOKENS=shape["TOKENS"],
            CLUSTERS=shape["CLUSTERS"], ITERATIONS=ITERATIONS, num_warps=shape["num_warps"],
        )
    return indices, assignments


@segment_choice.register_fake
def _(every: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    return (
        every.new_empty(keep, dtype=torch.int64), every.new_empty((ITERATIONS, every.shape[1]), dtype=torch.int64)
    )
