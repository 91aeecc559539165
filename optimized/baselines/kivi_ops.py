"""KIVI's operations: quantization, and a decode step in three launches, whose attention has a kernel for all sizes and
a faster one for wide heads of 16-bit numbers.

A step attends, merges the shares of the attention and quantizes a value per KV head, and quantizes R keys of the rows
that have as many. What is due follows from counters on the device, so a captured step can be replayed as any step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.contract.kivi import WORD, words_of
from .._common.launch import (
    INTERPRETED,
    MAX_SPLITS,
    PTX,
    SMALL_TILES,
    cdiv,
    group_rows,
    key_block,
    multiprocessors,
    next_power_of_2,
    on_device_of,
    padded_head_dim,
)
from .._common.numerics import LOG2_E
from .._common.operation import operation
from .kivi_fragment_kernels import REST, fragment_kernel
from .kivi_fragment_operands import EIGHT
from .kivi_kernels import APART, EVERY, PROMPT, STEP, dequantize_kernel, quantize_keys_kernel, quantize_values_kernel
from .kivi_step_kernels import attention_kernel, merge_kernel

#: Elements per program. In the interpreter, a program's cost does not depend on its size.
TILE = 8192 if INTERPRETED else 4096
#: One-warp programs per multiprocessor that run at the same time, and the registers of each. With 128 registers, 16
#: programs run, but take 5 % longer on an H100.
FRAGMENT_PROGRAMS, FRAGMENT_REGISTERS = 12, 168


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


@operation("kvtwin::kivi_quantize", mutates_args=())
def quantize_tensor(x: Tensor, bits: int, axis: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    found = _results(x, bits, axis, group, dtype)
    if axis == -2:
        _keys_kernel(x, None, None, None, None, *found, None, bits, group, 0, EVERY.value, x.shape[2] // group)
    else:
        _values_kernel(x, None, None, *found, None, bits, group, 0, EVERY.value, x.shape[2])
    return found


@quantize_tensor.register_fake
def _(x: Tensor, bits: int, axis: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return _results(x, bits, axis, group, dtype)


def _keys_kernel(
    x: Tensor, place: Tensor | None, count: Tensor | None, due: Tensor | None, counters: Tensor | None, codes: Tensor,
    scale: Tensor, minimum: Tensor, extreme: Tensor | None, bits: int, group: int, residual: int, mode: int,
    groups: int, fragments: bool = False,
) -> None:
    """Launch `quantize_keys_kernel`, with `groups` programs per head. Arguments that the mode does not use are None."""
    batch, heads, _, head_dim = x.shape
    rows = max(group, WORD // bits)
    block = min(padded_head_dim(head_dim), max(16, TILE // rows))
    with on_device_of(x):
        quantize_keys_kernel[(batch * heads * groups,)](
            x, codes if place is None else place, codes if count is None else count, codes if due is None else due,
            codes if counters is None else counters, codes, scale, minimum, codes if extreme is None else extreme,
            heads, groups, scale.shape[2], residual, 1 if place is None else place.shape[1], *x.stride(),
            HEAD_DIM=head_dim, BITS=bits, GROUP=group, ROWS=rows, BLOCK=block, MODE=mode, FRAGMENTS=fragments,
            num_warps=4,
        )


def _values_kernel(
    x: Tensor, place: Tensor | None, count: Tensor | None, codes: Tensor, scale: Tensor, minimum: Tensor,
    extreme: Tensor | None, bits: int, group: int, residual: int, mode: int, tokens: int, fragments: bool = False,
) -> None:
    """Launch `quantize_values_kernel` for the first `tokens` values. Arguments that the mode does not use are None."""
    batch, heads, _, head_dim = x.shape
    rows = 16 if SMALL_TILES else max(1, TILE // padded_head_dim(head_dim))
    tiles = cdiv(tokens, rows)
    with on_device_of(x):
        quantize_values_kernel[(batch * heads * tiles,)](
            x, codes if place is None else place, codes if count is None else count, codes, scale, minimum,
            codes if extreme is None else extreme, heads, tiles, tokens, scale.shape[2], residual,
            1 if place is None else place.shape[1], *x.stride(),
            HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), BITS=bits, GROUP=group, ROWS=rows, MODE=mode,
            DISTANCE=1 if mode == EVERY.value else APART.value, FRAGMENTS=fragments, num_warps=4,
        )


@operation("kvtwin::kivi_dequantize", mutates_args=())
def dequantize_codes(
    codes: Tensor, scale: Tensor, minimum: Tensor, bits: int, axis: int, group: int, dtype: torch.dtype
) -> Tensor:
    codes, scale, minimum = codes.contiguous(), scale.contiguous(), minimum.contiguous()
    result = _dequantized(scale, axis, group, dtype)
    block = TILE // 4
    with on_device_of(codes):
        dequantize_kernel[(cdiv(result.numel(), block),)](
            codes, scale, minimum, result, result.numel(), *result.shape[2:], scale.shape[axis],
            BITS=bits, AXIS=axis, GROUP=group, WORDS=words_of(group, bits), BLOCK=block, num_warps=4,
        )
    return result


def _dequantized(scale: Tensor, axis: int, group: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised result of `dequantize`."""
    shape = list(scale.shape)
    shape[axis] *= group
    return torch.empty(shape, dtype=dtype, device=scale.device)


