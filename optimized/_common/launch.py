"""Helpers for kernel launches: accepted tensors and devices, and the division of work into programs."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
import triton
from torch import Tensor

from ...reference.contract import Sizes
from ...reference.contract.arguments import check_dtype
from ...reference.contract.scales import FP8

#: True if Triton runs these kernels on the CPU in its interpreter (TRITON_INTERPRET=1 before triton is imported).
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

#: Whether tiles are small, so that short tensors need several of them: in the interpreter, and if tests ask for it.
SMALL_TILES: bool = INTERPRETED or os.environ.get("KVTWIN_SMALL_TILES") == "1"

#: Whether kernels may use instructions of NVIDIA GPUs.
PTX: bool = not INTERPRETED and torch.version.hip is None

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIM = range(16, 257)
MAX_GROUP = 16

#: Programs per multiprocessor: PROGRAMS with much work, which keeps the last wave short; RESIDENT, as many as run at
#: the same time, with little work. Best of 4 to 32 on an H200.
PROGRAMS, RESIDENT = 16, 4

#: Programs per multiprocessor at the end of a launch, all running at the same time. 2 to 6 are equally fast.
LATE = 3

#: The largest number of programs that share a row's slots. Their partial results are merged as one tile.
MAX_SPLITS = 64

#: The fewest rows of a `tl.dot` operand that tensor cores multiply, and the fewest for float32, which does not use
#: them. With float32, rows beyond those of a group of query heads take time, also to compile.
GROUP_ROWS, FLOAT32_ROWS = 16, 4

#: Scratch rows are padded to a multiple of this many slots, for whole tiles and whole cache lines.
ROW_UNIT = 128


def cdiv(number: int, by: int) -> int:
    """The quotient, rounded up: `triton.cdiv` without what that does to be called in kernels, some microseconds."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The lowest power of two from `number` on, like `triton.next_power_of_2`."""
    return 1 << (number - 1).bit_length() if number > 0 else 0


def group_rows(group: int, dtype: torch.dtype) -> int:
    """Rows of a `tl.dot` operand with the queries of a group, whose products are in `dtype`."""
    return max(FLOAT32_ROWS, next_power_of_2(group)) if dtype == torch.float32 else GROUP_ROWS


def check_launchable(stored: tuple[torch.dtype, ...] = (), /, **tensors: Tensor | None) -> None:
    """Raise ValueError or TypeError for tensors that kernels do not support: float64, autograd, or the wrong device.
    stored: dtypes that are supported besides those of `DTYPES`."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.is_floating_point():
            check_dtype(f"{name}.dtype", tensor.dtype, DTYPES + stored)
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
    """A context that launches kernels on the tensor's device instead of the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def padded_head_dim(head_dim: int) -> int:
    return max(16, next_power_of_2(head_dim))


