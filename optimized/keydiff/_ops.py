"""PyTorch operations that launch KeyDiff's kernels over whole caches.

With `fp8`, keys are the codes of this type as uint8: torch's checks of operations cannot compare FP8 tensors.
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


def _shape(
    key: Tensor, occupied: Tensor | None, fp8: torch.dtype | None, tiles: int
) -> tuple[tuple[int, int, int, int], dict[str, Any]]:
    """A pass over the keys, `tiles` at a time: (slots, slots per program, programs per row, heads), and its constants.
    """
    batch, heads, slots, head_dim = key.shape
    # FP8 numbers take as many registers as 16-bit numbers.
    block = key_block(head_dim, max(2, key.element_size()), slots) * (1 if SMALL_TILES else tiles)
    splits, split_size = _split(batch * heads, slots, block, key.device)
    return (slots, split_size, splits, heads), {
        "HEAD_DIM": head_dim, "D_PAD": padded_head_dim(head_dim), "BLOCK": block, "UNIT": stride_unit(key),
        "OCCUPIED": occupied is not None, "MASKED": occupied is not None or slots < block,
        "FP8": fp8_format(fp8, key.device), "num_warps": warps_of(block),
    }


def _key_strides(key: Tensor, unit: int) -> tuple[int, ...]:
    return (*(stride // unit for stride in key.stride()[:3]), key.stride(3))


def _mask_strides(mask: Tensor | None) -> tuple[int, int, int]:
    """The strides of a mask [B, S] or [B, Hkv, S] by row, head and slot."""
    if mask is None:
        return 0, 0, 0
    return mask.stride(0), mask.stride(1) if mask.dim() == 3 else 0, mask.stride(-1)


def _launch_anchor(
    key: Tensor, occupied: Tensor | None, anchor: Tensor, completion_counters: Tensor, fp8: torch.dtype | None = None
) -> Tensor:
    """Store the anchor and return the inverse lengths: see `anchor`. completion_counters [B * Hkv] int32, zero."""
    batch, heads, slots, _ = key.shape
    sizes, shape = _shape(key, occupied, fp8, 1)
    inverse = torch.empty(batch, heads, slots, dtype=torch.float32, device=key.device)
    partial = torch.empty(batch * heads, sizes[2], shape["D_PAD"], dtype=torch.float32, device=key.device)
    with on_device_of(key):
        anchor_kernel[(batch * heads * sizes[2],)](
            key, occupied, inverse, partial, anchor, completion_counters, *sizes,
            *_key_strides(key, shape["UNIT"]), *_mask_strides(occupied), **shape, STAGES=ANCHOR_STAGES,
        )
    return inverse


def _new_anchor(key: Tensor) -> Tensor:
    return torch.empty(*key.shape[:2], key.shape[3], dtype=torch.float32, device=key.device)


def _launch_ranks(
    key: Tensor, occupied: Tensor | None, protected: Tensor | None, inverse: Tensor, anchor: Tensor, result: Tensor,
    histograms: Tensor | None, fp8: torch.dtype | None,
) -> None:
    sizes, shape = _shape(key, occupied, fp8, 2)
    with on_device_of(key):
        rank_kernel[(key.shape[0] * key.shape[1] * sizes[2],)](
            key, occupied, protected, inverse, anchor, result, histograms, *sizes,
            *_key_strides(key, shape["UNIT"]), *_mask_strides(occupied), *inverse.stride()[:2],
            *_mask_strides(protected), **shape, STAGES=RANK_STAGES, PROTECTED=protected is not None,
            CODES=histograms is not None, CHUNK=64 if SMALL_TILES else 1024,
        )


@torch.library.custom_op("kvtwin::keydiff_anchor", mutates_args=())
def anchor(key: Tensor, occupied: Tensor | None, fp8: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """The sum of the normalized keys in occupied slots, [B, Hkv, D] float32, and the inverse lengths of all keys,
    [B, Hkv, S]: negative for odd keys (see `_step.lengths`), 0 where unoccupied."""
    result = _new_anchor(key)
    counters = torch.zeros(key.shape[0] * key.shape[1], dtype=torch.int32, device=key.device)
    return result, _launch_anchor(key, occupied, result, counters, fp8)


@anchor.register_fake
def _(key: Tensor, occupied: Tensor | None, fp8: torch.dtype | None) -> tuple[Tensor, Tensor]:
    return _new_anchor(key), key.new_empty(key.shape[:3], dtype=torch.float32)


@torch.library.custom_op("kvtwin::keydiff_update_anchor", mutates_args=("anchor", "completion_counters"))
def update_anchor(key: Tensor, occupied: Tensor, anchor: Tensor, completion_counters: Tensor) -> None:
    """Store the sum of the normalized keys in anchor [B, Hkv, D] float32. completion_counters: zeros, one per head."""
    _launch_anchor(key, occupied, anchor, completion_counters)


@update_anchor.register_fake
def _(key: Tensor, occupied: Tensor, anchor: Tensor, completion_counters: Tensor) -> None:
    return None


@torch.library.custom_op("kvtwin::keydiff_rank", mutates_args=())
def rank(
    key: Tensor, occupied: Tensor | None, anchor: Tensor, inverse: Tensor, fp8: torch.dtype | None = None
) -> Tensor:
    """-k_hat . anchor [B, Hkv, S] float32, anchor [B, Hkv, D], inverse lengths [B, Hkv, S]; -inf where unoccupied."""
    result = torch.empty(key.shape[:3], dtype=torch.float32, device=key.device)
    _launch_ranks(key, occupied, None, inverse, anchor, result, None, fp8)
    return result


@rank.register_fake
def _(
    key: Tensor, occupied: Tensor | None, anchor: Tensor, inverse: Tensor, fp8: torch.dtype | None = None
) -> Tensor:
    return key.new_empty(key.shape[:3], dtype=torch.float32)


@torch.library.custom_op("kvtwin::keydiff_codes", mutates_args=())
def codes(
    key: Tensor, occupied: Tensor | None, protected: Tensor | None, fp8: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Ranks as int32 in the same order, with 31 bits of the cosine, [B, Hkv, S]: the largest int32 if protected, the
    smallest if unoccupied. And int32 [B, Hkv, 4, 256]: the histogram of their first 8 bits, then three of zeros."""
    batch, heads, slots, _ = key.shape
    rows = batch * heads
    zeros = torch.zeros(rows * 1024 + rows, dtype=torch.int32, device=key.device)
    histograms = zeros[:rows * 1024].view(batch, heads, 4, 256)
    anchor = _new_anchor(key)
    inverse = _launch_anchor(key, occupied, anchor, zeros[rows * 1024:], fp8)
    result = torch.empty(batch, heads, slots, dtype=torch.int32, device=key.device)
    _launch_ranks(key, occupied, protected, inverse, anchor, result, histograms, fp8)
    return result, histograms


@codes.register_fake
def _(
    key: Tensor, occupied: Tensor | None, protected: Tensor | None, fp8: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    return key.new_empty(key.shape[:3], dtype=torch.int32), key.new_empty((*key.shape[:2], 4, 256), dtype=torch.int32)
