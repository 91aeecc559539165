"""PM-KVQ under test against the golden trace: codes, scales, minima and outputs on a trained model's vectors. The
checks are in suite/quantized_golden.py."""

from __future__ import annotations

import pytest

from kvtwin.conformance.suite.quantized_golden import Golden
from kvtwin.fixtures.record_known_pm_kvq import RECORDER as KNOWN
from kvtwin.fixtures.record_pm_kvq import RECORDER
from kvtwin.reference.baselines.pm_kvq import PMKVQConfig

pytestmark = [pytest.mark.kind("golden"), pytest.mark.main]

#: By trace: layer.width at the end. The first two, and the first one of the public model, have one KV head.
CASES = {"pm_kvq": ("3.2", "6.8", "6.2", "3.8"), "known_pm_kvq": ("18.2", "27.2")}


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
def test_every_case_shrinks_in_steps_and_uses_many_codes(name, case, golden, known):
    golden = golden if name == golden.recorder.name else known
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


def test_pm_kvq_follows_its_trace_of_a_public_model(known, twins, device):
    for case in known.cases_for(device):
        known.follow(case, twins, device)
