"""Scores of whole sequences, and device functions shared with the decode step (`_step_kernels`).

A window is a row of W_PAD lanes in a tile, with the newest value last, so that sequences and steps add in the same
order. Quotients and roots are rounded to nearest, which keeps the deviation of equal values far below the limit for
constant series.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._common.launch import INTERPRETED, SMALL_TILES, on_device_of, padded_head_dim
from .._common.numerics import divided, float32, root
from .._common.operation import operation

#: The longest window whose tile is as wide as the window whatever the number of tokens.
LONG_WINDOW = 4096
LEAST_RANGE = tl.constexpr(1e-6)


@triton.jit
def no_sign(x):
    """x with -0 replaced by +0. Adding 0 does not work: a fused multiply-add keeps the sign."""
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def rolled(x, there, newest, constant, ZSCORE: tl.constexpr):
    """The mean of each window in a tile [R, W_PAD], or the z-score of its last value, newest [R]; 0 for an empty
    window. constant: deviations up to this fraction of the largest magnitude count as 0."""
    count = tl.maximum(tl.sum(there.to(tl.float32), 1), 1.0)
    mean = divided(tl.sum(tl.where(there, x, 0.0), 1), count)
    if ZSCORE:
        deviation = tl.where(there, x - mean[:, None], 0.0)
        sigma = root(divided(tl.sum(deviation * deviation, 1), count))
        largest = tl.max(tl.where(there, tl.abs(x), 0.0), 1)
        is_constant = sigma <= constant * largest
        return tl.where(is_constant, 0.0, divided(newest - mean, tl.where(is_constant, 1.0, sigma)))
    else:
        return mean


@triton.jit
def variance(x, in_head, head_dim):
    """Variance (ddof 0) of each row of x [R, D_PAD]; in_head [R or 1, D_PAD]."""
    mean = tl.sum(tl.where(in_head, x, 0.0), 1) * (1.0 / head_dim)
    deviation = tl.where(in_head, x - mean[:, None], 0.0)
    return tl.sum(deviation * deviation, 1) * (1.0 / head_dim)


@triton.jit
def spread(x, low, high, in_head):
    """Variance over the channels of (x - low) / (high - low): x [R, D_PAD]; low, high, in_head [R or 1, D_PAD]."""
    width = high - low
    largest = tl.max(tl.where(in_head, tl.maximum(tl.abs(low), tl.abs(high)), 0.0), 1)
    says = (width > largest[:, None] * LEAST_RANGE) & in_head
    count = tl.maximum(tl.sum(says.to(tl.float32), 1), 1.0)[:, None]
    normal = tl.where(says, (x - low) / tl.where(says, width, 1.0), 0.0)
    centre = tl.sum(normal / count, 1)
    deviation = tl.where(says, normal - centre[:, None], 0.0)
    return tl.sum(deviation * deviation / count, 1)


@triton.jit
def taken(found, VARIANCE: tl.constexpr):
    """What "lag_kv" adds up of a spread: its root, the deviation, or itself."""
    if VARIANCE:
        return found
    else:
        return root(found)


# Operations ----------------------------------------------------------------------------------------------------------


@operation("kvtwin::epikv_change", mutates_args=())
def change(hidden: Tensor, previous: Tensor, source: Tensor | None) -> Tensor:
    """||hidden[b, t] - previous[b, source[b, t]]||_2: hidden, previous [B, T, C]; source [B, T] int64, by default t; -1
    gives 0. Returns [B, T] float32."""
    batch, tokens, size = hidden.shape
    result = torch.empty(batch, tokens, dtype=torch.float32, device=hidden.device)
    block = min(32 if SMALL_TILES else 512, triton.next_power_of_2(size))
    rows = 32 if INTERPRETED else 4
    with on_device_of(hidden):
        change_kernel[(triton.cdiv(batch * tokens, rows),)](
            hidden, previous, source, result, batch * tokens, tokens, size, *hidden.stride(), *previous.stride(),
            ROWS=rows, BLOCK=block, INDEXED=source is not None, num_warps=4,
        )
    return result


@change.register_fake
def _(hidden: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[:2], dtype=torch.float32)


@operation("kvtwin::epikv_rolling", mutates_args=())
def rolling(values: Tensor, first: Tensor | None, window: int, zscore: bool) -> Tensor:
    """Rolling means or z-scores of values [N, T]; those before first[n] are padding."""
    rows, tokens = values.shape
    result = torch.empty(rows, tokens, dtype=torch.float32, device=values.device)
    # A width that depends on T changes the order of sums, so only windows that would be expensive are cut.
    window, constant = min(window, max(tokens, LONG_WINDOW)), limit(window)
    width = triton.next_power_of_2(window)
    block = max(1, (8192 if INTERPRETED else 2048) // width)
    with on_device_of(values):
        rolling_kernel[(rows * triton.cdiv(tokens, block),)](
            values, first, result, tokens, window, triton.cdiv(tokens, block), constant, *values.stride(),
            BLOCK=block, W_PAD=width, ZSCORE=zscore, PADDED=first is not None, num_warps=4,
        )
    return result


@rolling.register_fake
def _(values: Tensor) -> Tensor:
    return values.new_empty(values.shape, dtype=torch.float32)


def limit(window: int) -> float:
    """The largest deviation that counts as 0, relative to the largest magnitude in the window. Exact in float32 for
    windows below 2^22."""
    return 4 * 2.0**-24 * window


@operation("kvtwin::epikv_variance", mutates_args=())
def variances(x: Tensor) -> Tensor:
    """Variance over the channels, averaged over heads: x [B, Hkv, T, D] -> [B, T]."""
    batch, heads, tokens, head_dim = x.shape
    result = torch.empty(batch, tokens, dtype=torch.float32, device=x.device)
    block = 16
    with on_device_of(x):
        variance_kernel[(batch * triton.cdiv(tokens, block),)](
            x, result, tokens, heads, triton.cdiv(tokens, block), *x.stride(),
            HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), BLOCK=block, num_warps=4,
        )
    return result


@variances.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[2]), dtype=torch.float32)


@operation("kvtwin::epikv_lag", mutates_args=())
def lag(key: Tensor, value: Tensor, order: Tensor, first: Tensor, chunk: int, variance: bool) -> Tensor:
    """`lag_kv` of key, value [B, Hkv, T, D]. order [B, T]: the indices of the padding, before place first[b], then of
    the tokens. Returns [B, T], at the tokens' own indices; 0 for padding."""
    batch, heads, tokens, head_dim = key.shape
    result = torch.zeros(batch, tokens, dtype=torch.float32, device=key.device)
    chunks = triton.cdiv(tokens, chunk)
    with on_device_of(key):
        lag_kernel[(batch * chunks,)](
            key, value, order, first, result, tokens, heads, chunk, chunks, *key.stride(), *value.stride(),
            HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim),
            TILE=min(4 if SMALL_TILES else 64, triton.next_power_of_2(chunk)), VARIANCE=variance, num_warps=8,
        )
    return result


