"""KIVI under test against the golden trace: codes, scales, minima and outputs on a trained model's vectors. The checks
are in suite/quantized_golden.py."""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.suite.quantized_golden import Golden
from kvtwin.fixtures.record_kivi import RECORDER
from kvtwin.fixtures.record_known_kivi import RECORDER as KNOWN

pytestmark = [pytest.mark.kind("golden"), pytest.mark.main]

#: By trace: layer.bits of keys and values. The first two, and the first one of the public model, have one KV head.
CASES = {"kivi": ("3.22", "6.44", "3.24", "6.42"), "known_kivi": ("18.22", "27.22")}


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden.load(RECORDER)


@pytest.fixture(scope="module")
def known() -> Golden:
    """The trace of a public model, whose keys have outlier channels."""
    return Golden.load(KNOWN)


def test_every_recorded_case_is_replayed(golden, known):
    for one in (golden, known):
        assert set(one.cases) == set(CASES[one.recorder.name])


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in CASES.items() for case in cases])
def test_every_case_uses_every_code_of_keys_and_values(name, case, golden, known):
    """And steps quantize keys, not only the prompt."""
    golden = golden if name == golden.recorder.name else known
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


def test_kivi_follows_its_trace_of_a_public_model(known, twins, device):
    for case in known.cases_for(device):
        known.follow(case, twins, device)
