"""EpiKV under test against the golden trace: scores and kept tokens of float64 on a trained model's vectors.

The state under test goes in lockstep with float64, which takes over a choice that is as right as its own. From there on
the record shows another state than is right: every step until then is compared with it, and these must be half of them
at least. The first steps of two cases on the CPU, all on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtwin.conformance.compare import assert_same, assert_within
from kvtwin.conformance.judges.epikv import Adapter
from kvtwin.conformance.lockstep import Lockstep
from kvtwin.fixtures import block_traces, record_epikv
from kvtwin.fixtures.load import load_trace
from kvtwin.fixtures.record_epikv import PROMPT, positions
from kvtwin.reference.epikv.contract import EpiKVConfig

pytestmark = pytest.mark.kind("golden")

CASES = ("3.epikv", "3.hs_variance", "6.kv_key", "6.lag_kv")


@pytest.fixture(scope="module")
def traces() -> Any:
    return load_trace("capture"), load_trace("epikv")


def test_every_recorded_case_is_replayed(traces):
    assert tuple(sorted(traces[1].metadata["cases"])) == CASES


@pytest.mark.parametrize("case", CASES)
def test_every_case_evicts(case, traces):
    held = traces[1].tensors[f"{case}.held"]
    assert int(held[-1].max()) == PROMPT + len(held) - 2
    assert int((held[-1] >= 0).sum()) < len(held)


@pytest.mark.parametrize("case", CASES)
def test_epikv_reference_repeats_the_golden_trace(case, traces):
    """All steps, in float64: decisions to the letter, the rest as near as `--check` allows."""
    about = traces[1].metadata["cases"][case]
    given = record_epikv.inputs(traces[0], about, torch.float64, "cpu")
    for name, tensor in record_epikv.record_case(*given, EpiKVConfig(**about["config"])).items():
        stored = traces[1].tensors[f"{case}.{name}"]
        if tensor.is_floating_point():
            allowed = record_epikv.tolerance(name)
            assert_within(tensor, stored, torch.full_like(stored, allowed), what=name)
        else:
            assert_same(tensor, stored, what=name)


def test_epikv_follows_the_golden_trace(traces, twins, device, monkeypatch):
    for case in CASES if device.type == "cuda" else ("3.epikv", "6.lag_kv"):
        steps = None if device.type == "cuda" else 12
        follow(case, traces, twins, device, monkeypatch, steps)


def follow(
    case: str, traces: Any, twins: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch, steps: int | None
) -> None:
    about = traces[1].metadata["cases"][case]
    config, recorded = EpiKVConfig(**about["config"]), traces[1].tensors[f"{case}.held"]
    tokens, hidden = record_epikv.inputs(traces[0], about, torch.bfloat16, device)
    sizes = block_traces.sizes(tokens)
    tested = twins.optimized.epikv.EpiKVState(config, **sizes)
    exact = twins.reference.epikv.EpiKVState(config, **{**sizes, "dtype": torch.float64})
    when: list[Any] = [slice(0, PROMPT)]

    def from_capture(*_: Any) -> dict[str, torch.Tensor]:
        """[B, L, T, C] or [B, L, C]."""
        return {name: tensor[:, when[0]][:, None] for name, tensor in hidden.items()}

    monkeypatch.setattr("kvtwin.conformance.judges.epikv.extras", from_capture)
    monkeypatch.setattr(Adapter, "_extras", staticmethod(lambda state, count, tokens: {
        name: tensor if tensor.dim() == 4 else tensor[:, :, None] for name, tensor in from_capture().items()
    }))
    both = Lockstep(tested, exact, Adapter())
    both.prefill(*(tensor[:, :, when[0]] for tensor in tokens))
    followed, as_recorded, total = 0, positions(exact) == kept(recorded[0]), steps or len(recorded) - 1
    for step in range(total):
        when[0] = PROMPT + step
        both.step(*(tensor[:, :, when[0]] for tensor in tokens))
        as_recorded &= positions(exact) == kept(recorded[step + 1])
        followed += as_recorded
    assert 2 * followed >= total, f"{followed} of {total} steps are the record's"


def kept(row: torch.Tensor) -> list[int]:
    return [token for token in row.tolist() if token >= 0]
