"""The files of perf/thresholds/: valid entries, and the benchmarks that they may name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401  pytester forgets what a run imports, and a second import registers operators twice

from kvtwin.conformance.tool.perf_source import PERF, perf_module

pytest_plugins = ["pytester"]

if not (PERF / "conftest.py").is_file():
    pytest.skip("perf/ is not in the wheel", allow_module_level=True)

gate, report = perf_module("gate"), perf_module("report")


@pytest.mark.parametrize("text", [
    '["step"]',
    "step = 1",
    '["step"]\nbars.ratio.cudnn = 1',
    '["step".bar]',
    '["step".bar]\nratios.cudnn = 1',
    '["step".bar]\nratio = 1',
    '["step".bar]\nratio.cudnn = "1"',
    '["step".held]\nshare = 0',
    '["step".held]\nshare = true',
    '["step".held]\nmilliseconds.here = 1',
])
def test_thresholds_that_say_nothing_are_refused(tmp_path, text):
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.toml: 'step'"):
        gate.load(path)


def test_thresholds_are_those_of_benchmarks_that_are_there(pytester):
    """A benchmark without thresholds says so when it runs. Thresholds without a benchmark would never be checked."""
    pytest.importorskip("pytest_benchmark", reason="the benchmarks need pytest-benchmark")
    result = pytester.runpytest_inprocess(
        str(PERF), "-p", "no:cacheprovider", "--collect-only", "-q", "-o", "python_files=bench_*.py",
        "-o", "filterwarnings=ignore",
    )
    found: dict[str, set[str]] = {}
    for line in result.stdout.lines:
        path, _, name = line.partition("::test_")
        if not name:
            continue
        stem = Path(path).stem.removeprefix("bench_")
        if stem in ("baselines", "prompts"):  # whose names have the method first
            stem = name.partition("[")[2].partition("-")[0]
        found.setdefault(stem, set()).add(report.title(f"test_{name}", stem))
    assert found.keys() >= {"longflow", "synckv", "h2o", "random"}
    for path in sorted((PERF / "thresholds").glob("*.toml")):
        assert gate.load(path).keys() <= found[path.stem], path.name
