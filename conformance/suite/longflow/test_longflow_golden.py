"""LongFlow under test against the golden trace: the float64 decisions on a trained model's queries, keys and values.

The CPU replays the first steps, the GPU all of them. The state under test runs in lockstep with the reference. Its
choices must agree with the trace up to the first adjudicated tie. After it, only lockstep judges. Wrong
choices are counted to the end of the trace.
"""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.cases.draws import golden_steps
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.judge.trace import follow
from kvtwin.conformance.suite import golden_cases

pytestmark = [pytest.mark.kind("golden"), pytest.mark.main]

CASES, KNOWN = ("3.64", "3.128", "6.64", "6.128"), ("18.64", "1.64", "27.64")  # layer.budget, of a public model too
traces, known, _, test_every_recorded_case_is_replayed = golden_cases.of_method(
    "longflow", {"traces": CASES, "known": KNOWN}
)


def inputs(case, traces, device, dtype):
    """The capture's query, key and value [1, H, T, D] in `dtype`, and the sizes of a state."""
    capture, golden = traces
    layer = golden.metadata["cases"][case]["layer"]
    tensors = [capture.tensors[f"{layer}.{name}"].to(device, dtype) for name in ("query", "key", "value")]
    query, key, _ = tensors
    return tensors, {
        "batch": 1, "query_heads": query.shape[1], "key_value_heads": key.shape[1], "head_dim": key.shape[3],
        "dtype": dtype, "device": device,
    }


@pytest.mark.parametrize("case", CASES)
def test_longflow_follows_the_golden_trace(case, traces, twins, device):
    follow_trace(case, traces, twins, device, golden_steps() if case == CASES[0] else golden_steps() // 6)


def test_longflow_follows_its_trace_of_a_public_model(known, twins, device):
    for case in KNOWN if device.type == "cuda" else KNOWN[:1]:
        follow_trace(case, known, twins, device, golden_steps() // 2)


def follow_trace(case, traces, twins, device, most):
    """most: the steps that the CPU replays."""
    golden = traces[1]
    prompt, steps = golden.metadata["prompt"], golden.metadata["steps"]
    if device.type == "cpu":
        steps = min(steps, most)
    tensors, sizes = inputs(case, traces, torch.device("cpu"), torch.bfloat16)
    kept, evicted = (golden.tensors[f"{case}.{name}"] for name in ("kept", "evicted"))
    config = golden.metadata["cases"][case]["config"]
    both = lockstep.pair(
        "longflow", twins.optimized.longflow, config=config, on_host=device.type != "cpu", **sizes | {"device": device}
    )
    followed = 0
    with follow() as wrong:
        both.prefill(*(tensor[:, :, :prompt] for tensor in tensors))
        if not both.summary.adjudicated and not wrong:
            assert_same(both.tested.positions[:, :kept.shape[1]], kept, what="positions kept from the prompt")
        for step in range(steps):
            leaves = both.tested.positions.gather(1, both.tested.next_slot[:, None])[:, 0]
            if not both.summary.adjudicated and not wrong:
                assert_same(leaves, evicted[step], what=f"evicted token of step {step}")
                followed += 1
            both.step(*(tensor[:, :, prompt + step] for tensor in tensors))
    assert 2 * followed > steps or both.summary.adjudicated
