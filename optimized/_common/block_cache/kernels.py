"""Attention of a block of queries, and the attention that each key receives, without a [Q, S] matrix in memory.

Two passes over the keys: see `attend_kernels.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....reference.contract import Sizes
from ..launch import (
    INTERPRETED,
    MAX_SPLITS,
    RESIDENT,
    SMALL_TILES,
    cdiv,
    dependent_launch,
    fp8_codes,
    fp8_format,
    multiprocessors,
    next_power_of_2,
    on_device_of,
    padded_head_dim,
    stride_unit,
)
from ..numerics import logit_factors
from ..operation import operation
from .attend_kernels import attention_kernel, received_kernel


class Attended(NamedTuple):
    """output [B, Hq, Q, D] in query's dtype. softmax_parts [2, B, Hq, Q] float32: each query's softmax shift and
    inverse sum, weight = exp2(base-2 logit - shift) * inverse. The inverse is 0 for queries that attend to nothing."""

    output: Tensor
    softmax_parts: Tensor


class Stored(NamedTuple):
    """How keys and values are stored: fp8, the type of their codes, or None, and the scales of codes, [] or [Hkv]."""

    fp8: torch.dtype | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None


PLAIN = Stored()


def codes(
    key: Tensor, value: Tensor, key_scale: Tensor | None, value_scale: Tensor | None
) -> tuple[Tensor, Tensor, Stored]:
    """Keys and values as `attend` takes them: FP8 numbers as uint8, others as they are."""
    key, value, fp8 = fp8_codes(key, value)
    return key, value, Stored(fp8, key_scale, value_scale)


def attend(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, scale: float,
    completion_counters: Tensor | None = None, stored: Stored = PLAIN, output: Tensor | None = None,
    softcap: float | None = None, sink_logits: Tensor | None = None,
) -> Attended:
    """Attention of the queries of the last Q slots, causal among themselves.

    query [B, Hq, Q, D]; key, value [B, Hkv, S, D], any strides; occupied [B, S] or [B, Hkv, S] bool. The query of an
    unoccupied slot attends to nothing: its output is 0. completion_counters: zeros, at least `counters_of`, by default
    allocated. FP8 keys and values: their codes as uint8, and `stored`. output: where to store the output, contiguous,
    without FP8. softcap: see `kvtwin.reference.attention.softcapped`. sink_logits [Hq], contiguous: of attention sinks.
    """
    fp8, *scales = stored
    if output is not None:
        if stored != PLAIN or output.shape != query.shape or output.dtype != query.dtype or not output.is_contiguous():
            raise ValueError(
                f"output must be contiguous, {tuple(query.shape)} {query.dtype}, without FP8, got "
                f"{tuple(output.shape)} {output.dtype}"
            )
        return Attended(output, _attend_into(
            query, key, value, occupied, output, completion_counters, sink_logits, scale, softcap
        ))
    return Attended(*_attend(
        query, key, value, *scales, occupied, sink_logits, scale, softcap, completion_counters, fp8
    ))


def received(
    query: Tensor, key: Tensor, occupied: Tensor, softmax_parts: Tensor, scale: float, *, mean: bool,
    stored: Stored = PLAIN, softcap: float | None = None,
) -> Tensor:
    """Each key's weights summed over all queries, averaged over the group: [B, Hkv, S] float32, 0 if unoccupied.

    mean: divide by the number of queries that attend to something. Arguments as in `attend`, and its softmax_parts. For
    the last queries of a block, the last ones of its attention's softmax_parts, a slice. The
    launch before this one is that attention: keys are read before it has ended.
    """
    result: Tensor = _received(
        query, key, stored.key_scale, occupied, softmax_parts, scale, softcap, mean, stored.fp8
    )
    return result


def accumulate(
    query: Tensor, key: Tensor, occupied: Tensor, softmax_parts: Tensor, score: Tensor, magnitude: Tensor | None,
    scale: float, softcap: float | None,
) -> Tensor:
    """Add what `received` returns to a state's score [B, Hkv, slots] float32, contiguous. Returns the sums for the
    slots of the keys, [B, Hkv, S], times magnitude, if given: a tensor like score."""
    end = key.shape[2]
    if magnitude is None:
        _accumulate(query, key, occupied, softmax_parts, score, None, None, scale, softcap)
        return score[..., :end]
    rank = torch.empty(key.shape[:3], dtype=torch.float32, device=key.device)
    _accumulate(query, key, occupied, softmax_parts, score, magnitude, rank, scale, softcap)
    return rank


# Operations ----------------------------------------------------------------------------------------------------------


#: Tile shapes for much work, (rows of queries and heads, slots, stages, warps): of the attention, and of the weights
#: that keys receive, by many programs and by few. The best measured on an H200.
ATTENTION_TILE = (128, 64, 3, 8)
RECEIVED_TILE = (64, 128, 3, 4)
RECEIVED_TILE_OF_FEW = (64, 64, 3, 4)
#: Tiles of slots that a program of the attention has at least, if programs share the slots.
TILES_EACH = 4
#: The smallest number of rows in a tile of the attention.
LEAST_ROWS = 16
#: Tensor cores do not multiply float32 exactly. Without them, operands are in registers, and tiles must be small.
FLOAT32_TILE = (16, 16, 2, 4)


def _attention_tile(query: Tensor, key: Tensor) -> tuple[int, int, int, int]:
    """See ATTENTION_TILE."""
    rows = query.shape[2] * (query.shape[1] // key.shape[1])
    if query.dtype == torch.float32 and not INTERPRETED:
        return FLOAT32_TILE
    if SMALL_TILES:
        return (16 if rows <= 16 else 64), (16 if key.shape[2] <= 48 else 64), 2, 4
    if query.shape[3] > 128:
        return (16 if rows <= 16 else 64), 32, 2, 4
    return ATTENTION_TILE if rows > 64 else (16 if rows <= 16 else 64, 64, 3, 4)


def _received_tile(query: Tensor, key: Tensor, attended: int) -> tuple[int, int, int, int]:
    """See RECEIVED_TILE. attended: the queries of the attention that computed the softmaxes. A tile has at least one
    query of all heads of a group, at most 16. It has 16 rows where the attention's has, and 64 otherwise, so that the
    same instructions multiply a query and a key in both."""
    rows = attended * (query.shape[1] // key.shape[1])
    if query.dtype == torch.float32 and not INTERPRETED:
        return FLOAT32_TILE
    if SMALL_TILES:
        return 16, (16 if key.shape[2] <= 48 else 64), 2, 4
    if query.shape[3] > 128:
        return (16 if rows <= 16 else 64), 64, 2, 4
    if rows <= 16:
        return 16, 64, 3, 4
    programs = key.shape[0] * key.shape[1] * cdiv(key.shape[2], RECEIVED_TILE[1])
    return RECEIVED_TILE if programs > 2 * multiprocessors(key.device) else RECEIVED_TILE_OF_FEW


def counters_of(sizes: Sizes, queries: int) -> int:
    """The most programs that `launch_attention` may have per split of the slots."""
    return sizes.batch * sizes.key_value_heads * cdiv(queries * sizes.group, LEAST_ROWS)


def _split(programs: int, tiles: int, device: torch.device) -> tuple[int, int]:
    """The number of programs that share the slots, with `programs` blocks of rows, and the tiles of each."""
    if INTERPRETED:
        wanted, least = (3 if tiles % 2 else 1), 1                     # so that tests cover both cases
    else:
        wanted, least = multiprocessors(device) // programs, TILES_EACH
    each = cdiv(tiles, max(1, min(wanted, tiles // least, MAX_SPLITS)))
    return cdiv(tiles, each), each


def _arguments(query: Tensor, key: Tensor, value: Tensor, occupied: Tensor) -> tuple[object, ...]:
    """Sizes and strides as the kernels take them."""
    unit = stride_unit(key, query, value)
    head_stride = occupied.stride(1) if occupied.dim() == 3 else 0
    return (
        key.shape[2], query.shape[2], key.shape[1],
        *(stride // unit for stride in query.stride()[:3]), query.stride(3),
        *(stride // unit for stride in key.stride()[:3]), key.stride(3),
        *(stride // unit for stride in value.stride()[:3]), value.stride(3),
        occupied.stride(0), head_stride, occupied.stride(-1),
    )


def _shape(query: Tensor, key: Tensor, value: Tensor) -> dict[str, int]:
    head_dim = query.shape[3]
    return {
        "GROUP": query.shape[1] // key.shape[1], "HEAD_DIM": head_dim, "D_PAD": padded_head_dim(head_dim),
        "UNIT": stride_unit(key, query, value),
    }


def scale_stride(scale: Tensor | None) -> int | None:
    """The stride by KV head of a scale of FP8 numbers, [] or [Hkv]; None for none."""
    if scale is None:
        return None
    return scale.stride(0) if scale.dim() else 0


@operation("kvtwin::block_attend", mutates_args=("completion_counters",))
def _attend(
    query: Tensor, key: Tensor, value: Tensor, key_scale: Tensor | None, value_scale: Tensor | None, occupied: Tensor,
    sink_logits: Tensor | None, scale: float, softcap: float | None, completion_counters: Tensor | None,
    fp8: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """See `attend`. Codes of FP8 are uint8: torch's checks of operations cannot compare FP8 tensors."""
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    softmax_parts = torch.empty(2, *query.shape[:3], dtype=torch.float32, device=query.device)
    launch_attention(
        query, key, value, occupied, None, output, softmax_parts, completion_counters, scale,
        Stored(fp8, key_scale, value_scale), softcap, sink_logits,
    )
    return output, softmax_parts


