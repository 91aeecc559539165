"""ThinKV under test against the golden trace: the thoughts, tokens and outputs of float64 on a trained model's vectors.

The state under test runs in lockstep with a float64 state, which adopts adjudicated choices. After an adopted choice
the float64 state may differ from the record, so windows are compared with the record only until then. At least half of
them must be. The CPU replays the small cases, the GPU all cases, or two of them with the profile gpu.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtwin.conformance.cases import draws
from kvtwin.conformance.judge.checkers import thinkv_paging
from kvtwin.conformance.judge.checkers.thinkv_state import Adapter
from kvtwin.conformance.judge.compare import assert_within
from kvtwin.conformance.judge.lockstep import Lockstep
from kvtwin.conformance.judge.trace import follow as follow_trace
from kvtwin.conformance.suite import golden_cases
from kvtwin.fixtures import block_traces, record_thinkv
from kvtwin.fixtures.record_thinkv import positions
from kvtwin.reference.contract.thinkv.config import ThinKVConfig
from kvtwin.reference.contract.thinkv.types import Thought
from kvtwin.reference.thinkv.thoughts import attention_sparsity, classify

pytestmark = [pytest.mark.kind("golden"), pytest.mark.main, pytest.mark.first]

#: layer.budget of each fixture. The first two have one KV head, the second quantizes nothing; so has the first of a
#: public model.
CASES = {"traces": ("3.16", "3.20", "3.48", "6.64"), "known": ("18.16", "27.48")}
traces, known, of_each_case, test_every_recorded_case_is_replayed = golden_cases.of_method("thinkv", CASES)


def started(module: Any, case: str, traces: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """An empty state of the case, with its query, key and value [1, H, T, D] in `dtype`."""
    about = traces[1].metadata["cases"][case]
    tensors = record_thinkv.inputs(traces[0], about, dtype, device)
    return module.ThinKVState(ThinKVConfig(**about["config"]), **block_traces.sizes(tensors)), tensors


@of_each_case
def test_every_case_has_every_thought(which, case, request):
    """All thought types occur, and they agree with the sparsities."""
    traces = request.getfixturevalue(which)
    about = traces[1].metadata["cases"][case]
    shares, thoughts = (traces[1].tensors[f"{case}.{name}"] for name in ("sparsity", "thought"))
    assert set(thoughts.tolist()) == set(Thought)
    low, high = about["config"]["edges"]
    told = [0 if share >= high else 2 if share >= low else 1 for share in shares.tolist()]
    assert thoughts.tolist() == told
    held = (traces[1].tensors[f"{case}.held"] >= 0).sum(1)
    assert int(held[-1]) < about["prompt"] + about["steps"]
    assert len(thoughts) == about["steps"] // about["config"]["tau"] == len(held) - 1


def test_thinkv_follows_the_golden_trace(traces, twins, device):
    for case in draws.of_run(CASES["traces"], 2) if device.type == "cuda" else CASES["traces"][:2]:
        follow(case, traces, twins, device)


def test_thinkv_follows_its_trace_of_a_public_model(known, twins, device):
    for case in CASES["known"] if device.type == "cuda" else CASES["known"][:1]:
        follow(case, known, twins, device)


def follow(case: str, traces: Any, twins: Any, device: torch.device) -> None:
    golden = traces[1]
    about = golden.metadata["cases"][case]
    recorded = {name: golden.tensors[f"{case}.{name}"] for name in ("thought", "held")}
    outputs = golden.tensors.get(f"{case}.output")
    prompt, tau = about["prompt"], about["config"]["tau"]
    tested, tensors = started(twins.optimized.thinkv, case, traces, device, torch.bfloat16)
    exact, _ = started(twins.reference.thinkv, case, traces, device, torch.float64)
    adapter = Adapter()
    adapter.stored = ()                                                    # at the ends of windows only, see below
    both = Lockstep(tested, exact, adapter)
    with follow_trace():
        both.prefill(*(tensor[:, :, :prompt] for tensor in tensors))
        as_recorded, followed = same_tokens(exact, recorded["held"][0]), 0
        for step in range(about["steps"]):
            output = both.step(*(tensor[:, :, prompt + step] for tensor in tensors))
            window, place = divmod(step, tau)
            if place == 0:
                as_recorded &= int(exact.thought) == int(recorded["thought"][window])
            if place < tau - 1:
                continue
            thinkv_paging.assert_same_tables(tested.cache, exact.cache, what=f"at the end of window {window}: ")
            thinkv_paging.assert_same_contents(tested.cache, exact.cache, what=f"at the end of window {window}: ")
            if as_recorded and outputs is not None:
                truth = outputs[window].to(device)[None]
                assert_within(output, truth, adapter.bound, what=f"output at the end of window {window}")
            followed += as_recorded
            as_recorded &= same_tokens(exact, recorded["held"][window + 1])
    windows = len(recorded["thought"])
    assert 2 * followed >= windows, f"only {followed} of {windows} windows agree with the record"


def same_tokens(state: Any, held: torch.Tensor) -> bool:
    return positions(state) == [position for position in held.tolist() if position >= 0]


def test_the_two_readings_of_sparsity_differ_at_a_third_of_the_steps(traces):
    """The numbers in the method's readings: steps whose thought type differs between the sparsity of heads and that of
    their mean, over all earlier tokens, with edges at the terciles of each."""
    about = traces[0].metadata
    end = about["prompt"] + about["steps"]
    shares = torch.empty(2, len(about["layers"]), about["steps"], dtype=torch.float64)
    for number, layer in enumerate(about["layers"]):
        query, key, _ = block_traces.inputs(traces[0], layer, torch.float64, "cpu")
        for step, last in enumerate(range(about["prompt"], end)):
            given = query[:, :, last], key[:, :, :last + 1], torch.ones(1, last + 1, dtype=torch.bool)
            for which, sparsity_of in enumerate(("heads", "mean")):
                shares[which, number, step] = attention_sparsity(*given, sparsity_of=sparsity_of)

    def types(share: torch.Tensor) -> torch.Tensor:
        low, high = share.quantile(torch.tensor([1 / 3, 2 / 3], dtype=share.dtype)).tolist()
        return classify(share, (low, high))

    differ = [types(one) != types(other) for one, other in zip(*shares, strict=True)]
    found = sorted(round(100 * float(layer.double().mean())) for layer in differ)
    assert (found[0], found[-1]) == (26, 43)
    heads, mean = shares.mean(1)
    assert round(100 * float((types(heads) != types(mean)).double().mean())) == 31
