"""PM-KVQ: codes of 16 bits that shrink to 8, 4 and 2 as the cache fills; no token is evicted.

Paper: Liu et al., "PM-KVQ: Progressive Mixed-precision KV Cache Quantization for Long-CoT LLMs" (2025, arXiv
2505.18610). Keys and values alike are quantized per token, in groups of consecutive channels. The first tokens and a
window of the newest ones stay unquantized; a full window is quantized at once. When the memory of a layer exceeds its
budget, the codes of all its quantized tokens shrink to half of their bits. Each layer has a budget of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract.arguments import check_integer, check_scale
from ..contract.pm_kvq import (
    WIDTHS,
    check_bits_budget,
    check_dequantize,
    check_head_dim,
    check_least_scale,
    check_pair_group,
    check_quantize,
    check_shrink,
    groups_of,
    scale_dtype,
    tokens_that_fit,
)
from ..growing_state import QuantizedState
from .kivi import codes_of_groups

__all__ = ["PMKVQConfig", "PMKVQState", "QuantizeResult", "ShrinkResult", "dequantize", "quantize", "shrink"]


@dataclass(frozen=True)
class PMKVQConfig:
    """Configuration of a PM-KVQ cache.

    bits: the budget of a layer, in bits per number of max_tokens tokens: the codes and the unquantized numbers of a
    sequence take at most bits * max_tokens * Hkv * D * 2 / 8 bytes. window: the newest tokens are quantized this many
    at a time. sinks: the first tokens, never quantized. group: the channels of a token that share a scale and a
    minimum, a power of two; a head with fewer channels is one group. least_scale: scales of 16-bit codes are at least
    this large. max_tokens: the longest sequence that a state can hold, prompt, padding and decoded tokens. scale: the
    factor on query . key, by default head_dim ** -0.5.
    Raises TypeError or ValueError for invalid arguments, such as a budget that max_tokens tokens exceed in 2 bits.
    """

    bits: float = 4
    window: int = 128
    sinks: int = 1
    group: int = 128
    least_scale: float = 0.0
    max_tokens: int = field(default=32768, kw_only=True)
    scale: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_bits_budget("bits", self.bits)
        check_integer("window", self.window, minimum=1)
        check_integer("sinks", self.sinks, minimum=0)
        check_pair_group("group", self.group)
        check_least_scale("least_scale", self.least_scale)
        check_integer("max_tokens", self.max_tokens, minimum=1)
        check_scale("scale", self.scale)
        if self.limits[-1] < self.max_tokens:
            raise ValueError(
                f"bits = {self.bits} is too small for max_tokens = {self.max_tokens}: in codes of 2 bits, "
                f"{self.limits[-1]} tokens fit, {self.sinks} sinks and up to {self.window - 1} others in 16 bits"
            )

    @property
    def limits(self) -> tuple[int, int, int, int]:
        """The most tokens that fit in the budget with codes of 16, 8, 4 and 2 bits."""
        fitting = [
            tokens_that_fit(self.bits, self.max_tokens, self.sinks, self.window, width) for width in WIDTHS
        ]
        return fitting[0], fitting[1], fitting[2], fitting[3]

    def width_after(self, seen: int) -> int:
        """The bits of the codes after `seen` tokens: the most with which the memory never exceeded the budget."""
        return next(width for width, limit in zip(WIDTHS, self.limits, strict=True) if seen <= limit)


class QuantizeResult(NamedTuple):
    """Quantized numbers x [B, H, T, D], in groups of g consecutive channels.

    codes: int32 [B, H, T, D], not packed. scale, minimum: one per group, [B, H, T, D / g]; scale is float32 if minimum
    is float16. A code stands for code * scale + minimum.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor


class ShrinkResult(NamedTuple):
    """Codes of half of the bits, int32 [B, H, T, D], and their scales [B, H, T, D / g]. Minima do not change."""

    codes: Tensor
    scale: Tensor