def key_block(head_dim: int, itemsize: int, slots: int) -> int:
    """Slots per tile: about 16 KB of keys, so that several stages of keys and values fit in shared memory.

    In the interpreter, a tile's cost does not depend on its size. Small caches get several tiles, so that tests cover
    what happens between tiles; larger caches get few.
    """
    small = 16 if slots <= 48 else 64
    if INTERPRETED:
        return small
    block = min(128, max(16, 16384 // (padded_head_dim(head_dim) * itemsize)))
    return min(small, block) if SMALL_TILES else block


def fused(sizes: Sizes, device: torch.device) -> bool:
    """Whether a KV head's last program also finishes the head. This pays if other programs still read keys at that
    time, that is, with many heads.

    In the interpreter, this is true for an even number of slots, so that tests cover both cases.
    """
    if INTERPRETED:
        return sizes.slots % 2 == 0
    return sizes.batch * sizes.key_value_heads >= 2 * multiprocessors(device)


def early_rows(sizes: Sizes, splits: int, device: torch.device) -> int:
    """The number of rows of a batch before those whose programs form the end of a launch. Each KV head has `splits`
    programs. In the interpreter, half of the rows."""
    if INTERPRETED:
        return (sizes.batch + 1) // 2
    return max(0, sizes.batch - cdiv(LATE * multiprocessors(device), sizes.key_value_heads * splits))


@lru_cache
def launches_early(device: torch.device) -> bool:
    """Whether a launch may start before the previous one has ended, and wait on the device (programmatic dependent
    launch)."""
    return PTX and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Options of a kernel that may start before the previous one has ended, and which calls `previous_done`."""
    return {"DEPENDENT": True, "launch_pdl": True} if launches_early(device) else {"DEPENDENT": False}


def padded_slots(slots: int) -> int:
    """`slots` rounded up to ROW_UNIT, the length of a scratch row."""
    return cdiv(slots, ROW_UNIT) * ROW_UNIT


@lru_cache
def converts_e4m3(device: torch.device) -> bool:
    """Whether the device has an instruction that converts E4M3 numbers."""
    return PTX and torch.cuda.get_device_capability(device) >= (8, 9)


def fp8_codes(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, torch.dtype | None]:
    """FP8 keys and values as uint8, and their type. Others as they are, and None."""
    if key.dtype in FP8:
        return key.view(torch.uint8), value.view(torch.uint8), key.dtype
    return key, value, None


def fp8_format(dtype: torch.dtype | None, device: torch.device) -> str | None:
    """A type of FP8 codes as `from_fp8` takes it; None for None."""
    if dtype is None:
        return None
    if dtype == torch.float8_e5m2:
        return "e5m2"
    return "e4m3_native" if converts_e4m3(device) else "e4m3"


@lru_cache
def discards(device: torch.device) -> bool:
    """Whether the device can drop cache lines without writing them to memory."""
    return PTX and torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def few_rows(sizes: Sizes, device: torch.device) -> bool:
    """Whether there are too few rows to fill the multiprocessors, so that what a program does first and last counts."""
    return sizes.batch * sizes.key_value_heads < RESIDENT // 2 * multiprocessors(device)


def split_slots(
    sizes: Sizes, block: int, device: torch.device, programs: int = PROGRAMS, resident: int = RESIDENT
) -> tuple[int, int]:
    """The number of programs that share one row's slots, and the slots of each, a multiple of `block`. With much work
    the aim is `programs` per multiprocessor, with few rows `resident`."""
    rows, tiles = sizes.batch * sizes.key_value_heads, cdiv(sizes.slots, block)
    if INTERPRETED:
        wanted = 2
    elif not few_rows(sizes, device):
        wanted = cdiv(programs * multiprocessors(device), rows)
    else:
        wanted = max(1, resident * multiprocessors(device) // rows)
    tiles_each = cdiv(tiles, min(wanted, tiles, MAX_SPLITS))
    return cdiv(tiles, tiles_each), tiles_each * block


def stride_unit(*tensors: Tensor) -> int:
    """8 if every outer stride of these D-contiguous tensors is a multiple of 8 elements (16 bytes of bf16), else 1. For
    numbers of one byte, 16 instead of 8.

    Kernels take strides divided by this unit and multiply by it. This tells the compiler that rows are aligned, without
    one specialization per stride.
    """
    # Larger strides are passed as 64-bit numbers: in 32 bits, multiplication by the unit would overflow.
    unit = 16 if tensors[0].element_size() == 1 else 8
    aligned = all(
        tensor.stride(-1) == 1 and all(stride % unit == 0 and stride < 2**31 for stride in tensor.stride()[:-1])
        for tensor in tensors
    )
    return unit if aligned else 1


def mask_unit(mask: Tensor) -> int:
    """16 if the rows of a slot mask start and end at multiples of 16 bytes, else 1; see `stride_unit`."""
    rows = (*mask.stride()[:-1], mask.shape[-1], mask.data_ptr())
    return 16 if mask.stride(-1) == 1 and all(number % 16 == 0 for number in rows) else 1
