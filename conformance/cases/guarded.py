"""Tensors at the very end of an allocation, followed by memory that no process may touch.

A kernel that reads or writes one element too far ends the process there, even if it throws the value away.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

import torch
from torch import Tensor

PROT_NONE = 0
#: Of cuMemCreate and cuMemSetAccess: pinned memory of a device, read and written by it.
PINNED, DEVICE, READ_WRITE = 1, 1, 3


def like(tensor: Tensor) -> Tensor:
    """An uninitialised contiguous tensor of the same shape and dtype, whose end is the end of its memory. Where the
    system cannot guard memory, an ordinary one."""
    size = tensor.numel() * tensor.element_size()
    if size == 0 or tensor.is_meta:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    if tensor.device.type == "cpu":
        return _on_cpu(size).view(tensor.dtype).view(tensor.shape)
    if tensor.device.type == "cuda" and _driver() is not None:
        return torch.as_tensor(_OnGPU(size, tensor.device), device=tensor.device).view(tensor.dtype).view(tensor.shape)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _on_cpu(size: int) -> Tensor:
    """`size` bytes before a page without access."""
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    room = mmap.mmap(-1, whole + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(room))
    if _libc().mprotect(ctypes.c_void_p(begin + whole), mmap.PAGESIZE, PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")
    return torch.frombuffer(room, dtype=torch.uint8, offset=whole - size, count=size)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", _Location), ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _OnGPU:
    """`size` bytes of a GPU's memory before addresses that are reserved and not mapped, by CUDA's virtual memory."""

    def __init__(self, size: int, device: torch.device) -> None:
        torch.cuda.current_stream(device)  # there is a context
        cuda = _driver()
        location = _Location(DEVICE, device.index or 0)
        properties = _Properties(PINNED, 0, location, None)
        unit, handle, address = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64()
        _check(cuda.cuMemGetAllocationGranularity(ctypes.byref(unit), ctypes.byref(properties), 0))
        whole = -(-size // unit.value) * unit.value
        _check(cuda.cuMemAddressReserve(
            ctypes.byref(address), ctypes.c_size_t(whole + unit.value), ctypes.c_size_t(0), ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        ))
        _check(cuda.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(whole), ctypes.byref(properties),
                                ctypes.c_uint64(0)))
        _check(cuda.cuMemMap(address, ctypes.c_size_t(whole), ctypes.c_size_t(0), handle, ctypes.c_uint64(0)))
        access = _Access(location, READ_WRITE)
        _check(cuda.cuMemSetAccess(address, ctypes.c_size_t(whole), ctypes.byref(access), ctypes.c_size_t(1)))
        self._device, self._whole, self._reserved = device, whole, whole + unit.value
        self._address, self._handle = address, handle
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address.value + whole - size, False), "version": 3,
        }

    def __del__(self) -> None:
        if not hasattr(self, "_whole"):
            return
        torch.cuda.synchronize(self._device)  # a kernel may still read it
        cuda = _driver()
        cuda.cuMemUnmap(self._address, ctypes.c_size_t(self._whole))
        cuda.cuMemRelease(self._handle)
        cuda.cuMemAddressFree(self._address, ctypes.c_size_t(self._reserved))


def _check(status: int) -> None:
    if status:
        raise MemoryError(f"CUDA's driver cannot guard memory: error {status}")


@functools.cache
def _driver() -> Any:
    """CUDA's driver; None without it."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None

