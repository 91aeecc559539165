"""What EpiKV's hybrids add to a step: statistics of the attention weights, and the choice of the slot by them.

`receive_kernel` and `add_sparsity_kernel` run after each layer's attention, which stores its logits and normalisers
(see `_attend_kernels`). `choose_by_weight_kernel` and `choose_by_thought_kernel` run after `_step_kernels.step`, which
ranks by hidden states alone and stores the new token's score, for the first of them in `frozen`. Buffers, contiguous:
logits [B, Hq, S] in base 2, -inf for unoccupied slots; normalisers [B, Hq, 2]; received [B, S] and sparsity [B]
float32, sums over the layers so far; aggregate, frozen, score [B, S] float32; thoughts [B, S], thought and decoded [B]
int64.
"""

from __future__ import annotations

from math import log2

import triton
import triton.language as tl
from torch import Tensor

from .._common.launch import GROUP_ROWS, SMALL_TILES, on_device_of
from .._common.numerics import log2_or_minus_inf
from .._common.operation import operation
from .._common.thoughts import below_cut, pooled_cut, thought_of
from ._entropy_kernel import thought_of_entropy
from ._score_kernels import no_sign
from ._step_kernels import code_of

_LAST = tl.constexpr(2**63 - 1)


@operation("kvtwin::epikv_receive", mutates_args=("received",))
def receive(logits: Tensor, normalisers: Tensor, received: Tensor, first: bool) -> None:
    """Add each token's weight, averaged over query heads, to `received`. The first layer of a step overwrites it."""
    batch, heads, slots = logits.shape
    block = _block(slots)
    with on_device_of(logits):
        receive_kernel[(batch * triton.cdiv(slots, block),)](
            logits, normalisers, received, slots, triton.cdiv(slots, block), heads,
            BLOCK=block, FIRST=first, num_warps=4,
        )


@operation("kvtwin::epikv_add_sparsity", mutates_args=("sparsity",))
def add_sparsity(
    logits: Tensor, normalisers: Tensor, occupied: Tensor, slot: Tensor, decoded: Tensor, sparsity: Tensor,
    key_value_heads: int, tau: int, threshold: float, first: bool,
) -> None:
    """Add a layer's sparsity to `sparsity` in rows where a segment begins. slot [B]: that of the new token."""
    batch, heads, slots = logits.shape
    with on_device_of(logits):
        add_sparsity_kernel[(batch,)](
            logits, normalisers, occupied, slot, decoded, sparsity, slots, key_value_heads, tau, log2(threshold),
            GROUP=heads // key_value_heads, ROWS=GROUP_ROWS,
            BLOCK=_block(slots), FIRST=first, num_warps=4,
        )


@operation("kvtwin::epikv_choose", mutates_args=("aggregate", "score", "next_slot"))
def choose_by_weight(
    received: Tensor, aggregate: Tensor, frozen: Tensor, score: Tensor, occupied: Tensor, positions: Tensor,
    rank: Tensor, seen: Tensor, next_slot: Tensor, layers: int,
) -> None:
    """Add this step's mean over `layers` to `aggregate`. The next slot has the lowest aggregate + `frozen`."""
    batch, slots = score.shape
    with on_device_of(score):
        choose_by_weight_kernel[(batch,)](
            received, aggregate, frozen, score, occupied, positions, rank, seen, next_slot, slots, layers,
            SLOTS=_tile(slots), num_warps=8,
        )


