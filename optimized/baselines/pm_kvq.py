"""PM-KVQ on the GPU: codes of 16 bits that shrink in place to 8, 4 and 2, and a decode step in three launches.

A step attends, merges the shares of the attention, and quantizes a full window and shrinks codes where that is due.
What is due follows from counters on the device, so a captured step can be replayed as any step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...reference.baselines.pm_kvq import PMKVQConfig, QuantizeResult, ShrinkResult
from ...reference.contract.pm_kvq import (
    WIDTHS,
    check_dequantize,
    check_head_dim,
    check_quantize,
    check_shrink,
    groups_of,
    scale_dtype,
)
from .._common.growing_state import GrowingState
from .._common.launch import (
    INTERPRETED,
    SMALL_TILES,
    cdiv,
    check_launchable,
    group_rows,
    key_block,
    multiprocessors,
    next_power_of_2,
    on_device_of,
    padded_head_dim,
    split_slots,
)
from .._common.numerics import LOG2_E
from .._common.operation import operation
from .pm_kvq_kernels import (
    PROMPT,
    STEP,
    dequantize_kernel,
    quantize_kernel,
    settle_kernel,
    shrink_kernel,
)
from .pm_kvq_step_kernels import attention_kernel, merge_kernel

__all__ = ["PMKVQConfig", "PMKVQState", "QuantizeResult", "ShrinkResult", "dequantize", "quantize", "shrink"]

#: Elements per program. In the interpreter, a program's cost does not depend on its size.
TILE = 8192 if INTERPRETED else 2048
#: Programs per multiprocessor that settle what a step makes due.
SETTLING = 4


def quantize(
    x: Tensor, *, bits: int = 16, group: int = 128, least_scale: float = 0.0, dtype: torch.dtype | None = None
) -> QuantizeResult:
    """Quantize x [B, H, T, D] in groups of channels, to 16, 8, 4 or 2 bits. Any strides.

    Semantics, bitwise: the reference's `quantize`, in float32, float16 or bfloat16. TypeError or ValueError for invalid
    arguments, for inputs that require grad, and for CPU tensors outside Triton's interpreter.
    """
    x, bits, group, least_scale, dtype = check_quantize(x, bits, group, least_scale, dtype)
    check_launchable(x=x, dtype=torch.empty(0, dtype=dtype, device=x.device))
    return QuantizeResult(*_quantize(x, bits, group, least_scale, dtype))


def shrink(codes: Tensor, scale: Tensor, *, bits: int) -> ShrinkResult:
    """Shrink codes of `bits` = 2n bits, 16, 8 or 4, to n bits.

    Semantics, bitwise: the reference's `shrink`, for scales in float32, float16 or bfloat16. Errors as in `quantize`.
    """
    codes, scale, bits = check_shrink(codes, scale, bits)
    check_launchable(scale=scale)
    return ShrinkResult(*_shrink(codes, scale, bits))


def dequantize(
    codes: Tensor, scale: Tensor, minimum: Tensor, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The numbers [B, H, T, D] that a `QuantizeResult` stands for, in `dtype`, by default that of the minima.

    Semantics, bitwise: the reference's `dequantize`, in float32, float16 or bfloat16. Errors as in `quantize`.
    """
    codes, scale, minimum, dtype = check_dequantize(codes, scale, minimum, dtype)
    check_launchable(scale=scale, minimum=minimum, dtype=torch.empty(0, dtype=dtype, device=scale.device))
    result: Tensor = _dequantize(codes, scale, minimum, dtype)
    return result


# Operations ----------------------------------------------------------------------------------------------------------


