"""The operations of SyncKV's decode step: attention of all heads in two launches, and an anticipation."""

from __future__ import annotations

from math import e, log2

import torch
from torch import Tensor

from ...reference.contract import Sizes
from .._common.launch import (
    GROUP_ROWS,
    INTERPRETED,
    RESIDENT,
    SMALL_TILES,
    cdiv,
    group_rows,
    key_block,
    multiprocessors,
    next_power_of_2,
    on_device_of,
    padded_head_dim,
)
from .._common.operation import operation
from ._anticipate_kernels import (
    choose_kernel,
    codes_kernel,
    count_if,
    histogram_if,
    include_kernel,
    unite_kernel,
)
from ._attend_kernels import attend_kernel, combine_kernel
from ._select import chunk_size
from .sets import POOL

#: The largest number of programs that share what one head attends to.
MAX_SPLITS = 256
#: Shares of up to this many tiles count as short. Measured on an H200: the limit is between 11 and 22.
SHORT = 16
#: Parts that are merged at a time.
MERGED = 64
#: Entries of a list that are united at a time.
UNITED = 16 if SMALL_TILES else 1024
#: In the interpreter, the most programs that share what one head attends to.
FEW = 2


def splits_of(
    sizes: Sizes, representative_heads: int, listed: int, itemsize: int, device: torch.device
) -> tuple[int, int, int]:
    """(dense_splits, list_splits, size): the numbers of programs that share what an R-head and another head attend to,
    and the places of each. `listed`: the largest number of places that a head other than an R-head attends to."""
    block = key_block(sizes.head_dim, itemsize, sizes.slots)
    tiles, list_tiles = cdiv(sizes.slots, block), cdiv(listed, block)
    if INTERPRETED:
        each = max(2, cdiv(tiles, FEW))
    else:
        other_heads = sizes.key_value_heads - representative_heads
        work = sizes.batch * (representative_heads * tiles + other_heads * list_tiles)
        # As many programs as fit at a time if shares are short; otherwise twice as many, which finish more evenly.
        fit = RESIDENT * multiprocessors(device)
        short = work <= SHORT * fit
        each = max(cdiv(work, fit if short else 2 * fit), 4, cdiv(tiles, MAX_SPLITS))
        # Each head's last share may be short: a few programs too many, for which all others would wait.
        heads = sizes.batch * representative_heads, sizes.batch * other_heads
        while short and heads[0] * cdiv(tiles, each) + heads[1] * cdiv(list_tiles, each) > fit and each < tiles:
            each += 1
    return cdiv(tiles, each), cdiv(list_tiles, each), each * block