@dequantize_codes.register_fake
def _(scale: Tensor, axis: int, group: int, dtype: torch.dtype) -> Tensor:
    return _dequantized(scale, axis, group, dtype)


@operation(
    "kvtwin::kivi_store",
    mutates_args=("key_codes", "key_scales", "value_codes", "value_scales", "extreme"),
)
def store_prompt(
    key: Tensor, value: Tensor, place: Tensor, count: Tensor, key_codes: Tensor, key_scales: Tensor,
    value_codes: Tensor, value_scales: Tensor, extreme: Tensor, key_bits: int, value_bits: int, group: int,
    residual: int, fragments: bool,
) -> None:
    """Quantize the keys and values of a prompt [B, Hkv, T, D], of which row b has count[b] tokens, at place[b] of the
    prompt. A state's buffers as in `attention_kernel` or, with fragments, `fragment_kernel`; key_scales:
    `scales_of_keys`."""
    total, (key_scale, key_minimum) = key.shape[2], scales_of_keys(key_scales, fragments)
    if total >= residual:
        _keys_kernel(
            key, place, count, None, None, key_codes, key_scale, key_minimum, extreme, key_bits, group, residual,
            PROMPT.value, (total - total % residual) // group, fragments,
        )
    if total > residual:
        scale, minimum = value_scales.unbind(-1)
        _values_kernel(
            value, place, count, value_codes, scale, minimum, extreme, value_bits, group, residual, PROMPT.value,
            total - residual, fragments,
        )


