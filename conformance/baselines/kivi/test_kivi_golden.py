"""KIVI under test against the golden trace: codes, scales, minima and outputs on a trained model's vectors.

The state under test runs in lockstep with a float64 state; no choice depends on rounding, so every step is compared
with the record. The CPU replays the small cases, the GPU all cases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtwin.conformance.judge.checkers.kivi import Adapter
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.conformance.judge.lockstep import Lockstep
from kvtwin.conformance.judge.trace import follow as follow_trace
from kvtwin.fixtures import block_traces, record_kivi
from kvtwin.fixtures.load import load_trace
from kvtwin.reference.baselines.kivi import KIVIConfig

pytestmark = pytest.mark.kind("golden")

CASES = ("3.22", "6.44", "3.24", "6.42")  # layer.bits of keys and values; the first two have one KV head


@pytest.fixture(scope="module")
def traces() -> Any:
    return load_trace("capture"), load_trace("kivi")


def started(module: Any, case: str, traces: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """An empty state of the case, with its query, key and value [1, H, T, D] in `dtype`."""
    about = traces[1].metadata["cases"][case]
    tensors = record_kivi.inputs(traces[0], about, dtype, device)
    return module.KIVIState(KIVIConfig(**about["config"]), **block_traces.sizes(tensors)), tensors


def test_every_recorded_case_is_replayed(traces):
    assert set(traces[1].metadata["cases"]) == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_every_case_uses_every_code_of_keys_and_values(case, traces):
    """And steps quantize keys, not only the prompt."""
    about = traces[1].metadata["cases"][case]
    for which in ("key", "value"):
        bits = about["config"][f"{which}_bits"]
        words = traces[1].tensors[f"{case}.{which}_codes"].long()
        codes = words[..., None] >> torch.arange(0, 32, bits) & (2**bits - 1)
        assert codes.unique().tolist() == list(range(2**bits))
    residual, total = about["config"]["residual"], about["prompt"] + about["steps"]
    assert about["prompt"] // residual < total // residual


@pytest.mark.parametrize("case", CASES)
def test_kivi_reference_repeats_the_golden_trace(case, traces, twins):
    """All steps in float64: codes, scales and minima are equal, outputs are within the tolerance of `--check`."""
    golden = traces[1]
    about = golden.metadata["cases"][case]
    state, tensors = started(twins.reference.baselines.kivi, case, traces, torch.device("cpu"), torch.float64)
    again = record_kivi.record_case(tensors, about["prompt"], state.config)
    for name, tensor in again.items():
        stored = golden.tensors[f"{case}.{name}"]
        if name == "output":
            allowed = record_kivi.tolerance(traces[0], about)
            assert_within(tensor, stored, torch.full_like(stored, allowed), what=name)
        else:
            assert_same(tensor, stored, what=name)


def test_kivi_follows_the_golden_trace(traces, twins, device):
    for case in CASES if device.type == "cuda" else CASES[:2]:
        follow(case, traces, twins, device)


def follow(case: str, traces: Any, twins: Any, device: torch.device) -> None:
    golden = traces[1]
    about = golden.metadata["cases"][case]
    tested, tensors = started(twins.optimized.baselines.kivi, case, traces, device, torch.bfloat16)
    exact, _ = started(twins.reference.baselines.kivi, case, traces, device, torch.float64)
    adapter = Adapter()
    both, prompt = Lockstep(tested, exact, adapter), about["prompt"]
    recorded = golden.tensors[f"{case}.output"].to(device)
    allowed = record_kivi.tolerance(traces[0], about)
    with follow_trace():
        both.prefill(*(tensor[:, :, :prompt] for tensor in tensors))
        for step in range(about["steps"]):
            output = both.step(*(tensor[:, :, prompt + step] for tensor in tensors))
            assert_within(output, recorded[None, step], adapter.bound + allowed, what=f"recorded output of step {step}")
    for name, tensor in record_kivi.contents(tested).items():
        assert_same(tensor, golden.tensors[f"{case}.{name}"].to(device), what=name)
