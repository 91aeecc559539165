"""The decode step's operation on a state's buffers; see `decode_kernels.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....reference.contract import Sizes
from ..launch import (
    MAX_SPLITS,
    SMALL_TILES,
    cdiv,
    discards,
    fused,
    group_rows,
    key_block,
    next_power_of_2,
    on_device_of,
    padded_head_dim,
    padded_slots,
    split_slots,
)
from ..numerics import logit_factors
from ..operation import operation
from .decode_kernels import finish_kernel, step_kernel
from .score_kernels import ACTIVATE, AGE, APPEND, NEWEST, NOTHING, RANDOM, RENEW, SUM

#: For heads finished by their last program: slots per iteration, stages, warps, registers. Fewer such programs run at a
#: time (three per multiprocessor), so logits are consumed sooner, before they leave the cache. Best on an H200.
CHUNK, STAGES, WARPS, REGISTERS = 512, 3, 4, 168

#: Rules of `step`, by name; see `score_kernels.py`.
RULES = {
    "nothing": NOTHING, "sum": SUM, "newest": NEWEST, "renew": RENEW, "activate": ACTIVATE, "random": RANDOM,
    "age": AGE, "append": APPEND,
}
#: Rules that rank by the logits.
WEIGHING = ("sum", "newest", "renew", "activate")
#: Rules that read a number that each token carries.
CARRYING = ("sum", "activate")
#: Rules that leave eviction to the caller. A head's last program finishes it, since little is left to do.
BARE = ("nothing", "append")


class Scratch(NamedTuple):
    """Buffers passed between the programs of a step. workspace float32: logits, partial accumulators, their maxima and
    sums, normalisers, new scores; candidates int64; completion_counters int32, one counter per batch_head and one for
    all, 0 between steps."""

    workspace: Tensor
    candidates: Tensor
    completion_counters: Tensor


class _Plan(NamedTuple):
    """How the work is divided: tiles of `block` slots, `share` tiles per split; fused: a head's last split finishes it.
    Otherwise `blocks` programs of `slots_each` * 16 slots do. cuts: the sizes of the workspace's pieces."""
    block: int
    splits: int
    share: int
    fused: bool
    blocks: int
    slots_each: int
    cuts: list[int]


def _plan(sizes: Sizes, budget: int, itemsize: int, device: torch.device, rule: str) -> _Plan:
    batch, query_heads, heads, _, head_dim = sizes
    sizes = sizes._replace(slots=budget)
    block = key_block(head_dim, itemsize, budget)
    if itemsize == 4:
        block = 16                                                     # see kernels.FLOAT32_TILE
    splits, split_size = split_slots(sizes, block, device)
    sixteens = cdiv(budget + 1, 16)
    blocks = cdiv(sixteens, 2 if SMALL_TILES else 16)
    logits = padded_slots(budget + 1) * next_power_of_2(sizes.group) if rule in WEIGHING else 0
    batch_heads, count = batch * heads, batch * query_heads
    # Every piece is aligned alike for all sizes, since Triton compiles a kernel again for another alignment.
    cuts = [
        cdiv(cut, 32) * 32
        for cut in (
            batch_heads * logits, count * splits * head_dim, count * splits, count * splits, count * 2, batch_heads
        )
    ]
    return _Plan(
        block, splits, split_size // block, rule in BARE or fused(sizes, device), blocks,
        cdiv(sixteens, blocks), cuts,
    )


def _registers(plan: _Plan, key: Tensor) -> int | None:
    """A register limit where it causes no spills; None leaves the choice to the compiler."""
    return REGISTERS if plan.fused and padded_head_dim(key.shape[3]) * key.element_size() <= 256 else None


@torch.inference_mode(False)
def scratch(sizes: Sizes, budget: int, dtype: torch.dtype, device: torch.device, rule: str) -> Scratch:
    """Allocate the buffers for a state's steps. The number of slots in sizes does not matter."""
    plan = _plan(sizes, budget, dtype.itemsize, device, rule)
    batch_heads = sizes.batch * sizes.key_value_heads
    return Scratch(
        # Zeros: the logits of slots that are not yet in use are read, for aligned accesses, and not used.
        torch.zeros(sum(plan.cuts), dtype=torch.float32, device=device),
        torch.empty(batch_heads, plan.blocks, dtype=torch.int64, device=device),
        torch.zeros(batch_heads + 1, dtype=torch.int32, device=device),
    )