def quantize(
    x: Tensor, *, bits: int = 16, group: int = 128, least_scale: float = 0.0, dtype: torch.dtype | None = None
) -> QuantizeResult:
    """Quantize x [B, H, T, D] in groups of channels, to 16, 8, 4 or 2 bits.

    minimum = min x, scale = max(least_scale, (max x - min x) / (2^bits - 1)), code = round((x - minimum) / scale) from
    0 to 2^bits - 1, halves to even. A D of less than the group is one group. dtype: that of minima, by default x's;
    scales are float32 if it is float16, else of the same dtype. Every operation rounds to float32 (to float64 if dtype
    is float64), and codes are computed with the stored scale and minimum. With a scale of 0, codes are 0. A group with
    NaN or infinity, or a range that the dtype cannot hold, has the codes and the scale 0 and the minimum NaN. Raises
    TypeError or ValueError for invalid arguments.
    """
    x, bits, group, least_scale, dtype = check_quantize(x, bits, group, least_scale, dtype)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    parts = x.to(work).unflatten(-1, (groups_of(x.shape[-1], group), -1))           # [B, H, T, D/g, g]
    code, scale, minimum = codes_of_groups(
        parts, -1, 2**bits - 1, scale_dtype=scale_dtype(dtype), dtype=dtype, least_scale=least_scale
    )
    return QuantizeResult(code.flatten(-2).to(torch.int32), scale, minimum)


def shrink(codes: Tensor, scale: Tensor, *, bits: int) -> ShrinkResult:
    """Shrink codes of `bits` = 2n bits, 16, 8 or 4, to n bits.

    code := floor((code + 2^(n-1)) (2^(2n) - 2^n + 1) / 2^(3n)), which is code / (2^n + 1) rounded to the nearest
    integer (there are no ties), and scale := scale (2^n + 1), in the scale's dtype. Raises TypeError or ValueError for
    invalid arguments.
    """
    codes, scale, bits = check_shrink(codes, scale, bits)
    n = bits // 2
    code = (codes.long() + 2 ** (n - 1)) * (2**bits - 2**n + 1) >> 3 * n
    work = torch.float64 if scale.dtype == torch.float64 else torch.float32
    return ShrinkResult(code.to(torch.int32), (scale.to(work) * (2**n + 1)).to(scale.dtype))


