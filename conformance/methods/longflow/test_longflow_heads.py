"""LongFlow under test against float64 in cases that are rarely drawn on the CPU: several KV heads, blocks, far
offsets: what only our own sides promise.
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
from kvtwin.conformance.suite.longflow.test_longflow_heads import few
from kvtwin.optimized.longflow import _ops

pytestmark = pytest.mark.kind("equivalence")

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