@operation(
    "kvtwin::synckv_attend",
    mutates_args=(
        "key", "value", "pool_key", "pool_value", "occupied", "counters", "due", "logits", "partial", "row_maxima",
        "weight_sums",
    ),
)
def attend(
    query: Tensor, new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor, pool_key: Tensor | None,
    pool_value: Tensor | None, occupied: Tensor, chosen: Tensor, members: Tensor, entries: Tensor, counters: Tensor,
    due: Tensor, logits: Tensor, partial: Tensor, row_maxima: Tensor, weight_sums: Tensor, scale: float, stride: int,
    dense_splits: int, list_splits: int, size: int, pool: int,
) -> Tensor:
    """One step: writes the token into its slots, attends with every head, and counts the step. See _attend_kernels.

    pool_key, pool_value: the storage of heads that are not R-heads, if not `key` and `value`. chosen [B, lists, N]: see
    `members`.
    """
    (batch, query_heads, head_dim), slots = query.shape, occupied.shape[1]
    heads, representative_heads, (lists, capacity) = members.shape[1], logits.shape[0] // batch, chosen.shape[1:]
    pool_key, pool_value = key if pool_key is None else pool_key, value if pool_value is None else pool_value
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    shape = {
        "HEADS": heads, "GROUP": query_heads // heads, "HEAD_DIM": head_dim,
    }
    programs = batch * (representative_heads * dense_splits + (heads - representative_heads) * list_splits)
    with on_device_of(query):
        attend_kernel[(programs,)](
            query, new_key, new_value, key, value, pool_key, pool_value, occupied, chosen, members, counters,
            logits, partial, row_maxima, weight_sums,
            scale * log2(e), slots, lists, capacity, stride, dense_splits, size, list_splits, size, batch,
            representative_heads, *query.stride(), *new_key.stride(), *new_value.stride(), *key.stride()[:2],
            *pool_key.stride()[:2],
            **shape, D_PAD=padded_head_dim(head_dim), ROWS=group_rows(query_heads // heads, query.dtype),
            BLOCK=key_block(head_dim, key.element_size(), slots), num_warps=4,
        )
        # In the interpreter, a program's overhead exceeds its work.
        queries = next_power_of_2(query_heads // heads) if INTERPRETED else 1
        blocks, splits = batch * heads * cdiv(query_heads // heads, queries), max(dense_splits, list_splits)
        # Few heads have many parts, which one program per head would read one after the other.
        widths = 1 + (slots % 2 == 0) if INTERPRETED else 4 if splits > MERGED else 1
        combine_kernel[(blocks * widths,)](
            partial, row_maxima, weight_sums, entries, counters, due, output, slots, stride, dense_splits, list_splits,
            batch, representative_heads, **shape, QUERIES=queries, WIDTH=padded_head_dim(head_dim) // widths,
            WIDTHS=widths, SPLITS=min(MERGED * widths, next_power_of_2(splits)), POOL=pool, num_warps=4,
        )
    return output


@attend.register_fake
def _(query: Tensor) -> Tensor:
    return query.new_empty(query.shape)


@operation("kvtwin::synckv_anticipate", mutates_args=("histograms", "chosen"))
def anticipate(
    due: Tensor, logits: Tensor, row_maxima: Tensor, weight_sums: Tensor, occupied: Tensor, fixed: Tensor,
    histograms: Tensor, chosen: Tensor, splits: int, count: int, exclude: bool,
) -> None:
    """If the step was an anticipation, write the `count` best tokens by its logits to the end of `chosen`.

    histograms [B, R-heads, 4, 256] int32: scratch, all 0 between calls.
    """
    code = _coded(due, logits, row_maxima, weight_sums, occupied, fixed, histograms, splits, exclude)
    _choose(due, code, histograms, fixed, chosen, count, exclude, counted=True)


def _coded(
    due: Tensor, logits: Tensor, row_maxima: Tensor, weight_sums: Tensor, occupied: Tensor, fixed: Tensor,
    histograms: Tensor | None, splits: int, exclude: bool,
) -> Tensor:
    """The codes of the R-heads whose logits there are, [B, R-heads, S]. Adds their first 8 bits to histograms."""
    (batch, slots), (rows, group) = occupied.shape, logits.shape[:2]
    code = _codes(rows // batch, occupied)
    pool = min(POOL, chunk_size())
    pools = cdiv(slots, pool)
    with on_device_of(occupied):
        codes_kernel[(rows * pools,)](
            due, logits, row_maxima, weight_sums, occupied, fixed, code, code if histograms is None else histograms,
            slots, splits, pools, rows // batch, GROUP=group, ROWS=GROUP_ROWS, SPLITS=next_power_of_2(splits),
            CHUNK=pool, EXCLUDE=exclude, COUNT=histograms is not None, num_warps=4,
        )
    return code


def _codes(heads: int, occupied: Tensor) -> Tensor:
    batch, slots = occupied.shape
    return torch.empty(batch, heads, slots, dtype=torch.int32, device=occupied.device)


def _choose(
    due: Tensor, code: Tensor, histograms: Tensor, fixed: Tensor, chosen: Tensor, count: int, exclude: bool, *,
    counted: bool,
) -> None:
    """Write the `count` tokens with the highest codes [B, N_r, S] to the end of `chosen`. counted: the histograms have
    the codes' first 8 bits."""
    (batch, clusters, capacity), slots = chosen.shape, code.shape[-1]
    rows, chunk, device = batch * clusters, chunk_size(), chosen.device
    chunks = cdiv(slots, chunk)
    found = torch.empty(rows, 4, 2, dtype=torch.int64, device=device)
    counts = torch.empty(rows, chunks, 2, dtype=torch.int32, device=device)
    grid = (rows * chunks,)
    with on_device_of(chosen):
        for number in range(1 if counted else 0, 4):
            histogram_if[grid](
                due, code, histograms, found, slots, count, chunks, PASS=number, CHUNK=chunk, FEW=chunk // 16,
                num_warps=4,
            )
        count_if[grid](due, code, histograms, found, counts, slots, count, chunks, CHUNK=chunk, num_warps=4)
        choose_kernel[grid](
            due, code, histograms, found, counts, fixed, chosen, slots, count, chunks, capacity, CHUNK=chunk,
            EXCLUDE=exclude, num_warps=4,
        )


@operation("kvtwin::synckv_codes", mutates_args=())
def codes(
    due: Tensor, logits: Tensor, row_maxima: Tensor, weight_sums: Tensor, occupied: Tensor, splits: int
) -> Tensor:
    """If the step was an anticipation, codes in the order of the log-weights of this rank's R-heads, [B, R-heads, S]
    int32, last slot first; otherwise arbitrary numbers."""
    if logits.shape[0] == 0:
        return _codes(0, occupied)
    return _coded(due, logits, row_maxima, weight_sums, occupied, occupied, None, splits, False)


@codes.register_fake
def _(logits: Tensor, occupied: Tensor) -> Tensor:
    return _codes(logits.shape[0] // occupied.shape[0], occupied)


@operation("kvtwin::synckv_choose", mutates_args=("code", "chosen"))
def choose(due: Tensor, code: Tensor, fixed: Tensor, chosen: Tensor, count: int, exclude: bool) -> None:
    """`anticipate` by the codes of the R-heads of all ranks, [B, N_r, S]."""
    rows, slots, chunk = code.shape[0] * code.shape[1], code.shape[2], chunk_size()
    chunks = cdiv(slots, chunk)
    histograms = torch.zeros(rows, 4, 256, dtype=torch.int32, device=code.device)
    with on_device_of(code):
        if exclude:
            include_kernel[(rows * chunks,)](due, fixed, code, slots, chunks, CHUNK=chunk, num_warps=4)
        _choose(due, code, histograms, fixed, chosen, count, exclude, counted=False)


@operation("kvtwin::synckv_unite", mutates_args=("united", "marks"))
def unite(due: Tensor, chosen: Tensor, united: Tensor, marks: Tensor) -> None:
    """If `due`, write the tokens of all lists in chosen [B, N_r, N], each once, then -1, to united [B, 1, M] int64.

    M: at least the number of different tokens. marks [B, S] int32: scratch, all 0 between calls.
    """
    batch, lists, capacity = chosen.shape
    with on_device_of(chosen):
        unite_kernel[(batch,)](
            due, chosen, united, marks, marks.shape[1], lists, capacity, united.shape[2], CHUNK=UNITED, num_warps=8
        )
