"""`attend` of every method that has it, against float64: the output, and the attention that each key received."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from kvtwin.conformance import discovery
from kvtwin.conformance.cases.block_cases import AttendCase, attend_cases
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.harness.impl import Twins
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.judge.compare import assert_same

ATTENDS = [pair for pair in discovery.methods() if AttendCase in checkers.ask(pair.name, "CASES", ())]
pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.parametrize("pair", ATTENDS, ids=str)]

some = settings(max_examples=max(at_least(3), settings().max_examples // 3))
few = settings(max_examples=max(2, settings().max_examples // 5))


def attend(pair: discovery.Pair, twins: Twins, case: AttendCase) -> Any:
    return checkers.module(twins.optimized, pair).attend(**case.inputs)


def assert_right(pair: discovery.Pair, twins: Twins, case: AttendCase) -> None:
    judge = checkers.checker_of(pair.name)
    assert judge is not None
    assert list(judge.replay(case, checkers.module(twins.optimized, pair))) == ["attend: right"]


@given(data=st.data())
@some
def test_attend_is_what_float64_says(pair, data, twins):
    assert_right(pair, twins, data.draw(attend_cases(pair.name)))


@given(data=st.data())
@few
def test_attend_of_queries_that_are_padding(pair, data, twins):
    """Rows and heads whose newest slots are free, whose block is all padding, or that are empty."""
    case = data.draw(attend_cases(pair.name, occupancy=("random", "one_token", "empty_row"), content=("ordinary",)))
    assert_right(pair, twins, case)
    output, received = attend(pair, twins, case)
    hidden = ~case.valid.repeat_interleave(case.group, 1)                                  # [B, Hq, Q]
    assert bool((output[hidden] == 0).all()), "padding queries must give zeros"
    occupied = case.occupied if case.per_head else case.occupied[:, None].expand(received.shape)
    assert bool((received[~occupied] == 0).all()), "free slots must receive nothing"


@pytest.mark.parametrize(("group", "head_dim", "queries", "dtype"), [
    (3, 16, 13, torch.float32), (5, 16, 13, torch.float32), (3, 64, 50, torch.bfloat16), (3, 160, 30, torch.bfloat16),
], ids=str)
def test_attend_of_groups_that_do_not_divide_a_tile(pair, group, head_dim, queries, dtype, twins, device):
    """A tile has rows behind its last whole group. There are several tiles, on a GPU too."""
    assert_right(pair, twins, AttendCase(
        batch=1, key_value_heads=2, group=group, head_dim=head_dim, queries=queries, slots=3 * queries, dtype=dtype,
        method=pair.name, seed=group, device=str(device),
    ))


@pytest.mark.parametrize("place", [5, -30])
def test_attend_does_not_read_a_lone_free_slot(pair, place, twins, device):
    """The kernel looks for free slots 1024 at a time, in the interpreter 16."""
    slots = 3000 if device.type == "cuda" else 80
    case = AttendCase(
        batch=1, key_value_heads=1, group=2, head_dim=16, queries=6, slots=slots, method=pair.name, seed=7,
        device=str(device),
    )
    given = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in case.inputs.items()}
    given["occupied"][..., place] = False
    for name in ("key", "value"):
        given[name][..., place, :] = torch.nan
    output, received = checkers.module(twins.optimized, pair).attend(**given)
    assert bool(output.isfinite().all()) and bool((received[..., place] == 0).all())


def test_attend_of_a_block_of_which_some_queries_are_padding(pair, twins, device):
    case = AttendCase(
        batch=3, key_value_heads=2, group=2, head_dim=16, queries=6, slots=20, method=pair.name, seed=5,
        occupancy="random", device=str(device),
    )
    assert bool((case.valid.any(-1) & ~case.valid.all(-1)).any()), "the block must have padding and valid queries"
    assert_right(pair, twins, case)


@pytest.mark.parametrize("queries", [8, 20])
def test_attend_where_the_last_slots_and_queries_are_padding(queries, pair, twins, device):
    """The last tokens of the cache, and the last queries, are not in the last of the pieces that a kernel looks at."""
    case = AttendCase(
        group=2, head_dim=16, queries=queries, slots=48, method=pair.name, seed=queries, device=str(device)
    )
    past = case.slots - queries
    for begin, end in ((10, 12), (min(20, past), past), (past + 4, case.slots)):
        case.occupied[:, begin:end] = False
    assert_right(pair, twins, case)


@pytest.mark.parametrize(("group", "head_dim", "dtype", "queries", "slots"), [
    (1, 80, torch.float32, 1, 33), (3, 96, torch.bfloat16, 7, 20), (5, 160, torch.float16, 3, 19),
    (8, 16, torch.float32, 1, 1), (8, 80, torch.bfloat16, 17, 17),
], ids=str)
def test_attend_of_every_shape(pair, group, head_dim, dtype, queries, slots, twins, device):
    """Group and head sizes that are not powers of two, a single query, a single slot, and a block of all slots."""
    assert_right(pair, twins, AttendCase(
        group=group, head_dim=head_dim, dtype=dtype, queries=queries, slots=slots, method=pair.name, seed=group,
        device=str(device), per_head=True, occupancy="random" if slots > queries else "full",
    ))


@given(data=st.data())
@few
def test_attend_with_heads_that_hold_different_tokens(pair, data, twins):
    """Two KV heads have separate masks. If the masks are equal, one mask for both heads gives bitwise equal results."""
    case = data.draw(attend_cases(pair.name, content=("ordinary", "overflow_88"), occupancy=("random", "left_padding")))
    case = replace(case, batch=1, key_value_heads=2, per_head=True)
    assert_right(pair, twins, case)
    shared = case.occupied[:, 0]
    inputs = {**case.inputs, "occupied": shared[:, None].expand(1, 2, -1)}
    module = checkers.module(twins.optimized, pair)
    for one, other in zip(module.attend(**inputs), module.attend(**{**inputs, "occupied": shared}), strict=True):
        assert_same(other, one, what="one mask for all heads")


@given(data=st.data())
@few
def test_attend_is_bitwise_repeatable(pair, data, twins):
    case = data.draw(attend_cases(pair.name, slots=(1, 24)))
    for one, other in zip(attend(pair, twins, case), attend(pair, twins, case), strict=True):
        assert_same(other, one, what="launched again")


@given(data=st.data())
@few
def test_attend_reads_nothing_of_free_slots(pair, data, twins):
    """Their contents have no effect, even NaN and infinity, in keys, values and padding queries."""
    masks = ("random", "left_padding")
    case = data.draw(attend_cases(pair.name, occupancy=masks, content=("ordinary",), slots=(1, 24)))
    clean, poisoned = (attend(pair, twins, replace(case, poison=poison)) for poison in ("zero", "nan"))
    for one, other in zip(clean, poisoned, strict=True):
        assert_same(other, one, what="free slots poisoned")


def allocations(act: Any, device: torch.device) -> int:
    """Bytes of the largest tensor that `act()` allocates. On a GPU, its peak of allocated bytes."""
    if device.type == "cuda":
        act()  # compiles
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        act()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        act()
    results: Any = seen.profiler
    return max(event.nbytes() for event in results.kineto_results.events() if event.name() == "[memory]")


def test_attend_never_allocates_the_attention_matrix(pair, twins, device):
    """The call allocates less than a quarter of B Hq Q S weights in 16 bits. The reference, which has this matrix in
    float32, shows that the measurement would detect it."""
    gpu = device.type == "cuda"
    batch, heads, group, queries, slots, head_dim = (2, 4, 4, 128, 8192, 128) if gpu else (1, 1, 2, 48, 704, 16)
    case = AttendCase(
        batch=batch, key_value_heads=heads, group=group, head_dim=head_dim, dtype=torch.bfloat16, queries=queries,
        slots=slots, method=pair.name, device=str(device),
    )
    inputs = case.inputs
    matrix = batch * heads * group * queries * slots
    most = {
        side: allocations(lambda side=side: checkers.module(getattr(twins, side), pair).attend(**inputs), device)
        for side in ("reference", "optimized")
    }
    assert most["reference"] >= 4 * matrix, "the measurement must detect the matrix of the reference"
    assert most["optimized"] < 2 * matrix / 4, f"attend allocates {most['optimized']} bytes for {matrix} weights"

