"""LongFlow under test against the golden trace: the float64 decisions on a trained model's queries, keys and values.

The CPU replays the first steps, the GPU all of them. Before each step the recorded choice is written to `next_slot`, so
that the rest of the trace stays comparable after a legal tie.
"""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.judge import bounds
from kvtwin.conformance.judge.checkers import longflow as judge
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.fixtures.load import load_trace

pytestmark = pytest.mark.kind("golden")

CPU_STEPS = 48
CASES = ("3.64", "3.128", "6.64", "6.128")  # layer.budget


@pytest.fixture(scope="module")
def traces():
    return load_trace("capture"), load_trace("longflow")


def started(module, case, traces, device, dtype):
    """A state of the case after the prompt, with the capture's query, key and value [1, H, T, D] in `dtype`."""
    capture, golden = traces
    about = golden.metadata["cases"][case]
    tensors = [capture.tensors[f"{about['layer']}.{name}"].to(device, dtype) for name in ("query", "key", "value")]
    query, key, _ = tensors
    config = module.LongFlowConfig(**about["config"])
    state = module.LongFlowState(
        config, batch=1, query_heads=query.shape[1], key_value_heads=key.shape[1], head_dim=key.shape[3],
        dtype=dtype, device=device,
    )
    prompt = golden.metadata["prompt"]
    state.prefill(*(tensor[:, :, :prompt] for tensor in tensors))
    kept = golden.tensors[f"{case}.kept"].to(device)
    assert_same(state.positions[:, :-1], kept, what="positions kept from the prompt")
    return state, tensors


def test_every_recorded_case_is_replayed(traces):
    assert set(traces[1].metadata["cases"]) == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_longflow_reference_repeats_the_golden_trace(case, traces, twins):
    """All steps in float64: the decisions are equal."""
    golden = traces[1]
    state, tensors = started(twins.reference.longflow, case, traces, torch.device("cpu"), torch.float64)
    prompt, steps = golden.metadata["prompt"], golden.metadata["steps"]
    for step in range(steps):
        assert_same(state.next_slot, golden.tensors[f"{case}.next_slot"][step], what=f"slot of step {step}")
        state.step(*(tensor[:, :, prompt + step] for tensor in tensors))


@pytest.mark.parametrize("case", CASES)
def test_longflow_follows_the_golden_trace(case, traces, twins, device):
    golden = traces[1]
    prompt, steps = golden.metadata["prompt"], golden.metadata["steps"]
    if device.type == "cpu":
        steps = min(steps, CPU_STEPS if case == CASES[0] else CPU_STEPS // 6)
    recorded = {
        name: golden.tensors[f"{case}.{name}"].to(device) for name in ("next_slot", "evicted", "output")
    }
    state, tensors = started(twins.optimized.longflow, case, traces, device, torch.bfloat16)
    for step in range(steps):
        state.next_slot.copy_(recorded["next_slot"][step])
        leaves = state.positions.gather(1, state.next_slot[:, None])[:, 0]
        assert_same(leaves, recorded["evicted"][step], what=f"evicted token of step {step}")
        query, key, value = (tensor[:, :, prompt + step] for tensor in tensors)
        output = state.step(query, key, value)
        newest = state.positions == prompt + step
        seen = DecodeCase.of(query, state.key, state.value, state.occupied, protected=newest)
        assert_within(output, recorded["output"][step], bounds.decode_output(seen), what=f"output of step {step}")
        judge.assert_slot_right(state.next_slot, seen, truth=recorded["next_slot"][step + 1])
