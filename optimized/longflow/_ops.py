"""The operations of a LongFlow step: its division into programs, its scratch memory, and its launches."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...reference.contract import Sizes
from .._common.launch import (
    GROUP_ROWS,
    MAX_SPLITS,
    PTX,
    SMALL_TILES,
    discards,
    early_rows,
    fused,
    key_block,
    launches_early,
    mask_unit,
    on_device_of,
    padded_head_dim,
    padded_slots,
    split_slots,
    stride_unit,
)
from .._common.numerics import LOG2_E
from ._attend_kernels import attend_kernel
from ._score_kernels import choose_kernel, score_kernel

#: Twice the value of _common/launch.py: with fewer KV heads in flight, fewer logits must stay in L2.
PROGRAMS = 32

#: Register limit per thread for 16-bit caches, so that three programs fit on a multiprocessor, the most that shared
#: memory allows. Without it, the compiler uses 118 or 206, depending on the shape, or spills to stay below 128.
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
    block = key_block(sizes.head_dim, key.element_size(), sizes.slots)
    splits, size = split_slots(sizes, block, key.device, PROGRAMS)
    if not fused(sizes, key.device) or size < 2 * block or 2 * splits > MAX_SPLITS:
        return _Work(block, 0, splits, size, splits, size)
    finer = triton.cdiv(size, 2 * block) * block
    late_splits = triton.cdiv(sizes.slots, finer)
    return _Work(block, early_rows(sizes, late_splits, key.device), splits, size, late_splits, finer)


def scratch(sizes: Sizes, key: Tensor, per_head: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the buffers passed between programs: a float32 workspace, divided by `_launch`; one candidate per block
    of slots; and counters, zero between steps, one per KV head and one per decision."""
    batch_heads = sizes.batch * sizes.key_value_heads
    decisions = batch_heads if per_head else sizes.batch
    return (
        torch.empty(sum(_cuts(sizes, _cut(sizes, key).late_splits)), dtype=torch.float32, device=key.device),
        torch.empty(decisions, triton.cdiv(sizes.slots, SCORE_BLOCK), dtype=torch.int64, device=key.device),
        torch.zeros(_after(batch_heads) + decisions, dtype=torch.int32, device=key.device),
    )


def _cuts(sizes: Sizes, splits: int) -> list[int]:
    """Sizes of logits, partial accumulators, their maxima and sums, normalizers and ranks in the workspace."""
    heads, batch_heads = sizes.batch * sizes.query_heads, sizes.batch * sizes.key_value_heads
    row = padded_slots(sizes.slots)
    group = triton.next_power_of_2(sizes.group)
    cuts = (
        batch_heads * row * group, heads * splits * sizes.head_dim, heads * splits, heads * splits, heads * 2,
        batch_heads * row
    )
    return [_after(cut) for cut in cuts]


def _after(count: int) -> int:
    """`count` rounded up, so that all pieces are aligned alike: Triton compiles again for another alignment."""
    return triton.cdiv(count, 32) * 32


@torch.library.custom_op("kvtwin::longflow_decode", mutates_args=())
def decode(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, protected: Tensor | None, scale: float,
    per_head: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, query_heads, head_dim = query.shape
    sizes = Sizes(batch, query_heads, key.shape[1], key.shape[2], head_dim)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    score = torch.empty(occupied.shape, dtype=torch.float32, device=query.device)
    slot = torch.empty(occupied.shape[:-1], dtype=torch.int64, device=query.device)
    _launch(
        sizes, query, key, value, occupied, protected, output, score, slot,
        scratch(sizes, key, per_head), scale=scale, per_head=per_head,
    )
    return output, score, slot


@decode.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, protected: Tensor | None, scale: float,
    per_head: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        query.new_empty(query.shape),
        query.new_empty(occupied.shape, dtype=torch.float32),
        query.new_empty(occupied.shape[:-1], dtype=torch.int64),
    )


@torch.library.custom_op(
    "kvtwin::longflow_step",
    mutates_args=(
        "key", "value", "occupied", "positions", "next_slot", "score", "seen", "workspace", "candidates",
        "completion_counters",
    ),
)
def step(
    query: Tensor, new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor,
    occupied: Tensor, positions: Tensor, next_slot: Tensor, score: Tensor, sink_end: Tensor, seen: Tensor,
    workspace: Tensor, candidates: Tensor, completion_counters: Tensor, scale: float, per_head: bool,
    protect_newest: bool,
) -> Tensor:
    batch, query_heads, head_dim = query.shape
    sizes = Sizes(batch, query_heads, key.shape[1], key.shape[2], head_dim)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _launch(
        sizes, query, key, value, occupied, None, output, score, next_slot,
        (workspace, candidates, completion_counters), scale=scale, per_head=per_head,
        new_token=_NewToken(new_key, new_value, positions, sink_end, seen), protect_newest=protect_newest,
    )
    return output


