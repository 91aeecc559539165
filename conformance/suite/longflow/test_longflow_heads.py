"""LongFlow under test against float64 in cases that are rarely drawn on the CPU: several KV heads, blocks, far offsets.

Mutants that mixed up heads or blocks survived tests in which these are drawn together with everything else.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.cases.strategies import decode_cases
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.checkers import longflow as judge

pytestmark = pytest.mark.kind("equivalence")

few = settings(max_examples=max(at_least(6), settings().max_examples // 4))


@pytest.mark.property("free_slots")
@pytest.mark.parametrize("slots", [199, 200])
def test_longflow_finds_a_free_slot_in_any_tile(slots, twins, device):
    """One free slot per row, among the first slots that a program looks at, among the next, or among the last ones."""
    case = DecodeCase(batch=5, key_value_heads=3, group=3, head_dim=16, slots=slots, seed=slots, device=str(device))
    for row, place in enumerate((3, 20, 70, 130, 190)):
        case.occupied[row, place] = False
        case.key[row, :, place] = case.value[row, :, place] = torch.nan
    judge.assert_decode_right(twins.optimized.longflow.decode_attention(**case.inputs), case)


@pytest.mark.property("extreme_numbers")
@given(case=decode_cases(content=("overflow_88",), slots=(24, None), occupancy=("full",), protect=("none", "newest")))
@few
def test_longflow_ranks_scores_that_underflow(case, twins):
    """Logits differ by up to 240, so most scores underflow in float32. Still, only one token is the lowest."""
    actual = twins.optimized.longflow.decode_attention(**case.inputs)
    judge.assert_decode_right(actual, case)


@pytest.mark.property("free_slots")
@pytest.mark.parametrize("slots", [6, 7])
def test_longflow_gives_zeros_for_a_row_without_tokens(slots, twins, device):
    """For both ways to finish a step. In the interpreter, the parity of the number of slots selects one."""
    case = DecodeCase(
        batch=2, key_value_heads=2, group=2, head_dim=32, dtype=torch.float32, slots=slots, occupancy="empty_row",
        device=str(device),
    )
    empty = ~case.occupied.any(-1)
    assert empty.any()
    actual = twins.optimized.longflow.decode_attention(**case.inputs)
    assert (actual.output[empty] == 0).all()
    judge.assert_decode_right(actual, case)


FAR = pytest.mark.parametrize(
    ("batch", "heads", "length"), [(3, 1, 5), (1, 3, 5), (1, 1, 4), (1, 1, 17)],
    ids=["rows", "heads", "tokens", "tiles"],                              # a tile has 16 tokens in the interpreter
)


@pytest.mark.property("layouts")
@FAR
def test_longflow_reaches_slots_beyond_2_to_the_31(batch, heads, length, twins, device):
    """Offsets of the last row, head or slot do not fit into 32 bits."""
    case = DecodeCase(
        batch=batch, key_value_heads=heads, group=1, head_dim=128, dtype=torch.float16, layout="far", slots=length,
        occupancy="full", device=str(device),
    )
    assert max(case.key.stride()) * (max(batch, heads, length) - 1) > 2**31 - 1
    judge.assert_decode_right(twins.optimized.longflow.decode_attention(**case.inputs), case)


@pytest.mark.property("layouts")
@FAR
@pytest.mark.parametrize("budget", [3, 9], ids=["compressed", "whole"])
def test_longflow_reaches_prompts_beyond_2_to_the_31(budget, batch, heads, length, twins, device):
    """The same for queries, keys and values of a prompt, in attention and in compression."""
    trace = StateTrace(
        batch=batch, key_value_heads=heads, group=1, head_dim=128, dtype=torch.float16, layout="far", seed=1,
        config=(("budget", budget), ("window", 2), ("kernel_size", 3)), prompt=length, steps=1, device=str(device),
    )
    lockstep.run(trace, twins.optimized.longflow)
