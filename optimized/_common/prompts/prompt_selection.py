"""The tokens of a whole prompt that an empty cache keeps: those with the best scores, which take the first slots.

In SnapKV and LongFlow, the scores are the attention that tokens receive from the prompt's last queries, pooled along
the prompt. One kernel scores the tokens, the kernels of `radix_selection.py` find the best, and the last one fills
slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..block_cache.kernels import Window, launch_attention, launch_received
from ..launch import SMALL_TILES, on_device_of, padded_head_dim, stride_unit
from ..numerics import sortable
from ..operation import operation
from ..radix_selection import _FREE, first_digit, search

#: Tokens per program that scores them.
CHUNK = 64 if SMALL_TILES else 1024
#: Tokens per program that fills slots.
FILLED = 16 if SMALL_TILES else 32

#: The codes of tokens that rank above all scores: the first ones, and the window's.
_FIRST = tl.constexpr(2**31 - 1)
_WINDOW = tl.constexpr(2**31 - 2)


@operation("kvtwin::prompt_received", mutates_args=())
def received(
    query_window: Tensor, key: Tensor, occupied: Tensor, scale: float, prefix_alone: bool = False,
    softcap: float | None = None, sink_logits: Tensor | None = None,
) -> Tensor:
    """Each token's softmax weight, averaged over the window's queries and the heads of a group: [B, Hkv, T] float32.

    query_window [B, Hq, W, D]: the queries of the last W tokens; key [B, Hkv, T, D]; occupied [B, T] bool.
    prefix_alone: the softmax runs over the tokens before the window alone, whose own tokens receive 0. softcap: of the
    logits. sink_logits [Hq], contiguous: those of attention sinks.
    """
    window = None
    if prefix_alone:
        total = key.shape[2]
        prefix = total - query_window.shape[2]
        asks = torch.where(occupied[:, prefix:], prefix - 1, -1)       # every query sees the prefix, and no more
        window = Window(asks, torch.arange(total, device=key.device).expand(key.shape[:3]))
    softmax_parts = torch.empty(2, *query_window.shape[:3], dtype=torch.float32, device=key.device)
    result = torch.empty(key.shape[:3], dtype=torch.float32, device=key.device)
    launch_attention(query_window, key, None, occupied, window, None, softmax_parts, None, scale, softcap=softcap,
                     sink_logits=sink_logits)
    launch_received(query_window, key, occupied, window, softmax_parts, result, scale, mean=True, softcap=softcap)
    return result


@received.register_fake
def _(key: Tensor) -> Tensor:
    return key.new_empty(key.shape[:3], dtype=torch.float32)


@operation("kvtwin::prompt_choose", mutates_args=())
def choose(
    received: Tensor, occupied: Tensor | None, first_end: Tensor | None, count: int, window: int, kernel_size: int,
    rows_each: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best of a row's T tokens, count > 0.

    received [R, H, T] float32: a token's score is the mean of the row's H heads, pooled with `kernel_size` over the
    tokens before the window. The last `window` tokens rank above all scores. NaN ranks as -inf; of equal scores the
    last ones win. occupied [R / rows_each, T] bool, by default all True; first_end [R / rows_each] int64: tokens at
    earlier indices rank above the window. Returns their indices, ascending, [R, count] int32, of which the first
    kept_count [R] int32 are written; kept_count; and the scores [R, T] float32, +inf in the window.
    """
    rows, heads, total = received.shape
    received = received.contiguous()
    code = torch.empty(rows, 1, total, dtype=torch.int32, device=received.device)
    score = torch.empty(rows, total, dtype=torch.float32, device=received.device)
    histograms = torch.zeros(rows, 1, 4, 256, dtype=torch.int32, device=received.device)
    chunks = triton.cdiv(total, CHUNK)
    with on_device_of(received):
        prompt_score_kernel[(rows * chunks,)](
            received, occupied, first_end, code, score, histograms, heads, total, total - window, kernel_size, chunks,
            rows_each, *((0, 0) if occupied is None else occupied.stride()), CHUNK=CHUNK, num_warps=4,
        )
    return *search(code, histograms, count, True), score


