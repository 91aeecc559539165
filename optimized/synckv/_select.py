"""The tokens with the highest scores, ties to the lowest index: a radix search over codes in reverse order.

The search of `_common/radix_selection.py` keeps the last of equal codes. In reverse order, these are the first tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._common.launch import SMALL_TILES, on_device_of
from .._common.numerics import float32, sortable
from .._common.operation import operation
from .._common.radix_selection import _FREE, compact_kernel, count_kernel, histogram_kernel

#: Codes per program.
CHUNK = 2048


def chunk_size() -> int:
    return 64 if SMALL_TILES else CHUNK


@operation("kvtwin::synckv_select", mutates_args=())
def select(score: Tensor, candidates: Tensor, taken: Tensor, count: int) -> Tensor:
    """The `count` candidates with the highest scores that are not taken, ascending, then -1: [R, H, count] int64.

    score [R, H, S] floating, NaN ranks as -inf; candidates [R, S] bool; taken [R, H, N] int64, -1 for none.
    """
    rows, slots = score.shape[0] * score.shape[1], score.shape[2]
    index = _places(score, count)
    if count == 0:
        return index
    score, taken = score.contiguous(), taken.contiguous()
    chunk = chunk_size()
    chunks = triton.cdiv(slots, chunk)
    grid = (rows * chunks,)
    code = torch.empty(rows, slots, dtype=torch.int32, device=score.device)
    histograms = torch.zeros(rows, 4, 256, dtype=torch.int32, device=score.device)
    found = torch.empty(rows, 4, 2, dtype=torch.int64, device=score.device)
    counts = torch.empty(rows, chunks, 2, dtype=torch.int32, device=score.device)
    place = torch.empty(rows, count, dtype=torch.int32, device=score.device)
    kept_count = torch.empty(rows, dtype=torch.int32, device=score.device)
    with on_device_of(score):
        codes_kernel[grid](
            score, candidates, code, slots, chunks, score.shape[1], *candidates.stride(), CHUNK=chunk, num_warps=4
        )
        if taken.shape[-1]:
            pieces = triton.cdiv(taken.shape[-1], chunk)
            take_kernel[(rows * pieces,)](taken, code, slots, taken.shape[-1], pieces, CHUNK=chunk, num_warps=4)
        for number in range(4):
            histogram_kernel[grid](
                code, histograms, found, slots, count, chunks, PASS=number, CHUNK=chunk, FEW=chunk // 16, num_warps=4
            )
        count_kernel[grid](code, histograms, found, counts, slots, count, chunks, CHUNK=chunk, num_warps=4)
        compact_kernel[grid](code, found, counts, place, kept_count, slots, count, chunks, CHUNK=chunk, num_warps=4)
        pieces = triton.cdiv(count, chunk)
        forward_kernel[(rows * pieces,)](place, kept_count, index, slots, count, pieces, CHUNK=chunk, num_warps=4)
    return index


@select.register_fake
def _(score: Tensor, count: int) -> Tensor:
    return _places(score, count)


def _places(score: Tensor, count: int) -> Tensor:
    return score.new_empty((*score.shape[:2], count), dtype=torch.int64)


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["slots", "chunks", "heads", "candidates_r", "candidates_s"])
def codes_kernel(scores, candidates, codes, slots, chunks, heads, candidates_r, candidates_s, CHUNK: tl.constexpr):
    """Program (chunk, batch_head): the codes of a share of the slots, last slot first; _FREE for slots without
    candidates."""
    chunk = tl.program_id(0) % chunks
    batch_head = (tl.program_id(0) // chunks).to(tl.int64)
    s = (chunk * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    counts = tl.load(candidates + batch_head // heads * candidates_r + s * candidates_s, mask=s < slots, other=0) != 0
    score = float32(tl.load(scores + batch_head * slots + s, mask=counts, other=0.0))
    tl.store(codes + batch_head * slots + (slots - 1 - s), tl.where(counts, sortable(score), _FREE), mask=s < slots)


@triton.jit(do_not_specialize=["slots", "wanted", "pieces"])
def take_kernel(taken, codes, slots, wanted, pieces, CHUNK: tl.constexpr):
    """Program (piece, batch_head): sets the codes of taken tokens to _FREE."""
    piece = tl.program_id(0) % pieces
    batch_head = (tl.program_id(0) // pieces).to(tl.int64)
    number = piece * CHUNK + tl.arange(0, CHUNK)
    token = tl.load(taken + batch_head * wanted + number, mask=number < wanted, other=-1)
    tl.store(codes + batch_head * slots + (slots - 1 - token), _FREE, mask=(token >= 0) & (token < slots))


@triton.jit(do_not_specialize=["slots", "wanted", "pieces"])
def forward_kernel(place, kept_count, index, slots, wanted, pieces, CHUNK: tl.constexpr):
    """Program (piece, batch_head): turns the chosen places, read from the end, into slots; -1 beyond the last."""
    piece = tl.program_id(0) % pieces
    batch_head = (tl.program_id(0) // pieces).to(tl.int64)
    number = piece * CHUNK + tl.arange(0, CHUNK)
    kept = tl.load(kept_count + batch_head)
    holds = number < kept
    at = tl.load(place + batch_head * wanted + (kept - 1 - number), mask=holds, other=0)
    tl.store(
        index + batch_head * wanted + number, tl.where(holds, slots - 1 - at, -1).to(tl.int64), mask=number < wanted
    )
