"""KIVI on the GPU: keys and values quantized to 2 or 4 bits, and a decode step in three launches.

A step attends, merges the shares of the attention and quantizes a value per KV head, and quantizes R keys of the rows
that have as many. What is due follows from counters on the device, so a captured step can be replayed as any step.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...reference._validate import check_config, check_reorder, check_room
from ...reference.baselines._validate_kivi import (
    WORD,
    check_dequantize,
    check_head_dim,
    check_quantize,
    words_of,
)
from ...reference.baselines.kivi import KIVIConfig, QuantizeResult
from .._common.launch import (
    GROUP_ROWS,
    INTERPRETED,
    MAX_SPLITS,
    PTX,
    SMALL_TILES,
    check_launchable,
    key_block,
    multiprocessors,
    on_device_of,
    padded_head_dim,
    split_slots,
)
from .._common.numerics import LOG2_E
from .._common.state import State
from .kivi_fragment_kernels import EIGHT, fragment_kernel
from .kivi_kernels import (
    APART,
    EVERY,
    PROMPT,
    SEEN,
    STEP,
    dequantize_kernel,
    quantize_keys_kernel,
    quantize_values_kernel,
)
from .kivi_step_kernels import attention_kernel, merge_kernel

__all__ = ["KIVIConfig", "KIVIState", "QuantizeResult", "dequantize", "quantize"]

#: Elements per program. In the interpreter, a program's cost does not depend on its size.
TILE = 8192 if INTERPRETED else 4096
#: One-warp programs per multiprocessor that run at the same time, and the registers of each. With 128 registers, 16 run,
#: but take 5 % longer on an H100.
FRAGMENT_PROGRAMS, FRAGMENT_REGISTERS = 12, 168
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
    return QuantizeResult(*_quantize(x, bits, axis, group, dtype))


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
    result: Tensor = _dequantize(codes, scale, minimum, bits, axis, group, dtype)
    return result


# Operations ----------------------------------------------------------------------------------------------------------


def _results(x: Tensor, bits: int, axis: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised codes, scales and minima of x [B, H, T, D]."""
    *rows, tokens, channels = x.shape
    if axis == -2:
        words, groups = (tokens // group * words_of(group, bits), channels), (tokens // group, channels)
    else:
        words, groups = (tokens, channels * bits // WORD), (tokens, channels // group)
    codes = torch.empty(*rows, *words, dtype=torch.int32, device=x.device)
    scale, minimum = (torch.empty(*rows, *groups, dtype=dtype, device=x.device) for _ in range(2))
    return codes, scale, minimum


@torch.library.custom_op("kvtwin::kivi_quantize", mutates_args=())
def _quantize(x: Tensor, bits: int, axis: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    found = _results(x, bits, axis, group, dtype)
    if axis == -2:
        _keys_kernel(x, None, None, None, None, *found, bits, group, 0, EVERY.value, x.shape[2] // group)
    else:
        _values_kernel(x, None, None, *found, bits, group, 0, EVERY.value, x.shape[2])
    return found


@_quantize.register_fake
def _(x: Tensor, bits: int, axis: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return _results(x, bits, axis, group, dtype)


def _keys_kernel(
    x: Tensor, place: Tensor | None, count: Tensor | None, due: Tensor | None, counters: Tensor | None, codes: Tensor,
    scale: Tensor, minimum: Tensor, bits: int, group: int, residual: int, mode: int, groups: int,
) -> None:
    """Launch `quantize_keys_kernel`, with `groups` programs per head. Arguments that the mode does not use are None."""
    batch, heads, _, head_dim = x.shape
    rows = max(group, WORD // bits)
    block = min(padded_head_dim(head_dim), max(16, TILE // rows))
    with on_device_of(x):
        quantize_keys_kernel[(batch * heads * groups,)](
            x, codes if place is None else place, codes if count is None else count, codes if due is None else due,
            codes if counters is None else counters, codes, scale, minimum, heads, groups, scale.shape[2], residual,
            1 if place is None else place.shape[1], *x.stride(),
            HEAD_DIM=head_dim, BITS=bits, GROUP=group, ROWS=rows, BLOCK=block, MODE=mode, num_warps=4,
        )


def _values_kernel(
    x: Tensor, place: Tensor | None, count: Tensor | None, codes: Tensor, scale: Tensor, minimum: Tensor, bits: int,
    group: int, residual: int, mode: int, tokens: int,
) -> None:
    """Launch `quantize_values_kernel` for the first `tokens` values. Arguments that the mode does not use are None."""
    batch, heads, _, head_dim = x.shape
    rows = 16 if SMALL_TILES else max(1, TILE // padded_head_dim(head_dim))
    tiles = triton.cdiv(tokens, rows)
    with on_device_of(x):
        quantize_values_kernel[(batch * heads * tiles,)](
            x, codes if place is None else place, codes if count is None else count, codes, scale, minimum, heads,
            tiles, tokens, scale.shape[2], residual, 1 if place is None else place.shape[1], *x.stride(),
            HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), BITS=bits, GROUP=group, ROWS=rows, MODE=mode,
            DISTANCE=1 if mode == EVERY.value else APART.value, num_warps=4,
        )


@torch.library.custom_op("kvtwin::kivi_dequantize", mutates_args=())
def _dequantize(
    codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, axis: int, group: int, dtype: torch.dtype
) -> Tensor:
    codes, scale, minimum = codes.contiguous(), scale.contiguous(), minimum.contiguous()
    result = _dequantized(scale, axis, group, dtype)
    block = TILE // 4
    with on_device_of(codes):
        dequantize_kernel[(triton.cdiv(result.numel(), block),)](
            codes, scale, minimum, result, result.numel(), *result.shape[2:], scale.shape[axis],
            BITS=bits, AXIS=axis, GROUP=group, WORDS=words_of(group, bits), BLOCK=block, num_warps=4,
        )
    return result


def _dequantized(scale: Tensor, axis: int, group: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised result of `dequantize`."""
    shape = list(scale.shape)
    shape[axis] *= group
    return torch.empty(shape, dtype=dtype, device=scale.device)


@_dequantize.register_fake
def _(
    codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, axis: int, group: int, dtype: torch.dtype
) -> Tensor:
    return _dequantized(scale, axis, group, dtype)


@torch.library.custom_op(
    "kvtwin::kivi_store",
    mutates_args=("key_codes", "key_scale", "key_minimum", "value_codes", "value_scales"),
)
def _store(
    key: Tensor, value: Tensor, place: Tensor, count: Tensor, key_codes: Tensor, key_scale: Tensor, key_minimum: Tensor,
    value_codes: Tensor, value_scales: Tensor, key_bits: int, value_bits: int, group: int, residual: int,
) -> None:
    """Quantize the keys and values of a prompt [B, Hkv, T, D], of which row b has count[b] tokens, at place[b] of the
    prompt. A state's buffers as in `attention_kernel`."""
    total = key.shape[2]
    if total >= residual:
        _keys_kernel(
            key, place, count, None, None, key_codes, key_scale, key_minimum, key_bits, group, residual, PROMPT.value,
            (total - total % residual) // group,
        )
    if total > residual:
        scale, minimum = value_scales.unbind(-1)
        _values_kernel(
            value, place, count, value_codes, scale, minimum, value_bits, group, residual, PROMPT.value,
            total - residual,
        )


@_store.register_fake
def _(
    key: Tensor, value: Tensor, place: Tensor, count: Tensor, key_codes: Tensor, key_scale: Tensor, key_minimum: Tensor,
    value_codes: Tensor, value_scales: Tensor, key_bits: int, value_bits: int, group: int,
    residual: int,
) -> None:
    return None


@torch.library.custom_op(
    "kvtwin::kivi_step",
    mutates_args=(
        "keys", "values", "key_codes", "key_scale", "key_minimum", "value_codes", "value_scales",
        "count", "counters", "due", "positions", "partial", "row_maxima", "weight_sums",
    ),
)
def _step(
    query: Tensor, new_key: Tensor, new_value: Tensor, keys: Tensor, values: Tensor, key_codes: Tensor,
    key_scale: Tensor, key_minimum: Tensor, value_codes: Tensor, value_scales: Tensor,
    count: Tensor, counters: Tensor, due: Tensor, positions: Tensor, partial: Tensor, row_maxima: Tensor,
    weight_sums: Tensor, scale: float, key_bits: int, value_bits: int, group: int, splits: int,
) -> Tensor:
    """One step: stores the token in the buffers, attends, quantizes what is due, and counts the token."""
    (batch, query_heads, head_dim), (_, heads, residual, _) = query.shape, keys.shape
    slots, pad = positions.shape[1], padded_head_dim(head_dim)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    value_scale, value_minimum = value_scales.unbind(-1)
    shape = {"GROUP_HEADS": query_heads // heads, "HEAD_DIM": head_dim, "D_PAD": pad, "ROWS": GROUP_ROWS}
    with on_device_of(query):
        numbers = (
            count, counters, positions, partial, row_maxima, weight_sums, scale * LOG2_E.value, heads, splits, residual,
            slots, key_scale.shape[2], value_scales.shape[2], *query.stride(), *new_key.stride(), *new_value.stride(),
        )
        constants = {
            "KEY_BITS": key_bits, "VALUE_BITS": value_bits, "GROUP": group, "WORDS": words_of(group, key_bits),
        }
        if _in_fragments(keys.dtype, query_heads // heads, head_dim, group, key_bits, value_bits):
            fragment_kernel[(batch * heads * (splits + 1),)](
                query, new_key, new_value, keys, values, key_codes, key_scale, key_minimum, key_scale.view(torch.int32),
                key_minimum.view(torch.int32), value_codes, value_scales.view(torch.int32), *numbers, **constants,
                GROUP_HEADS=query_heads // heads, HEAD_DIM=head_dim, num_warps=1, num_stages=1,
                maxnreg=FRAGMENT_REGISTERS,
            )
        else:
            attention_kernel[(batch * heads * (splits + 1),)](
                query, new_key, new_value, keys, values, key_codes, key_scale, key_minimum, value_codes, value_scale,
                value_minimum, *numbers, **shape, **constants,
                BLOCK=key_block(head_dim, query.element_size(), slots),
                KEY_PAIRS=_in_pairs(keys.dtype, group, key_bits),
                VALUE_PAIRS=_in_pairs(keys.dtype, group, value_bits), num_warps=4,
            )
        merge_kernel[(batch * heads,)](
            partial, row_maxima, weight_sums, output, values, value_codes, value_scale, value_minimum, count, counters,
            due, heads, splits + 1, residual, slots, value_scales.shape[2],
            **shape, BITS=value_bits, GROUP=group, PARTS=triton.next_power_of_2(splits + 1), num_warps=4,
        )
        _keys_kernel(
            keys, None, count, due, counters, key_codes, key_scale, key_minimum, key_bits, group, residual, STEP.value,
            residual // group,
        )
    return output


@_step.register_fake
def _(
    query: Tensor, new_key: Tensor, new_value: Tensor, keys: Tensor, values: Tensor, key_codes: Tensor,
    key_scale: Tensor, key_minimum: Tensor, value_codes: Tensor, value_scales: Tensor,
    count: Tensor, counters: Tensor, due: Tensor, positions: Tensor, partial: Tensor, row_maxima: Tensor,
    weight_sums: Tensor, scale: float, key_bits: int, value_bits: int, group: int, splits: int,
) -> Tensor:
    return query.new_empty(query.shape)


def _in_fragments(
    dtype: torch.dtype, group_heads: int, head_dim: int, group: int, key_bits: int, value_bits: int
) -> bool:
    """Whether `fragment_kernel` applies: a lane has whole words, and all numbers of a lane's words have one scale."""
    units = head_dim * value_bits // (WORD * EIGHT.value)
    return (
        (PTX or INTERPRETED) and dtype != torch.float32 and head_dim in (64, 128) and group_heads <= EIGHT.value
        and units in (1, 2) and group % (WORD // key_bits) == 0 and group % (units * WORD // value_bits) == 0
    )


def _fragment_splits(rows: int, tokens: int, key_bits: int, device: torch.device) -> int:
    """The number of one-warp programs that share the quantized tokens of a KV head, beside one for the others. Rounded
    down, since a nearly empty wave takes as long as a full one."""
    tiles = triton.cdiv(tokens, EIGHT.value * WORD // key_bits)
    wanted = 2 if INTERPRETED else FRAGMENT_PROGRAMS * multiprocessors(device) // rows
    return max(1, min(wanted, tiles, MAX_SPLITS - 1))


def _in_pairs(dtype: torch.dtype, group: int, bits: int) -> bool:
    """Whether a step computes two numbers with one instruction: those of 16 bits, if a word has one scale."""
    return dtype != torch.float32 and group >= WORD // bits


# The state -----------------------------------------------------------------------------------------------------------


class KIVIState(State):
    """The KIVI cache of `batch` sequences in one layer. Attributes and errors as in the reference.

    float32, float16 or bfloat16; D from 16 to 256; up to 16 query heads per KV head. TypeError or ValueError for other
    arguments, and for CPU tensors outside Triton's interpreter.
    """

    config: KIVIConfig

    def __init__(
        self, config: KIVIConfig, *, batch: int, query_heads: int, key_value_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str,
    ) -> None:
        config = check_config(config, KIVIConfig)
        super().__init__(
            config, slots=config.max_tokens, batch=batch, query_heads=query_heads, key_value_heads=key_value_heads,
            head_dim=head_dim, dtype=dtype, device=device,
        )
        check_head_dim(head_dim, group=config.group, bits=config.value_bits, of="value_bits")
        slots, residual, each = config.max_tokens, config.residual, config.group
        # The most keys and values of a row that can be quantized; at least a group and one.
        groups, rows = max(slots - slots % residual, each) // each, max(slots - residual, 1)
        self._keys, self._values = (
            self._buffer(batch, key_value_heads, places, head_dim, dtype=self.dtype)
            for places in (residual, residual + 1)
        )
        words = groups * words_of(each, config.key_bits)
        self._key_codes = self._buffer(batch, key_value_heads, words, head_dim, dtype=torch.int32)
        self._key_scale, self._key_minimum = (
            self._buffer(batch, key_value_heads, groups, head_dim, dtype=self.dtype) for _ in range(2)
        )
        words = head_dim * config.value_bits // WORD
        self._value_codes = self._buffer(batch, key_value_heads, rows, words, dtype=torch.int32)
        # Scale and minimum lie side by side, so that one load reads both.
        self._value_scales = self._buffer(batch, key_value_heads, rows, head_dim // each, 2, dtype=self.dtype)
        self._value_scale, self._value_minimum = self._value_scales.unbind(-1)
        self._count, self._due = (self._buffer(batch, dtype=torch.int64) for _ in range(2))
        self._counters = self._buffer(2, dtype=torch.int64)
        self.positions = self._buffer(batch, slots, dtype=torch.int64)
        if _in_fragments(
            self.dtype, query_heads // key_value_heads, head_dim, each, config.key_bits, config.value_bits
        ):
            self._splits = _fragment_splits(batch * key_value_heads, slots, config.key_bits, self.device)
        else:
            self._splits, _ = split_slots(self.sizes, key_block(head_dim, self.dtype.itemsize, slots), self.device)
        parts = batch * query_heads * (self._splits + 1)
        self._partial = self._buffer(parts, head_dim, dtype=torch.float32)
        self._row_maxima, self._weight_sums = (self._buffer(parts, dtype=torch.float32) for _ in range(2))
        self.reset()

    def reset(self) -> None:
        """Forget every token."""
        self._interrupted = "reset"
        self._count.zero_()
        self._counters.zero_()
        self.positions.fill_(-1)
        self._counted = 0
        self._end_change()

    @property
    def tokens_seen(self) -> int:
        """Tokens received, padding included. Reads the device, since the host does not see replays of a graph."""
        return int(self._counters[SEEN.value])

    @property
    def occupied(self) -> Tensor:
        return self.positions >= 0

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
        parts = self._key_codes, self._key_scale, self._key_minimum
        return self._masked(parts, self.keys_quantized, self.config.group)

    def codes_of_values(self) -> QuantizeResult:
        """The quantized values of every row, as `quantize` returns them: the first tokens, then zeros."""
        parts = self._value_codes, self._value_scale, self._value_minimum
        return self._masked(parts, self.values_quantized, 1)

    def _masked(self, parts: tuple[Tensor, Tensor, Tensor], quantized: Tensor, each: int) -> QuantizeResult:
        """Codes, scales and minima of the quantized tokens; zeros for others. each: the tokens of a row of scales."""
        groups = parts[1].shape[2]
        found = []
        for part in parts:
            group = torch.arange(part.shape[2], device=self.device) // (part.shape[2] // groups)
            there = (group * each < quantized[:, None])[:, None, :, None]
            found.append(part.masked_fill(~there, 0))
        return QuantizeResult(*found)

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Full causal attention of the prompt; then its keys and values are quantized.

        query [B, Hq, T, D]; key, value [B, Hkv, T, D]; occupied [B, T] bool, False for padding, by default all True.
        Returns [B, Hq, T, D], zeros for padding, which takes no slot. RuntimeError if the state holds tokens;
        ValueError for more than config.max_tokens tokens.
        """
        padded = occupied is not None
        occupied = self._check_prompt(query, key, value, occupied)
        total = occupied.shape[1]
        self._check_empty()
        check_room(0, total, self.config.max_tokens)
        self._start_change("prefill")
        output = self._attend_prompt(query, key, value, occupied, padded=padded)
        place = (~occupied).to(torch.int8).argsort(stable=True, dim=1)        # the tokens of each row, then its padding
        count = occupied.sum(1)
        _store(
            key, value, place, count, self._key_codes, self._key_scale, self._key_minimum, self._value_codes,
            self._value_scales, self.config.key_bits, self.config.value_bits, self.config.group, self.config.residual,
        )
        for buffer, tokens in ((self._keys, key), (self._values, value)):
            # The newest tokens in their places: place i has the last token whose number is i modulo its length.
            length = buffer.shape[2]
            i = torch.arange(length, device=self.device)
            number = count[:, None] - 1 - (count[:, None] - 1 - i) % length
            at = place.gather(1, number.clamp(0, total - 1))
            buffer.copy_(tokens.take_along_dim(at[:, None, :, None], 2))
        slot = torch.arange(total, device=self.device)
        self.positions[:, :total].copy_(place.masked_fill(slot >= count[:, None], -1))
        self._count.copy_(count)
        self._counters.fill_(total)
        self._counted = total
        self._end_change()
        return output

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append a token and attend to all tokens; then quantize.

        query [B, Hq, D]; key, value [B, Hkv, D]. Returns the attention output [B, Hq, D]. Does not synchronize with the
        host. ValueError beyond config.max_tokens tokens, counted by the host; in replays of a graph, further tokens are
        dropped.
        """
        self._check_step(query, key, value)
        check_room(self._counted, 1, self.config.max_tokens)
        self._start_change("step")
        config = self.config
        output: Tensor = _step(
            query, key, value, self._keys, self._values, self._key_codes, self._key_scale, self._key_minimum,
            self._value_codes, self._value_scales, self._count, self._counters, self._due,
            self.positions, self._partial, self._row_maxima, self._weight_sums, self.scale, config.key_bits,
            config.value_bits, config.group, self._splits,
        )
        self._counted += 1
        self._end_change()
        return output

    def reorder(self, index: Tensor) -> None:
        """Replace row b by row index[b], as beam search requires. index [B] int64."""
        index = check_reorder(index, self.sizes.batch, self.device)
        self._start_change("reorder")
        for tensor in (
            self._keys, self._values, self._key_codes, self._key_scale, self._key_minimum, self._value_codes,
            self._value_scales, self._count, self.positions,
        ):
            tensor.copy_(tensor.index_select(0, index))
        self._end_change()
