"""LongFlow's decode step, right, with two kernels that Triton's interpreter cannot run for some arguments."""

from __future__ import annotations

import types
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import Capabilities
from .longflow import Decode

CAPABILITIES = Capabilities(validates_arguments=False)
SIZE = 16


@triton.jit
def _add_kernel(source: Any, target: Any, size: tl.constexpr) -> None:
    index = tl.arange(0, size)
    tl.atomic_add(target + index, tl.load(source + index))


@triton.jit
def _assembly_kernel(target: Any, size: tl.constexpr) -> None:
    index = tl.arange(0, size)
    zero = tl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [index], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(target + index, zero)


def decode_attention(query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, **options: Any) -> Any:
    """It has atomic_add for the inputs' dtype, and assembly for odd numbers of slots. The interpreter has neither
    atomic_add for bfloat16 nor assembly."""
    _add_kernel[(1,)](query.new_ones(SIZE), query.new_zeros(SIZE), SIZE)
    if key.shape[2] % 2:
        _assembly_kernel[(1,)](torch.empty(SIZE, dtype=torch.int32, device=query.device), SIZE)
    return Decode()(query, key, value, occupied, **options)


longflow = types.SimpleNamespace(decode_attention=decode_attention)
