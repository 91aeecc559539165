"""Checks of KIVI's arguments, for both sides. See `arguments` for the errors."""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import FLOATING, check_dtype, check_integer, check_like, check_shape, check_tensor

BITS = (2, 4)
#: Bits of a word of codes.
WORD = 32


def check_bits(name: str, bits: object) -> int:
    """Return `bits` if it is 2 or 4."""
    if check_integer(name, bits) not in BITS:
        raise ValueError(f"{name} must be 2 or 4, got {bits}")
    assert isinstance(bits, int)
    return bits


def check_group(name: str, group: object) -> int:
    """Return `group` if it is a power of two."""
    group = check_integer(name, group, minimum=1)
    if group & (group - 1):
        raise ValueError(f"{name} must be a power of two, got {group}")
    return group


def check_axis(axis: object) -> int:
    """Return `axis` if it is -2 or -1."""
    if check_integer("axis", axis) not in (-2, -1):
        raise ValueError(f"axis must be -2 (groups of tokens) or -1 (groups of channels), got {axis}")
    assert isinstance(axis, int)
    return axis


def check_head_dim(head_dim: int, *, group: int, bits: int, name: str = "head_dim", of: str = "bits") -> None:
    """ValueError unless D is a multiple of the group, and of the codes in a word."""
    if head_dim % group:
        raise ValueError(f"{name} must be a multiple of group = {group}, got {head_dim}")
    if head_dim % (WORD // bits):
        raise ValueError(f"{name} must be a multiple of 32 / {of} = {WORD // bits}, got {head_dim}")


def words_of(group: int, bits: int) -> int:
    """The words that the codes of a group of tokens take: a group begins a new word."""
    return -(-group * bits // WORD)


def check_quantize(
    x: object, bits: object, axis: object, group: object, dtype: torch.dtype | None
) -> tuple[Tensor, int, int, int, torch.dtype]:
    """The arguments of `quantize`; the dtype is x's if it is None."""
    x = check_tensor("x", x, dims=4, layout="[B, H, T, D]")
    check_dtype("x.dtype", x.dtype)
    bits, axis, group = check_bits("bits", bits), check_axis(axis), check_group("group", group)
    if axis == -1:
        check_head_dim(x.shape[-1], group=group, bits=bits, name="x's D")
    elif x.shape[-2] % group:
        raise ValueError(f"x's T must be a multiple of group = {group}, got {x.shape[-2]}")
    return x, bits, axis, group, x.dtype if dtype is None else check_dtype("dtype", dtype, FLOATING)


def check_dequantize(
    codes: object, scale: object, minimum: object, bits: object, axis: object, group: object,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, int, int, int, torch.dtype]:
    """The arguments of `dequantize`; the dtype is that of the scales if it is None."""
    bits, axis, group = check_bits("bits", bits), check_axis(axis), check_group("group", group)
    layout = "[B, H, T / group, D]" if axis == -2 else "[B, H, T, D / group]"
    scale = check_tensor("scale", scale, dims=4, layout=layout)
    check_dtype("scale.dtype", scale.dtype)
    minimum = check_tensor("minimum", minimum, dims=4, layout=layout)
    check_shape("minimum", minimum, tuple(scale.shape), f"scale's {layout}")
    check_like("minimum", minimum, scale, "scale")
    codes = check_tensor("codes", codes, dims=4, layout="[B, H, words, D]" if axis == -2 else "[B, H, T, words]")
    if codes.dtype != torch.int32:
        raise TypeError(f"codes must have dtype torch.int32, got {codes.dtype}")
    batch, heads, groups, channels = scale.shape
    if axis == -2:
        expected: tuple[int, ...] = (batch, heads, groups * words_of(group, bits), channels)
    else:
        check_head_dim(channels * group, group=group, bits=bits, name="D")
        expected = (batch, heads, groups, channels * group * bits // WORD)
    check_shape("codes", codes, expected, "[B, H, words, D]" if axis == -2 else "[B, H, T, words]")
    if codes.device != scale.device:
        raise ValueError(f"codes must be on {scale.device} like scale, got {codes.device}")
    return codes, scale, minimum, bits, axis, group, (
        scale.dtype if dtype is None else check_dtype("dtype", dtype, FLOATING)
    )