@lag.register_fake
def _(key: Tensor) -> Tensor:
    return key.new_empty((key.shape[0], key.shape[2]), dtype=torch.float32)


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=[
    "rows", "tokens", "size", "hidden_b", "hidden_t", "previous_b", "previous_t",
])
def change_kernel(
    hidden, previous, source, result, rows, tokens, size, hidden_b, hidden_t, hidden_c, previous_b, previous_t,
    previous_c, ROWS: tl.constexpr, BLOCK: tl.constexpr, INDEXED: tl.constexpr,
):
    """Program: ROWS tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    b, t = row // tokens, row % tokens
    before = t
    if INDEXED:
        before = tl.load(source + row, mask=inside, other=-1)
    counts = inside & (before >= 0)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        c = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = counts[:, None] & (c < size)[None, :]
        h = tl.load(hidden + (b * hidden_b + t * hidden_t)[:, None] + c[None, :] * hidden_c, mask=mask, other=0.0)
        p = tl.load(
            previous + (b * previous_b + before * previous_t)[:, None] + c[None, :] * previous_c, mask=mask, other=0.0
        )
        difference = float32(h) - float32(p)
        total += difference * difference
    tl.store(result + row, root(tl.sum(total, 1)), mask=inside)


@triton.jit(do_not_specialize=["tokens", "window", "blocks", "values_n", "values_t"])
def rolling_kernel(
    values, first, result, tokens, window, blocks, constant, values_n, values_t,
    BLOCK: tl.constexpr, W_PAD: tl.constexpr, ZSCORE: tl.constexpr, PADDED: tl.constexpr,
):
    """Program: BLOCK windows of a row."""
    n = (tl.program_id(0) // blocks).to(tl.int64)
    t = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    begin = 0
    if PADDED:
        begin = tl.load(first + n).to(tl.int32)
    at = t[:, None] - (W_PAD - 1) + tl.arange(0, W_PAD)[None, :]
    there = (at >= begin) & (at > t[:, None] - window) & (t < tokens)[:, None]
    x = float32(tl.load(values + n * values_n + at.to(tl.int64) * values_t, mask=there, other=0.0))
    newest = float32(
        tl.load(values + n * values_n + t.to(tl.int64) * values_t, mask=(t >= begin) & (t < tokens), other=0.0)
    )
    tl.store(
        result + n * tokens + t, no_sign(rolled(x, there, newest, constant, ZSCORE)), mask=t < tokens
    )


@triton.jit(do_not_specialize=["tokens", "heads", "blocks", "x_b", "x_h", "x_t"])
def variance_kernel(
    x, result, tokens, heads, blocks, x_b, x_h, x_t, x_d,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
):
    """Program: BLOCK tokens of a row of the batch, all heads."""
    b = (tl.program_id(0) // blocks).to(tl.int64)
    t = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D_PAD).to(tl.int64)
    in_head = (d < HEAD_DIM)[None, :]
    total = tl.zeros([BLOCK], tl.float32)
    for head in range(heads):
        at = x + b * x_b + tl.cast(head, tl.int64) * x_h + t.to(tl.int64)[:, None] * x_t + d[None, :] * x_d
        vectors = float32(tl.load(at, mask=(t < tokens)[:, None] & in_head, other=0.0))
        total += variance(vectors, in_head, HEAD_DIM)
    tl.store(result + b * tokens + t, total / heads, mask=t < tokens)


@triton.jit
def _vectors(x, order, begin, last, tile, x_t, x_d, dim, D_PAD: tl.constexpr, TILE: tl.constexpr):
    """The vectors x [TILE, D_PAD] at places begin + tile and on of a row's order, before `last`; their mask and
    indices.
    """
    place = begin + tile + tl.arange(0, TILE)
    d = tl.arange(0, D_PAD).to(tl.int64)
    there = place < last
    t = tl.load(order + place, mask=there, other=0)
    mask = there[:, None] & (d < dim)[None, :]
    return float32(tl.load(x + t[:, None] * x_t + d[None, :] * x_d, mask=mask, other=0.0)), mask, t


@triton.jit
def _ranges(x, order, begin, chunk, x_t, x_d, dim, D_PAD: tl.constexpr, TILE: tl.constexpr):
    """The minimum and maximum of each channel in the chunk that begins at place `begin`, [1, D_PAD]."""
    low = tl.full([D_PAD], float("inf"), tl.float32)
    high = tl.full([D_PAD], float("-inf"), tl.float32)
    for tile in range(0, chunk, TILE):
        v, mask, _ = _vectors(x, order, begin, begin + chunk, tile, x_t, x_d, dim, D_PAD, TILE)
        low = tl.minimum(low, tl.min(tl.where(mask, v, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(mask, v, float("-inf")), 0))
    empty = low > high
    return tl.where(empty, 0.0, low)[None, :], tl.where(empty, 0.0, high)[None, :]


@triton.jit(do_not_specialize=[
    "tokens", "heads", "chunk", "chunks", "key_b", "key_h", "key_t", "value_b", "value_h", "value_t",
])
def lag_kernel(
    key, value, order, first, result, tokens, heads, chunk, chunks,
    key_b, key_h, key_t, key_d, value_b, value_h, value_t, value_d,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, VARIANCE: tl.constexpr,
):
    """Program: one chunk of a row of the batch, normalized by the chunk before it."""
    b = (tl.program_id(0) // chunks).to(tl.int64)
    number = tl.program_id(0) % chunks
    begin = tl.load(first + b).to(tl.int32) + number * chunk
    last = tl.minimum(begin + chunk, tokens)
    order += b * tokens
    in_head = (tl.arange(0, D_PAD) < HEAD_DIM)[None, :]
    for tile in range(0, chunk, TILE):
        total = tl.zeros([TILE], tl.float32)
        if number == 0:
            total += float("inf")
        elif begin < tokens:                                            # else padding moved it out of the row
            for head in range(heads):
                h = tl.cast(head, tl.int64)
                one, other = key + b * key_b + h * key_h, value + b * value_b + h * value_h
                low, high = _ranges(one, order, begin - chunk, chunk, key_t, key_d, HEAD_DIM, D_PAD, TILE)
                x, _, _ = _vectors(one, order, begin, last, tile, key_t, key_d, HEAD_DIM, D_PAD, TILE)
                total += taken(spread(x, low, high, in_head), VARIANCE)
                low, high = _ranges(other, order, begin - chunk, chunk, value_t, value_d, HEAD_DIM, D_PAD, TILE)
                x, _, _ = _vectors(other, order, begin, last, tile, value_t, value_d, HEAD_DIM, D_PAD, TILE)
                total += taken(spread(x, low, high, in_head), VARIANCE)
            total = total / heads
        place = begin + tile + tl.arange(0, TILE)
        # A tile may extend beyond the end of its chunk.
        inside = (place < last) & (tile + tl.arange(0, TILE) < chunk)
        t = tl.load(order + place, mask=inside, other=0)
        tl.store(result + b * tokens + t, total, mask=inside)
