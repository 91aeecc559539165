"""The operations that put a whole prompt into an empty paged cache. `_prompt_kernels.py` describes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from ...reference.contract.thinkv.types import Thought
from .._common.launch import SMALL_TILES, on_device_of, padded_head_dim
from .._common.operation import operation
from ._paging_ops import LANES, Layout, chunk_of, layout
from ._paging_store_kernels import store_prompt_kernel
from ._prompt_kernels import cluster_kernel, place_kernel, prepare_kernel
from ._tiles import ITERATIONS, packed_retention, tile


def _format_of(plan_of: Layout) -> tuple[str, int]:
    """The format of the thought type R, which all tokens of a prompt have, and its first word in a row."""
    number = plan_of.number[Thought.REASONING]
    return plan_of.formats[number], plan_of.base[number]


@operation(
    "kvtwin::thinkv_plan_prompt", mutates_args=("sizes", "levels", "live", "over_budget", "segment")
)
def plan_prompt(
    key: Tensor, order: Tensor, counts: Tensor, sizes: Tensor, levels: Tensor, live: Tensor, over_budget: Tensor,
    segment: Tensor, entries: int, formats: str, block: int, group: int, tau: int, budget: int,
    retention: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """What happens to the tokens of a prompt: the number of tokens that are evicted at each turn [B, M] int32, and the
    turn at which a token is evicted [B, T] int32, by its index in the prompt, -1 for tokens that stay.

    key [B, Hkv, T, D]; order [B, T] int64, rows contiguous: the indices of a row's tokens, then -1; counts [B]
    int64, their number; entries: those of the cache's tables. Sets the state's sizes and levels [B, segments] int64,
    live and segment [B] int64, and over_budget [B] bool.
    """
    (batch, heads, total, head_dim), device = key.shape, key.device
    plan_of = layout(formats, block, group, heads, head_dim, entries)
    fmt, _ = _format_of(plan_of)
    parts, segments = triton.cdiv(tau, group), triton.cdiv(total, tau)
    all_groups, num_levels = segments * parts, len(retention)

    def integers(*shape: int) -> Tensor:
        return torch.empty(batch, *shape, dtype=torch.int32, device=device)

    keeps, turns, scratch = integers(segments, num_levels), integers(segments, num_levels), integers(segments, tau)
    evictions, gone = integers(segments), integers(total).fill_(-1)
    scales = torch.empty(
        (batch, all_groups, heads) if fmt == "fp8" else (batch, all_groups, heads, head_dim),
        dtype=torch.float32 if fmt == "fp8" else torch.uint8, device=device,
    ) if LANES[fmt] else gone
    with on_device_of(key):
        prepare_kernel[(batch + (batch * all_groups * heads if LANES[fmt] else 0),)](
            counts, keeps, turns, evictions, sizes, levels, live, over_budget, segment, tau, segments,
            sizes.shape[1], budget, batch, key, order, scales, heads, all_groups, total, parts, order.stride(0),
            *key.stride(), RETENTION=packed_retention([min(keep, tau) for keep in retention]), LEVELS=num_levels,
            SEGMENTS=max(16, triton.next_power_of_2(segments)), FORMAT=fmt, LANES=LANES[fmt], GROUP=group,
            HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), TOKENS=triton.next_power_of_2(group), num_warps=1,
        )
        cluster_kernel[(batch * segments,)](
            key, scales, order, counts, keeps, turns, gone, scratch, heads, all_groups, total, tau, parts, segments,
            order.stride(0), *key.stride(), FORMAT=fmt, LANES=LANES[fmt], GROUP=group, HEAD_DIM=head_dim,
            LEVELS=num_levels, ITERATIONS=ITERATIONS, **tile(tau, min(retention[0], tau), head_dim), num_stages=1,
        )
    return evictions, gone


@plan_prompt.register_fake
def _(key: Tensor, counts: Tensor, tau: int) -> tuple[Tensor, Tensor]:
    batch, _, total, _ = key.shape
    return (
        counts.new_empty((batch, triton.cdiv(total, tau)), dtype=torch.int32),
        counts.new_empty((batch, total), dtype=torch.int32),
    )


@operation(
    "kvtwin::thinkv_place_prompt",
    mutates_args=(
        "place", "positions", "segments", "evicted", "slot_groups", "block_thoughts", "physical", "entry_order", "used",
        "group_tokens", "starts", "block_counts", "overflow",
    ),
)
def place_prompt(
    order: Tensor, counts: Tensor, evictions: Tensor, gone: Tensor, place: Tensor, positions: Tensor, segments: Tensor,
    evicted: Tensor, slot_groups: Tensor, block_thoughts: Tensor, physical: Tensor, entry_order: Tensor, used: Tensor,
    group_tokens: Tensor, starts: Tensor, block_counts: Tensor, overflow: Tensor, heads: int, head_dim: int,
    formats: str, block: int, group: int, tau: int,
) -> None:
    """Give the tokens of a prompt their slots in the tables of an empty cache (`Tables`), and free those of the tokens
    that go. evictions, gone: what `plan_prompt` returns for order and counts. Sets place [B, T] int32, all -1 before:
    the slots of the tokens that stay, by index."""
    (batch, total), entries = gone.shape, block_thoughts.shape[1]
    plan_of = layout(formats, block, group, heads, head_dim, entries)
    parts_pad, new = triton.next_power_of_2(triton.cdiv(tau, group)), triton.cdiv(tau, block)
    block_pad = triton.next_power_of_2(block)
    places = torch.empty(batch, tau + 2 * new + parts_pad, dtype=torch.int32, device=gone.device)
    with on_device_of(gone):
        place_kernel[(batch,)](
            order, counts, evictions, gone, place, positions, segments, evicted, slot_groups, block_thoughts, physical,
            entry_order, used, group_tokens, starts, block_counts, overflow, places,
            total, tau, evictions.shape[1], starts.shape[1], positions.shape[1], entries, group_tokens.shape[1],
            order.stride(0), plan_of.first[Thought.REASONING], plan_of.capacity[Thought.REASONING], **plan_of.types,
            GROUP=group, BLOCK=block, BLOCK_PAD=block_pad, NEW=new, GROUPS=parts_pad,
            TOKENS=triton.next_power_of_2(tau), BLOCKS=triton.next_power_of_2(new),
            ENTRIES=max(1, (32 if SMALL_TILES else 2048) // block_pad), CHUNK=chunk_of(entries), num_warps=4,
        )


@operation("kvtwin::thinkv_store_prompt", mutates_args=("pool", "key_scales", "chunk_scales"))
def store_prompt(
    key: Tensor, value: Tensor, order: Tensor, place: Tensor, pool: Tensor, key_scales: Tensor, chunk_scales: Tensor,
    slot_groups: Tensor, physical: Tensor, formats: str, block: int, group: int, tau: int,
) -> None:
    """Quantize the groups of a prompt, and store the tokens that have a place, with the scales of their groups, in the
    pool (`Storage`).

    key, value [B, Hkv, T, D]; order, place [B, T]: those of `place_prompt`, after it. slot_groups, physical: `Tables`.
    """
    (batch, heads, total, head_dim), entries = key.shape, physical.shape[1]
    plan_of = layout(formats, block, group, heads, head_dim, entries)
    fmt, base = _format_of(plan_of)
    parts = triton.cdiv(tau, group)
    all_groups = triton.cdiv(total, tau) * parts
    with on_device_of(key):
        store_prompt_kernel[(2 * batch * all_groups * heads,)](
            key, value, order, place, pool, pool.view(torch.int16), pool.view(torch.uint8),
            key_scales.view(torch.uint8), chunk_scales, slot_groups, physical, heads, slot_groups.shape[1], entries,
            key_scales.shape[1], all_groups, total, tau, parts, order.stride(0), *key.stride(), *value.stride(),
            plan_of.row_words, base, FORMAT=fmt, LANES=LANES[fmt], GROUP=group, BLOCK=block, HEAD_DIM=head_dim,
            D_PAD=padded_head_dim(head_dim), TOKENS=triton.next_power_of_2(group), num_warps=4,
        )
