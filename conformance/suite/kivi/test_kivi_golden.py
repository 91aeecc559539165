"""KIVI under test against the golden trace: codes, scales, minima and outputs on a trained model's vectors. The checks
are in suite/quantized_golden.py."""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.suite.quantized_golden import Golden
from kvtwin.fixtures.record_kivi import RECORDER

pytestmark = [pytest.mark.kind("golden"), pytest.mark.main]

CASES = ("3.22", "6.44", "3.24", "6.42")  # layer.bits of keys and values; the first two have one KV head


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden.of(RECORDER)


def test_every_recorded_case_is_replayed(golden):
    assert set(golden.cases) == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_every_case_uses_every_code_of_keys_and_values(case, golden):
    """And steps quantize keys, not only the prompt."""
    about = golden.cases[case]
    for which in ("key", "value"):
        bits = about["config"][f"{which}_bits"]
        words = golden.trace.tensors[f"{case}.{which}_codes"].long()
        codes = words[..., None] >> torch.arange(0, 32, bits) & (2**bits - 1)
        assert codes.unique().tolist() == list(range(2**bits))
    residual, total = about["config"]["residual"], about["prompt"] + about["steps"]
    assert about["prompt"] // residual < total // residual


def test_kivi_follows_the_golden_trace(golden, twins, device):
    for case in golden.cases_for(device):
        golden.follow(case, twins, device)
