"""The properties of Triton's memory and control flow that the kernels rely on, on each backend (see
test_backend.py)."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from kvtwin.optimized._common.launch import INTERPRETED

NAN = math.nan


@triton.jit
def _guarded_copy(x, holds, out, far, BLOCK: tl.constexpr):
    """The pointers of masked lanes are far outside of any allocation."""
    i = tl.arange(0, BLOCK)
    keep = tl.load(holds + i) != 0
    where = i.to(tl.int64) + tl.where(keep, 0, far)
    tl.store(out + where, tl.load(x + where, mask=keep, other=0.0) * 2.0, mask=keep)
    tl.store(out + BLOCK + i, tl.load(x + i, mask=keep, other=0.0))


@pytest.mark.parametrize("held", [[], [0], [3, 17, 31], list(range(32))], ids=["none", "first", "some", "all"])
def test_masked_lanes_touch_nothing(held: list[int], device: torch.device) -> None:
    """They neither use the memory that they point to (NaN here) nor access an invalid address."""
    x, out = torch.full((32,), NAN, device=device), torch.full((64,), -1.0, device=device)
    holds = torch.zeros(32, dtype=torch.bool, device=device)
    x[held], holds[held] = 1.5, True
    _guarded_copy[(1,)](x, holds, out, 1 << 44, BLOCK=32)
    assert out[:32].tolist() == [3.0 if held_ else -1.0 for held_ in holds.tolist()]
    assert out[32:].tolist() == [1.5 if held_ else 0.0 for held_ in holds.tolist()]


@triton.jit
def _flip(mask, out, seen, n, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    holds = tl.load(mask + i.to(tl.int64) * stride, mask=i < n, other=0) != 0
    tl.store(out + i, ~holds, mask=i < n)
    tl.store(seen + i, holds.to(tl.int32), mask=i < n)
    tl.store(out + n, 1)


@pytest.mark.parametrize("stride", [1, 3])
def test_bool_masks_are_read_and_written(stride: int, device: torch.device) -> None:
    mask = torch.tensor([True, False, False, True, True], device=device)
    strided = torch.zeros(5, stride, dtype=torch.bool, device=device)[:, 0].copy_(mask)
    out, seen = torch.zeros(7, dtype=torch.bool, device=device), torch.zeros(5, dtype=torch.int32, device=device)
    _flip[(1,)](strided, out, seen, 5, stride, BLOCK=8)
    assert out.view(torch.uint8).tolist() == [0, 1, 1, 0, 0, 1, 0]
    assert seen.tolist() == [1, 0, 0, 1, 1]


@triton.jit(do_not_specialize=["stride", "slots"])
def _far(x, at, value, slots, stride, BLOCK: tl.constexpr):
    """Write the last slot, then read all slots and write them next to the first ones: slot * stride exceeds 2^31."""
    s = tl.arange(0, BLOCK)
    tl.store(x + tl.load(at).to(tl.int64) * stride, value)
    tl.debug_barrier()
    y = tl.load(x + s.to(tl.int64) * stride, mask=s < slots, other=0)
    tl.store(x + 1 + s, y, mask=s < slots)


def test_offsets_beyond_2_to_the_31(device: torch.device) -> None:
    """Offsets in elements. On the CPU, elements are bytes of a new allocation, of which only used pages take memory."""
    stride = 2**30 + 8  # fits into 32 bits, twice of it does not
    x = torch.empty(2 * stride + 16, dtype=torch.int8 if INTERPRETED else torch.float16, device=device)
    x[:8], x[stride], x[2 * stride] = 1, 2, 99
    _far[(1,)](x, torch.tensor([2], device=device), 3, 3, stride, BLOCK=4)
    assert x[: 5].tolist() == [1, 1, 2, 3, 1]
    assert x[2 * stride] == 3


@triton.jit
def _write_then_read(x, new, at, out, D: tl.constexpr, BLOCK: tl.constexpr):
    """As in a decode step: a few threads write one row, and then all threads read its tile."""
    p = tl.program_id(0)
    d, s = tl.arange(0, D), tl.arange(0, BLOCK)
    tile = p * BLOCK * D + s[:, None] * D + d[None, :]
    tl.store(x + p * BLOCK * D + tl.load(at + p) * D + d, tl.load(new + p * D + d))
    tl.debug_barrier()
    tl.store(out + tile, tl.load(x + tile))


def test_a_program_reads_what_it_wrote_before_the_barrier(device: torch.device) -> None:
    programs = 4 if INTERPRETED else 512
    x, new = torch.zeros(programs, 32, 128, device=device), torch.rand(programs, 128, device=device) + 1
    at = torch.arange(programs, device=device) * 7 % 32
    out = torch.empty_like(x)
    _write_then_read[(programs,)](x, new, at, out, D=128, BLOCK=32)
    expected = torch.zeros_like(x)
    expected[torch.arange(programs, device=device), at] = new
    assert torch.equal(out, expected)
    assert torch.equal(x, expected)


@triton.jit(do_not_specialize=["begin", "end"])
def _loop(out, begin, end, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    top = -1
    for start in range(begin, end, BLOCK):
        total += 1.0
        top = start
    for _ in tl.range(0, end - begin):
        total += 100.0
    tl.store(out + tl.arange(0, BLOCK), total)
    tl.store(out + BLOCK, top)


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [(0, 0, [0, -1]), (32, 16, [0, -1]), (16, 16, [0, -1]), (0, 1, [101, 0]), (3, 36, [3303, 35])],
)
def test_loops_run_as_often_as_they_should(begin: int, end: int, expected: list[int], device: torch.device) -> None:
    """An empty range has no iterations: a split may have no slots."""
    out = torch.empty(17, device=device)
    _loop[(1,)](out, begin, end, BLOCK=16)
    assert out.tolist() == [expected[0]] * 16 + [expected[1]]


@triton.jit
def _programs(out, heads):
    """The grid is (splits, KV heads, rows). A flat row number is split up as in prefill."""
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    flat = row * heads + head
    at = flat * tl.num_programs(0) + split
    tl.store(out + at * 3, split)
    tl.store(out + at * 3 + 1, flat // heads)
    tl.store(out + at * 3 + 2, flat % heads)


def test_every_program_of_a_grid_runs_once_with_its_own_numbers(device: torch.device) -> None:
    splits, heads, rows = 2, 3, 2
    out = torch.full((rows, heads, splits, 3), -1, dtype=torch.int64, device=device)
    _programs[(splits, heads, rows)](out, heads)
    expected = [[[[s, r, h] for s in range(splits)] for h in range(heads)] for r in range(rows)]
    assert out.tolist() == expected
