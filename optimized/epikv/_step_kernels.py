"""All decisions of an EpiKV step in one launch: the new token's score, its place, and the slot to overwrite next.

Buffers of a scorer, contiguous: previous [B, L, C] in the dtype of the hidden states; values [B, L, W], a ring indexed
by the number of the value; occupied, positions, score [B, S]; rank [B, S] int64, the order of eviction, lowest first;
next_slot, tokens (without padding) and seen [B] int64; recents [B, R], the slots of the newest tokens except the last,
a ring indexed by position, -1 for entries without a slot or never evicted; ranges [4, B, 2, Hkv, D]: low and high of
keys and values in the current chunk, then in the one before it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .._common.launch import SMALL_TILES, on_device_of, padded_head_dim
from .._common.numerics import float32, root, sortable
from .._common.operation import operation
from ._score_kernels import limit, no_sign, rolled, spread, taken, variance

#: Above and below every code of a token.
LAST, FIRST = 2**63 - 1, -(2**63)
_LAST, _FIRST = tl.constexpr(LAST), tl.constexpr(FIRST)


@operation(
    "kvtwin::epikv_step",
    mutates_args=(
        "previous", "values", "occupied", "positions", "score", "rank", "next_slot", "tokens", "seen", "recents",
        "ranges",
    ),
)
def step(
    hidden_a: Tensor | None, hidden_b: Tensor | None, key: Tensor | None, value: Tensor | None,
    previous: Tensor, values: Tensor, occupied: Tensor, positions: Tensor, score: Tensor, rank: Tensor,
    next_slot: Tensor, tokens: Tensor, seen: Tensor, recents: Tensor, ranges: Tensor,
    policy: str, window: int, chunk: int, newest: int, lag_variance: bool,
) -> None:
    """One step of all rows. hidden_a, hidden_b [B, L, C] for policies that read them, else key, value [B, Hkv, D]."""
    batch, slots = score.shape
    if hidden_a is not None and hidden_b is not None:
        # A band without layers has no memory to point to.
        one, other = hidden_a, hidden_b if hidden_b.shape[1] else hidden_a
        kind, size = 0 if policy == "hs_variance" else 1, hidden_a.shape[2]
        layers_a, layers_b = hidden_a.shape[1], hidden_b.shape[1]
    else:
        assert key is not None
        assert value is not None
        one, other = (value, value) if policy == "kv_val" else (key, value)
        kind, size = (4 if lag_variance else 3) if policy == "lag_kv" else 2, key.shape[2]
        layers_a, layers_b = key.shape[1], 1
    with on_device_of(score):
        step_kernel[(batch,)](
            one, other, previous, values, occupied, positions, score, rank, next_slot, tokens, seen, recents, ranges,
            batch, slots, size, window, chunk, recents.shape[1], limit(window),
            *one.stride(), *other.stride(),
            LAYERS_A=layers_a, LAYERS_B=layers_b, KIND=kind, RECENT=newest > 1,
            W_PAD=triton.next_power_of_2(window), D_PAD=padded_head_dim(size) if kind > 1 else 16,
            H_PAD=triton.next_power_of_2(layers_a) if kind > 1 else 1,
            BLOCK=min(32 if SMALL_TILES else 4096, max(16, triton.next_power_of_2(size))) if kind < 2 else 16,
            SLOTS=8 if SMALL_TILES else min(2048, max(16, triton.next_power_of_2(slots))), num_warps=8,
        )


@triton.jit
def code_of(score, position):
    """The order of eviction as an integer: by score, NaN as -inf, then the oldest first."""
    return (sortable(no_sign(score)).to(tl.int64) << 32) | position


@triton.jit
def _window(values, number, window, newest, counts, W_PAD: tl.constexpr):
    """The last `window` values up to the new one, whose number is `number`, newest last, [1, W_PAD], and which of them
    exist. The new value is stored in the ring if it `counts`."""
    at = number - (W_PAD - 1) + tl.arange(0, W_PAD).to(tl.int64)
    there = (at >= 0) & (at > number - window)
    x = tl.load(values + tl.maximum(at, 0) % window, mask=there & (at < number), other=0.0)
    x = tl.where(at == number, newest, x)
    tl.debug_barrier()
    tl.store(values + tl.maximum(number, 0) % window, newest, mask=counts)
    return x[None, :], there[None, :]


@triton.jit
def _band(
    hidden, previous, values, hidden_l, hidden_c, size, number, window, constant, LAYERS: tl.constexpr,
    W_PAD: tl.constexpr, BLOCK: tl.constexpr, ZSCORE: tl.constexpr,
):
    """The rolling mean or z-score of the changes, averaged over the layers of a band: [1]. The hidden states replace
    the previous ones. Pointers are at the row and the band's first layer; number: that of the value, -1 for none."""
    total = tl.zeros([1], tl.float32)
    for layer in range(LAYERS):
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            c = start + tl.arange(0, BLOCK).to(tl.int64)
            h = tl.load(hidden + layer * hidden_l + c * hidden_c, mask=c < size, other=0.0)
            p = tl.load(previous + layer * size + c, mask=c < size, other=0.0)
            difference = float32(h) - float32(p)
            squares += difference * difference
            tl.debug_barrier()                                          # other threads may still load what is stored
            tl.store(previous + layer * size + c, h, mask=c < size)
        newest = root(tl.sum(squares[None, :], 1))                      # [1]
        x, there = _window(values + layer * window, number, window, tl.sum(newest, 0), number >= 0, W_PAD)
        total += rolled(x, there, newest, constant, ZSCORE)
    return total / LAYERS


