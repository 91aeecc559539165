"""KeyDiff's decode step: the new token in slot `budget` joins the anchor, all tokens are ranked, and one is evicted.

`length_kernel` computes the new key's inverse length and adds the normalized key to the anchor. `step_kernel` reads the
keys once. The state stores inverse lengths of keys, always from `length_kernel`: see `_kernels.py`. Keys and values may
lie in pages, as there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._common.launch import INTERPRETED, SMALL_TILES, cdiv, key_block, multiprocessors, on_device_of, padded_head_dim
from .._common.numerics import sortable
from .._common.operation import operation
from .._common.paged_rows import offset
from ._kernels import any_units, inverse_lengths, load, odd_ranks, ranks, sum_partials

#: Programs per multiprocessor that share the keys, and software pipeline stages.
PROGRAMS = 64
STAGES = 3
MAX_SPLITS = 64

_PROTECTED = tl.constexpr(2**31 - 1)
_NO_SLOT = tl.constexpr(2**63 - 1)
_INDEX = tl.constexpr(2**32 - 1)
#: Candidates of splits that are compared at a time. In the interpreter, each alone.
_COMPARED = tl.constexpr(1 if SMALL_TILES else 64)


@operation("kvtwin::keydiff_lengths", mutates_args=("inverse",))
def lengths(key: Tensor, inverse: Tensor, begin: int, end: int) -> None:
    """Store the inverse lengths of the keys in slots begin to end - 1: key [B, Hkv, S, D] into inverse [B, Hkv, S].
    Negative for odd keys, so large or small that their squares are inexact; 0 for zero keys."""
    _launch_lengths(key, None, inverse, None, begin, end)


def _launch_lengths(
    key: Tensor, block_table: Tensor | None, inverse: Tensor, anchor: Tensor | None, begin: int, end: int
) -> None:
    batch, heads, slots = inverse.shape
    head_dim, tiles = key.shape[3], cdiv(end - begin, 16)
    with on_device_of(key):
        # Without fused multiply-adds, both variants of the kernel return the same bits.
        length_kernel[(batch * heads * tiles,)](
            key, inverse, anchor, begin, end, tiles, slots, *_pages(key, block_table),
            HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), ANCHOR=anchor is not None,
            PAGE=0 if block_table is None else key.shape[2], num_warps=2, enable_fp_fusion=False,
        )


def _pages(cache: Tensor, block_table: Tensor | None) -> tuple[Tensor | int | None, ...]:
    """The block table and its strides, the number of heads, and the strides of a cache [pages, Hkv, page_size, D]."""
    if block_table is None:
        return (None,) * 8
    return block_table, *block_table.stride(), cache.shape[1], *cache.stride()


@operation(
    "kvtwin::keydiff_step",
    mutates_args=(
        "key", "value", "occupied", "positions", "token_index", "inverse", "anchor", "ranked", "age", "partial",
        "candidates", "completion_counters",
    ),
)
def step(
    key: Tensor, value: Tensor, block_table: Tensor | None, occupied: Tensor, positions: Tensor, token_index: Tensor,
    inverse: Tensor, valid_seen: Tensor, anchor: Tensor, ranked: Tensor, age: Tensor, partial: Tensor,
    candidates: Tensor, completion_counters: Tensor, budget: int, refresh: int, recent: int,
) -> None:
    """Rank all tokens of a state, including the new one in slot `budget`, which then moves to the first free slot, or
    to that of the lowest rank. Takes the state's buffers; with block_table [B, n], key and value are in pages
    [pages, Hkv, page_size, D]. valid_seen: the row's valid tokens, the new one included;
    anchor [B, Hkv, D]: the sum of the normalized keys below `budget`; ranked: the anchor that the ranks were computed
    with; age [B, Hkv] int32: steps since the anchor was recomputed; partial, candidates, completion_counters: from
    `scratch`."""
    batch, heads, slots = occupied.shape
    head_dim = key.shape[3]
    block, splits, split_size = plan((batch, heads, head_dim), key.element_size(), key.device, budget)
    _launch_lengths(key, block_table, inverse, anchor, budget, budget + 1)
    paged = block_table is not None
    value_strides = value.stride() if paged else (None,) * 4
    with on_device_of(key):
        step_kernel[(batch * heads * splits,)](
            key, value, occupied, positions, token_index, inverse, valid_seen, anchor, ranked, age,
            partial, candidates, completion_counters, slots, budget, split_size, splits, refresh, recent,
            *_pages(key, block_table), *value_strides,
            HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), BLOCK=block, RECENT=recent > 0,
            MASKED=slots < block or paged, PAGE=key.shape[2] if paged else 0, STAGES=STAGES, num_warps=warps_of(block),
        )


def warps_of(block: int) -> int:
    """One thread per key of a tile: with more, several threads would load and compute a key's scalars."""
    return max(1, block // 32)


def plan(
    sizes: tuple[int, int, int], itemsize: int, device: torch.device, budget: int
) -> tuple[int, int, int]:
    """Slots per tile, programs per row, and slots per program, for a state of these B, Hkv and D."""
    batch, heads, head_dim = sizes
    block = key_block(head_dim, itemsize, budget + 1)
    tiles = cdiv(budget + 1, block)
    wanted = 2 if INTERPRETED else cdiv(PROGRAMS * multiprocessors(device), batch * heads)
    each = cdiv(tiles, min(wanted, tiles, MAX_SPLITS))
    return block, cdiv(tiles, each), each * block


def scratch(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, budget: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate partial, candidates and completion_counters for `step`. completion_counters are zero between steps.
    sizes: B, Hkv and D."""
    rows = sizes[0] * sizes[1]
    _, splits, _ = plan(sizes, dtype.itemsize, device, budget)
    return (
        torch.empty(rows, splits, padded_head_dim(sizes[2]), dtype=torch.float32, device=device),
        torch.empty(rows, splits, dtype=torch.int64, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
    )


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["begin", "end", "tiles", "slots"])
def length_kernel(
    key, inverse, anchor, begin, end, tiles, slots, pages, pages_b, pages_s, heads, key_p, key_h, key_s, key_d,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, ANCHOR: tl.constexpr, PAGE: tl.constexpr,
):
    """Program (16 slots, batch_head): inverse lengths of slots begin to end. With ANCHOR, adds the normalized keys to
    the anchor (one program per batch_head)."""
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    start = begin + (tl.program_id(0) % tiles) * 16
    s = start + tl.arange(0, 16)
    holds = s < end
    if PAGE:
        pages += batch_head // heads * pages_b
        key += batch_head % heads * key_h
        k = load(key, pages, start, holds, key_p, key_s, key_d, pages_s, 16, HEAD_DIM, D_PAD, True, PAGE)
    else:
        key += batch_head * slots * HEAD_DIM
        k = load(key, None, start, holds, None, HEAD_DIM, 1, None, 16, HEAD_DIM, D_PAD, True, 0)
    length = inverse_lengths(k)
    length = tl.where(length == length, length, tl.where(tl.max(tl.abs(k), 1) == 0.0, 0.0, -1.0))
    tl.store(inverse + batch_head * slots + s, length, mask=holds)
    if ANCHOR:
        d = tl.arange(0, D_PAD)
        at = anchor + batch_head * HEAD_DIM + d
        total = tl.load(at, mask=d < HEAD_DIM, other=0.0) + tl.sum(any_units(k), 0)
        tl.store(at, total, mask=d < HEAD_DIM)


@triton.jit
def _sum_units(
    key, pages, begin, tokens, end, budget, key_p, key_s, key_d, pages_s,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
):
    """The sum of the normalized keys in slots begin to end. Rarely needed, so its tiles are small to save registers."""
    total = tl.zeros([16, D_PAD], tl.float32)
    for start in range(begin, end, 16):
        s = start + tl.arange(0, 16)
        holds = ((s < tokens) | (s == budget)) & (s < end)
        k = load(key, pages, start, holds, key_p, key_s, key_d, pages_s, 16, HEAD_DIM, D_PAD, True, PAGE)
        total += any_units(k)
    return tl.sum(total, 0)


@triton.jit
def _earlier(code, slot, rank, token_index, youngest, s, counts, RECENT: tl.constexpr):
    """The earlier eviction of (code, slot) and a new rank: the lower code; if equal, the lower slot, which came
    first."""
    new = sortable(rank)
    if RECENT:
        new = tl.where(tl.load(token_index + s, mask=counts, other=0) >= youngest, _PROTECTED, new)
    sooner = counts & ((new < code) | (slot < 0))
    return tl.where(sooner, new, code), tl.where(sooner, s, slot)


@triton.jit
def _first(code, slot):
    """The slot with the lowest code (ties: the lowest slot), as one integer with the code in the upper half."""
    return tl.min(tl.where(slot < 0, _NO_SLOT, (code.to(tl.int64) << 32) | slot.to(tl.int64)), 0)


@triton.jit
def _copy_token(
    cache, pages, slot, source, stride_p, stride_s, stride_d, pages_s,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
):
    """Copy a key or a value from slot `source` to `slot`."""
    d = tl.arange(0, D_PAD)
    in_head = d < HEAD_DIM
    if PAGE:
        d = d.to(tl.int64) * stride_d
        to = cache + offset(pages, slot, stride_p, stride_s, pages_s, PAGE) + d
        at = cache + offset(pages, source, stride_p, stride_s, pages_s, PAGE) + d
    else:
        to = cache + slot * HEAD_DIM + d
        at = cache + source * HEAD_DIM + d
    tl.store(to, tl.load(at, mask=in_head), mask=in_head)


@triton.jit
def _replace(
    key, value, pages, occupied, positions, token_index, inverse, slot, budget,
    key_p, key_s, key_d, value_p, value_s, value_d, pages_s,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
):
    """Move the token in slot `budget` to `slot`, overwriting its token. If both slots are equal, evict the new
    token."""
    if slot != budget:
        _copy_token(key, pages, slot, budget, key_p, key_s, key_d, pages_s, HEAD_DIM, D_PAD, PAGE)
        _copy_token(value, pages, slot, budget, value_p, value_s, value_d, pages_s, HEAD_DIM, D_PAD, PAGE)
        tl.store(positions + slot, tl.load(positions + budget))
        tl.store(token_index + slot, tl.load(token_index + budget))
        tl.store(inverse + slot, tl.load(inverse + budget))
        tl.store(occupied + slot, 1)
    tl.debug_barrier()
    tl.store(positions + budget, -1)
    tl.store(occupied + budget, 0)


@triton.jit(do_not_specialize=["slots", "budget", "split_size", "splits", "refresh", "recent"])
def step_kernel(
    key, value, occupied, positions, token_index, inverse, valid_seen, anchor, ranked, age, partial, candidates,
    completion_counters, slots, budget, split_size, splits, refresh, recent,
    pages, pages_b, pages_s, heads, key_p, key_h, key_s, key_d, value_p, value_h, value_s, value_d,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, RECENT: tl.constexpr, MASKED: tl.constexpr,
    PAGE: tl.constexpr, STAGES: tl.constexpr,
):
    """Program (split, batch_head): ranks its tokens against the anchor, which includes the new key. The last program of
    a (row, KV head) picks the slot, moves the new token there, and subtracts the evicted key from the anchor. If the
    anchor is `refresh` steps old, it subtracts from a sum that all programs have recomputed in this step.

    Below `budget`, occupied slots come first. Other slots are read, since tiles are read whole, but have no effect.
    """
    split = tl.program_id(0) % splits
    batch_head = (tl.program_id(0) // splits).to(tl.int64)
    begin = split * split_size
    end = tl.minimum(begin + split_size, budget + 1)
    row = batch_head * slots
    if PAGE == 0:
        key += row * HEAD_DIM
        value += row * HEAD_DIM
        row_s: tl.constexpr = HEAD_DIM
        row_d: tl.constexpr = 1
    else:
        pages += batch_head // heads * pages_b
        key += batch_head % heads * key_h
        value += batch_head % heads * value_h
        row_s = key_s
        row_d = key_d
    occupied += row
    positions += row
    token_index += row
    inverse += row
    partial += batch_head * splits * D_PAD
    d = tl.arange(0, D_PAD)
    at_anchor = anchor + batch_head * HEAD_DIM + d
    total = tl.load(at_anchor, mask=d < HEAD_DIM, other=0.0)
    number = tl.load(valid_seen + batch_head)
    tokens = tl.minimum(number - 1, budget)
    # A sum that is NaN is recomputed.
    renews = (tl.load(age + batch_head) + 1 >= refresh) | (tl.max(tl.where(total != total, 1, 0), 0) > 0)
    code = tl.zeros([BLOCK], tl.int32)
    slot = tl.full([BLOCK], -1, tl.int32)                               # none yet
    odd = tl.zeros([BLOCK], tl.int32)
    last = tl.where(end == budget + 1, end, tl.minimum(end, tokens))
    for start in tl.range(begin, last, BLOCK, num_stages=STAGES):
        first = start
        if not MASKED:
            first = tl.minimum(start, slots - BLOCK)
        s = first + tl.arange(0, BLOCK)
        holds = ((s < tokens) | (s == budget)) & (s >= start)
        k = load(key, pages, first, holds, key_p, row_s, row_d, pages_s, BLOCK, HEAD_DIM, D_PAD, MASKED, PAGE)
        factor = tl.load(inverse + s, mask=holds, other=0.0)
        rank = ranks(k, factor, total)
        code, slot = _earlier(code, slot, rank, token_index, number - recent, s, holds & (factor >= 0.0), RECENT)
        odd = tl.where(factor < 0.0, 1, odd)
    chosen = _first(code, slot)
    if tl.max(odd, 0) > 0:
        code_of_odd = tl.zeros([16], tl.int32)
        odd_slot = tl.full([16], -1, tl.int32)
        for start in range(begin, last, 16):
            s = start + tl.arange(0, 16)
            factor = tl.load(inverse + s, mask=((s < tokens) | (s == budget)) & (s < last), other=0.0)
            holds = factor < 0.0
            k = load(key, pages, start, holds, key_p, row_s, row_d, pages_s, 16, HEAD_DIM, D_PAD, True, PAGE)
            rank = odd_ranks(k, total)
            code_of_odd, odd_slot = _earlier(
                code_of_odd, odd_slot, rank, token_index, number - recent, s, holds, RECENT
            )
        chosen = tl.minimum(chosen, _first(code_of_odd, odd_slot))
    tl.store(candidates + batch_head * splits + split, chosen)
    if renews:
        share = _sum_units(
            key, pages, begin, tokens, last, budget, key_p, row_s, row_d, pages_s, HEAD_DIM, D_PAD, PAGE
        )
        tl.store(partial + split.to(tl.int64) * D_PAD + d, share)
    tl.debug_barrier()
    if tl.atomic_add(completion_counters + batch_head, 1, sem="acq_rel", scope="gpu") == splits - 1:
        found = tl.full([_COMPARED], _NO_SLOT, tl.int64)
        for start in range(0, splits, _COMPARED):
            i = start + tl.arange(0, _COMPARED)
            found = tl.minimum(found, tl.load(
                candidates + batch_head * splits + i, mask=i < splits, other=_NO_SLOT, cache_modifier=".cg"
            ))
        goes = tl.where(tokens < budget, tokens.to(tl.int64), tl.min(found, 0) & _INDEX)
        tl.store(ranked + batch_head * HEAD_DIM + d, total, mask=d < HEAD_DIM)
        if renews:
            total = sum_partials(partial, splits, D_PAD)
        if tokens == budget:
            one = tl.zeros([1], tl.int32) == 0
            k = load(key, pages, goes, one, key_p, row_s, row_d, pages_s, 1, HEAD_DIM, D_PAD, True, PAGE)
            total -= tl.sum(any_units(k), 0)
            tl.debug_barrier()
        tl.store(at_anchor, total, mask=d < HEAD_DIM)
        tl.store(age + batch_head, tl.where(renews, 0, tl.load(age + batch_head) + 1))
        _replace(
            key, value, pages, occupied, positions, token_index, inverse, goes, budget.to(tl.int64),
            key_p, row_s, row_d, value_p, value_s, value_d, pages_s, HEAD_DIM, D_PAD, PAGE,
        )
        tl.store(completion_counters + batch_head, 0)                   # reset for the next step