@step.register_fake
def _(
    query: Tensor, new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor,
    occupied: Tensor, positions: Tensor, next_slot: Tensor, score: Tensor, sink_end: Tensor, seen: Tensor,
    workspace: Tensor, candidates: Tensor, completion_counters: Tensor, scale: float, per_head: bool,
    protect_newest: bool,
) -> Tensor:
    return query.new_empty(query.shape)


def _launch(
    sizes: Sizes, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor, protected: Tensor | None,
    output: Tensor, score: Tensor, slot: Tensor,
    scratch: tuple[Tensor, Tensor, Tensor], *, scale: float, per_head: bool,
    new_token: _NewToken | None = None, protect_newest: bool = False,
) -> None:
    """Launch the two kernels of a step. A new token is first written into slot `slot`, and the protected slots are
    derived from positions. Without one, the cache is unchanged and `protected` is a mask."""
    batch, _, heads, slots, head_dim = sizes
    group = sizes.group
    group_pad = triton.next_power_of_2(group)
    work = _cut(sizes, key)
    splits = work.late_splits                                                   # late_splits >= splits
    at_once = fused(sizes, key.device)
    workspace, candidates, completion_counters = scratch
    logits, partial, row_maxima, weight_sums, normalisers, ranks = workspace.split(_cuts(sizes, splits))
    token = _NewToken.none(query, slot) if new_token is None else new_token
    unit, byte_unit = stride_unit(key, value), mask_unit(occupied)
    head_stride = occupied.stride(1) if per_head else 0
    mask = occupied if protected is None else protected
    masks = (
        occupied.stride(0), head_stride, occupied.stride(-1),
        mask.stride(0), mask.stride(1) if per_head else 0, mask.stride(-1),
    )
    discard, dependent = discards(key.device), at_once and launches_early(key.device)
    options = {"GROUP": group, "HEAD_DIM": head_dim, "PER_HEAD": per_head, "ARRIVAL": new_token is not None}
    splitting = {
        "GROUP_PAD": group_pad, "D_PAD": padded_head_dim(head_dim),
        "SPLITS": 8 if splits <= 8 else 16 if splits <= 16 else MAX_SPLITS,
    }
    protection = {"PROTECTED": protected is not None, "PROTECT_NEWEST": protect_newest}
    registers = {"maxnreg": REGISTERS} if PTX and at_once and key.element_size() == 2 else {}
    decisions, blocks = candidates.shape
    # With 4 warps, fewer programs run at a time and finish KV heads sooner, before logits leave the cache.
    warps = 4 if at_once else 2
    with on_device_of(key):
        attend_kernel[(heads * (work.early * work.splits + (batch - work.early) * splits),)](
            query, key, value, occupied, token.key, token.value, slot, token.positions, token.seen,
            logits, partial, row_maxima, weight_sums, ranks, output, completion_counters,
            scale * LOG2_E.value, slots, *work[1:], heads,
            *query.stride(), *(stride // unit for stride in key.stride()[:3]), key.stride(3),
            *(stride // unit for stride in value.stride()[:3]), value.stride(3),
            occupied.stride(0) // byte_unit, head_stride // byte_unit, occupied.stride(-1),
            *token.key.stride(), *token.value.stride(),
            ROWS=GROUP_ROWS, BLOCK=work.block, UNIT=unit, MASK_UNIT=byte_unit,
            CHUNK=32 if SMALL_TILES else min(1024, 4096 // group_pad), WARPS=warps,
            FUSED=at_once, DISCARD=discard, DEPENDENT=dependent, **options, **splitting,
            num_warps=warps, num_stages=3 if at_once else 2, **registers,
        )
        if at_once:
            row = min(4096, triton.next_power_of_2(padded_slots(slots)))
            choose_kernel[(decisions,)](
                ranks, occupied, mask, token.positions, token.sink_end, token.seen, score, slot, slots, heads, *masks,
                HEADS=1 if per_head else 8, BLOCK=32 if SMALL_TILES else row, DISCARD=discard, DEPENDENT=dependent,
                **options, **protection, num_warps=16, **({"launch_pdl": True} if dependent else {}),
            )
        else:
            score_kernel[(decisions * blocks + batch * heads,)](
                logits, partial, row_maxima, weight_sums, normalisers, occupied, mask, token.positions,
                token.sink_end, token.seen, output, score, slot, candidates,
                completion_counters[_after(batch * heads):], slots, splits, heads, blocks, *masks,
                HEADS=4 if SMALL_TILES else 16, BLOCK=SCORE_BLOCK, **options, **splitting, **protection, num_warps=8,
            )