@operation(
    "kvtwin::kivi_step",
    mutates_args=(
        "keys", "values", "key_codes", "key_scales", "value_codes", "value_scales", "extreme", "count", "counters",
        "due", "positions", "partial", "row_maxima", "weight_sums",
    ),
)
def attend_step(
    query: Tensor, new_key: Tensor, new_value: Tensor, keys: Tensor, values: Tensor, key_codes: Tensor,
    key_scales: Tensor, value_codes: Tensor, value_scales: Tensor, extreme: Tensor, count: Tensor, counters: Tensor,
    due: Tensor, positions: Tensor, partial: Tensor, row_maxima: Tensor, weight_sums: Tensor, scale: float,
    key_bits: int, value_bits: int, group: int, splits: int, rests: int, fragments: bool,
) -> Tensor:
    """One step: stores the token in the buffers, attends, quantizes what is due, and counts the token. key_scales:
    `scales_of_keys`. splits, rests: the programs that share a KV head's quantized tokens, and the others. fragments:
    whether the state's memory is in that order, see `in_fragments`."""
    (batch, query_heads, head_dim), (_, heads, residual, _) = query.shape, keys.shape
    slots, pad = positions.shape[1], padded_head_dim(head_dim)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    (key_scale, key_minimum), (value_scale, value_minimum) = (
        scales_of_keys(key_scales, fragments), value_scales.unbind(-1)
    )
    shape = {"GROUP_HEADS": query_heads // heads, "HEAD_DIM": head_dim, "D_PAD": pad}
    with on_device_of(query):
        tables = (count, counters, positions, partial, row_maxima, weight_sums, scale * LOG2_E.value, heads, splits)
        numbers = (
            residual, slots, key_scale.shape[2], value_scales.shape[2], *query.stride(), *new_key.stride(),
            *new_value.stride(),
        )
        constants = {
            "KEY_BITS": key_bits, "VALUE_BITS": value_bits, "GROUP": group, "WORDS": words_of(group, key_bits),
        }
        if fragments:
            fragment_kernel[(batch * heads * (splits + rests),)](
                query, new_key, new_value, keys, values, key_codes, key_scale, key_minimum, key_scale.view(torch.int32),
                value_codes, value_scales.view(torch.int32), extreme, *tables, rests, *numbers, **constants,
                GROUP_HEADS=query_heads // heads, HEAD_DIM=head_dim, num_warps=1, num_stages=1,
                maxnreg=FRAGMENT_REGISTERS,
            )
        else:
            attention_kernel[(batch * heads * (splits + 1),)](
                query, new_key, new_value, keys, values, key_codes, key_scale, key_minimum, value_codes, value_scale,
                value_minimum, *tables, *numbers, **shape, **constants,
                ROWS=group_rows(query_heads // heads, query.dtype),
                BLOCK=key_block(head_dim, query.element_size(), slots),
                KEY_PAIRS=in_pairs(keys.dtype, group, key_bits),
                VALUE_PAIRS=in_pairs(keys.dtype, group, value_bits), num_warps=4,
            )
        merge_kernel[(batch * query_heads,)](
            partial, row_maxima, weight_sums, output, values, value_codes, value_scale, value_minimum, extreme, count,
            counters, due, heads, splits + rests, residual, slots, value_scales.shape[2],
            **shape, BITS=value_bits, GROUP=group, PARTS=next_power_of_2(splits + rests), FRAGMENTS=fragments,
            num_warps=4,
        )
        _keys_kernel(
            keys, None, count, due, counters, key_codes, key_scale, key_minimum, extreme, key_bits, group, residual,
            STEP.value, residual // group, fragments,
        )
    return output


@attend_step.register_fake
def _(query: Tensor) -> Tensor:
    return query.new_empty(query.shape)


def scales_of_keys(scales: Tensor, fragments: bool) -> tuple[Tensor, ...]:
    """Scale and minimum of a state's groups of keys. They are one tensor, scales [2, B, Hkv, S / G, D], or with
    fragments [B, Hkv, S / G, D / 2, 2, 2], because PyTorch captures no graph of steps that change two views of one.
    """
    return scales.unbind(-2 if fragments else 0)


def in_fragments(
    dtype: torch.dtype, group_heads: int, head_dim: int, group: int, key_bits: int, value_bits: int
) -> bool:
    """Whether `fragment_kernel` applies: a lane has whole words, and all numbers of a lane's words have one scale."""
    units = head_dim * value_bits // (WORD * EIGHT.value)
    return (
        (PTX or INTERPRETED) and dtype != torch.float32 and head_dim in (64, 128) and group_heads <= EIGHT.value
        and units in (1, 2) and group % (WORD // key_bits) == 0 and group % (units * WORD // value_bits) == 0
    )


def fragment_room(groups: int, rows: int, group: int, key_bits: int) -> tuple[int, int]:
    """The groups of keys and rows of values to allocate per KV head: whole tiles, so that `fragment_kernel` can read
    them if `groups` and `rows` are in use. It also loads the keys of a tile more, but does not use them."""
    tile = EIGHT.value * WORD // key_bits
    tiles = cdiv(rows, tile)
    tiles_of_keys = max(cdiv(groups * group, tile), tiles + 1)
    return cdiv(tiles_of_keys * tile, group), tiles * tile


def fragment_splits(rows: int, tokens: int, residual: int, key_bits: int, device: torch.device) -> tuple[int, int]:
    """The numbers of one-warp programs that share the quantized tokens of a KV head, and the `residual` others. The
    first is rounded down, since a nearly empty wave takes as long as a full one."""
    tiles = cdiv(tokens, EIGHT.value * WORD // key_bits)
    wanted = 2 if INTERPRETED else FRAGMENT_PROGRAMS * multiprocessors(device) // rows
    splits = max(1, min(wanted, tiles, MAX_SPLITS - 1))
    # A small tile of the others takes about half as long as a tile of quantized tokens.
    rest_tiles = cdiv(residual + 1, REST.value)
    return splits, 2 if INTERPRETED else cdiv(rest_tiles, max(1, tiles // splits // 2))


def in_pairs(dtype: torch.dtype, group: int, bits: int) -> bool:
    """Whether a step computes two numbers with one instruction: those of 16 bits, if a word has one scale."""
    return dtype != torch.float32 and group >= WORD // bits
