"""CAKE under test against the golden trace: preferences, budgets, kept and evicted tokens and outputs of several layers
on a trained model's vectors.

The states under test run in lockstep with float64 states, which adopt what differs within the bounds. The CPU replays
the small case, the GPU all cases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.judge.trace import follow as follow_trace
from kvtwin.conformance.suite import golden_cases
from kvtwin.fixtures import block_traces, record_cake

pytestmark = [pytest.mark.kind("golden"), pytest.mark.main]

#: Of each fixture.
CASES = {"traces": ("small", "large", "capped"), "known": ("small", "large")}
traces, known, of_each_case, test_every_recorded_case_is_replayed = golden_cases.of_method("cake", CASES)
NAMES = ("query", "key", "value")


@of_each_case
def test_the_recorded_budgets_differ_between_layers_and_fall(which, case, request):
    traces = request.getfixturevalue(which)
    about, granted = (traces[1].metadata["cases"][case], traces[1].tensors[f"{case}.budgets"])
    total = (about["config"]["budget"] - about["config"]["window"]) * len(granted)
    prefix = about["prompt"] - about["config"]["window"]
    for layer, row in enumerate(granted):
        assert int(row[:layer + 1].sum()) == min(total, prefix * (layer + 1)) and bool((row[layer + 1:] == -1).all())
    assert len(set(granted[-1].tolist())) == len(granted) and bool((granted[-1][:-1] < granted.amax(0)[:-1]).all())
    assert bool((granted[1:] == prefix).any()) == (case == "capped")


def test_cake_follows_the_golden_trace(traces, twins, device):
    for case in CASES["traces"] if device.type == "cuda" else CASES["traces"][:1]:
        follow(case, traces, twins, device)


def test_cake_follows_its_trace_of_a_public_model(known, twins, device):
    for case in CASES["known"] if device.type == "cuda" else CASES["known"][:1]:
        follow(case, known, twins, device)


def follow(case: str, traces: Any, twins: Any, device: torch.device) -> None:
    capture, golden = traces
    about, stored = golden.metadata["cases"][case], golden.tensors
    layers, prompt = record_cake.inputs_of(capture, about, torch.bfloat16, device), about["prompt"]
    both = lockstep.layers_of(
        "cake", twins.optimized.baselines.cake, config=about["config"], layers=len(layers),
        **block_traces.sizes(layers[0]),
    )
    states = [each.tested for each in both.layers]
    alike = decided = 0
    with follow_trace():
        both.prefill([
            dict(zip(NAMES, (tensor[:, :, :prompt] for tensor in tensors), strict=True)) for tensors in layers
        ])
        expected = stored[f"{case}.budgets"][-1].long()
        assert_same(states[0].cascade.budgets[0].cpu(), expected, what="recorded budgets")
        for layer, state in enumerate(states):
            kept = {(head, one) for head, row in enumerate(record_cake.held(state).tolist()) for one in row}
            wanted = {(head, one) for head, row in enumerate(stored[f"{case}.{layer}.kept"].tolist()) for one in row}
            alike, decided = alike + len(kept & wanted), decided + len(wanted)
        for step in range(about["steps"]):
            before = [state.positions[0].clone() for state in states]
            both.step([
                dict(zip(NAMES, (tensor[:, :, prompt + step] for tensor in tensors), strict=True)) for tensors in layers
            ])
            for layer, state in enumerate(states):
                gone = record_cake.gone(before[layer], state.positions[0], prompt + step).cpu()
                same = gone == stored[f"{case}.{layer}.evicted"][step]
                alike, decided = alike + int(same.sum()), decided + same.numel()
    assert alike > 0.9 * decided, "few of the recorded tokens are kept and evicted"
