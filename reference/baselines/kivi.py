"""KIVI: keys in 2 or 4 bits per channel, values per token, the newest tokens unquantized; no token is evicted.

Paper: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (2024, arXiv 2402.02750). A group of
g numbers shares a scale and a minimum: g consecutive tokens of one channel of the keys, g consecutive channels of one
token's values. A residual of the newest tokens stays unquantized. The two residuals end at different tokens: keys leave
theirs R at a time, values one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..contract.arguments import check_integer, check_scale
from ..contract.kivi import (
    WORD,
    check_bits,
    check_dequantize,
    check_group,
    check_head_dim,
    check_quantize,
    words_of,
)
from ..growing_state import QuantizedState

__all__ = ["KIVIConfig", "KIVIState", "QuantizeResult", "dequantize", "quantize"]


@dataclass(frozen=True)
class KIVIConfig:
    """Configuration of a KIVI cache.

    key_bits, value_bits: the bits of a code, 2 or 4. group: g, the numbers that share a scale and a minimum, a power of
    two that divides head_dim. residual: R, a multiple of the group: the newest n mod R of n keys stay unquantized, and
    the newest R values. max_tokens: the longest sequence that a state can hold, prompt, padding and decoded tokens.
    scale: the factor on query . key, by default head_dim ** -0.5.
    Raises TypeError or ValueError for invalid arguments.
    """

    key_bits: int = 2
    value_bits: int = 2
    group: int = 32
    residual: int = 128
    max_tokens: int = field(default=32768, kw_only=True)
    scale: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_bits("key_bits", self.key_bits)
        check_bits("value_bits", self.value_bits)
        check_group("group", self.group)
        if check_integer("residual", self.residual, minimum=1) % self.group:
            raise ValueError(f"residual must be a multiple of group = {self.group}, got {self.residual}")
        check_integer("max_tokens", self.max_tokens, minimum=1)
        check_scale("scale", self.scale)


class QuantizeResult(NamedTuple):
    """Quantized numbers x [B, H, T, D], with groups of g along an axis.

    codes: int32 words of 32 / bits codes, the first code in the lowest bits. With axis -2, [B, H, words, D]: codes of
    consecutive tokens; each group begins a new word, and takes ceil(g bits / 32) words. With axis -1, [B, H, T,
    D bits / 32]: codes of consecutive channels. scale, minimum: one per group, [B, H, T / g, D] or [B, H, T, D / g].
    A code stands for code * scale + minimum.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor


def quantize(x: Tensor, *, bits: int, axis: int, group: int, dtype: torch.dtype | None = None) -> QuantizeResult:
    """Quantize x [B, H, T, D] in groups along axis -2 (tokens, as for keys) or -1 (channels, as for values).

    minimum = min x, scale = (max x - min x) / (2^bits - 1), code = round((x - minimum) / scale) from 0 to 2^bits - 1,
    halves to even. dtype: that of scales and minima, by default x's. Every operation rounds to float32 (to float64 if
    dtype is float64), and codes are computed with the stored scale and minimum. With a scale of 0, as in a constant
    group, codes are 0. A group with NaN or infinity, or a range that the dtype cannot hold, has the codes and the scale
    0 and the minimum NaN. Raises TypeError or ValueError for invalid arguments, such as a T or D that is not a multiple
    of the group.
    """
    x, bits, axis, group, dtype = check_quantize(x, bits, axis, group, dtype)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    parts = x.to(work).unflatten(axis, (-1, group))              # [B, H, T/g, g, D] or [B, H, T, D/g, g]
    code, scale, minimum = codes_of_groups(parts, axis, 2**bits - 1, scale_dtype=dtype, dtype=dtype)
    return QuantizeResult(pack(code, bits, axis), scale, minimum)


