"""A prompt's tokens take the first slots of an empty scorer: all of its buffers in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .._common.launch import SMALL_TILES, on_device_of
from .._common.operation import operation
from ._step_kernels import _FIRST, _LAST, _lowest, code_of


@operation(
    "kvtwin::epikv_admit",
    mutates_args=("occupied", "positions", "score", "rank", "next_slot", "tokens", "seen", "recents"),
)
def admit(
    kept: Tensor, scores: Tensor | None, received: Tensor | None, num_tokens: Tensor | None, occupied: Tensor,
    positions: Tensor, score: Tensor, rank: Tensor, next_slot: Tensor, tokens: Tensor, seen: Tensor, recents: Tensor,
    total: int, budget: int, newest: int, extends: bool,
) -> None:
    """Put a prompt of T tokens into the buffers of an empty scorer (`_step_kernels`).

    kept [B, N] int64, ascending, rows contiguous, -1 at the end: the indices of the tokens that stay. scores [B, T]
    float32: the scores of all tokens, or None for a prompt that is never evicted; received, like them, is
    added. num_tokens [B] int64: the tokens without padding, by default `total`. A row may use `budget` slots, and with
    `extends` as many more as it has tokens.
    """
    batch, slots = score.shape
    scores, received = (None if one is None else one.contiguous() for one in (scores, received))
    with on_device_of(score):
        admit_kernel[(batch,)](
            kept, scores, received, num_tokens, occupied, positions, score, rank, next_slot, tokens, seen, recents,
            kept.shape[1], slots, total, budget, newest, recents.shape[1], kept.stride(0), EXTENDS=extends,
            SLOTS=8 if SMALL_TILES else min(1024, max(16, triton.next_power_of_2(slots))), num_warps=8,
        )


@triton.jit(do_not_specialize=["count", "slots", "total", "budget", "newest", "ring", "kept_b"])
def admit_kernel(
    kept, scores, received, num_tokens, occupied, positions, score, rank, next_slot, tokens, seen, recents, count,
    slots, total, budget, newest, ring, kept_b, EXTENDS: tl.constexpr, SLOTS: tl.constexpr,
):
    """Program: one row."""
    b = tl.program_id(0).to(tl.int64)
    row = b * slots
    there = tl.cast(total, tl.int64)
    if num_tokens is not None:
        there = tl.load(num_tokens + b)
    usable = tl.cast(budget, tl.int64)
    if EXTENDS:
        usable += there
    for start in range(0, slots, SLOTS):
        s = start + tl.arange(0, SLOTS).to(tl.int64)
        token = tl.load(kept + b * kept_b + s, mask=s < count, other=-1)
        holds = token >= 0
        if scores is None:
            x = tl.where(holds, float("inf"), float("-inf"))
            code = tl.full([SLOTS], _LAST, tl.int64)
        else:
            x = tl.load(scores + b * total + token, mask=holds, other=float("-inf"))
            if received is not None:
                x += tl.load(received + b * total + token, mask=holds, other=0.0)
            is_newest = holds & (token > total - newest)
            code = tl.where(is_newest, _LAST, code_of(x, token))
            tl.store(recents + b * ring + token % ring, s, mask=is_newest)
        code = tl.where(holds, code, tl.where(s < usable, s + _FIRST, _LAST))
        tl.store(occupied + row + s, holds, mask=s < slots)
        tl.store(positions + row + s, token, mask=s < slots)
        tl.store(score + row + s, x, mask=s < slots)
        tl.store(rank + row + s, code, mask=s < slots)
    tl.store(tokens + b, there)
    tl.store(seen + b, tl.cast(total, tl.int64))
    tl.debug_barrier()                                                  # ranks are read by other threads
    tl.store(next_slot + b, _lowest(rank + row, slots, SLOTS))
