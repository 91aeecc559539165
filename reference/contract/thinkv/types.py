"""The public types of ThinKV, without the config: thought types, quantized tensors, results, block tables."""

from __future__ import annotations

from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

#: Bits per element of each format (section 3.2 and D.3; int4 and int2 are the ablation of E.8). "unquantized" keeps
#: elements as they are, for the ablations without quantization (tables 2 and 3): see `bits_in_cache`.
BITS = MappingProxyType({"fp8": 8, "nvfp4": 4, "ternary": 2, "int4": 4, "int2": 2, "unquantized": 16})
SCALE_RULES = ("amax", "mse")


class Thought(IntEnum):
    """Thought types, numbered as in the paper (D.6), in ascending order of importance (observation 2)."""

    TRANSITION = 0
    EXECUTION = 1
    REASONING = 2


#: The letters of the thought types, the keys of `ThinKVConfig.formats`.
LETTERS = MappingProxyType({"T": Thought.TRANSITION, "E": Thought.EXECUTION, "R": Thought.REASONING})


class Quantized(NamedTuple):
    """A tensor in a low-bit format, the result of `quantize`.

    codes: uint8 [..., T, D], one code per element; `pack` stores several codes in a byte. For "unquantized", the
    elements themselves, float16, bfloat16 or float32. scales: for fp8 float32 [..., ceil(T / group)], one scale for all
    channels of `group` tokens; for "unquantized" uint8 [0], none; for other formats uint8, the bits of E4M3 numbers,
    [..., ceil(T / group), D] for axis -2 and [..., T, ceil(D / group)] for axis -1. fmt, group: the arguments of
    `quantize`. axis: -1 or -2. shape: the shape of the quantized tensor. tensor_scale: the second-level scale, a
    float32 scalar, or None.
    """

    codes: Tensor
    scales: Tensor
    fmt: str
    axis: int
    group: int
    shape: torch.Size
    tensor_scale: Tensor | None = None


class Thresholds(NamedTuple):
    """The result of `calibrate`: the layers L* whose sparsity separates the thought types, and (theta_1, theta_2)."""

    layers: tuple[int, ...]
    edges: tuple[float, float]


class PagedAttentionResult(NamedTuple):
    """The result of one decode step over a paged cache.

    output: [B, Hq, D] in query's dtype. sparsity: [B] float32 (float64 for float64 inputs), see `attention_sparsity`;
    NaN for rows whose sparsity was not requested.
    """

    output: Tensor
    sparsity: Tensor


class AnnealResult(NamedTuple):
    """How many tokens each segment keeps.

    size: [B, M] int64, live tokens per segment. level: [B, M] int64, how often each segment was selected so far.
    over_budget: [B] bool, True if the smallest sizes of all segments still exceed the budget.
    """

    size: Tensor
    level: Tensor
    over_budget: Tensor


class RepresentativesResult(NamedTuple):
    """The tokens that represent a segment.

    indices: [keep] int64, ascending, distinct. assignments: [iterations, size] int64, the cluster of each token after
    the assignment step of each Lloyd iteration.
    """

    indices: Tensor
    assignments: Tensor


class BlockEntry(NamedTuple):
    """An entry of a sequence's block table (section 4.2, figure 5).

    entry: its number in the table. physical: the number of the block in the pool of its format. filled: the number of
    tokens in the block. thought: their thought type. start_indices: the first position of each segment with tokens in
    the block, ascending. segment_masks: for each of these segments, the slots of the block that hold its tokens.
    eviction_mask: the slots whose token was evicted and which new tokens reuse. Masks are tuples of 0 and 1.
    """

    entry: int
    physical: int
    filled: int
    thought: int
    start_indices: tuple[int, ...]
    segment_masks: tuple[tuple[int, ...], ...]
    eviction_mask: tuple[int, ...]


class PagedCodes(NamedTuple):
    """The quantized tokens of a paged cache by slot, all [B, Hkv, S, D], 0 in slots without a quantized token.

    keys, values: uint8, one code per element. key_scales, value_scales: float32, the scale of each element. All are 0
    for tokens in the format "unquantized", whose elements `dequantized` returns.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor


def bits_in_cache(fmt: str, dtype: torch.dtype) -> int:
    """Bits per element in a paged cache whose tokens have `dtype`. "unquantized" keeps elements of 16 bits as they are.
    It also keeps those of float32, with 32 bits; those of float64, like those of all formats, become float32 first."""
    return min(32, 8 * dtype.itemsize) if fmt == "unquantized" else BITS[fmt]


def has_groups(fmt: str) -> bool:
    """Whether groups of tokens and of channels have scales. fp8 has one scale per chunk, "unquantized" has none."""
    return fmt not in ("fp8", "unquantized")
