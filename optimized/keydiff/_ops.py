"""PyTorch operations that launch KeyDiff's kernels over whole caches.

With `fp8`, keys are the codes of this type as uint8: torch's checks of operations cannot compare FP8 tensors.
Operations with a `block_table` [B, n] take keys in pages, [pages, Hkv, page_size, D], if it is not None; then
`occupied` [B, S] or [B, Hkv, S] is not None and has the number of slots.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from .._common.launch import (
    INTERPRETED,
    SMALL_TILES,
    fp8_format,
    key_block,
    multiprocessors,
    on_device_of,
    padded_head_dim,
    stride_unit,
)
from .._common.operation import operation
from ._kernels import anchor_kernel, rank_kernel
from ._step import warps_of

#: Programs per multiprocessor that share the keys, and software pipeline stages of the two passes: the sum and the
#: ranks. The ranking pass takes two tiles at a time.
PROGRAMS = 16
ANCHOR_STAGES, RANK_STAGES = 3, 1
#: The largest number of programs that share a row.
MAX_SPLITS = 128


def _split(rows: int, slots: int, block: int, device: torch.device) -> tuple[int, int]:
    """The number of programs that share one row's slots, and the slots of each (a multiple of `block`)."""
    tiles = triton.cdiv(slots, block)
    wanted = 2 if INTERPRETED else triton.cdiv(PROGRAMS * multiprocessors(device), rows)
    each = triton.cdiv(tiles, min(wanted, tiles, MAX_SPLITS))
    return triton.cdiv(tiles, each), each * block


def _rows(key: Tensor, block_table: Tensor | None, occupied: Tensor | None) -> tuple[int, int, int]:
    """B, Hkv and S."""
    if block_table is None:
        return key.shape[0], key.shape[1], key.shape[2]
    assert occupied is not None
    return block_table.shape[0], key.shape[1], occupied.shape[-1]


def _shape(
    key: Tensor, block_table: Tensor | None, occupied: Tensor | None, fp8: torch.dtype | None, tiles: int
) -> tuple[tuple[int, int, int, int], dict[str, Any]]:
    """A pass over the keys, `tiles` at a time: (slots, slots per program, programs per row, heads), and its constants.
    """
    batch, heads, slots = _rows(key, block_table, occupied)
    head_dim = key.shape[3]
    # FP8 numbers take as many registers as 16-bit numbers.
    block = key_block(head_dim, max(2, key.element_size()), slots) * (1 if SMALL_TILES else tiles)
    splits, split_size = _split(batch * heads, slots, block, key.device)
    return (slots, split_size, splits, heads), {
        "HEAD_DIM": head_dim, "D_PAD": padded_head_dim(head_dim), "BLOCK": block, "UNIT": stride_unit(key),
        "OCCUPIED": occupied is not None, "MASKED": occupied is not None or slots < block,
        "PAGE": 0 if block_table is None else key.shape[2], "FP8": fp8_format(fp8, key.device),
        "num_warps": warps_of(block),
    }


