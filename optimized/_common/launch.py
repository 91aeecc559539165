"""What every kernel launch shares: which tensors may be launched on, where, and how work is cut into programs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
import triton
from torch import Tensor

from ...reference.contract import Sizes, check_dtype

#: True when Triton runs these kernels on the CPU through its interpreter (TRITON_INTERPRET=1 before triton's import).
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

#: Whether kernels may hold instructions of NVIDIA's GPUs.
PTX: bool = not INTERPRETED and torch.version.hip is None

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIM = range(16, 257)
MAX_GROUP = 16

#: Programs per multiprocessor that the slots are split for where there is much work: the last wave of them is short.
#: Where there is little, as many as fit at a time. Measured best of 4 to 32 on an H200.
PROGRAMS, RESIDENT = 16, 4

#: Programs per multiprocessor that the end of a launch is made of, all that run at a time. 2 to 6 are as good.
LATE = 3

#: The most programs that share a row's slots; their partial results are merged as one tile.
MAX_SPLITS = 64

#: Rows of a `tl.dot` operand: the smallest that tensor cores take.
GROUP_ROWS = 16

#: Rows of scratch are padded to a multiple of this many slots: whole tiles, whole lines of the cache.
ROW_UNIT = 128


def check_launchable(**tensors: Tensor | None) -> None:
    """ValueError or TypeError for tensors that a kernel cannot take: float64, autograd, a device without Triton."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.is_floating_point():
            check_dtype(f"{name}.dtype", tensor.dtype, DTYPES)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, but the kernels have no backward: call under torch.no_grad()")
        check_kernel_device(name, tensor.device)


def check_kernel_device(name: str, device: torch.device) -> None:
    if device.type == "cuda":
        if INTERPRETED:
            raise ValueError(
                f"{name} is on {device}, but triton was imported with TRITON_INTERPRET=1, which runs on the CPU"
            )
    elif device.type != "cpu":
        raise ValueError(f"{name} must be on a CUDA device (or the CPU under Triton's interpreter), got {device}")
    elif not INTERPRETED:
        raise ValueError(
            f"{name} is on the CPU: the optimized kernels need a CUDA device, or Triton's interpreter "
            "(set TRITON_INTERPRET=1 before triton is imported)"
        )


def check_kernel_sizes(sizes: Sizes) -> None:
    if sizes.head_dim not in HEAD_DIM:
        raise ValueError(f"head_dim must be from {HEAD_DIM[0]} to {HEAD_DIM[-1]}, got D = {sizes.head_dim}")
    if sizes.group > MAX_GROUP:
        raise ValueError(
            f"query heads per KV head must be at most {MAX_GROUP}, got G = {sizes.group} "
            f"(Hq = {sizes.query_heads}, Hkv = {sizes.key_value_heads})"
        )


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Kernels launch on the tensor's device, not on the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def padded_head_dim(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def key_block(head_dim: int, itemsize: int, slots: int) -> int:
    """Slots per tile: about 16 KB of keys, so that several stages of keys and values fit in shared memory.

    In the interpreter a tile costs the same whatever its size: small caches are cut into several, so that what happens
    between tiles is tested, larger ones into few.
    """
    if INTERPRETED:
        return 16 if slots <= 48 else 64
    return min(128, max(16, 16384 // (padded_head_dim(head_dim) * itemsize)))


def fused(sizes: Sizes, device: torch.device) -> bool:
    """Whether a KV head's last program finishes it: pays where others still read keys then, that is with many of them.

    In the interpreter caches of an even number of slots do, so that both ways are tested.
    """
    if INTERPRETED:
        return sizes.slots % 2 == 0
    return sizes.batch * sizes.key_value_heads >= 2 * multiprocessors(device)


def early_rows(sizes: Sizes, splits: int, device: torch.device) -> int:
    """How many rows of a batch come before those that the end of a launch is made of, of which each KV head has
    `splits` programs; in the interpreter half of them."""
    if INTERPRETED:
        return (sizes.batch + 1) // 2
    return max(0, sizes.batch - triton.cdiv(LATE * multiprocessors(device), sizes.key_value_heads * splits))


@lru_cache
def launches_early(device: torch.device) -> bool:
    """Whether a launch may begin, to wait on the device, before the one before it has ended (programmatic dependent
    launch)."""
    return PTX and torch.cuda.get_device_capability(device) >= (9, 0)


def padded_slots(slots: int) -> int:
    """Slots of a row of scratch."""
    return triton.cdiv(slots, ROW_UNIT) * ROW_UNIT


@lru_cache
def discards(device: torch.device) -> bool:
    """Whether lines can be dropped from the cache there, unwritten."""
    return PTX and torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def split_slots(sizes: Sizes, block: int, device: torch.device, programs: int = PROGRAMS) -> tuple[int, int]:
    """How many programs share one row's slots, and how many slots each takes (a multiple of `block`). `programs` per
    multiprocessor are wanted where there is much work."""
    rows, tiles = sizes.batch * sizes.key_value_heads, triton.cdiv(sizes.slots, block)
    if INTERPRETED:
        wanted = 2
    elif rows >= RESIDENT // 2 * multiprocessors(device):
        wanted = triton.cdiv(programs * multiprocessors(device), rows)
    else:
        wanted = RESIDENT * multiprocessors(device) // rows
    tiles_each = triton.cdiv(tiles, min(wanted, tiles, MAX_SPLITS))
    return triton.cdiv(tiles, tiles_each), tiles_each * block


def stride_unit(*tensors: Tensor) -> int:
    """8 if every outer stride of these D-contiguous tensors is a multiple of 8 elements (16 bytes of bf16), else 1.

    Kernels take strides divided by this unit and multiply by it, which tells the compiler that rows are aligned
    without one specialization per stride.
    """
    # Larger strides go as 64-bit numbers: multiplied by the unit in 32 bits they would overflow.
    aligned = all(
        tensor.stride(-1) == 1 and all(stride % 8 == 0 and stride < 2**31 for stride in tensor.stride()[:-1])
        for tensor in tensors
    )
    return 8 if aligned else 1


def mask_unit(mask: Tensor) -> int:
    """16 if rows of a mask of slots begin at multiples of 16 bytes and end there, else 1; see `stride_unit`."""
    rows = (*mask.stride()[:-1], mask.shape[-1], mask.data_ptr())
    return 16 if mask.stride(-1) == 1 and all(number % 16 == 0 for number in rows) else 1