@operation(
    "kvtwin::epikv_choose_by_thought", mutates_args=("thoughts", "thought", "decoded", "next_slot")
)
def choose_by_thought(
    sparsity: Tensor, thoughts: Tensor, thought: Tensor, decoded: Tensor, occupied: Tensor, positions: Tensor,
    rank: Tensor, seen: Tensor, next_slot: Tensor, layers: int, tau: int, low: float, high: float, by_entropy: bool,
) -> None:
    """Classify segments that begin by the mean over `layers` of `sparsity`, which is the entropy if `by_entropy`. Store
    the new token's thought, and choose the next slot: the lowest rank among tokens of the least important thought."""
    batch, slots = thoughts.shape
    with on_device_of(rank):
        choose_by_thought_kernel[(batch,)](
            sparsity, thoughts, thought, decoded, occupied, positions, rank, seen, next_slot, slots, layers, tau, low,
            high, SLOTS=_tile(slots), ENTROPY=by_entropy, num_warps=8,
        )


def _block(slots: int) -> int:
    """Slots per iteration, or per program. In the interpreter few, so that tests cover several."""
    return 8 if SMALL_TILES else min(256, max(16, triton.next_power_of_2(slots)))


def _tile(slots: int) -> int:
    return 8 if SMALL_TILES else min(2048, max(16, triton.next_power_of_2(slots)))


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["slots", "blocks", "heads"])
def receive_kernel(
    logits, normalisers, received, slots, blocks, heads, BLOCK: tl.constexpr, FIRST: tl.constexpr
):
    """Program: one block of a row's slots, over all heads."""
    b = (tl.program_id(0) // blocks).to(tl.int64)
    s = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = s < slots
    total = tl.zeros([BLOCK], tl.float32)
    for h in range(heads):
        head = b * heads + h
        logit = tl.load(logits + head * slots + s, mask=inside, other=float("-inf"))
        weight = tl.exp2(logit - tl.load(normalisers + head * 2))
        total += weight / tl.load(normalisers + head * 2 + 1)
    total = total / heads
    if not FIRST:
        total += tl.load(received + b * slots + s, mask=inside, other=0.0)
    tl.store(received + b * slots + s, total, mask=inside)


@triton.jit(do_not_specialize=["slots", "heads", "tau"])
def add_sparsity_kernel(
    logits, normalisers, occupied, slot, decoded, sparsity, slots, heads, tau, log_threshold,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr,
):
    """Program: one row, over all KV heads. Returns at once if no segment begins."""
    b = tl.program_id(0).to(tl.int64)
    if tl.load(decoded + b) % tau == 0:
        newest = tl.load(slot + b)
        g = tl.arange(0, ROWS)
        shares = 0.0
        for k_head in range(heads):
            head = (b * heads + k_head) * GROUP + g
            row_max = tl.load(normalisers + head * 2, mask=g < GROUP, other=0.0)
            log_total = log2_or_minus_inf(tl.load(normalisers + head * 2 + 1, mask=g < GROUP, other=1.0))
            cut = pooled_cut(log_total, log_threshold, GROUP, ROWS)
            below = tl.zeros([BLOCK], tl.int32)
            num_tokens = tl.zeros([BLOCK], tl.int32)
            for start in range(0, slots, BLOCK):
                s = start + tl.arange(0, BLOCK)
                inside = s < slots
                holds = ((tl.load(occupied + b * slots + s, mask=inside, other=0) != 0) | (s == newest)) & inside
                logit = tl.load(
                    logits + head[:, None] * slots + s[None, :], mask=(g < GROUP)[:, None] & inside[None, :],
                    other=float("-inf"),
                )
                below += (below_cut(logit, row_max, log_total, cut, GROUP, ROWS) & holds).to(tl.int32)
                num_tokens += holds.to(tl.int32)
            shares += tl.sum(below, 0).to(tl.float32) / tl.sum(num_tokens, 0).to(tl.float32)
        total = shares / heads
        if not FIRST:
            total += tl.load(sparsity + b)
        tl.store(sparsity + b, total)


@triton.jit
def _earlier(found, s, best, slot):
    """The lower of two ranks in each lane, and its slot."""
    return tl.minimum(found, best), tl.where(found < best, s, slot)


@triton.jit
def _slot_of(best, slot):
    return tl.min(tl.where(best == tl.min(best, 0), slot, _LAST), 0)


@triton.jit(do_not_specialize=["slots", "layers"])
def choose_by_weight_kernel(
    received, aggregate, frozen, score, occupied, positions, rank, seen, next_slot, slots, layers, SLOTS: tl.constexpr
):
    """Program: one row. Ranks tell which slots are free and which tokens cannot be evicted."""
    b = tl.program_id(0).to(tl.int64)
    row = b * slots
    newest = tl.load(seen + b) - 1
    best = tl.full([SLOTS], _LAST, tl.int64)
    slot = tl.zeros([SLOTS], tl.int64)
    for start in range(0, slots, SLOTS):
        s = start + tl.arange(0, SLOTS).to(tl.int64)
        inside = s < slots
        holds = tl.load(occupied + row + s, mask=inside, other=0) != 0
        position = tl.load(positions + row + s, mask=inside, other=-1)
        before = tl.load(aggregate + row + s, mask=inside, other=0.0)
        more = tl.load(received + row + s, mask=inside, other=0.0) / layers
        total = tl.where(position == newest, more, before + more)
        value = no_sign(total + tl.load(frozen + row + s, mask=inside, other=0.0))
        tl.store(aggregate + row + s, total, mask=holds)
        tl.store(score + row + s, value, mask=holds)
        found = tl.load(rank + row + s, mask=inside, other=_LAST)
        found = tl.where(holds & (found != _LAST), code_of(value, position), found)
        best, slot = _earlier(found, s, best, slot)
    tl.store(next_slot + b, _slot_of(best, slot))


@triton.jit(do_not_specialize=["slots", "layers", "tau"])
def choose_by_thought_kernel(
    sparsity, thoughts, thought, decoded, occupied, positions, rank, seen, next_slot, slots, layers, tau, low, high,
    SLOTS: tl.constexpr, ENTROPY: tl.constexpr,
):
    """Program: one row. Free slots come first, then the least important thought among evictable tokens, then the rank.
    """
    b = tl.program_id(0).to(tl.int64)
    row = b * slots
    newest, number = tl.load(seen + b) - 1, tl.load(decoded + b)
    mine = tl.load(thought + b)
    if number % tau == 0:
        mean = tl.load(sparsity + b) / layers
        mine = thought_of_entropy(mean, low, high) if ENTROPY else thought_of(mean, low, high)
    least = tl.full([SLOTS], 3, tl.int64)
    for start in range(0, slots, SLOTS):
        s = start + tl.arange(0, SLOTS).to(tl.int64)
        inside = s < slots
        holds = tl.load(occupied + row + s, mask=inside, other=0) != 0
        arrived = holds & (tl.load(positions + row + s, mask=inside, other=-1) == newest)
        kind = tl.where(arrived, mine, tl.load(thoughts + row + s, mask=inside, other=3))
        tl.store(thoughts + row + s, kind, mask=arrived)
        may_go = tl.load(rank + row + s, mask=inside, other=_LAST) != _LAST
        least = tl.minimum(least, tl.where(may_go, tl.where(holds, kind, -1), 3))
    least_of_all = tl.min(least, 0)
    tl.debug_barrier()                                                  # all have read; the thought is stored
    best = tl.full([SLOTS], _LAST, tl.int64)
    slot = tl.zeros([SLOTS], tl.int64)
    for start in range(0, slots, SLOTS):
        s = start + tl.arange(0, SLOTS).to(tl.int64)
        inside = s < slots
        holds = tl.load(occupied + row + s, mask=inside, other=0) != 0
        kind = tl.where(holds, tl.load(thoughts + row + s, mask=inside, other=3), -1)
        found = tl.load(rank + row + s, mask=inside & (kind == least_of_all), other=_LAST)
        best, slot = _earlier(found, s, best, slot)
    tl.store(thought + b, mine)
    tl.store(decoded + b, number + 1)
    tl.store(next_slot + b, _slot_of(best, slot))
