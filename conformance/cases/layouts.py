"""Memory layouts of tensors: those that callers use, and those that break index arithmetic.

Every layout holds the same numbers. The memory between them is poisoned, to expose kernels that read it.
"""

from __future__ import annotations

import gc
import math
import mmap

import torch
from torch import Tensor

from . import gpu_memory, guarded

#: Names of layouts. Those in REPEATED repeat an axis (stride 0), so their contents are equal along it. "apart": values
#: are a slice of a larger tensor, such as a fused projection, and everything else is contiguous.
LAYOUTS = (
    "contiguous", "transposed", "sliced", "spread", "channels_first", "apart", "repeat_rows", "repeat_heads",
    "repeat_slots", "far",
)
REPEATED = {"repeat_rows": 0, "repeat_heads": 1, "repeat_slots": 2}

#: Another layout: each tensor is contiguous, and ends where its memory ends (guarded.py).
GUARDED = "guarded"
#: Another layout: each tensor has one of its own, and no two masks, and no two others, have a stride in common.
MIXED = "mixed"
_OWN = {"query": "spread", "key": "sliced", "value": "channels_first", "occupied": "spread", "protected": "spread_by_3"}

#: Beyond this many elements a 32-bit offset overflows.
FAR = 2**31


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """Copy `tensor` (first axis rows, second heads or slots, last channels or slots) to the given layout."""
    if layout in ("contiguous", "apart"):
        return tensor.contiguous()
    if layout == "transposed":
        return tensor.transpose(1, -2).contiguous().transpose(1, -2) if tensor.dim() > 3 else _swapped(tensor, 0, 1)
    if layout == "channels_first":
        return _swapped(tensor, -2, -1)
    if layout in REPEATED:
        axis = REPEATED[layout]
        return tensor.narrow(axis, 0, 1).contiguous().expand(tensor.shape) if axis < tensor.dim() - 1 else tensor
    if layout == "sliced":
        room = _poisoned(tensor, [size + 3 for size in tensor.shape])
        view = room[tuple(slice(1, 1 + size) for size in tensor.shape)]
    elif layout == "spread":
        room = _poisoned(tensor, [2 * size for size in tensor.shape])
        view = room[tuple(slice(0, 2 * size, 2) for size in tensor.shape)]
    elif layout == "spread_by_3":
        room = _poisoned(tensor, [3 * size for size in tensor.shape])
        view = room[tuple(slice(0, 3 * size, 3) for size in tensor.shape)]
    elif layout == GUARDED:
        view = guarded.like(tensor)
    elif layout == "far":
        view = _far(tensor) if tensor.dim() > 3 else torch.empty_like(tensor)
    else:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    return view.copy_(tensor)


def layout_of(layout: str, name: str) -> str:
    """The layout of the tensor with this name, in a case with this layout."""
    if layout == MIXED:
        return next((own for part, own in _OWN.items() if part in name), "contiguous")
    return ("sliced" if "value" in name else "contiguous") if layout == "apart" else layout


def _swapped(tensor: Tensor, first: int, second: int) -> Tensor:
    return tensor.transpose(first, second).contiguous().transpose(first, second)


def _poisoned(like: Tensor, shape: list[int]) -> Tensor:
    fill = True if like.dtype == torch.bool else math.nan if like.is_floating_point() else -1
    return torch.full(shape, fill, dtype=like.dtype, device=like.device)


def _far(tensor: Tensor) -> Tensor:
    """An uninitialised tensor whose last row (or head, or slot) begins more than FAR elements after the first."""
    strides = list(tensor.contiguous().stride())
    axis = next((axis for axis in range(tensor.dim() - 1) if tensor.shape[axis] > 1), None)
    if axis is None:
        return torch.empty_like(tensor)
    strides[axis] = -(-FAR // (tensor.shape[axis] - 1)) + tensor.numel() + 8
    strides[axis] -= strides[axis] % 8
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    return untouched(extent, tensor.dtype, tensor.device).as_strided(tensor.shape, strides)


def untouched(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised vector. On the CPU it only reserves address space until it is written to."""
    if device.type != "cpu":
        # Gigabytes of a size that is rarely reused: first wait for the processes that hold as much, and free the blocks
        # that the allocator cached for earlier tensors of this kind, and such tensors not yet garbage-collected.
        gpu_memory.lock_memory(device)
        gc.collect()
        torch.cuda.empty_cache()
        return torch.empty(count, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    room = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    return torch.frombuffer(room, dtype=dtype, count=count)