@_attend.register_fake
def _(query: Tensor) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty((2, *query.shape[:3]), dtype=torch.float32)


@operation("kvtwin::block_attend_into", mutates_args=("output", "completion_counters"))
def _attend_into(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, output: Tensor, completion_counters: Tensor | None,
    sink_logits: Tensor | None, scale: float, softcap: float | None,
) -> Tensor:
    """See `attend`."""
    softmax_parts = torch.empty(2, *query.shape[:3], dtype=torch.float32, device=query.device)
    launch_attention(
        query, key, value, occupied, None, output, softmax_parts, completion_counters, scale, softcap=softcap,
        sink_logits=sink_logits,
    )
    return softmax_parts


@_attend_into.register_fake
def _(query: Tensor) -> Tensor:
    return query.new_empty((2, *query.shape[:3]), dtype=torch.float32)


class Window(NamedTuple):
    """Queries of a window instead of the last slots. A query attends to the keys up to its own position.
    query_positions [B, W] int64, -1 for none; positions [B, Hkv, S] int64. counts [B, Hkv] int32: heads with at most
    `capacity` tokens are skipped, nothing is written for them, and their programs cost one load. None: all heads."""

    query_positions: Tensor
    positions: Tensor
    counts: Tensor | None = None
    capacity: int = 0

    @property
    def strides(self) -> tuple[int, ...]:
        return (*self.query_positions.stride(), *self.positions.stride())


