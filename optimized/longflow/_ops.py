"""The operations of a LongFlow step: its division into programs, its scratch memory, and its launches.

Operations with a `block_table` [B, n] take key and value in pages, [pages, Hkv, page_size, D], if it is not None. With
`fp8`, key and value are the codes of this type as uint8: torch's checks of operations cannot compare FP8 tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...reference.contract import Sizes
from .._common.launch import (
    MAX_SPLITS,
    PTX,
    SMALL_TILES,
    cdiv,
    discards,
    early_rows,
    fp8_format,
    fused,
    group_rows,
    key_block,
    launches_early,
    mask_unit,
    next_power_of_2,
    on_device_of,
    padded_head_dim,
    padded_slots,
    split_slots,
    stride_unit,
)
from .._common.numerics import logit_factors
from .._common.operation import operation
from ._attend_kernels import attend_kernel
from ._score_kernels import choose_kernel, score_kernel

#: Twice the value of _common/launch.py: with fewer KV heads in flight, fewer logits must stay in L2.
PROGRAMS = 32

#: Register limit per thread for 16-bit and FP8 caches, so that three programs fit on a multiprocessor, the most that
#: shared memory allows for 16 bits. Without it, the compiler uses 118 or 206 for these, depending on the shape, or
#: spills to stay below 128.
REGISTERS = 168

#: Slots per program if a second launch finishes the scores.
SCORE_BLOCK = 32 if SMALL_TILES else 256


class _Work(NamedTuple):
    """How a step is divided into programs: tiles of `block` slots; in a batch's first `early` rows, `splits` programs
    per KV head with `split_size` slots each; in the other rows, `late_splits` programs with `late_size` slots."""

    block: int
    early: int
    splits: int
    split_size: int
    late_splits: int
    late_size: int


class _Stored(NamedTuple):
    """How keys and values are stored: fp8, the type of their codes, or None, and the scales of codes, [] or [Hkv]."""

    fp8: torch.dtype | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None


_PLAIN = _Stored()


class _NewToken(NamedTuple):
    """The token of a state's step: key and value [B, Hkv, D], and the state's buffers for its slot and its position."""

    key: Tensor
    value: Tensor
    positions: Tensor
    sink_end: Tensor
    seen: Tensor

    @classmethod
    def none(cls, query: Tensor, slot: Tensor) -> _NewToken:
        """Arguments of the right types for kernels that read none of them."""
        return cls(key=query, value=query, positions=slot, sink_end=slot, seen=slot)


def _cut(sizes: Sizes, key: Tensor) -> _Work:
    # FP8 numbers are computed with as 16-bit numbers: larger tiles need more registers than there are.
    block = key_block(sizes.head_dim, max(2, key.element_size()), sizes.slots)
    splits, size = split_slots(sizes, block, key.device, PROGRAMS)
    if not fused(sizes, key.device) or size < 2 * block or 2 * splits > MAX_SPLITS:
        return _Work(block, 0, splits, size, splits, size)
    finer = cdiv(size, 2 * block) * block
    late_splits = cdiv(sizes.slots, finer)
    return _Work(block, early_rows(sizes, late_splits, key.device), splits, size, late_splits, finer)


def scratch(sizes: Sizes, key: Tensor, per_head: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the buffers passed between programs: a float32 workspace, divided by `_launch`; one candidate per block
    of slots; and counters, zero between steps, one per KV head and one per decision."""
    batch_heads = sizes.batch * sizes.key_value_heads
    decisions = batch_heads if per_head else sizes.batch
    return (
        torch.empty(sum(_cuts(sizes, _cut(sizes, key).late_splits)), dtype=torch.float32, device=key.device),
        torch.empty(decisions, cdiv(sizes.slots, SCORE_BLOCK), dtype=torch.int64, device=key.device),
        torch.zeros(_after(batch_heads) + decisions, dtype=torch.int32, device=key.device),
    )