@operation(
    "kvtwin::block_step",
    mutates_args=(
        "key", "value", "occupied", "positions", "score", "token_index", "carried", "valid_seen", "seen", "workspace",
        "candidates", "completion_counters", "counts", "ranks", "window_query", "window_positions",
    ),
)
def step(
    query: Tensor, new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor, occupied: Tensor, positions: Tensor,
    score: Tensor, token_index: Tensor, carried: Tensor | None, valid_seen: Tensor, seen: Tensor,
    workspace: Tensor, candidates: Tensor, completion_counters: Tensor,
    counts: Tensor | None, ranks: Tensor | None, window_query: Tensor | None, window_positions: Tensor | None,
    scale: float, softcap: float | None, budget: int, rule: str, sinks: int, recent: int, offset: int, alpha: float,
    block_table: Tensor | None = None, sink_logits: Tensor | None = None,
) -> Tensor:
    """Add one token: attention to the cache and to itself, update of the scores, and its slot, if the rule gives one.

    query [B, Hq, D]; new_key, new_value [B, Hkv, D]; a state's buffers as in `ops.arrive`; workspace, candidates and
    completion_counters: a Scratch. rule: "sum" (times carried, ||v||_1, if given), "newest", "renew" (by a weight of at
    least alpha), "activate" (likewise; carried int64: see `score_slots`; offset: what is added to age / gap), "random"
    (offset: the generator's state without the position) or "age"; with "nothing" the token takes slot `budget`, and the
    caller evicts. The oldest `sinks` and the newest `recent` tokens are protected. With counts [B, Hkv] int32, the
    tokens of each head, the token takes the first of `budget` + 1 slots that is free, counts is incremented, and the
    caller evicts: the rules of WEIGHING store in ranks [B, Hkv, S] (float32; int64 with "renew") what a head with
    `budget` + 1 tokens is to be ranked by, by slot. "append" needs counts; the query replaces the oldest in
    window_query [B, Hq, W, D] and window_positions [B, W]. With block_table [B, n], which needs "nothing", key and
    value are in pages [pages, Hkv, page_size, D], any strides. sink_logits [Hq], contiguous, or None. Returns the
    output [B, Hq, D].
    """
    batch, query_heads, head_dim = query.shape
    _, heads, slots = occupied.shape
    paged = block_table is not None
    assert not paged or rule == "nothing"
    sizes = Sizes(batch, query_heads, heads, slots, head_dim)
    plan = _plan(sizes, budget, key.element_size(), key.device, rule)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    logits, partial, row_maxima, weight_sums, normalisers, new_scores = workspace.split(plan.cuts)
    batch_heads, group = batch * heads, sizes.group
    unit = 16 if slots % 16 == 0 else 1
    group_pad = next_power_of_2(group)
    strides = (*new_key.stride(), *new_value.stride())
    page_strides = (*block_table.stride(), *key.stride(), *value.stride()) if block_table is not None else [None] * 10
    state = (
        new_key, new_value, key, value, occupied, positions, score, token_index,
        score if carried is None else carried, valid_seen, seen,
    )
    numbers = (heads, batch_heads, sinks, recent, offset)
    options = {
        "GROUP": group, "GROUP_PAD": group_pad, "HEAD_DIM": head_dim, "D_PAD": padded_head_dim(head_dim),
        "UNIT": unit, "SPLITS": 8 if plan.splits <= 8 else MAX_SPLITS, "RULE": RULES[rule],
        "MAGNITUDE": carried is not None and rule != "activate",
        "PROTECTS": sinks + recent > 0 and counts is None, "GROWS": counts is not None,
    }
    # What only finish_kernel uses has one value for step_kernel, so that most rules share one kernel.
    attends = options if plan.fused else {
        **options, "RULE": RULES["sum" if rule in WEIGHING else "age"], "MAGNITUDE": False, "PROTECTS": False,
    }
    padded = padded_slots(budget + 1) // 16
    grown = valid_seen if counts is None else counts, score if ranks is None else ranks
    window = query if window_query is None else window_query, seen if window_positions is None else window_positions
    with on_device_of(key):
        step_kernel[(batch_heads * plan.splits,)](
            query, *state, output, logits, partial, row_maxima, weight_sums, normalisers, completion_counters,
            *grown, *window, sink_logits, *logit_factors(scale, softcap), alpha, budget, slots // unit, padded,
            plan.share, plan.splits, *numbers, 1 if window_query is None else window_query.shape[2], *query.stride(),
            *strides, block_table, *page_strides, **attends, ROWS=group_rows(group, query.dtype), BLOCK=plan.block,
            CHUNK=32 if SMALL_TILES else min(CHUNK, 8 * CHUNK // group_pad), PAGE=key.shape[2] if paged else 0,
            FUSED=plan.fused, DISCARD=plan.fused and discards(key.device),
            num_warps=WARPS if plan.fused or key.element_size() == 4 else 2, num_stages=STAGES if plan.fused else 2,
            maxnreg=_registers(plan, key),
        )
        if not plan.fused:
            finish_kernel[(batch_heads * (plan.blocks + group),)](
                *state, output, logits, partial, row_maxima, normalisers, completion_counters, candidates, new_scores,
                *grown, alpha, budget, slots // unit, padded, plan.slots_each, plan.splits, plan.blocks, *numbers,
                *strides, **options, CHUNK=next_power_of_2(plan.slots_each * 16), num_warps=4,
            )
    return output


@step.register_fake
def _(query: Tensor) -> Tensor:
    return query.new_empty(query.shape)
