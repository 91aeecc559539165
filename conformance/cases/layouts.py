"""Where a tensor's numbers lie in memory: the layouts that callers have, and those that break index arithmetic.

Every layout holds the same numbers; what lies between them is poison, so that a kernel which reads beside them shows.
"""

from __future__ import annotations

import gc
import math
import mmap

import torch
from torch import Tensor

#: Names a case may carry. Those that repeat an axis (stride 0) need contents that are equal along it: see REPEATED.
LAYOUTS = (
    "contiguous", "transposed", "sliced", "spread", "channels_first", "repeat_rows", "repeat_heads", "repeat_slots",
    "far",
)
REPEATED = {"repeat_rows": 0, "repeat_heads": 1, "repeat_slots": 2}

#: Beyond this many elements a 32-bit offset overflows.
FAR = 2**31


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers as `tensor` (first axis rows, second heads or slots, last channels or slots), laid out anew."""
    if layout == "contiguous":
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
    elif layout == "far":
        view = _far(tensor) if tensor.dim() > 3 else torch.empty_like(tensor)
    else:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    return view.copy_(tensor)


def _swapped(tensor: Tensor, first: int, second: int) -> Tensor:
    return tensor.transpose(first, second).contiguous().transpose(first, second)


def _poisoned(like: Tensor, shape: list[int]) -> Tensor:
    fill = True if like.dtype == torch.bool else math.nan if like.is_floating_point() else -1
    return torch.full(shape, fill, dtype=like.dtype, device=like.device)


def _far(tensor: Tensor) -> Tensor:
    """Room whose last row (or head, or slot) begins more than FAR elements after the first. Its pages are untouched."""
    strides = list(tensor.contiguous().stride())
    axis = next((axis for axis in range(tensor.dim() - 1) if tensor.shape[axis] > 1), None)
    if axis is None:
        return torch.empty_like(tensor)
    strides[axis] = -(-FAR // (tensor.shape[axis] - 1)) + tensor.numel() + 8
    strides[axis] -= strides[axis] % 8
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    return untouched(extent, tensor.dtype, tensor.device).as_strided(tensor.shape, strides)


def untouched(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised vector. On the CPU it costs address space alone, however long, until something writes to it."""
    if device.type != "cpu":
        # Gigabytes of a size that hardly comes again: in the way is what the allocator kept of the last ones, and these
        # themselves where their cases are garbage that nobody has collected yet.
        gc.collect()
        torch.cuda.empty_cache()
        return torch.empty(count, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    room = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    return torch.frombuffer(room, dtype=dtype, count=count)
