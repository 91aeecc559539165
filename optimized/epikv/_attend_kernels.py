"""Attention of a decode step: the new token is written into its slot, and all occupied slots are attended to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference.contract import Sizes
from .._common.launch import (
    MAX_SPLITS,
    SMALL_TILES,
    few_rows,
    group_rows,
    key_block,
    next_power_of_2,
    on_device_of,
    padded_head_dim,
    split_slots,
)
from .._common.numerics import LOG2_E, dot, finite_or_zero, round_output, round_to
from .._common.operation import operation
from .._common.scratch import is_last
from .._common.softmax import merge_outputs, merge_sums, weigh_tile


@operation(
    "kvtwin::epikv_attend", mutates_args=("key", "value", "workspace", "completion_counters", "logits", "normalisers")
)
def attend(
    query: Tensor, new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor, occupied: Tensor, slot: Tensor,
    workspace: Tensor, completion_counters: Tensor, scale: float, logits: Tensor, normalisers: Tensor,
) -> Tensor:
    """Write new_key, new_value [B, Hkv, D] into slot [B] of key, value [B, Hkv, S, D], and attend with query [B, Hq, D]
    to this slot and to occupied [B, S]. workspace, completion_counters: from `scratch`. Returns [B, Hq, D].

    logits [B, Hq, S] and normalisers [B, Hq, 2], float32: unless empty, they receive the logits in base 2, -inf for
    unoccupied slots, and each head's largest logit with the sum of 2 ^ (logit - largest)."""
    batch, query_heads, head_dim = query.shape
    heads, slots = key.shape[1], key.shape[2]
    sizes = Sizes(batch, query_heads, heads, slots, head_dim)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    block, splits, split_size, options = _cut(sizes, key)
    with on_device_of(key):
        attend_kernel[(batch * heads * splits,)](
            query, new_key, new_value, key, value, occupied, slot, output, workspace, completion_counters, logits,
            normalisers, scale * LOG2_E.value, slots, split_size, splits, heads, batch * query_heads,
            *query.stride(), *new_key.stride(), *new_value.stride(),
            GROUP=sizes.group, HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim),
            GROUP_PAD=next_power_of_2(sizes.group), ROWS=group_rows(sizes.group, query.dtype), BLOCK=block,
            SPLITS=1 if splits == 1 else 8 if splits <= 8 else MAX_SPLITS, KEEP=logits.numel() > 0,
            **options,
        )
    return output


@attend.register_fake
def _(query: Tensor) -> Tensor:
    return query.new_empty(query.shape)


def _cut(sizes: Sizes, key: Tensor) -> tuple[int, int, int, dict[str, int]]:
    """The slots of a tile, the number of splits and the slots of each, and launch options."""
    block = key_block(sizes.head_dim, key.element_size(), sizes.slots)
    if not SMALL_TILES and key.element_size() == 2 and few_rows(sizes, key.device):
        # Two programs on a multiprocessor, with larger tiles: 43 instead of 64 us on an H200, for one row of 33K slots.
        wide = min(2 * block, 128)
        return wide, *split_slots(sizes, wide, key.device, resident=2), {"num_warps": 8, "num_stages": 2}
    return block, *split_slots(sizes, block, key.device), {"num_warps": 4, "num_stages": 3}


def scratch(sizes: Sizes, key: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the buffers passed between the programs of a KV head: accumulators, maxima and sums for each query head
    and split; and counters, zero between steps."""
    _, splits, _, _ = _cut(sizes, key)
    heads = sizes.batch * sizes.query_heads
    return (
        torch.empty(heads * splits * (sizes.head_dim + 2), dtype=torch.float32, device=key.device),
        torch.zeros(sizes.batch * sizes.key_value_heads, dtype=torch.int32, device=key.device),
    )


@triton.jit
def _write(key, value, new_key, new_value, slot, new_key_d, new_value_d, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr):
    d = tl.arange(0, D_PAD).to(tl.int64)
    at, mask = slot * HEAD_DIM + d, d < HEAD_DIM
    tl.store(key + at, tl.load(new_key + d * new_key_d, mask=mask), mask=mask)
    tl.store(value + at, tl.load(new_value + d * new_value_d, mask=mask), mask=mask)


@triton.jit
def _merge(
    partial, row_maxima, weight_sums, output, normalisers, batch_head, splits,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, GROUP_PAD: tl.constexpr, SPLITS: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Merge the outputs of a KV head's query heads from their splits."""
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D_PAD).to(tl.int64)
    i = tl.arange(0, SPLITS)
    part = (batch_head * GROUP + g)[:, None] * splits + i[None, :]
    there = (g < GROUP)[:, None] & (i < splits)[None, :]
    row_max, total = merge_sums(row_maxima, weight_sums, part, there)
    first = (batch_head * GROUP + g) * splits
    out = merge_outputs(
        partial, row_maxima, first, splits, row_max, total, g < GROUP, HEAD_DIM, D_PAD, TOGETHER=8
    )
    at = (batch_head * GROUP + g)[:, None] * HEAD_DIM + d[None, :]
    mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(output + at, round_output(out, output.dtype.element_ty), mask=mask)
    if KEEP:
        _keep(normalisers, batch_head * GROUP + g, row_max, total, g < GROUP)