def _shape_of_groups(x: Tensor, group: int) -> dict[str, int]:
    """The channels and groups of tokens as kernels take them."""
    head_dim = x.shape[-1]
    return {
        "HEAD_DIM": head_dim, "HALF_PAD": padded_head_dim(head_dim // 2), "GROUPS": groups_of(head_dim, group),
        "GROUP": group,
    }


def _results(x: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised codes, scales and minima of x [B, H, T, D]."""
    shape = (*x.shape[:3], groups_of(x.shape[-1], group))
    return (
        torch.empty(x.shape, dtype=torch.int32, device=x.device),
        torch.empty(shape, dtype=scale_dtype(dtype), device=x.device),
        torch.empty(shape, dtype=dtype, device=x.device),
    )


@operation("kvtwin::pm_kvq_quantize", mutates_args=())
def _quantize(
    x: Tensor, bits: int, group: int, least_scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    found = _results(x, group, dtype)
    shape = _shape_of_groups(x, group)
    batch, heads, tokens, _ = x.shape
    count, rows = batch * heads * tokens, 16 if SMALL_TILES else max(1, TILE // (2 * shape["HALF_PAD"]))
    with on_device_of(x):
        quantize_kernel[(cdiv(count, rows),)](
            x, *found, least_scale, count, tokens, heads, *x.stride(), **shape, BITS=bits, ROWS=rows, num_warps=4
        )
    return found


@_quantize.register_fake
def _(x: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return _results(x, group, dtype)


@operation("kvtwin::pm_kvq_shrink", mutates_args=())
def _shrink(codes: Tensor, scale: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    codes, scale = codes.contiguous(), scale.contiguous()
    found = torch.empty_like(codes), torch.empty_like(scale)
    with on_device_of(codes):
        shrink_kernel[(cdiv(codes.numel(), TILE),)](
            codes, scale, *found, codes.numel(), scale.numel(), TO=bits // 2, BLOCK=TILE, num_warps=4
        )
    return found


@_shrink.register_fake
def _(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return codes.new_empty(codes.shape), scale.new_empty(scale.shape)


@operation("kvtwin::pm_kvq_dequantize", mutates_args=())
def _dequantize(codes: Tensor, scale: Tensor, minimum: Tensor, dtype: torch.dtype) -> Tensor:
    codes, scale, minimum = codes.contiguous(), scale.contiguous(), minimum.contiguous()
    result = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    with on_device_of(codes):
        dequantize_kernel[(cdiv(codes.numel(), TILE),)](
            codes, scale, minimum, result, codes.numel(), codes.shape[-1] // scale.shape[-1], BLOCK=TILE, num_warps=4
        )
    return result


@_dequantize.register_fake
def _(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


def _settle(
    key: Tensor, value: Tensor, place: Tensor | None, count: Tensor, due: Tensor | None, counters: Tensor | None,
    stored: tuple[Tensor, ...], least_scale: float, sinks: int, window: int, limits: list[int], seen: int, group: int,
) -> None:
    """Launch `settle_kernel`. stored: words, scales and minima of keys and of values."""
    batch, heads = key.shape[:2]
    units, capacity = stored[0].shape[2], stored[1].shape[2]
    shape = _shape_of_groups(key, group)
    block = 16 if SMALL_TILES else max(1, TILE // (2 * shape["HALF_PAD"]))
    parts = cdiv(units, block)
    if place is None:
        # Nearly all steps find nothing due: 4,096 programs that say so took 10 us on an H200, with one row.
        parts = min(parts, 1 if INTERPRETED else cdiv(SETTLING * multiprocessors(key.device), batch * heads))
    with on_device_of(key):
        settle_kernel[(batch * heads * parts,)](
            key, value, count if place is None else place, count, count if due is None else due,
            count if counters is None else counters, *stored, least_scale, heads, parts, units, capacity, sinks, window,
            1 if place is None else place.shape[1], *limits, seen, *key.stride(), *value.stride(),
            **shape, BLOCK=block, MODE=(STEP if place is None else PROMPT).value, num_warps=4,
        )


@operation(
    "kvtwin::pm_kvq_store",
    mutates_args=("key_words", "key_scale", "key_minimum", "value_words", "value_scale", "value_minimum"),
)
def _store(
    key: Tensor, value: Tensor, place: Tensor, count: Tensor, key_words: Tensor, key_scale: Tensor, key_minimum: Tensor,
    value_words: Tensor, value_scale: Tensor, value_minimum: Tensor, least_scale: float, sinks: int, window: int,
    limits: list[int], group: int,
) -> None:
    """Quantize the keys and values of a prompt [B, Hkv, T, D], of which row b has count[b] tokens, at place[b] of the
    prompt. A state's buffers as in `attention_kernel`."""
    stored = key_words, key_scale, key_minimum, value_words, value_scale, value_minimum
    total = key.shape[2]
    if total >= sinks + window:
        _settle(key, value, place, count, None, None, stored, least_scale, sinks, window, limits, total, group)


@operation(
    "kvtwin::pm_kvq_step",
    mutates_args=(
        "keys", "values", "key_words", "key_scale", "key_minimum", "value_words", "value_scale", "value_minimum",
        "count", "counters", "due", "positions", "partial", "row_maxima", "weight_sums",
    ),
)
def _step(
    query: Tensor, new_key: Tensor, new_value: Tensor, keys: Tensor, values: Tensor, key_words: Tensor,
    key_scale: Tensor, key_minimum: Tensor, value_words: Tensor, value_scale: Tensor, value_minimum: Tensor,
    count: Tensor, counters: Tensor, due: Tensor, positions: Tensor, partial: Tensor, row_maxima: Tensor,
    weight_sums: Tensor, scale: float, least_scale: float, sinks: int, window: int, limits: list[int], group: int,
    splits: int,
) -> Tensor:
    """One step: stores the token in the buffers, attends, quantizes and shrinks what is due, and counts the token."""
    (batch, query_heads, head_dim), (_, heads, _, _) = query.shape, keys.shape
    slots, units, capacity = positions.shape[1], key_words.shape[2], key_scale.shape[2]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    groups, rows = _shape_of_groups(keys, group), group_rows(query_heads // heads, query.dtype)
    with on_device_of(query):
        attention_kernel[(batch * heads * (splits + 1),)](
            query, new_key, new_value, keys, values, key_words, key_scale, key_minimum, value_words, value_scale,
            value_minimum, count, counters, positions, partial, row_maxima, weight_sums,
            scale * LOG2_E.value, heads, splits, units, capacity, sinks, window, slots, *limits,
            *query.stride(), *new_key.stride(), *new_value.stride(),
            **groups, GROUP_HEADS=query_heads // heads, ROWS=rows,
            BLOCK=_block(head_dim, query.element_size(), units), num_warps=4,
        )
        merge_kernel[(batch * query_heads,)](
            partial, row_maxima, weight_sums, output, count, counters, due, heads, splits + 1, slots,
            GROUP_HEADS=query_heads // heads, HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim),
            PARTS=next_power_of_2(splits + 1), num_warps=4,
        )
    stored = key_words, key_scale, key_minimum, value_words, value_scale, value_minimum
    _settle(keys, values, None, count, due, counters, stored, least_scale, sinks, window, limits, 0, group)
    return output


@_step.register_fake
def _(query: Tensor) -> Tensor:
    return query.new_empty(query.shape)


def _block(head_dim: int, itemsize: int, units: int) -> int:
    """The units of a tile of attention."""
    return key_block(head_dim, itemsize, units)


# The state -----------------------------------------------------------------------------------------------------------


class PMKVQState(GrowingState):
    """The PM-KVQ cache of `batch` sequences in one layer. Attributes and errors as in the reference.

    float32, float16 or bfloat16; D from 16 to 256; up to 16 query heads per KV head. TypeError or ValueError for other
    arguments, and for CPU tensors outside Triton's interpreter.
    """

    Config = PMKVQConfig
    config: PMKVQConfig
    _step = _step
    _rows = (
        "_keys", "_values", "_key_words", "_key_scale", "_key_minimum", "_value_words", "_value_scale",
        "_value_minimum", *GrowingState._rows,
    )

    def _allocate(self) -> int:
        (batch, _, heads, _, head_dim), config = self.sizes, self.config
        check_head_dim(head_dim, config.group)
        self._limits = list(config.limits[:-1])
        tokens, units = _room(config)
        groups, minima = groups_of(head_dim, config.group), self.dtype
        self._keys, self._values = (
            self._buffer(batch, heads, config.sinks + config.window, head_dim, dtype=self.dtype) for _ in range(2)
        )
        self._key_words, self._value_words = (
            self._buffer(batch, heads, units, head_dim // 2, dtype=torch.int32) for _ in range(2)
        )
        self._key_scale, self._value_scale = (
            self._buffer(batch, heads, tokens, groups, dtype=scale_dtype(minima)) for _ in range(2)
        )
        self._key_minimum, self._value_minimum = (
            self._buffer(batch, heads, tokens, groups, dtype=minima) for _ in range(2)
        )
        self._due = self._buffer(batch, dtype=torch.int64)
        self._splits, _ = split_slots(
            self.sizes._replace(slots=units), _block(head_dim, self.dtype.itemsize, units), self.device
        )
        return self._splits + 1

    def _named(self) -> dict[str, Any]:
        config = self.config
        return super()._named() | {
            "keys": self._keys, "values": self._values, "key_words": self._key_words, "key_scale": self._key_scale,
            "key_minimum": self._key_minimum, "value_words": self._value_words, "value_scale": self._value_scale,
            "value_minimum": self._value_minimum, "due": self._due, "least_scale": float(config.least_scale),
            "sinks": config.sinks, "window": config.window, "limits": self._limits, "group": config.group,
            "splits": self._splits,
        }

    @property
    def tokens_quantized(self) -> Tensor:
        entered = (self._count - self.config.sinks).clamp_min(0)
        return entered - entered % self.config.window

    @property
    def width(self) -> int:
        return self.config.width_after(self.tokens_seen)

    @property
    def budget_bytes(self) -> int:
        """The most bytes that the codes and the unquantized keys and values, in 16 bits, of a sequence take."""
        return int(self.config.bits * self.config.max_tokens * self.sizes.key_value_heads * self.sizes.head_dim) // 4

    @property
    def key(self) -> Tensor:
        """[B, Hkv, S, D], computed at each access."""
        return self._with_buffer(dequantize(*self.codes_of_keys()), self._keys)

    @property
    def value(self) -> Tensor:
        """[B, Hkv, S, D], computed at each access."""
        return self._with_buffer(dequantize(*self.codes_of_values()), self._values)

    def _with_buffer(self, found: Tensor, buffer: Tensor) -> Tensor:
        """Quantized tokens from `found`, others from a buffer, and zeros: [B, Hkv, S, D]."""
        slot = torch.arange(self.sizes.slots, device=self.device)
        place = slot - self.tokens_quantized[:, None] * (slot >= self.config.sinks)
        at = place.clamp(0, buffer.shape[2] - 1)[:, None, :, None]
        whole = buffer.take_along_dim(at, 2).where(self.occupied[:, None, :, None], 0)
        return found.where(self._packed()[:, None, :, None], whole)

    def _packed(self) -> Tensor:
        """The slots of quantized tokens, [B, S] bool."""
        token = torch.arange(self.sizes.slots, device=self.device) - self.config.sinks
        return (token >= 0) & (token < self.tokens_quantized[:, None])

    def codes_of_keys(self) -> QuantizeResult:
        """The quantized keys of every row, codes of `width` bits, as `quantize` returns them: [B, Hkv, S, D] codes in
        the slots of their tokens, [B, Hkv, S, D / g] scales and minima, zeros in other slots."""
        return self._codes(self._key_words, self._key_scale, self._key_minimum)

    def codes_of_values(self) -> QuantizeResult:
        """The quantized values of every row, like `codes_of_keys`."""
        return self._codes(self._value_words, self._value_scale, self._value_minimum)

    def _codes(self, words: Tensor, *scales: Tensor) -> QuantizeResult:
        units, (batch, _, heads, slots, head_dim) = words.shape[2], self.sizes
        token = (torch.arange(slots, device=self.device) - self.config.sinks).clamp(0, scales[0].shape[2] - 1)
        start = _field_start(token // units)[:, None, None]
        halves = words[:, :, token % units, :, None] >> (start + torch.tensor([0, 16], device=self.device))
        codes = (halves & (1 << self.width) - 1).view(batch, heads, slots, head_dim).to(torch.int32)
        packed = self._packed()[:, None, :, None]
        return QuantizeResult(*(part.masked_fill(~packed, 0) for part in (codes, *(x[:, :, token] for x in scales))))

    def _store_prompt(self, key: Tensor, value: Tensor, place: Tensor, padded: bool) -> None:
        _store(
            key, value, place, self._count, self._key_words, self._key_scale, self._key_minimum, self._value_words,
            self._value_scale, self._value_minimum, float(self.config.least_scale), self.config.sinks,
            self.config.window, self._limits, self.config.group,
        )
        # The unquantized tokens: sinks, then those behind the quantized ones.
        i = torch.arange(self._keys.shape[2], device=self.device)
        number = i + self.tokens_quantized[:, None] * (i >= self.config.sinks)
        at = place.gather(1, number.clamp(0, key.shape[2] - 1))[:, None, :, None]
        for buffer, tokens in ((self._keys, key), (self._values, value)):
            buffer.copy_(tokens.take_along_dim(at, 2))


def _field_start(field: Tensor) -> Tensor:
    """`pm_kvq_kernels.field_start` on tensors."""
    return (field & 1) * 8 + (field & 2) * 2 + (field & 4) // 2


def _room(config: PMKVQConfig) -> tuple[int, int]:
    """The most quantized tokens of a row, and the units of memory, of a token in 16 bits, that they need in any width:
    at least one token, and a window of units."""
    most, units = 0, config.window
    for width, limit in zip(WIDTHS, config.limits, strict=True):
        entered = max(0, min(limit, config.max_tokens) - config.sinks)
        most = entered - entered % config.window
        units = max(units, -(-most * width // WIDTHS[0]))
    return max(most, 1), units