def _cuts(sizes: Sizes, splits: int) -> list[int]:
    """Sizes of logits, partial accumulators, their maxima and sums, normalizers and ranks in the workspace."""
    heads, batch_heads = sizes.batch * sizes.query_heads, sizes.batch * sizes.key_value_heads
    row = padded_slots(sizes.slots)
    group = next_power_of_2(sizes.group)
    cuts = (
        batch_heads * row * group, heads * splits * sizes.head_dim, heads * splits, heads * splits, heads * 2,
        batch_heads * row
    )
    return [_after(cut) for cut in cuts]


def _after(count: int) -> int:
    """`count` rounded up, so that all pieces are aligned alike: Triton compiles again for another alignment."""
    return cdiv(count, 32) * 32


@operation("kvtwin::longflow_decode", mutates_args=())
def decode(
    query: Tensor, key: Tensor, value: Tensor, block_table: Tensor | None, occupied: Tensor,
    protected: Tensor | None, key_scale: Tensor | None, value_scale: Tensor | None, scale: float, per_head: bool,
    fp8: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = _sizes(query, key, occupied)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    score = torch.empty(occupied.shape, dtype=torch.float32, device=query.device)
    slot = torch.empty(occupied.shape[:-1], dtype=torch.int64, device=query.device)
    _launch(
        sizes, query, key, value, block_table, occupied, protected, output, score, slot,
        scratch(sizes, key, per_head), scale=scale, per_head=per_head, stored=_Stored(fp8, key_scale, value_scale),
    )
    return output, score, slot


@decode.register_fake
def _(query: Tensor, occupied: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        query.new_empty(query.shape),
        query.new_empty(occupied.shape, dtype=torch.float32),
        query.new_empty(occupied.shape[:-1], dtype=torch.int64),
    )


@operation(
    "kvtwin::longflow_step",
    mutates_args=(
        "key", "value", "occupied", "positions", "next_slot", "score", "seen", "workspace", "candidates",
        "completion_counters",
    ),
)
def step(
    query: Tensor, new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor, block_table: Tensor | None,
    occupied: Tensor, positions: Tensor, next_slot: Tensor, score: Tensor, sink_end: Tensor, seen: Tensor,
    workspace: Tensor, candidates: Tensor, completion_counters: Tensor, scale: float, softcap: float | None,
    per_head: bool, protect_newest: bool, sink_logits: Tensor | None,
) -> Tensor:
    sizes = _sizes(query, key, occupied)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _launch(
        sizes, query, key, value, block_table, occupied, None, output, score, next_slot,
        (workspace, candidates, completion_counters), scale=scale, per_head=per_head,
        new_token=_NewToken(new_key, new_value, positions, sink_end, seen), protect_newest=protect_newest,
        softcap=softcap, sink_logits=sink_logits,
    )
    return output


@step.register_fake
def _(query: Tensor) -> Tensor:
    return query.new_empty(query.shape)


@operation(
    "kvtwin::longflow_rank", mutates_args=("key", "value", "occupied", "positions", "workspace", "completion_counters")
)
def rank(
    query: Tensor, new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor, block_table: Tensor | None,
    occupied: Tensor, positions: Tensor, next_slot: Tensor, seen: Tensor,
    workspace: Tensor, completion_counters: Tensor, scale: float, softcap: float | None, sink_logits: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The first half of `step`: the output, and the ranks of this process's KV heads, [B, Hkv, padded slots]."""
    sizes = _sizes(query, key, occupied)
    output, ranks = _ranked(query, sizes)
    pieces = [*workspace.split(_cuts(sizes, _cut(sizes, key).late_splits))[:-1], ranks]
    _launch_attend(
        sizes, query, key, value, block_table, occupied, output, next_slot, pieces, completion_counters, scale=scale,
        per_head=False, token=_NewToken(new_key, new_value, positions, next_slot, seen), arrival=True,
        at_once=True, dependent=False, softcap=softcap, sink_logits=sink_logits,
    )
    return output, ranks


@rank.register_fake
def _(query: Tensor, key: Tensor, occupied: Tensor) -> tuple[Tensor, Tensor]:
    return _ranked(query, _sizes(query, key, occupied))


def _sizes(query: Tensor, key: Tensor, occupied: Tensor) -> Sizes:
    batch, query_heads, head_dim = query.shape
    return Sizes(batch, query_heads, key.shape[1], occupied.shape[-1], head_dim)


def _ranked(query: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    row = padded_slots(sizes.slots)
    return (
        torch.empty(query.shape, dtype=query.dtype, device=query.device),
        torch.empty(sizes.batch, sizes.key_value_heads, row, dtype=torch.float32, device=query.device),
    )


@operation("kvtwin::longflow_choose", mutates_args=("next_slot", "score", "seen", "ranks"))
def choose(
    ranks: Tensor, occupied: Tensor, positions: Tensor, next_slot: Tensor, score: Tensor, sink_end: Tensor,
    seen: Tensor, group: int, head_dim: int, protect_newest: bool,
) -> None:
    """The second half of `step`: sums the ranks [B, H, padded slots] of all KV heads, and selects the next slot."""
    batch, slots = occupied.shape
    token = _NewToken(ranks, ranks, positions, sink_end, seen)
    masks = (occupied.stride(0), 0, occupied.stride(1)) * 2
    with on_device_of(ranks):
        _launch_choose(
            batch, slots, ranks.shape[1], ranks, occupied, occupied, token, score, next_slot, masks, per_head=False,
            dependent=False, GROUP=group, HEAD_DIM=head_dim, ARRIVAL=True, PROTECTED=False,
            PROTECT_NEWEST=protect_newest,
        )


def _launch(
    sizes: Sizes, query: Tensor, key: Tensor, value: Tensor, block_table: Tensor | None, occupied: Tensor,
    protected: Tensor | None, output: Tensor, score: Tensor, slot: Tensor,
    scratch: tuple[Tensor, Tensor, Tensor], *, scale: float, per_head: bool,
    new_token: _NewToken | None = None, protect_newest: bool = False,
    stored: _Stored = _PLAIN, softcap: float | None = None, sink_logits: Tensor | None = None,
) -> None:
    """Launch the two kernels of a step. A new token is first written into slot `slot`, and the protected slots are
    derived from positions. Without one, the cache is unchanged and `protected` is a mask."""
    batch, _, heads, slots, head_dim = sizes
    splits = _cut(sizes, key).late_splits
    at_once = fused(sizes, key.device)
    workspace, candidates, completion_counters = scratch
    pieces = workspace.split(_cuts(sizes, splits))
    logits, partial, row_maxima, weight_sums, normalisers, ranks = pieces
    token = _NewToken.none(query, slot) if new_token is None else new_token
    head_stride = _head_stride(occupied, per_head)
    mask = occupied if protected is None else protected
    masks = (
        occupied.stride(0), head_stride, occupied.stride(-1),
        mask.stride(0), mask.stride(1) if per_head else 0, mask.stride(-1),
    )
    dependent = at_once and launches_early(key.device)
    options = {
        "GROUP": sizes.group, "HEAD_DIM": head_dim, "ARRIVAL": new_token is not None,
        "PROTECTED": protected is not None, "PROTECT_NEWEST": protect_newest,
    }
    decisions, blocks = candidates.shape
    _launch_attend(
        sizes, query, key, value, block_table, occupied, output, slot, pieces, completion_counters, scale=scale,
        per_head=per_head, token=token, arrival=new_token is not None, at_once=at_once, dependent=dependent,
        stored=stored, softcap=softcap, sink_logits=sink_logits,
    )
    with on_device_of(key):
        if at_once:
            _launch_choose(
                decisions, slots, heads, ranks, occupied, mask, token, score, slot, masks, per_head=per_head,
                dependent=dependent, **options,
            )
        else:
            score_kernel[(decisions * blocks + batch * heads,)](
                logits, partial, row_maxima, weight_sums, normalisers, occupied, mask, token.positions,
                token.sink_end, token.seen, output, score, slot, candidates,
                completion_counters[_after(batch * heads):], slots, splits, heads, blocks, *masks,
                HEADS=4 if SMALL_TILES else 16, BLOCK=SCORE_BLOCK, PER_HEAD=per_head, **options,
                **_splitting(sizes, splits), num_warps=8,
            )


def _head_stride(occupied: Tensor, per_head: bool) -> int:
    return occupied.stride(1) if per_head else 0


def _splitting(sizes: Sizes, splits: int) -> dict[str, int]:
    return {
        "GROUP_PAD": next_power_of_2(sizes.group), "D_PAD": padded_head_dim(sizes.head_dim),
        "SPLITS": 8 if splits <= 8 else 16 if splits <= 16 else MAX_SPLITS,
    }


def _launch_attend(
    sizes: Sizes, query: Tensor, key: Tensor, value: Tensor, block_table: Tensor | None, occupied: Tensor,
    output: Tensor, slot: Tensor, pieces: Sequence[Tensor], completion_counters: Tensor, *, scale: float,
    per_head: bool, token: _NewToken, arrival: bool, at_once: bool, dependent: bool,
    stored: _Stored = _PLAIN, softcap: float | None = None, sink_logits: Tensor | None = None,
) -> None:
    """The first kernel: attention. at_once: it also ranks the slots of each KV head."""
    batch, _, heads, slots, head_dim = sizes
    work = _cut(sizes, key)
    splits = work.late_splits                                                   # late_splits >= splits
    logits, partial, row_maxima, weight_sums, _, ranks = pieces
    unit, byte_unit = stride_unit(key, value), mask_unit(occupied)
    head_stride = _head_stride(occupied, per_head)
    scales = (stored.key_scale, stored.value_scale)
    pages = slot if block_table is None else block_table                        # `slot` is not read as pages
    # Only ranking needs SPLITS, and only an arrival PER_HEAD: launches without them share a kernel.
    splitting = _splitting(sizes, splits if at_once else 1)
    registers = {"maxnreg": REGISTERS} if PTX and at_once and key.element_size() <= 2 else {}
    # With 4 warps, fewer programs run at a time and finish KV heads sooner, before logits leave the cache.
    warps = 4 if at_once else 2
    with on_device_of(key):
        attend_kernel[(heads * (work.early * work.splits + (batch - work.early) * splits),)](
            query, key, value, *scales, pages, occupied, token.key, token.value, slot, token.positions, token.seen,
            logits, partial, row_maxima, weight_sums, ranks, output, completion_counters, sink_logits,
            *logit_factors(scale, softcap), slots, *work[1:], heads,
            *query.stride(), *(stride // unit for stride in key.stride()[:3]), key.stride(3),
            *(stride // unit for stride in value.stride()[:3]), value.stride(3),
            occupied.stride(0) // byte_unit, head_stride // byte_unit, occupied.stride(-1),
            *token.key.stride(), *token.value.stride(), pages.stride(0), pages.stride(-1),
            *(None if one is None else one.stride(0) if one.dim() else 0 for one in scales),
            ROWS=group_rows(sizes.group, query.dtype), BLOCK=work.block, UNIT=unit, MASK_UNIT=byte_unit,
            CHUNK=32 if SMALL_TILES else min(1024, 4096 // splitting["GROUP_PAD"]), WARPS=warps,
            FUSED=at_once, DISCARD=discards(key.device), DEPENDENT=dependent, GROUP=sizes.group, HEAD_DIM=head_dim,
            PER_HEAD=per_head and arrival, ARRIVAL=arrival, PAGE=0 if block_table is None else key.shape[2],
            FP8=fp8_format(stored.fp8, key.device), **splitting,
            num_warps=warps, num_stages=3 if at_once else 2, **registers,
        )


def _launch_choose(
    decisions: int, slots: int, heads: int, ranks: Tensor, occupied: Tensor, mask: Tensor, token: _NewToken,
    score: Tensor, slot: Tensor, masks: tuple[int, ...], *, per_head: bool, dependent: bool, **options: Any,
) -> None:
    """The second kernel, after an attention kernel that ranked the slots. dependent: it starts before that ends."""
    row = min(4096, next_power_of_2(padded_slots(slots)))
    choose_kernel[(decisions,)](
        ranks, occupied, mask, token.positions, token.sink_end, token.seen, score, slot, slots, heads, *masks,
        HEADS=1 if per_head else 8, BLOCK=32 if SMALL_TILES else row, DISCARD=discards(ranks.device),
        DEPENDENT=dependent, PER_HEAD=per_head, **options, num_warps=16,
        **({"launch_pdl": True} if dependent else {}),
    )
