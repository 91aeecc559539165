"""SyncKV under test against the golden trace: the clusters, sets and outputs of float64 on a trained model's vectors.

The state under test runs in lockstep with a float64 state, which adopts adjudicated choices. After an adopted choice
the float64 state may differ from the record, so anticipations are compared with the record only until then. At least
half of them must be. The CPU replays the small case, the GPU all cases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtwin.conformance.judge.checkers.synckv_state import Adapter
from kvtwin.conformance.judge.compare import assert_within
from kvtwin.conformance.judge.lockstep import Lockstep
from kvtwin.conformance.judge.trace import follow as follow_trace
from kvtwin.conformance.suite import golden_cases
from kvtwin.fixtures import block_traces, record_synckv
from kvtwin.reference.synckv import SyncKVConfig

pytestmark = [pytest.mark.kind("golden"), pytest.mark.main]

#: layer.k of each fixture.
CASES = {"traces": ("3.8", "3.32", "6.24"), "known": ("18.8", "27.32")}
traces, known, of_each_case, test_every_recorded_case_is_replayed = golden_cases.of_method("synckv", CASES)


def started(module: Any, case: str, traces: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """An empty state of the case, with its query, key and value [1, H, T, D] in `dtype`."""
    about = traces[1].metadata["cases"][case]
    tensors = record_synckv.inputs(traces[0], about, dtype, device)
    clusters = record_synckv.clusters_of(about)
    return module.SyncKVState(SyncKVConfig(**about["config"]), clusters, **block_traces.sizes(tensors)), tensors


@of_each_case
def test_recorded_sets_change(which, case, request):
    """There is more than one cluster, and successive sets differ in part."""
    traces = request.getfixturevalue(which)
    about = traces[1].metadata["cases"][case]
    assert sorted(set(about["labels"])) == [0, 1]
    chosen = traces[1].tensors[f"{case}.chosen"]
    kept = (chosen[1:, :, :, None] == chosen[:-1, :, None, :]).any(-1).double().mean((1, 2))
    assert len(chosen) == about["steps"] // about["config"]["stride"] + 1
    assert 0.3 < float(kept.mean()) < 1


@of_each_case
def test_clusters_equal_the_recorded_ones(which, case, request, twins, device):
    golden = request.getfixturevalue(which)[1]
    about = golden.metadata["cases"][case]
    found = twins.optimized.synckv.cluster_heads(golden.tensors[f"{case}.similarity"].to(device), 2)
    assert found == record_synckv.clusters_of(about)


def test_synckv_follows_the_golden_trace(traces, twins, device):
    for case in CASES["traces"] if device.type == "cuda" else CASES["traces"][:1]:
        follow(case, traces, twins, device)


def test_synckv_follows_its_trace_of_a_public_model(known, twins, device):
    for case in CASES["known"] if device.type == "cuda" else CASES["known"][:1]:
        follow(case, known, twins, device)


def follow(case: str, traces: Any, twins: Any, device: torch.device) -> None:
    golden = traces[1]
    about = golden.metadata["cases"][case]
    recorded = {name: golden.tensors[f"{case}.{name}"].to(device) for name in ("static", "chosen")}
    outputs = golden.tensors.get(f"{case}.output")
    prompt, stride = about["prompt"], about["config"]["stride"]
    tested, tensors = started(twins.optimized.synckv, case, traces, device, torch.bfloat16)
    exact, _ = started(twins.reference.synckv, case, traces, device, torch.float64)
    adapter = Adapter()
    adapter.stored = ()                                                    # slow, and tested in lockstep already
    both = Lockstep(tested, exact, adapter)
    with follow_trace():
        both.prefill(*(tensor[:, :, :prompt] for tensor in tensors))
        as_recorded = torch.equal(exact.static[0].short(), recorded["static"])
        followed = 0
        for step in range(about["steps"]):
            as_recorded &= torch.equal(exact.chosen[0].short(), recorded["chosen"][step // stride])
            output = both.step(*(tensor[:, :, prompt + step] for tensor in tensors))
            if (step + 1) % stride or not as_recorded:
                continue
            if outputs is not None:
                truth = outputs[step // stride][None].to(device)
                assert_within(output, truth, adapter.bound, what=f"output of step {step}")
            followed += 1
    choices = about["steps"] // stride
    assert 2 * followed >= choices, f"only {followed} of {choices} anticipations agree with the record"