def _key_strides(key: Tensor, unit: int) -> tuple[int, ...]:
    return (*(stride // unit for stride in key.stride()[:3]), key.stride(3))


def _mask_strides(mask: Tensor | None) -> tuple[int, int, int]:
    """The strides of a mask [B, S] or [B, Hkv, S] by row, head and slot."""
    if mask is None:
        return 0, 0, 0
    return mask.stride(0), mask.stride(1) if mask.dim() == 3 else 0, mask.stride(-1)


def _page_strides(block_table: Tensor | None) -> tuple[int | None, int | None]:
    return (None, None) if block_table is None else (block_table.stride(0), block_table.stride(1))


def _launch_anchor(
    key: Tensor, block_table: Tensor | None, occupied: Tensor | None, anchor: Tensor, completion_counters: Tensor,
    fp8: torch.dtype | None = None,
) -> Tensor:
    """Store the anchor and return the inverse lengths: see `anchor`. completion_counters [B * Hkv] int32, zero."""
    batch, heads, slots = _rows(key, block_table, occupied)
    sizes, shape = _shape(key, block_table, occupied, fp8, 1)
    inverse = torch.empty(batch, heads, slots, dtype=torch.float32, device=key.device)
    partial = torch.empty(batch * heads, sizes[2], shape["D_PAD"], dtype=torch.float32, device=key.device)
    with on_device_of(key):
        anchor_kernel[(batch * heads * sizes[2],)](
            key, block_table, occupied, inverse, partial, anchor, completion_counters, *sizes,
            *_key_strides(key, shape["UNIT"]), *_mask_strides(occupied), *_page_strides(block_table), **shape,
            STAGES=ANCHOR_STAGES,
        )
    return inverse


def _new_anchor(key: Tensor, rows: tuple[int, int, int]) -> Tensor:
    return torch.empty(*rows[:2], key.shape[3], dtype=torch.float32, device=key.device)


def _launch_ranks(
    key: Tensor, block_table: Tensor | None, occupied: Tensor | None, protected: Tensor | None, inverse: Tensor,
    anchor: Tensor, result: Tensor, histograms: Tensor | None, fp8: torch.dtype | None,
) -> None:
    sizes, shape = _shape(key, block_table, occupied, fp8, 2)
    with on_device_of(key):
        rank_kernel[(anchor.shape[0] * anchor.shape[1] * sizes[2],)](
            key, block_table, occupied, protected, inverse, anchor, result, histograms, *sizes,
            *_key_strides(key, shape["UNIT"]), *_mask_strides(occupied), *_page_strides(block_table),
            *inverse.stride()[:2], *_mask_strides(protected), **shape, STAGES=RANK_STAGES,
            PROTECTED=protected is not None, CODES=histograms is not None, CHUNK=64 if SMALL_TILES else 1024,
        )


@operation("kvtwin::keydiff_anchor", mutates_args=())
def anchor(
    key: Tensor, block_table: Tensor | None, occupied: Tensor | None, fp8: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """The sum of the normalized keys in occupied slots, [B, Hkv, D] float32, and the inverse lengths of all keys,
    [B, Hkv, S]: negative for odd keys (see `_step.lengths`), 0 where unoccupied."""
    rows = _rows(key, block_table, occupied)
    result = _new_anchor(key, rows)
    counters = torch.zeros(rows[0] * rows[1], dtype=torch.int32, device=key.device)
    return result, _launch_anchor(key, block_table, occupied, result, counters, fp8)


@anchor.register_fake
def _(key: Tensor, block_table: Tensor | None, occupied: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = _rows(key, block_table, occupied)
    return _new_anchor(key, rows), key.new_empty(rows, dtype=torch.float32)


@operation("kvtwin::keydiff_update_anchor", mutates_args=("anchor", "completion_counters"))
def update_anchor(key: Tensor, occupied: Tensor, anchor: Tensor, completion_counters: Tensor) -> None:
    """Store the sum of the normalized keys in anchor [B, Hkv, D] float32. completion_counters: zeros, one per head."""
    _launch_anchor(key, None, occupied, anchor, completion_counters)


@operation("kvtwin::keydiff_rank", mutates_args=())
def rank(
    key: Tensor, block_table: Tensor | None, occupied: Tensor | None, anchor: Tensor, inverse: Tensor,
    fp8: torch.dtype | None = None,
) -> Tensor:
    """-k_hat . anchor [B, Hkv, S] float32, anchor [B, Hkv, D], inverse lengths [B, Hkv, S]; -inf where unoccupied."""
    result = torch.empty(inverse.shape, dtype=torch.float32, device=key.device)
    _launch_ranks(key, block_table, occupied, None, inverse, anchor, result, None, fp8)
    return result


@rank.register_fake
def _(key: Tensor, inverse: Tensor) -> Tensor:
    return key.new_empty(inverse.shape, dtype=torch.float32)


@operation("kvtwin::keydiff_codes", mutates_args=())
def codes(
    key: Tensor, block_table: Tensor | None, occupied: Tensor | None, protected: Tensor | None,
    fp8: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Ranks as int32 in the same order, with 31 bits of the cosine, [B, Hkv, S]: the largest int32 if protected, the
    smallest if unoccupied. And int32 [B, Hkv, 4, 256]: the histogram of their first 8 bits, then three of zeros."""
    rows = batch, heads, _ = _rows(key, block_table, occupied)
    count = batch * heads
    zeros = torch.zeros(count * 1024 + count, dtype=torch.int32, device=key.device)
    histograms = zeros[:count * 1024].view(batch, heads, 4, 256)
    anchor = _new_anchor(key, rows)
    inverse = _launch_anchor(key, block_table, occupied, anchor, zeros[count * 1024:], fp8)
    result = torch.empty(rows, dtype=torch.int32, device=key.device)
    _launch_ranks(key, block_table, occupied, protected, inverse, anchor, result, histograms, fp8)
    return result, histograms


@codes.register_fake
def _(key: Tensor, block_table: Tensor | None, occupied: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = _rows(key, block_table, occupied)
    return key.new_empty(rows, dtype=torch.int32), key.new_empty((*rows[:2], 4, 256), dtype=torch.int32)