def _of_window(window: Window | None) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """A window's tensors and numbers as the kernels take them."""
    if window is None:
        return (None, None, None), (0, 0, 0, 0, 0, 0)
    return (window.query_positions, window.positions, window.counts), (window.capacity, *window.strides)


def launch_attention(
    query: Tensor, key: Tensor, value: Tensor | None, occupied: Tensor, window: Window | None, output: Tensor | None,
    softmax_parts: Tensor, completion_counters: Tensor | None, scale: float, stored: Stored = PLAIN,
    softcap: float | None = None, sink_logits: Tensor | None = None,
) -> None:
    """Launch the attention of a block or of a window's queries. Without an output, it only computes the
    softmax_parts. With few rows, several programs share the slots."""
    value = key if value is None else value
    shape = _shape(query, key, value)
    rows, block, stages, warps = _attention_tile(query, key)
    programs = query.shape[0] * key.shape[1] * cdiv(query.shape[2] * shape["GROUP"], rows)
    splits, each = _split(programs, cdiv(key.shape[2], block), key.device)
    scratch: list[Tensor | None] = [None] * 4
    if splits > 1:
        partial, row_maxima, weight_sums = (
            torch.empty(*query.shape[:3], splits, length, dtype=torch.float32, device=query.device)
            for length in (1 if output is None else query.shape[3], 1, 1)
        )
        if completion_counters is None:
            completion_counters = torch.zeros(programs, dtype=torch.int32, device=query.device)
        scratch = [partial, row_maxima, weight_sums, completion_counters]
    tensors, numbers = _of_window(window)
    with on_device_of(query):
        attention_kernel[(programs * splits,)](
            query, key, value, stored.key_scale, stored.value_scale, occupied, *tensors, output, softmax_parts,
            *scratch, sink_logits, *logit_factors(scale, softcap), *_arguments(query, key, value, occupied), *numbers,
            scale_stride(stored.key_scale), scale_stride(stored.value_scale), splits, each,
            **shape, ROWS=rows, BLOCK=block, STAGES=stages, POSITIONS=window is not None, DUE=tensors[2] is not None,
            OUTPUT=output is not None, NEGATIVE=scale < 0, SPLITS=next_power_of_2(splits),
            FP8=fp8_format(stored.fp8, key.device), num_warps=warps, **dependent_launch(key.device),
        )