@triton.jit
def _vectors(x, x_h, x_d, size, HEADS: tl.constexpr, H_PAD: tl.constexpr, D_PAD: tl.constexpr):
    h = tl.arange(0, H_PAD).to(tl.int64)[:, None]
    d = tl.arange(0, D_PAD).to(tl.int64)[None, :]
    return float32(tl.load(x + h * x_h + d * x_d, mask=(h < HEADS) & (d < size), other=0.0))


@triton.jit
def _lag(
    x, ranges, all_ranges, size, begins, HEADS: tl.constexpr, H_PAD: tl.constexpr, D_PAD: tl.constexpr,
):
    """The variance of a new key or value x [H_PAD, D_PAD] per head, [H_PAD], see `spread`. Updates the ranges.

    ranges: the row's ranges of keys or of values; all_ranges: the size of each of the four. begins: the token is the
    first of a chunk."""
    h = tl.arange(0, H_PAD)[:, None]
    d = tl.arange(0, D_PAD)[None, :]
    mask = (h < HEADS) & (d < size)
    at = ranges + h * size + d
    low, high = tl.load(at, mask=mask, other=0.0), tl.load(at + all_ranges, mask=mask, other=0.0)
    low_before = tl.load(at + 2 * all_ranges, mask=mask, other=0.0)
    high_before = tl.load(at + 3 * all_ranges, mask=mask, other=0.0)
    low_before, high_before = tl.where(begins, low, low_before), tl.where(begins, high, high_before)
    tl.debug_barrier()                                                  # other threads may still load what is stored
    tl.store(at, tl.where(begins, x, tl.minimum(low, x)), mask=mask)
    tl.store(at + all_ranges, tl.where(begins, x, tl.maximum(high, x)), mask=mask)
    tl.store(at + 2 * all_ranges, low_before, mask=mask)
    tl.store(at + 3 * all_ranges, high_before, mask=mask)
    return spread(x, low_before, high_before, mask)


@triton.jit
def _lowest(rank, slots, SLOTS: tl.constexpr):
    """The slot with the lowest rank. Ranks below _LAST are distinct."""
    best = tl.full([SLOTS], _LAST, tl.int64)
    slot = tl.zeros([SLOTS], tl.int64)
    for start in range(0, slots, SLOTS):
        s = start + tl.arange(0, SLOTS).to(tl.int64)
        found = tl.load(rank + s, mask=s < slots, other=_LAST)
        slot = tl.where(found < best, s, slot)
        best = tl.minimum(found, best)
    lowest = tl.min(best, 0)
    return tl.min(tl.where(best == lowest, slot, _LAST), 0)


