"""Quest under test against the golden trace: bounds, selected pages and outputs on a trained model's vectors.

The state under test runs in lockstep with a float64 state, which adopts pages that differ within the bounds. A step
whose pages are the recorded ones is compared with the record. The CPU replays the small cases, the GPU all cases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtwin.conformance.judge.checkers.quest import Adapter
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.conformance.judge.lockstep import Lockstep
from kvtwin.conformance.judge.trace import follow as follow_trace
from kvtwin.conformance.suite import golden_cases
from kvtwin.fixtures import block_traces, record_quest
from kvtwin.reference.baselines.quest import QuestConfig

pytestmark = [pytest.mark.kind("golden"), pytest.mark.main]

#: layer.budget of each fixture. The first two, and the first one of the public model, have one KV head.
CASES = {"traces": ("3.16", "6.20", "3.64", "6.48"), "known": ("18.16", "27.64")}
traces, known, of_each_case, test_every_recorded_case_is_replayed = golden_cases.of_method("quest", CASES)


def started(module: Any, case: str, traces: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """An empty state of the case, with its query, key and value [1, H, T, D] in `dtype`."""
    about = traces[1].metadata["cases"][case]
    tensors = record_quest.inputs(traces[0], about, dtype, device)
    return module.QuestState(QuestConfig(**about["config"]), **block_traces.sizes(tensors)), tensors


@of_each_case
def test_pages_change_from_step_to_step_and_differ_between_heads(which, case, request):
    traces = request.getfixturevalue(which)
    selected = traces[1].tensors[f"{case}.selected"]
    assert bool((selected[1:] != selected[:-1]).any()) and bool((selected[:, 1:] != selected[:, :1]).any())
    assert int(selected.max()) < traces[1].tensors[f"{case}.maximum"].shape[1]


def test_quest_follows_the_golden_trace(traces, twins, device):
    for case in CASES["traces"] if device.type == "cuda" else CASES["traces"][:2]:
        follow(case, traces, twins, device)


def test_quest_follows_its_trace_of_a_public_model(known, twins, device):
    for case in CASES["known"] if device.type == "cuda" else CASES["known"][:1]:
        follow(case, known, twins, device)


def follow(case: str, traces: Any, twins: Any, device: torch.device) -> None:
    golden = traces[1]
    about = golden.metadata["cases"][case]
    tested, tensors = started(twins.optimized.baselines.quest, case, traces, device, torch.bfloat16)
    exact, _ = started(twins.reference.baselines.quest, case, traces, device, torch.float64)
    adapter = Adapter()
    both, prompt = Lockstep(tested, exact, adapter), about["prompt"]
    outputs, pages = golden.tensors.get(f"{case}.output"), golden.tensors[f"{case}.selected"].to(device)
    allowed = record_quest.tolerance(traces[0], about)
    alike = 0
    with follow_trace():
        both.prefill(*(tensor[:, :, :prompt] for tensor in tensors))
        for step in range(about["steps"]):
            output = both.step(*(tensor[:, :, prompt + step] for tensor in tensors))
            same = (tested.selected[0] == pages[step]).all(-1)                             # [Hq]
            alike += int(same.sum())
            if outputs is not None:
                assert_within(
                    output[0, same], outputs.to(device)[step, same], (adapter.bound[0] + allowed)[same],
                    what=f"recorded output of step {step}",
                )
    assert alike > 0.9 * about["steps"] * tested.sizes.query_heads, "few steps select the recorded pages"
    for name, tensor in record_quest.bounds_of(tested).items():
        assert_same(tensor, golden.tensors[f"{case}.{name}"].to(device), what=name)
