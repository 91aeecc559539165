"""LongFlow under test against float64 in cases that are rarely drawn on the CPU: several KV heads, blocks, far offsets.

Mutants that mixed up heads or blocks survived tests in which these are drawn together with everything else.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.cases.strategies import decode_cases
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.checkers import longflow as judge
from kvtwin.optimized.longflow import _ops

pytestmark = pytest.mark.kind("equivalence")

few = settings(max_examples=max(at_least(6), settings().max_examples // 4))
PLAIN = ("ordinary", "duplicates", "dominant")


def of_heads(heads: int):
    """A function that makes a case with one row and `heads` KV heads."""
    return lambda case: replace(case, batch=1, key_value_heads=heads)


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per_head"])
@given(data=st.data())
@few
def test_longflow_keeps_heads_apart(per_head, heads, data, twins):
    """Each KV head has its own query heads and norms, and with per_head also its own mask and protection."""
    cases = decode_cases(
        content=PLAIN, layout=("contiguous", "transposed", "spread"), slots=(8, None), per_head=per_head,
        occupancy=("full", "random", "one_free"), protect=("none", "random", "all_but_one"),
    )
    case = data.draw(cases.map(of_heads(heads)))
    judge.assert_decode_right(twins.optimized.longflow.decode_attention(**case.inputs), case)


@given(
    case=decode_cases(content=("ordinary",), slots=(40, None), occupancy=("full",), protect=("none",)),
    back=st.sampled_from((1, 4, 8, 20, 40)),
)
@few
def test_longflow_scores_every_block_of_slots(case, back, twins):
    """There are more slots than one program processes. The victim, a zero value, may be in the block of any program."""
    value = case.value.contiguous().index_fill(2, torch.tensor(case.slots - back, device=case.value.device), 0)
    case = DecodeCase.of(case.query, case.key, value, case.occupied, scale=case.scale, per_head=case.per_head)
    actual = twins.optimized.longflow.decode_attention(**case.inputs)
    assert (actual.slot == case.slots - back).all()
    judge.assert_decode_right(actual, case)


def with_no_candidates(make):
    """`_ops.scratch` with candidates that never win, instead of what the memory held before."""
    def scratch(*arguments):
        workspace, candidates, counters = make(*arguments)
        return workspace, candidates.fill_(2**63 - 1), counters

    return scratch


@pytest.mark.parametrize("many", [False, True], ids=["few heads", "many heads"])
def test_longflow_waits_for_the_candidate_of_every_block(many, twins, device):
    """The victim, a zero value, is in the first, a middle or the last block of slots, for both ways to finish a step.
    Stale candidates of an earlier call must not help."""
    slots = 1100 if device.type == "cuda" else 100                         # blocks of up to 1024 or of 32 slots
    case = DecodeCase(batch=3, key_value_heads=2, group=4, head_dim=16, slots=slots, seed=1, device=str(device))
    victims = [5, slots // 2, slots - 1]
    case.value[range(3), :, victims] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ops, "fused", lambda *_: many)
        patch.setattr(_ops, "scratch", with_no_candidates(_ops.scratch))
        assert twins.optimized.longflow.decode_attention(**case.inputs).slot.tolist() == victims


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


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per_head"])
@pytest.mark.parametrize("prompt", [5, 14], ids=["short", "long"])
@given(seed=st.integers(0, 2**31 - 1), padding=st.sampled_from(("left_padding", "random", "none")))
@settings(max_examples=max(at_least(3), settings().max_examples // 6))
def test_longflow_state_keeps_heads_apart(prompt, per_head, seed, padding, twins, device):
    """Two rows with two KV heads of two query heads each. One prompt leaves slots free, the other does not."""
    config = {"budget": 9, "per_head": per_head, "sinks": 2, "window": 4, "kernel_size": 3}
    trace = StateTrace(
        batch=2, key_value_heads=2, group=2, head_dim=32, dtype=torch.bfloat16, seed=seed, device=str(device),
        config=tuple(config.items()), prompt=prompt, padding=padding, steps=6,
    )
    lockstep.run(trace, twins.optimized.longflow)


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