@choose.register_fake
def _(received: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, _, total = received.shape
    return (
        received.new_empty((rows, count), dtype=torch.int32), received.new_empty(rows, dtype=torch.int32),
        received.new_empty((rows, total)),
    )


@operation(
    "kvtwin::prompt_fill",
    mutates_args=("held_key", "held_value", "held", "positions", "next_slot", "score", "token_index"),
)
def fill(
    key: Tensor, value: Tensor, place: Tensor, kept_count: Tensor, pooled: Tensor, held_key: Tensor | None,
    held_value: Tensor | None, held: Tensor, positions: Tensor, next_slot: Tensor | None, score: Tensor | None,
    token_index: Tensor | None,
) -> None:
    """Put the tokens that `choose` returns into the first slots of an empty cache.

    key, value [B, Hkv, T, D]; place, kept_count, pooled: what `choose` returned for B rows, or B * Hkv if heads differ.
    The cache: held_key, held_value [B, Hkv, S, D], or None for none; held and positions, [B, S] or [B, Hkv, S];
    next_slot, for the first free slot of each row of held, or None; score float32 and token_index int32, both like
    held, or None.
    """
    _launch_fill(
        key, value, place, kept_count, pooled, held_key, held_value, held, positions, next_slot, score, token_index,
        held.shape[-1],
    )


@operation("kvtwin::prompt_copy", mutates_args=("held_key", "held_value"))
def copy(key: Tensor, value: Tensor, kept: Tensor | None, held_key: Tensor, held_value: Tensor) -> None:
    """Copy the tokens kept [B, N] int64, rows contiguous, -1 for none, of key, value [B, Hkv, T, D] into the first N
    slots of held_key, held_value [B, Hkv, S, D], contiguous. kept=None: all T tokens."""
    _launch_fill(key, value, kept, None, None, held_key, held_value, None, None, None, None, None, held_key.shape[2])


def _launch_fill(
    key: Tensor, value: Tensor, place: Tensor | None, kept_count: Tensor | None, pooled: Tensor | None,
    held_key: Tensor | None, held_value: Tensor | None, held: Tensor | None, positions: Tensor | None,
    next_slot: Tensor | None, score: Tensor | None, token_index: Tensor | None, slots: int,
) -> None:
    batch, heads, total, head_dim = key.shape
    rows, count = (batch, total) if place is None else place.shape
    unit = stride_unit(key, value)
    blocks = triton.cdiv(count, FILLED)
    with on_device_of(key):
        fill_kernel[(batch * heads * blocks,)](
            key, value, place, kept_count, pooled, held_key, held_value, held, positions, next_slot, score, token_index,
            count, total, slots, heads, blocks, 0 if place is None else place.stride(0),
            *(stride // unit for stride in key.stride()[:3]), key.stride(3),
            *(stride // unit for stride in value.stride()[:3]), value.stride(3),
            HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), TOKENS=FILLED, UNIT=unit, EACH=rows > batch,
            PER_HEAD=held is not None and held.dim() == 3, num_warps=4,
        )


def indices(place: Tensor, kept_count: Tensor) -> Tensor:
    """The indices that `choose` returns, -1 beyond kept_count: int64."""
    number = torch.arange(place.shape[1], device=place.device)
    return place.where(number < kept_count[:, None], -1).long()


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=[
    "heads", "total", "prefix", "kernel_size", "chunks", "rows_each", "occupied_b", "occupied_t",
])
def prompt_score_kernel(
    received, occupied, first_end, codes, scores, histograms, heads, total, prefix, kernel_size, chunks, rows_each,
    occupied_b, occupied_t, CHUNK: tl.constexpr,
):
    """Program (chunk of tokens, row): scores the tokens, +inf from `prefix` on, codes them, and counts the first digits
    of the codes."""
    chunk = tl.program_id(0) % chunks
    row = (tl.program_id(0) // chunks).to(tl.int64)
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    received += row * heads * total
    pooled = tl.zeros([CHUNK], tl.float32)
    for k in range(kernel_size):
        near = t + k - kernel_size // 2
        inside = (near >= 0) & (near < prefix) & (t < prefix)
        over_heads = tl.zeros([CHUNK], tl.float32)
        from_head = received
        for _ in range(heads):
            over_heads += tl.load(from_head + near, mask=inside, other=0.0)
            from_head += total
        pooled += over_heads / heads
    score = tl.where(t < prefix, pooled / kernel_size, float("inf"))
    code = tl.where(t < prefix, sortable(score), _WINDOW)
    b = row // rows_each
    if first_end is not None:
        code = tl.where(t < tl.load(first_end + b), _FIRST, code)
    if occupied is not None:
        holds = tl.load(occupied + b * occupied_b + t.to(tl.int64) * occupied_t, mask=t < total, other=0) != 0
        code = tl.where(holds, code, _FREE)
    tl.store(scores + row * total + t, score, mask=t < total)
    tl.store(codes + row * total + t, code, mask=t < total)
    count = tl.histogram(first_digit(code), 256, mask=t < total)
    tl.atomic_add(histograms + row * 1024 + tl.arange(0, 256), count, mask=count > 0, sem="relaxed")


@triton.jit(do_not_specialize=[
    "count", "total", "slots", "heads", "blocks", "place_r", "key_b", "key_h", "key_t", "value_b", "value_h", "value_t",
])
def fill_kernel(
    key, value, place, kept_count, pooled, held_key, held_value, held, positions, next_slot, score, token_index,
    count, total, slots, heads, blocks, place_r,
    key_b, key_h, key_t, key_d, value_b, value_h, value_t, value_d,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr, UNIT: tl.constexpr, EACH: tl.constexpr,
    PER_HEAD: tl.constexpr,
):
    """Program (TOKENS of the kept tokens, KV head, row of the batch): copies them into their slots. EACH: heads keep
    different tokens. PER_HEAD: heads have slots of their own; otherwise the first head's program writes them. Without
    kept_count, place is -1 where there is no token; without place, all tokens are kept."""
    first = tl.program_id(0) % blocks * TOKENS
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    b, head = batch_head // heads, batch_head % heads
    row = batch_head if EACH else b
    number = first + tl.arange(0, TOKENS)
    inside = number < count
    if kept_count is not None:
        kept = tl.load(kept_count + row)
        inside = number < kept
    token = tl.where(inside, number, -1).to(tl.int64)
    if place is not None:
        token = tl.load(place + row * place_r + number, mask=inside, other=-1).to(tl.int64)
    holds = token >= 0
    if held_key is not None:
        d = tl.arange(0, D_PAD).to(tl.int64)
        tile = holds[:, None] & (d < HEAD_DIM)[None, :]
        key += (b * key_b + head * key_h) * UNIT
        value += (b * value_b + head * value_h) * UNIT
        k = tl.load(key + token[:, None] * (key_t * UNIT) + d[None, :] * key_d, mask=tile, other=0.0)
        v = tl.load(value + token[:, None] * (value_t * UNIT) + d[None, :] * value_d, mask=tile, other=0.0)
        into = (batch_head * slots + number)[:, None] * HEAD_DIM + d[None, :]
        tl.store(held_key + into, k, mask=tile)
        tl.store(held_value + into, v, mask=tile)
    owner = batch_head if PER_HEAD else b
    if positions is not None and (PER_HEAD or head == 0):
        at = owner * slots + number
        tl.store(positions + at, token, mask=holds)
        tl.store(held + at, holds, mask=holds)
        if score is not None:
            tl.store(score + at, tl.load(pooled + row * total + token, mask=holds, other=0.0), mask=holds)
        if token_index is not None:
            tl.store(token_index + at, token.to(tl.int32), mask=holds)
        if next_slot is not None:
            tl.store(next_slot + owner, kept.to(tl.int64), mask=first == 0)
