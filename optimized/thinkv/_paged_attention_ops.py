"""The operation of attention over a paged cache: the choice of the kernel, and the division into parts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._common.launch import (
    GROUP_ROWS,
    INTERPRETED,
    MAX_SPLITS,
    PROGRAMS,
    RESIDENT,
    SMALL_TILES,
    cdiv,
    multiprocessors,
    next_power_of_2,
    on_device_of,
    padded_head_dim,
    padded_slots,
)
from .._common.numerics import LOG2_E
from .._common.operation import operation
from ._paged_attention_kernels import attend_kernel, finish_kernel
from ._paged_fragment_kernels import EIGHT, fragment_kernel
from ._paging_ops import Layout, has_groups, layout

#: One-warp programs that fit on a multiprocessor with its 64 K registers, the registers per thread, and how many times
#: a multiprocessor is filled when there is much work. Once would be fastest if all rows were equally long. With 128
#: registers, 16 programs run at the same time, but the compiler keeps some registers in memory, which takes longer.
FRAGMENT_PROGRAMS, FRAGMENT_REGISTERS, FRAGMENT_TURNS = 12, 168, 4


def _tile(block: int, head_dim: int, dtype: torch.dtype) -> int:
    """Slots per tile: whole blocks, up to 32 KB of float16. Tensor cores do not multiply float32 exactly, so float32
    operands are in registers, and tiles must be small.

    Compiled with Triton 3.6 for an H100, 16 slots of a half type give wrong outputs, and 32, 64 and 128 right ones."""
    if INTERPRETED or dtype == torch.float32:
        wanted = 16
    else:
        wanted = 32 if SMALL_TILES else min(128, max(32, 16384 // padded_head_dim(head_dim)))
    return max(wanted, next_power_of_2(block))


def _in_fragments(
    plan_of: Layout, dtype: torch.dtype, block: int, group: int, group_heads: int, head_dim: int, key_scales: Tensor
) -> bool:
    """Whether `fragment_kernel` applies: its tensor-core shapes fit, and offsets within a row fit into 32 bits."""
    return (
        dtype != torch.float32 and block == EIGHT.value and group_heads <= EIGHT.value and head_dim in (64, 128)
        and group % (head_dim // 8) == 0 and all(map(has_groups, plan_of.formats))
        and plan_of.row_words < 2**30 and key_scales[0].numel() < 2**31
    )


def _fragment_tile(entries: int) -> int:
    """Slots per tile. In the interpreter, some caches are cut into small tiles, so that tests cover what happens
    between tiles."""
    return 16 if SMALL_TILES and entries // 3 % 2 else 32


def _splits(rows: int, tiles: int, device: torch.device) -> int:
    """The number of programs that share a (row, KV head), by the rule of `launch.split_slots`."""
    if INTERPRETED:
        wanted = 2
    elif rows >= RESIDENT // 2 * multiprocessors(device):
        wanted = cdiv(PROGRAMS * multiprocessors(device), rows)
    else:
        wanted = RESIDENT * multiprocessors(device) // rows
    return max(1, min(wanted, tiles, MAX_SPLITS))


def _fragment_splits(rows: int, tiles: int, device: torch.device) -> int:
    """As `_splits`, for one-warp programs. Rounded down, since a nearly empty wave takes as long as a full one. The
    buffer's program comes in addition."""
    if INTERPRETED:
        wanted = 2
    else:
        at_once = FRAGMENT_PROGRAMS * multiprocessors(device)
        wanted = (FRAGMENT_TURNS * at_once if rows >= at_once // 2 else at_once) // rows
    return max(1, min(wanted, tiles, MAX_SPLITS - 1))


@operation("kvtwin::thinkv_paged_attention", mutates_args=("completion_counters", "pooled"))
def attend(
    query: Tensor, pool: Tensor, key_scales: Tensor, chunk_scales: Tensor, buffer_key: Tensor, buffer_value: Tensor,
    slot_groups: Tensor, physical: Tensor, order: Tensor, counts: Tensor, buffered: Tensor, completion_counters: Tensor,
    sparsity_mask: Tensor | None, formats: str, block: int, scale: float, threshold: float, of_mean: bool,
    pooled: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `decode_attention`. completion_counters [B] int32, 0 between calls; sparsity_mask [B] bool or None; of_mean:
    the sparsity is that of the weights averaged over KV heads. Returns output and sparsity. pooled [B, Hkv, padded
    slots] float32: only store the weights there, for `sparsity_of_ranks`; the sparsity is then arbitrary."""
    batch, query_heads, head_dim = query.shape
    _, heads, group, _ = buffer_key.shape
    slots, entries = slot_groups.shape[1], physical.shape[1]
    plan_of = layout(formats, block, group, heads, head_dim, entries)
    batch_heads, group_heads = batch * heads, query_heads // heads
    in_fragments = _in_fragments(plan_of, query.dtype, block, group, group_heads, head_dim, key_scales)
    tile = _fragment_tile(entries) if in_fragments else _tile(block, head_dim, query.dtype)
    # One thought type has at most a third of the entries, and no more blocks are live at a time.
    tiles = cdiv(entries // 3, tile // block)
    # In fragment_kernel, the buffer is a part of its own.
    num_partials = (
        _fragment_splits(batch_heads, tiles, query.device) + 1 if in_fragments
        else _splits(batch_heads, tiles, query.device)
    )
    count = batch * query_heads * num_partials

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=query.device)

    logits, partial = scratch(batch_heads, padded_slots(slots), group_heads), scratch(count, head_dim)
    row_maxima, weight_sums, below = scratch(count), scratch(count), scratch(batch_heads, dtype=torch.int32)
    of_ranks, sums = pooled is not None, row_maxima
    if of_mean:
        sums = scratch(batch_heads)
    if pooled is None:
        pooled = scratch(batch_heads, padded_slots(slots)) if of_mean else logits
    output, sparsity = _attended(query)
    d_pad = padded_head_dim(head_dim)
    mask = counts if sparsity_mask is None else sparsity_mask.contiguous()
    tables = (slot_groups, physical, order, counts, buffered, mask, logits, partial, row_maxima, weight_sums)
    numbers = (
        scale * LOG2_E.value, heads, slots, entries, key_scales.shape[1], num_partials, plan_of.row_words,
        *plan_of.base, *query.stride(),
    )
    constants = {
        **plan_of.constants, **plan_of.units, "GROUP_HEADS": group_heads, "GROUP": group, "HEAD_DIM": head_dim,
        "TILE": tile, "TOKENS": max(16, next_power_of_2(group)), "HAS_SPARSITY_MASK": sparsity_mask is not None,
    }
    with on_device_of(query):
        if in_fragments:
            fragment_kernel[(batch_heads * num_partials,)](
                query, pool, pool.view(torch.int16), key_scales, buffer_key, buffer_value, *tables, *numbers,
                **constants, num_warps=1, num_stages=1, maxnreg=FRAGMENT_REGISTERS,
            )
        else:
            attend_kernel[(batch_heads * num_partials,)](
                query, pool, pool.view(torch.int16), pool.view(torch.uint8), key_scales, chunk_scales, buffer_key,
                # With float32 queries, weights are multiplied in two parts of bfloat16, on tensor cores.
                buffer_value, *tables, *numbers, **constants, BLOCK=block, D_PAD=d_pad, ROWS=GROUP_ROWS,
                num_warps=4, num_stages=2,
            )
        finish_kernel[(batch_heads * (group_heads + 1),)](
            logits, partial, row_maxima, weight_sums, counts, buffered, mask, output, below, sparsity,
            completion_counters, pooled, sums, math.log2(threshold), threshold, heads, slots, num_partials,
            GROUP_HEADS=group_heads, GROUP_PAD=next_power_of_2(group_heads), BLOCK=block, HEAD_DIM=head_dim,
            D_PAD=d_pad, SPLITS=8 if num_partials <= 8 else MAX_SPLITS, CHUNK=16 if SMALL_TILES else 512,
            HAS_SPARSITY_MASK=sparsity_mask is not None, OF_MEAN=of_mean, OF_RANKS=of_ranks, num_warps=4,
        )
    return output, sparsity


@attend.register_fake
def _(query: Tensor) -> tuple[Tensor, Tensor]:
    return _attended(query)


def _attended(query: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(query.shape, dtype=query.dtype, device=query.device),
        torch.empty(query.shape[0], dtype=torch.float32, device=query.device),
    )
