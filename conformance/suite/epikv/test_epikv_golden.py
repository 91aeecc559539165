"""EpiKV under test against the golden trace: scores and kept tokens of float64 on a trained model's vectors.

The state under test runs in lockstep with a float64 state, which adopts adjudicated choices. After an adopted choice
the float64 state may differ from the record, so steps are compared with the record only until then. At least half of
the steps must be. The CPU replays the first steps of four cases, the GPU all steps of all cases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtwin.conformance.judge.checkers.epikv import Adapter
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.judge.lockstep import Lockstep
from kvtwin.conformance.judge.trace import follow as follow_trace
from kvtwin.conformance.suite import golden_cases
from kvtwin.fixtures import block_traces, record_epikv
from kvtwin.fixtures.record_epikv import PROMPT, positions
from kvtwin.reference.contract.epikv.config import EpiKVConfig

pytestmark = [pytest.mark.kind("golden"), pytest.mark.main]

#: layer.policy of each fixture.
CASES = {
    "traces": ("3.attn_x_hs", "3.epikv", "3.hs_variance", "6.kv_key", "6.lag_kv", "6.segment_entropy", "6.segment_hs"),
    "known": ("18.attn_x_hs", "18.epikv", "27.lag_kv"),
}
traces, known, of_each_case, test_every_recorded_case_is_replayed = golden_cases.of_method("epikv", CASES)
FEW = 12                                                                # steps of a case on the CPU
HYBRIDS = ("3.attn_x_hs", "6.segment_entropy", "6.segment_hs")


@of_each_case
def test_every_case_evicts(which, case, request):
    traces = request.getfixturevalue(which)
    held = traces[1].tensors[f"{case}.held"]
    assert int(held[-1].max()) == PROMPT + len(held) - 2
    assert int((held[-1] >= 0).sum()) < len(held)


@of_each_case
def test_recorded_choices_are_beyond_rounding(which, case, request):
    """Margins exceed the errors of float64 on any machine. The exceptions are ties that no rounding can break: those of
    a row's first two tokens, whose z-scores are fixed, and the infinite scores of a first chunk."""
    traces = request.getfixturevalue(which)
    about = traces[1].metadata["cases"][case]
    held, margin = (traces[1].tensors[f"{case}.{name}"] for name in ("held", "margin"))
    firsts = (held[1:] == 0).any(1) & (held[1:] == 1).any(1)
    tied = (margin == 0) & (firsts | (about["config"]["policy"] == "lag_kv"))
    assert bool(((margin > record_epikv.tolerance(traces[0], about, "margin")) | tied).all())
    assert int((tied | margin.isinf()).sum()) < 2 * len(margin) / 3, "too few choices are decided by scores"


@pytest.mark.parametrize(("case", "by", "rising"), [
    ("6.segment_hs", "sparsity", [1, 2, 0]), ("6.segment_entropy", "entropy", [0, 2, 1]),
])
def test_recorded_thoughts_are_beyond_rounding_and_of_every_type(case, by, rising, traces):
    """No weight is at the threshold, and no sparsity or entropy is at an edge. Each edge has some on both sides."""
    about = traces[1].metadata["cases"][case]
    told, thought = (traces[1].tensors[f"{case}.{name}"] for name in (by, "thought"))
    if by == "sparsity":
        leeway = traces[1].tensors[f"{case}.leeway"]
        assert float(leeway.min()) > record_epikv.tolerance(traces[0], about, "leeway")
    edges = torch.tensor(about["config"]["edges"], dtype=torch.float64)
    assert float((told[:, None] - edges).abs().min()) > record_epikv.tolerance(traces[0], about, by)
    by_hand = torch.tensor(rising, dtype=torch.int8)[(told[:, None] >= edges).sum(1)]
    every = by_hand.repeat_interleave(about["config"]["tau"])[:len(thought)]
    assert_same(thought, every, what="thoughts")
    assert thought[:FEW].unique().tolist() == [0, 1, 2], "the CPU's steps must have all thought types"


@pytest.mark.parametrize(("which", "case"), [*(("traces", case) for case in HYBRIDS), ("known", "18.attn_x_hs")])
def test_hybrid_choices_depend_on_attention(which, case, request):
    """With the same budget, window and hidden states, the policy "epikv", which ignores attention, keeps other
    tokens."""
    traces = request.getfixturevalue(which)
    about = traces[1].metadata["cases"][case]
    alone = {**about["config"], "policy": "epikv", "edges": None, "segments_by": "sparsity"}
    given = record_epikv.inputs(traces[0], {**about, "config": alone}, torch.float64, "cpu")
    plain = record_epikv.record_case(*given, EpiKVConfig(**alone))["held"]
    differ = (traces[1].tensors[f"{case}.held"] != plain).any(1)
    assert int(differ[:1 + FEW].sum()) > FEW // 2, "the steps that the CPU replays would not show the difference"


def test_epikv_follows_the_golden_trace(traces, twins, device, monkeypatch):
    for case in ("3.epikv", "6.lag_kv", *(("3.hs_variance", "6.kv_key") if device.type == "cuda" else ())):
        follow(case, traces, twins, device, monkeypatch)


def test_epikv_follows_its_trace_of_a_public_model(known, twins, device, monkeypatch):
    for case in CASES["known"]:
        follow(case, known, twins, device, monkeypatch)


@pytest.mark.parametrize("case", HYBRIDS)
def test_hybrids_follow_the_golden_trace(case, traces, twins, device, monkeypatch):
    follow(case, traces, twins, device, monkeypatch)


def follow(case: str, traces: Any, twins: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    about = traces[1].metadata["cases"][case]
    config, recorded = EpiKVConfig(**about["config"]), traces[1].tensors[f"{case}.held"]
    thoughts = traces[1].tensors.get(f"{case}.thought")
    tokens, hidden = record_epikv.inputs(traces[0], about, torch.bfloat16, device)
    sizes = block_traces.sizes(tokens)
    tested = twins.optimized.epikv.EpiKVState(config, **sizes)
    exact = twins.reference.epikv.EpiKVState(config, **{**sizes, "dtype": torch.float64})
    when: list[Any] = [slice(0, PROMPT)]

    def from_capture(*_: Any) -> dict[str, torch.Tensor]:
        """[B, L, T, C] or [B, L, C]."""
        return {name: tensor[:, when[0]][:, None] for name, tensor in hidden.items()}

    monkeypatch.setattr("kvtwin.conformance.judge.checkers.epikv.extras", from_capture)
    monkeypatch.setattr(Adapter, "_extras", staticmethod(lambda state, count, tokens: {
        name: tensor if tensor.dim() == 4 else tensor[:, :, None] for name, tensor in from_capture().items()
    }))
    both = Lockstep(tested, exact, Adapter())
    total = len(recorded) - 1 if device.type == "cuda" else FEW
    with follow_trace():
        both.prefill(*(tensor[:, :, when[0]] for tensor in tokens))
        followed, as_recorded = 0, positions(exact) == kept(recorded[0])
        for step in range(total):
            when[0] = PROMPT + step
            both.step(*(tensor[:, :, when[0]] for tensor in tokens))
            as_recorded &= positions(exact) == kept(recorded[step + 1])
            if thoughts is not None:
                as_recorded &= bool((exact.thoughts[exact.positions == when[0]] == thoughts[step]).all())
            followed += as_recorded
    assert 2 * followed >= total, f"only {followed} of {total} steps agree with the record"


def kept(row: torch.Tensor) -> list[int]:
    return [token for token in row.tolist() if token >= 0]