def dequantize(
    codes: Tensor, scale: Tensor, minimum: Tensor, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The numbers [B, H, T, D] that a `QuantizeResult` stands for, in `dtype`, by default that of the minima.

    code * scale, plus minimum: both operations round to float32, or to float64 for float64 scales; then the result is
    rounded to `dtype`. Raises TypeError or ValueError for invalid arguments.
    """
    codes, scale, minimum, dtype = check_dequantize(codes, scale, minimum, dtype)
    work = torch.float64 if scale.dtype == torch.float64 else torch.float32
    code = codes.to(work).unflatten(-1, (scale.shape[-1], -1))                      # [B, H, T, D/g, g]
    return (code * scale.to(work)[..., None] + minimum.to(work)[..., None]).flatten(-2).to(dtype)


class PMKVQState(QuantizedState):
    """The PM-KVQ cache of `batch` sequences in one layer.

    Token i of a row, padding not counted, is in slot i of S = config.max_tokens. Of the n tokens of a row, the first
    `sinks` and the newest (n - sinks) mod window are not quantized. A token arrives, the query attends, and then the
    cache quantizes and shrinks. Codes of all rows have the same width, which follows from the number of tokens seen,
    padding included (`PMKVQConfig.width_after`). Prompts attend to unquantized keys and values.

    Readable: occupied [B, S] bool; positions [B, S] int64, counted with padding, -1 = no token; key, value
    [B, Hkv, S, D], those that attention reads, rounded to the state's dtype; tokens_quantized [B] int64; width, the
    bits of a code; budget_bytes, of one sequence; `codes_of_keys()`, `codes_of_values()`. Raises ValueError if head_dim
    is odd, or larger than config.group and no multiple of it.
    """

    Config = PMKVQConfig
    config: PMKVQConfig

    def _set_up(self) -> None:
        check_head_dim(self.sizes.head_dim, self.config.group)
        self._stored = self.dtype                                # of minima; scales: `scale_dtype`

    def _allocate(self) -> None:
        super()._allocate()
        slots, head_dim, work = self.sizes.slots, self.sizes.head_dim, self._stored_as
        self._key_codes, self._value_codes = (self._zeros(slots, head_dim, torch.int32) for _ in range(2))
        self._key_scale, self._key_minimum, self._value_scale, self._value_minimum = (
            self._zeros(slots, groups_of(head_dim, self.config.group), work) for _ in range(4)
        )

    @property
    def tokens_quantized(self) -> Tensor:
        entered = (self._count - self.config.sinks).clamp_min(0)
        return entered - entered % self.config.window

    @property
    def width(self) -> int:
        return self.config.width_after(self._seen)

    @property
    def budget_bytes(self) -> int:
        """The most bytes that the codes and the unquantized keys and values, in 16 bits, of a sequence take."""
        return int(self.config.bits * self.config.max_tokens * self.sizes.key_value_heads * self.sizes.head_dim) // 4

    def codes_of_keys(self) -> QuantizeResult:
        """The quantized keys of every row, codes of `width` bits, as `quantize` returns them: [B, Hkv, S, D] codes in
        the slots of their tokens, [B, Hkv, S, D / g] scales and minima, zeros in other slots."""
        return self._codes(self._key_codes, self._key_scale, self._key_minimum)

    def codes_of_values(self) -> QuantizeResult:
        """The quantized values of every row, like `codes_of_keys`."""
        return self._codes(self._value_codes, self._value_scale, self._value_minimum)

    def _codes(self, codes: Tensor, scale: Tensor, minimum: Tensor) -> QuantizeResult:
        return QuantizeResult(codes, scale.to(scale_dtype(self._stored)), minimum.to(self._stored))

    def _grow(self, count: Tensor, seen: int) -> None:
        """Shrink and quantize what is due when the rows have `count` [B] tokens, of `seen` with padding."""
        before, width = self.tokens_quantized.tolist(), self.width
        super()._grow(count, seen)
        first = self.config.sinks
        for row, (old, new) in enumerate(zip(before, self.tokens_quantized.tolist(), strict=True)):
            if old and self.width < width:
                self._shrink(row, slice(first, first + old), width)
            if old < new:
                self._quantize(row, slice(first + old, first + new))

    def _shrink(self, row: int, slots: slice, width: int) -> None:
        """Shrink the codes of a row from `width` bits to those of the state."""
        for which in ("_key", "_value"):
            codes, scale, minimum = (
                getattr(self, f"{which}_{part}")[row:row + 1, :, slots] for part in ("codes", "scale", "minimum")
            )
            found = QuantizeResult(codes, scale.to(scale_dtype(self._stored)), minimum)
            self._store(which, row, slots, self._shrunk(found, width))

    def _quantize(self, row: int, slots: slice) -> None:
        """Quantize the keys and values in these slots of a row to 16 bits, and shrink them to the state's width."""
        for which in ("_key", "_value"):
            found = quantize(
                getattr(self, which)[row:row + 1, :, slots], group=self.config.group,
                least_scale=float(self.config.least_scale), dtype=self._stored,
            )
            self._store(which, row, slots, self._shrunk(found, WIDTHS[0]))

    def _shrunk(self, found: QuantizeResult, width: int) -> QuantizeResult:
        """Codes of `width` bits in the state's width."""
        while width > self.width:
            found, width = QuantizeResult(*shrink(found.codes, found.scale, bits=width), found.minimum), width // 2
        return found

    def _store(self, which: str, row: int, slots: slice, found: QuantizeResult) -> None:
        """Store codes, and the numbers that they stand for."""
        work = self._key.dtype
        codes, scale, minimum = found.codes, found.scale.to(work), found.minimum.to(work)
        for part, tensor in (("codes", codes), ("scale", scale), ("minimum", minimum)):
            getattr(self, f"{which}_{part}")[row, :, slots] = tensor[0]
        getattr(self, which)[row, :, slots] = dequantize(codes, scale, minimum)[0]
