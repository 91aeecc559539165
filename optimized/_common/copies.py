"""Copies of a prompt's blocks into contiguous memory, in one launch: for few tokens, a launch takes as long as its
copy."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .launch import SMALL_TILES, cdiv, next_power_of_2

#: Elements of a program. In the interpreter few, so that tests cover several programs.
ELEMENTS = 64 if SMALL_TILES else 4096
#: The most tensors of a launch.
MOST = 4


def copy_blocks(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair to the first: at most MOST pairs of [N, B, H, T, D] or [N, B, T] with the
    same N, B and T. The first ones are contiguous. The second ones have their dtypes, and any strides."""
    arguments: list[Tensor | int | None] = []
    widths, programs = [0] * MOST, 0
    for place, (target, source) in enumerate(pairs):
        tokens = source if source.dim() == 5 else source[:, :, None, :, None]
        arguments += [target, source, programs, tokens.shape[2], *tokens.stride()]
        widths[place] = tokens.shape[4]
        programs += cdiv(tokens[..., 0].numel(), _rows(widths[place]))
    arguments += [None, None, programs, 1, 0, 0, 0, 0, 0] * (MOST - len(pairs))
    shape = pairs[0][1].shape
    copy_kernel[(programs,)](
        *arguments, shape[0], shape[1], shape[-2] if len(shape) == 5 else shape[2],
        **{f"D{place}": width for place, width in enumerate(widths)}, ELEMENTS=ELEMENTS, num_warps=4,
    )


def _rows(width: int) -> int:
    """Tokens of a head that a program copies."""
    return max(1, ELEMENTS // next_power_of_2(width))


@triton.jit
def _copy(
    target, source, first, heads, source_n, source_b, source_h, source_t, source_d, number, batch, total,
    D: tl.constexpr, ELEMENTS: tl.constexpr,
):
    """Copy tokens of a tensor whose programs begin with `first`."""
    D_PAD: tl.constexpr = triton.next_power_of_2(D)
    ROWS: tl.constexpr = ELEMENTS // D_PAD if ELEMENTS > D_PAD else 1
    d = tl.arange(0, D_PAD)
    row = (tl.program_id(0) - first) * ROWS + tl.arange(0, ROWS)
    t, head = row % total, row // total
    h, b, n = head % heads, head // heads % batch, head // heads // batch
    mask = (n < number)[:, None] & (d < D)[None, :]
    at = n.to(tl.int64) * source_n + b.to(tl.int64) * source_b + h.to(tl.int64) * source_h + t.to(tl.int64) * source_t
    tokens = tl.load(source + at[:, None] + d[None, :] * source_d, mask=mask)
    tl.store(target + row.to(tl.int64)[:, None] * D + d[None, :], tokens, mask=mask)


@triton.jit(do_not_specialize=["first0", "first1", "first2", "first3", "number", "batch", "total"])
def copy_kernel(
    target0, source0, first0, heads0, n0, b0, h0, t0, d0,
    target1, source1, first1, heads1, n1, b1, h1, t1, d1,
    target2, source2, first2, heads2, n2, b2, h2, t2, d2,
    target3, source3, first3, heads3, n3, b3, h3, t3, d3,
    number, batch, total,
    D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr, ELEMENTS: tl.constexpr,
):
    """Program (tokens of a head, row and block, tensor)."""
    program = tl.program_id(0)
    if program < first1:
        _copy(target0, source0, first0, heads0, n0, b0, h0, t0, d0, number, batch, total, D0, ELEMENTS)
    elif program < first2:
        if D1 > 0:
            _copy(target1, source1, first1, heads1, n1, b1, h1, t1, d1, number, batch, total, D1, ELEMENTS)
    elif program < first3:
        if D2 > 0:
            _copy(target2, source2, first2, heads2, n2, b2, h2, t2, d2, number, batch, total, D2, ELEMENTS)
    else:
        if D3 > 0:
            _copy(target3, source3, first3, heads3, n3, b3, h3, t3, d3, number, batch, total, D3, ELEMENTS)
