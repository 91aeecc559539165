"""KIVI on the GPU: keys and values quantized to 2 or 4 bits. kivi_ops.py has the operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...reference.baselines.kivi import KIVIConfig, QuantizeResult
from ...reference.contract.kivi import WORD, check_dequantize, check_head_dim, check_quantize, words_of
from .._common.growing_state import GrowingState
from .._common.launch import check_launchable, key_block, split_slots
from .kivi_ops import (
    attend_step,
    dequantize_codes,
    fragment_room,
    fragment_splits,
    in_fragments,
    quantize_tensor,
    scales_of_keys,
    store_prompt,
)
from .kivi_order import in_token_order, keys_by_word, values_by_token

__all__ = ["KIVIConfig", "KIVIState", "QuantizeResult", "dequantize", "quantize"]

#: The largest group of `quantize`.
MAX_GROUP = 1024


def quantize(x: Tensor, *, bits: int, axis: int, group: int, dtype: torch.dtype | None = None) -> QuantizeResult:
    """Quantize x [B, H, T, D] in groups along axis -2 (tokens) or -1 (channels). Any strides.

    Semantics, bitwise: the reference's `quantize`, in float32, float16 or bfloat16, and groups of up to 1024.
    TypeError or ValueError for invalid arguments, for inputs that require grad, and for CPU tensors outside Triton's
    interpreter.
    """
    x, bits, axis, group, dtype = check_quantize(x, bits, axis, group, dtype)
    if group > MAX_GROUP:
        raise ValueError(f"group must be at most {MAX_GROUP}, got {group}")
    check_launchable(x=x, dtype=torch.empty(0, dtype=dtype, device=x.device))
    return QuantizeResult(*quantize_tensor(x, bits, axis, group, dtype))


def dequantize(
    codes: Tensor, scale: Tensor, minimum: Tensor, *, bits: int, axis: int, group: int, dtype: torch.dtype | None = None
) -> Tensor:
    """The numbers [B, H, T, D] that a `QuantizeResult` stands for, in `dtype`, by default that of the scales.

    Semantics, bitwise: the reference's `dequantize`, in float32, float16 or bfloat16. Errors as in `quantize`.
    """
    codes, scale, minimum, bits, axis, group, dtype = check_dequantize(
        codes, scale, minimum, bits, axis, group, dtype
    )
    check_launchable(scale=scale, minimum=minimum, dtype=torch.empty(0, dtype=dtype, device=scale.device))
    result: Tensor = dequantize_codes(codes, scale, minimum, bits, axis, group, dtype)
    return result


# The state -----------------------------------------------------------------------------------------------------------


class KIVIState(GrowingState):
    """The KIVI cache of `batch` sequences in one layer. Attributes and errors as in the reference.

    float32, float16 or bfloat16; D from 16 to 256; up to 16 query heads per KV head. TypeError or ValueError for other
    arguments, and for CPU tensors outside Triton's interpreter.
    """

    Config = KIVIConfig
    config: KIVIConfig
    _step = attend_step
    _rows = (
        "_keys", "_values", "_key_codes", "_key_scale", "_key_minimum", "_value_codes", "_value_scales", "_extreme",
        *GrowingState._rows,
    )

    def _allocate(self) -> int:
        (batch, query_heads, heads, slots, head_dim), config = self.sizes, self.config
        check_head_dim(head_dim, group=config.group, bits=config.value_bits, of="value_bits")
        residual, each = config.residual, config.group
        # The most keys and values of a row that can be quantized; at least a group and one.
        groups, rows = max(slots - slots % residual, each) // each, max(slots - residual, 1)
        self._most_groups, self._most_values = groups, rows
        fragments = in_fragments(self.dtype, query_heads // heads, head_dim, each, config.key_bits, config.value_bits)
        if fragments:
            groups, rows = fragment_room(groups, rows, each, config.key_bits)
        self._keys, self._values = (
            self._buffer(batch, heads, places, head_dim, dtype=self.dtype) for places in (residual, residual + 1)
        )
        words = groups * words_of(each, config.key_bits)
        self._key_codes = self._buffer(batch, heads, words, head_dim, dtype=torch.int32)
        of_keys = (batch, heads, groups, head_dim // 2, 2, 2) if fragments else (2, batch, heads, groups, head_dim)
        self._key_scales = self._buffer(*of_keys, dtype=self.dtype)
        self._key_scale, self._key_minimum = scales_of_keys(self._key_scales, fragments)
        words = head_dim * config.value_bits // WORD
        self._value_codes = self._buffer(batch, heads, rows, words, dtype=torch.int32)
        # Scale and minimum lie side by side, so that one load reads both.
        self._value_scales = self._buffer(batch, heads, rows, head_dim // each, 2, dtype=self.dtype)
        self._extreme = self._buffer(batch, heads, dtype=torch.int32)
        self._fragments = fragments
        self._key_parts = keys_by_word(self._key_codes, self._key_scale, self._key_minimum, fragments)
        self._value_parts = values_by_token(self._value_codes, self._value_scales, fragments)
        self._due = self._buffer(batch, dtype=torch.int64)
        if fragments:
            self._splits, self._rests = fragment_splits(batch * heads, slots, residual, config.key_bits, self.device)
        else:
            self._splits, _ = split_slots(self.sizes, key_block(head_dim, self.dtype.itemsize, slots), self.device)
            self._rests = 1
        return self._splits + self._rests

    def _named(self) -> dict[str, Any]:
        config = self.config
        return super()._named() | {
            "keys": self._keys, "values": self._values, "key_codes": self._key_codes,
            "key_scales": self._key_scales, "value_codes": self._value_codes, "value_scales": self._value_scales,
            "extreme": self._extreme, "due": self._due, "key_bits": config.key_bits, "value_bits": config.value_bits,
            "group": config.group, "splits": self._splits, "rests": self._rests, "fragments": self._fragments,
        }

    def _clear(self) -> None:
        self._extreme.zero_()

    @property
    def keys_quantized(self) -> Tensor:
        return self._count - self._count % self.config.residual

    @property
    def values_quantized(self) -> Tensor:
        return (self._count - self.config.residual).clamp_min(0)

    @property
    def key(self) -> Tensor:
        """[B, Hkv, S, D], computed at each access."""
        config = self.config
        found = dequantize(*self.codes_of_keys(), bits=config.key_bits, axis=-2, group=config.group)
        return self._with_buffer(found, self._keys, self.keys_quantized)

    @property
    def value(self) -> Tensor:
        """[B, Hkv, S, D], computed at each access."""
        config = self.config
        found = dequantize(*self.codes_of_values(), bits=config.value_bits, axis=-1, group=config.group)
        return self._with_buffer(found, self._values, self.values_quantized)

    def _with_buffer(self, found: Tensor, buffer: Tensor, quantized: Tensor) -> Tensor:
        """Quantized tokens from `found`, later ones from a buffer, and zeros: [B, Hkv, S, D]."""
        slot = torch.arange(self.sizes.slots, device=self.device)
        packed = (slot < quantized[:, None])[:, None, :, None]
        whole = found[:, :, slot.clamp_max(found.shape[2] - 1)]
        kept = buffer[:, :, slot % buffer.shape[2]].where(self.occupied[:, None, :, None], 0)
        return whole.where(packed, kept)

    def codes_of_keys(self) -> QuantizeResult:
        """The quantized keys of every row, as `quantize` returns them: groups of the first tokens, then zeros."""
        return self._masked(self._key_parts, self.keys_quantized, self.config.group, self._most_groups)

    def codes_of_values(self) -> QuantizeResult:
        """The quantized values of every row, as `quantize` returns them: the first tokens, then zeros."""
        return self._masked(self._value_parts, self.values_quantized, 1, self._most_values)

    def _masked(self, parts: tuple[Tensor, Tensor, Tensor], quantized: Tensor, each: int, most: int) -> QuantizeResult:
        """Codes, scales and minima of the quantized tokens; zeros for others. each: the tokens of a row of scales,
        most: the rows of scales."""
        codes, scale, minimum = map(in_token_order, parts)
        words = codes.shape[2] // scale.shape[2]
        found = []
        for part, rows in ((codes, words), (scale, 1), (minimum, 1)):
            part = part[:, :, :most * rows]
            group = torch.arange(most * rows, device=self.device) // rows
            there = (group * each < quantized[:, None])[:, None, :, None]
            found.append(part.masked_fill(~there, 0))
        return QuantizeResult(*found)

    def _store_prompt(self, key: Tensor, value: Tensor, place: Tensor, padded: bool) -> None:
        count, total = self._count, key.shape[2]
        store_prompt(
            key, value, place, count, self._key_codes, self._key_scales, self._value_codes, self._value_scales,
            self._extreme, self.config.key_bits, self.config.value_bits, self.config.group,
            self.config.residual, self._fragments,
        )
        for buffer, tokens in ((self._keys, key), (self._values, value)):
            # The newest tokens in their places: place i has the last token whose number is i modulo its length.
            length = buffer.shape[2]
            i = torch.arange(length, device=self.device)
            number = count[:, None] - 1 - (count[:, None] - 1 - i) % length
            at = place.gather(1, number.clamp(0, total - 1))
            buffer.copy_(tokens.take_along_dim(at[:, None, :, None], 2))
