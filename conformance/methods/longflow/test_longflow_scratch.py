"""LongFlow with many KV heads: data that is read for the last time is discarded from a GPU's cache, and must not be
read again.

No drawn case has that many heads, so here a few heads take the same path. On a GPU, cache lines are really discarded.
In the interpreter they are overwritten, blocks have the sizes of a GPU, and programs run in any order, as on a GPU.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.strategies import decode_cases, state_traces
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.checkers import longflow as judge
from kvtwin.optimized import longflow
from kvtwin.optimized._common.launch import INTERPRETED
from kvtwin.optimized.longflow import _ops
from kvtwin.optimized.longflow import _score_kernels as score_kernels

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.first]

some = settings(max_examples=max(at_least(4), settings().max_examples // 2))
LINE = 128  # bytes
BEHIND = 2**16  # numbers behind the workspace, in case a wrong line is discarded


@triton.jit
def overwritten(line):
    """The worst effect of discarding lines: the whole line that `line` points into becomes NaN."""
    first = (tl.ravel(line).to(tl.int64) // 128 * 128).to(tl.pointer_type(tl.float32))
    tl.store(first[:, None] + tl.arange(0, 32)[None, :], float("nan"))


def in_line(make):
    """`_scratch` with a workspace that starts at a cache line, as memory allocated on a GPU does."""
    def scratch(*arguments):
        workspace, *rest = make(*arguments)
        room = torch.full((len(workspace) + BEHIND,), torch.nan, device=workspace.device)
        begin = -room.data_ptr() % LINE // 4
        return room[begin:begin + len(workspace)], *rest

    return scratch


def in_any_order(builder, seed):
    """`set_grid_idx` of the interpreter's builder, which runs programs one by one, with their order shuffled."""
    place, orders = builder.set_grid_idx, {}

    def set_grid_idx(x, y, z):
        count = builder.grid_dim[0]
        if count not in orders:
            orders[count] = random.Random(seed).sample(range(count), count)
        place(orders[count][x], y, z)

    return set_grid_idx


@contextmanager
def many_heads(seed: int = 0) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ops, "fused", lambda *_: True)
        patch.setattr(_ops, "split_slots", lambda sizes, block, *_: (triton.cdiv(sizes.slots, block), block))
        if INTERPRETED:
            patch.setattr(_ops, "discards", lambda _: True)
            patch.setattr(_ops, "scratch", in_line(_ops.scratch))
            patch.setattr(_ops, "SCORE_BLOCK", 256)
            patch.setattr(_ops, "SMALL_TILES", False)
            patch.setattr(score_kernels, "discard", overwritten)
            builder = sys.modules["triton.runtime.interpreter"].interpreter_builder
            patch.setattr(builder, "set_grid_idx", in_any_order(builder, seed))
        yield


def test_scratch_buffers_share_no_cache_line(device):
    """No two of them share a cache line."""
    with many_heads():
        for slots in (1, 127, 129, 3200):
            sizes = _ops.Sizes(3, 7 * 5, 5, slots, 24)
            assert all(cut * 4 % LINE == 0 for cut in _ops._cuts(sizes, 3))
            workspace, *_ = _ops.scratch(sizes, torch.empty(0, device=device), False)
            assert workspace.data_ptr() % LINE == 0


@given(case=decode_cases(slots=(1, 600), content=("ordinary",), layout=("contiguous", "transposed")))
@some
def test_longflow_of_many_heads_decodes_as_float64_would(case):
    with many_heads(case.seed):
        actual = longflow.decode_attention(**case.inputs)
    judge.assert_decode_right(actual, case)


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per head"])
@pytest.mark.parametrize("heads", [8, 11])
def test_longflow_sums_ranks_over_several_chunks_of_heads(heads, per_head, device):
    case = DecodeCase(
        batch=2, key_value_heads=heads, group=2, head_dim=24, slots=300, per_head=per_head, occupancy="full",
        device=str(device),
    )
    with many_heads():
        actual = longflow.decode_attention(**case.inputs)
    judge.assert_decode_right(actual, case)


@given(trace=state_traces("longflow", content=("ordinary",)))
@some
def test_longflow_of_many_heads_keeps_step_with_float64(trace):
    """Every step reuses the scratch memory."""
    with many_heads(trace.seed):
        lockstep.run(trace, longflow)