@triton.jit
def _keep(normalisers, head, row_max, total, mask):
    tl.store(normalisers + head * 2, row_max, mask=mask)
    tl.store(normalisers + head * 2 + 1, tl.where(total == 0.0, 1.0, total), mask=mask)


@triton.jit(do_not_specialize=[
    "slots", "split_size", "splits", "heads", "query_heads", "query_b", "query_h", "new_key_b", "new_key_h",
    "new_value_b", "new_value_h",
])
def attend_kernel(
    query, new_key, new_value, key, value, occupied, slot, output, workspace, completion_counters, logits, normalisers,
    scale, slots, split_size, splits, heads, query_heads,
    query_b, query_h, query_d, new_key_b, new_key_h, new_key_d, new_value_b, new_value_h, new_value_d,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, GROUP_PAD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, KEEP: tl.constexpr,
):
    """Program (split, batch_head): attends to a share of the slots of a (row, KV head), for its GROUP query heads. The
    last program of a batch_head merges. KEEP: also stores logits and normalisers. `query_heads`: those of all rows
    together. Unoccupied slots are not read."""
    split = tl.program_id(0) % splits
    batch_head = (tl.program_id(0) // splits).to(tl.int64)
    b, k_head = batch_head // heads, batch_head % heads
    key += batch_head * slots * HEAD_DIM
    value += batch_head * slots * HEAD_DIM
    occupied += b * slots
    partial = workspace
    row_maxima = workspace + tl.cast(query_heads, tl.int64) * splits * HEAD_DIM
    weight_sums = row_maxima + query_heads * splits
    newest = tl.load(slot + b)
    begin = split * split_size
    end = tl.minimum(begin + split_size, slots)
    if (newest >= begin) & (newest < end):
        _write(
            key, value, new_key + b * new_key_b + k_head * new_key_h,
            new_value + b * new_value_b + k_head * new_value_h, newest, new_key_d, new_value_d, HEAD_DIM, D_PAD,
        )
    tl.debug_barrier()                                                  # this program also reads that slot
    row = tl.arange(0, ROWS)
    d = tl.arange(0, D_PAD).to(tl.int64)
    in_head = (d < HEAD_DIM)[None, :]
    mask = (row < GROUP)[:, None] & in_head
    head = (k_head * GROUP + row)[:, None]
    q = tl.load(query + b * query_b + head * query_h + d[None, :] * query_d, mask=mask, other=0.0)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    for start in range(begin, end, BLOCK):
        s = start + tl.arange(0, BLOCK)
        holds = (tl.load(occupied + s, mask=s < end, other=0) != 0) | (s == newest)
        holds = holds & (s < end)
        at = s.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
        k = tl.load(key + at, mask=holds[:, None] & in_head, other=0.0)
        logit = tl.where(holds[None, :], dot(q, tl.trans(k)) * scale, float("-inf"))
        if KEEP:
            place = (batch_head * GROUP + row)[:, None] * slots + s.to(tl.int64)[None, :]
            tl.store(logits + place, logit, mask=(row < GROUP)[:, None] & (s < end)[None, :])
        p, row_max, weight_sum, rescale = weigh_tile(logit, row_max, weight_sum)
        v = tl.load(value + at, mask=holds[:, None] & in_head, other=0.0)
        acc = acc * rescale[:, None] + dot(round_to(p, v.dtype), v)
    if SPLITS == 1:
        # The new token is always attended to, so the sum is 0 only if all logits are -inf.
        out = acc / tl.where(weight_sum == 0.0, 1.0, weight_sum)[:, None]
        at = (batch_head * GROUP + row)[:, None] * HEAD_DIM + d[None, :]
        tl.store(output + at, round_output(out, output.dtype.element_ty), mask=mask)
        if KEEP:
            _keep(normalisers, batch_head * GROUP + row, finite_or_zero(row_max), weight_sum, row < GROUP)
    else:
        part = (batch_head * GROUP + row) * splits + split
        tl.store(row_maxima + part, row_max, mask=row < GROUP)
        tl.store(weight_sums + part, weight_sum, mask=row < GROUP)
        tl.store(partial + part[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)
        if is_last(completion_counters + batch_head, splits):
            _merge(
                partial, row_maxima, weight_sums, output, normalisers, batch_head, splits,
                GROUP, HEAD_DIM, D_PAD, GROUP_PAD, SPLITS, KEEP,
            )
