"""PM-KVQ under test against the golden trace: codes, scales, minima and outputs on a trained model's vectors. The
checks are in suite/quantized_golden.py."""

from __future__ import annotations

import pytest

from kvtwin.conformance.suite.quantized_golden import Golden
from kvtwin.fixtures.record_pm_kvq import RECORDER
from kvtwin.reference.baselines.pm_kvq import PMKVQConfig

pytestmark = [pytest.mark.kind("golden"), pytest.mark.main]

CASES = ("3.2", "6.8", "6.2", "3.8")  # layer.width at the end; the first two have one KV head


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden.of(RECORDER)


def test_every_recorded_case_is_replayed(golden):
    assert set(golden.cases) == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_every_case_shrinks_in_steps_and_uses_many_codes(case, golden):
    about = golden.cases[case]
    config = PMKVQConfig(**about["config"])
    width = config.width_after(about["prompt"] + about["steps"])
    assert case.endswith(f".{width}") and width < config.width_after(about["prompt"])
    for which in ("key", "value"):
        codes = golden.trace.tensors[f"{case}.{which}_codes"].unique()
        assert (int(codes.min()), int(codes.max())) == (0, 2**width - 1)
        assert len(codes) > 0.7 * 2**width


def test_pm_kvq_follows_the_golden_trace(golden, twins, device):
    for case in golden.cases_for(device):
        golden.follow(case, twins, device)