@triton.jit(do_not_specialize=[
    "batch", "slots", "size", "window", "chunk", "ring", "one_b", "one_l", "other_b", "other_l",
])
def step_kernel(
    one, other, previous, values, occupied, positions, score, rank, next_slot, tokens, seen, recents, ranges,
    batch, slots, size, window, chunk, ring, constant, one_b, one_l, one_c, other_b, other_l, other_c,
    LAYERS_A: tl.constexpr, LAYERS_B: tl.constexpr, KIND: tl.constexpr, RECENT: tl.constexpr, W_PAD: tl.constexpr,
    D_PAD: tl.constexpr, H_PAD: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):
    """Program: one row. KIND: 0 means, 1 z-scores of hidden states; 2 variance of `one`, 3 deviations of the lag of
    `one` and `other`, 4 their variances, with LAYERS_A heads."""
    b = tl.program_id(0).to(tl.int64)
    position, token, slot = tl.load(seen + b), tl.load(tokens + b), tl.load(next_slot + b)
    one += b * one_b
    other += b * other_b
    if KIND < 2:
        previous += b * (LAYERS_A + LAYERS_B) * size
        values += b * (LAYERS_A + LAYERS_B) * window
        result = _band(
            one, previous, values, one_l, one_c, size, token - 1, window, constant, LAYERS_A, W_PAD, BLOCK, KIND == 1
        )
        if LAYERS_B > 0:
            result -= _band(
                other, previous + LAYERS_A * size, values + LAYERS_A * window, other_l, other_c, size, token - 1,
                window, constant, LAYERS_B, W_PAD, BLOCK, KIND == 1,
            )
        new = tl.where(token == 0, 0.0, tl.sum(result, 0))
    elif KIND == 2:
        x = _vectors(one, one_l, one_c, size, LAYERS_A, H_PAD, D_PAD)
        deviation = variance(x, (tl.arange(0, D_PAD) < size)[None, :], size)
        x, there = _window(
            values + b * window, token, window, tl.sum(deviation, 0) / LAYERS_A, token >= 0, W_PAD
        )
        new = tl.sum(rolled(x, there, tl.zeros([1], tl.float32), constant, False), 0)
    else:
        begins = token % chunk == 0
        width = LAYERS_A * size
        x = _vectors(one, one_l, one_c, size, LAYERS_A, H_PAD, D_PAD)
        found = _lag(
            x, ranges + b * 2 * width, batch * 2 * width, size, begins, LAYERS_A, H_PAD, D_PAD
        )
        total = taken(found, KIND == 4)
        x = _vectors(other, other_l, other_c, size, LAYERS_A, H_PAD, D_PAD)
        found = _lag(
            x, ranges + (b * 2 + 1) * width, batch * 2 * width, size, begins, LAYERS_A, H_PAD, D_PAD
        )
        total += taken(found, KIND == 4)
        new = tl.where(token < chunk, float("inf"), tl.sum(total, 0) / LAYERS_A)
    new = no_sign(new)

    tl.debug_barrier()                                                  # all have read the counters
    row = b * slots
    tl.store(occupied + row + slot, 1)
    tl.store(positions + row + slot, position)
    tl.store(score + row + slot, new)
    if RECENT:
        # When the next token arrives, this token and the `ring` before it are the newest.
        place = recents + b * ring + position % ring
        leaves = tl.load(place)
        tl.debug_barrier()
        tl.store(place, slot)
        tl.store(rank + row + slot, _LAST)
        if leaves >= 0:
            tl.store(
                rank + row + leaves, code_of(tl.load(score + row + leaves), tl.load(positions + row + leaves))
            )
    else:
        tl.store(rank + row + slot, code_of(new, position))
    tl.store(seen + b, position + 1)
    tl.store(tokens + b, token + 1)
    tl.debug_barrier()                                                  # ranks are read by other threads
    tl.store(next_slot + b, _lowest(rank + row, slots, SLOTS))
