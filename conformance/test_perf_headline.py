"""The headline experiments of perf/headline run from end to end, at sizes that mean nothing; so do their times here."""

from __future__ import annotations

import json

import pytest

from kvtwin.conformance.perf_source import PERF, perf_module

if not (PERF / "conftest.py").is_file():
    pytest.skip("perf/ is not in the wheel", allow_module_level=True)

headline = perf_module("headline.__main__")

#: What each experiment must measure, at least: ours, and who it is compared with.
MEASURED = {
    "longflow": {"attention module", "full KV", "longflow", "h2o fused", "snapkv", "h2o", "r-kv", "ratios"},
    "thinkv": {"state", "full KV", "thinkv", "gather, sequential", "gather, overlapped", "r-kv", "ratios"},
    "epikv": {"steps", "context", "context ratios"},
    "keydiff": {"eviction", "keydiff", "one piece"},
}


@pytest.mark.parametrize("name", headline.EXPERIMENTS)
def test_an_experiment_runs(name, tmp_path, device):
    complaints = headline.run_one(name, tmp_path, str(device), tiny=True)
    assert complaints == []
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["finished"]
    assert found["tiny"]
    assert found["figures"].keys() >= MEASURED[name]