def launch_received(
    query: Tensor, key: Tensor, occupied: Tensor, window: Window | None, softmax_parts: Tensor, result: Tensor,
    scale: float, *, mean: bool, add: bool = False, magnitude: Tensor | None = None, rank: Tensor | None = None,
    stored: Stored = PLAIN, softcap: float | None = None,
) -> None:
    """Launch `received_kernel` into result [B, Hkv, S] float32. If heads may be skipped, there are fewer programs with
    several blocks of keys each, since even a program that returns at once takes time."""
    shape = _shape(query, key, key)
    attended = softmax_parts.stride(2)
    rows, block, stages, warps = _received_tile(query, key, attended)
    heads, blocks = key.shape[0] * key.shape[1], cdiv(key.shape[2], block)
    tensors, numbers = _of_window(window)
    each = 1
    if tensors[2] is not None:
        wanted = 2 if INTERPRETED else max(1, cdiv(RESIDENT * multiprocessors(key.device), heads))
        each = cdiv(blocks, min(wanted, blocks))
    with on_device_of(query):
        received_kernel[(heads * cdiv(blocks, each),)](
            query, key, key, stored.key_scale, occupied, *tensors, softmax_parts, result, magnitude, rank,
            *logit_factors(scale, softcap), *_arguments(query, key, key, occupied), *numbers,
            scale_stride(stored.key_scale), each, result.stride(1) if add else key.shape[2], softmax_parts.stride(0),
            attended,
            **shape, ROWS=rows, BLOCK=block, STAGES=stages, POSITIONS=window is not None,
            DUE=tensors[2] is not None, MEAN=mean, ADD=add, MAGNITUDE=magnitude is not None,
            FP8=fp8_format(stored.fp8, key.device), num_warps=warps, **dependent_launch(key.device),
        )


@operation("kvtwin::block_received", mutates_args=())
def _received(
    query: Tensor, key: Tensor, key_scale: Tensor | None, occupied: Tensor, softmax_parts: Tensor, scale: float,
    softcap: float | None, mean: bool, fp8: torch.dtype | None,
) -> Tensor:
    result = torch.empty(key.shape[:3], dtype=torch.float32, device=key.device)
    launch_received(
        query, key, occupied, None, softmax_parts, result, scale, mean=mean, stored=Stored(fp8, key_scale),
        softcap=softcap,
    )
    return result


@_received.register_fake
def _(key: Tensor) -> Tensor:
    return key.new_empty(key.shape[:3], dtype=torch.float32)


@operation("kvtwin::block_accumulate", mutates_args=("score", "rank"))
def _accumulate(
    query: Tensor, key: Tensor, occupied: Tensor, softmax_parts: Tensor, score: Tensor, magnitude: Tensor | None,
    rank: Tensor | None, scale: float, softcap: float | None,
) -> None:
    launch_received(
        query, key, occupied, None, softmax_parts, score, scale, mean=False, add=True, magnitude=magnitude, rank=rank,
        softcap=softcap,
    )