def codes_of_groups(
    parts: Tensor, axis: int, most: int, *, scale_dtype: torch.dtype, dtype: torch.dtype, least_scale: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The codes from 0 to `most` of groups along an axis, int64, their scales, of at least `least_scale`, and their
    minima, in these dtypes. Computes in the dtype of `parts`; see `quantize`."""
    low, high = parts.amin(axis), parts.amax(axis)               # NaN if the group has NaN
    minimum = (low + 0.0).to(dtype)                              # -0 becomes 0
    scale = ((high - low) / torch.full_like(low, most)).clamp_min(least_scale).to(scale_dtype)
    holds = (high - low).isfinite() & scale.isfinite() & minimum.isfinite()
    minimum, scale = minimum.where(holds, torch.nan), scale.where(holds, 0)
    step, shift = scale.to(parts.dtype).unsqueeze(axis), minimum.to(parts.dtype).unsqueeze(axis)
    ratio = (parts - shift) / step.where(step > 0, 1)
    return ratio.clamp(0, most).round().where(step > 0, 0).long(), scale, minimum


def dequantize(
    codes: Tensor, scale: Tensor, minimum: Tensor, *, bits: int, axis: int, group: int, dtype: torch.dtype | None = None
) -> Tensor:
    """The numbers [B, H, T, D] that a `QuantizeResult` stands for, in `dtype`, by default that of the scales.

    code * scale, plus minimum: both operations round to float32, or to float64 for float64 scales; then the result is
    rounded to `dtype`. Raises TypeError or ValueError for invalid arguments.
    """
    codes, scale, minimum, bits, axis, group, dtype = check_dequantize(
        codes, scale, minimum, bits, axis, group, dtype
    )
    work = torch.float64 if scale.dtype == torch.float64 else torch.float32
    code = unpack(codes, bits, axis, group).to(work)             # [B, H, T/g, g, D] or [B, H, T, D/g, g]
    product = code * scale.to(work).unsqueeze(axis)
    return (product + minimum.to(work).unsqueeze(axis)).flatten(axis - 1, axis).to(dtype)


def pack(code: Tensor, bits: int, axis: int) -> Tensor:
    """Pack codes in groups, [B, H, T/g, g, D] (axis -2) or [B, H, T, D/g, g], into words, see `QuantizeResult`."""
    each = WORD // bits
    if axis == -1:
        code = code.flatten(-2).unflatten(-1, (-1, each))        # [B, H, T, words, each]
    else:
        code = pad(code, (0, 0, 0, -code.shape[-2] % each)).flatten(-3, -2).unflatten(-2, (-1, each))
    shifts = bits * torch.arange(each, device=code.device)
    return (code << (shifts if axis == -1 else shifts[:, None])).sum(axis).to(torch.int32)


def unpack(codes: Tensor, bits: int, axis: int, group: int) -> Tensor:
    """The inverse of `pack`, int32."""
    each = WORD // bits
    shifts = bits * torch.arange(each, dtype=torch.int32, device=codes.device)
    code = codes.unsqueeze(axis) >> (shifts if axis == -1 else shifts[:, None]) & (1 << bits) - 1
    if axis == -1:
        return code.flatten(-2).unflatten(-1, (-1, group))
    return code.flatten(-3, -2).unflatten(-2, (-1, words_of(group, bits) * each))[..., :group, :]


def quantized_most(config: KIVIConfig, slots: int) -> tuple[int, int]:
    """The most keys and values of a row that can be quantized; at least a group and one."""
    return max(slots - slots % config.residual, config.group), max(slots - config.residual, 1)


class KIVIState(QuantizedState):
    """The KIVI cache of `batch` sequences in one layer.

    Token i of a row, padding not counted, is in slot i of S = config.max_tokens. Of n tokens, the first n - n mod R
    keys and the first n - R values are quantized. A token arrives, the query attends, and then the cache quantizes: all
    R unquantized keys of a row, if it has R of them, and its oldest value, if R + 1 are unquantized. Prompts attend to
    unquantized keys and values.

    Readable: occupied [B, S] bool; positions [B, S] int64, counted with padding, -1 = no token; key, value
    [B, Hkv, S, D], those that attention reads, rounded to the state's dtype; keys_quantized, values_quantized [B]
    int64; `codes_of_keys()`, `codes_of_values()`. Raises ValueError if head_dim is not a multiple of config.group or of
    the codes in a word, 32 / value_bits.
    """

    Config = KIVIConfig
    config: KIVIConfig

    def _set_up(self) -> None:
        check_head_dim(self.sizes.head_dim, group=self.config.group, bits=self.config.value_bits, of="value_bits")
        self._stored = self.dtype                                # of scales and minima

    def _allocate(self) -> None:
        super()._allocate()
        keys, values = quantized_most(self.config, self.sizes.slots)
        head_dim, each, work = self.sizes.head_dim, self.config.group, self._stored_as
        self._key_codes = self._zeros(keys // each * words_of(each, self.config.key_bits), head_dim, torch.int32)
        self._key_scale, self._key_minimum = (self._zeros(keys // each, head_dim, work) for _ in range(2))
        self._value_codes = self._zeros(values, head_dim * self.config.value_bits // WORD, torch.int32)
        self._value_scale, self._value_minimum = (self._zeros(values, head_dim // each, work) for _ in range(2))

    @property
    def keys_quantized(self) -> Tensor:
        return self._count - self._count % self.config.residual

    @property
    def values_quantized(self) -> Tensor:
        return (self._count - self.config.residual).clamp_min(0)

    def codes_of_keys(self) -> QuantizeResult:
        """The quantized keys of every row, as `quantize` returns them: groups of the first tokens, then zeros."""
        return QuantizeResult(self._key_codes, self._key_scale.to(self._stored), self._key_minimum.to(self._stored))

    def codes_of_values(self) -> QuantizeResult:
        """The quantized values of every row, as `quantize` returns them: the first tokens, then zeros."""
        return QuantizeResult(
            self._value_codes, self._value_scale.to(self._stored), self._value_minimum.to(self._stored)
        )

    def _grow(self, count: Tensor, seen: int) -> None:
        """Quantize what is due when the rows have `count` [B] tokens."""
        before = self.keys_quantized.tolist(), self.values_quantized.tolist()
        super()._grow(count, seen)
        after = self.keys_quantized.tolist(), self.values_quantized.tolist()
        for row in range(self.sizes.batch):
            for which in range(2):
                if before[which][row] < after[which][row]:
                    self._quantize(which, row, before[which][row], after[which][row])

    def _quantize(self, which: int, row: int, first: int, end: int) -> None:
        """Quantize the keys (which = 0) or the values (1) in slots first to end - 1 of a row."""
        config, tokens = self.config, (self._key, self._value)[which][row:row + 1, :, first:end]
        bits, axis = ((config.key_bits, -2), (config.value_bits, -1))[which]
        codes, scale, minimum = quantize(tokens, bits=bits, axis=axis, group=config.group, dtype=self._stored)
        work = scale.to(self._key.dtype), minimum.to(self._key.dtype)
        tokens.copy_(dequantize(codes, *work, bits=bits, axis=axis, group=config.group))
        each, words = (config.group, words_of(config.group, bits)) if which == 0 else (1, 1)
        groups, places = slice(first // each, end // each), slice(first // each * words, end // each * words)
        names = ("_key", "_value")[which]
        getattr(self, f"{names}_codes")[row, :, places] = codes[0]
        getattr(self, f"{names}_scale")[row, :, groups] = work[0][0]
        getattr(self, f"{names}_minimum")[row, :, groups] = work[1][0]
