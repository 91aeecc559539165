"""Figures, gates and limits of a device; the files of perf/thresholds/: their entries, and the benchmarks they name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch._dynamo  # noqa: F401  pytester forgets what a run imports, and a second import registers operators twice

from kvtwin.conformance.tool.perf_source import PERF, perf_module

pytest_plugins = ["pytester"]

if not (PERF / "conftest.py").is_file():
    pytest.skip("perf/ is not in the wheel", allow_module_level=True)

gate, report, device, roofline = (perf_module(name) for name in ("gate", "report", "device", "roofline"))


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


LIMITS = roofline.Roofline(copy=4e12, read=4.2e12, peak=4.8e12)


def figures(seconds: float = 1e-3, **changes) -> object:
    """Figures for 2 GB in `seconds`. At 1 ms this is half of the copy bandwidth, and 1.25 times the strongest peer."""
    settings = {"moves": 2 * 10**9, "roofline": LIMITS, "peers": {"cudnn": 8e-4, "flash": 2e-3}, "peers_move": 10**9}
    return gate.Figures(seconds, **settings | changes)


def test_figures():
    found = figures()
    assert found.bandwidth == 2e12
    assert found.share == 0.5
    assert found.strongest == "cudnn"
    assert found.ratio("strongest") == found.ratio("cudnn") == 1.25
    assert found.ratio("flash") == 0.5
    assert found.ratio("flashinfer") is None
    assert figures(peers={}).strongest is figures(peers={}).ratio("strongest") is None
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.parametrize(("bar", "complaint"), [
    ({"bar_ratio": {"cudnn": 1.25}}, ""),
    ({"bar_ratio": {"cudnn": 1.249}}, "1.250 times as long as cudnn; the target allows 1.249"),
    ({"bar_ratio": {"strongest": 1.2}}, "as long as strongest"),
    ({"bar_ratio": {"flashinfer": 9.0}}, "no figure for peer flashinfer"),
    ({"bar_milliseconds": {"here": 1.0}}, ""),
    ({"bar_milliseconds": {"here": 0.99}}, "allows 0.99 ms on here"),
    ({"bar_milliseconds": {"elsewhere": 0.1}}, ""),
    ({"held_ratio": {"strongest": 1.191}}, ""),
    ({"held_ratio": {"strongest": 1.19}}, "1.250 times as long as strongest, more than 5% worse than 1.19"),
    ({"held_ratio": {"flashinfer": 9.0}}, "no figure for peer flashinfer"),
    ({"held_share": 0.526}, ""),
    ({"held_share": 0.527}, "0.500 of the copy bandwidth, more than 5% below 0.527"),
])
def test_thresholds(bar, complaint):
    """Bars have no slack, and held levels have 5 %. Milliseconds apply only to their machine."""
    found = gate.too_slow(figures(), gate.Gate(**bar), "here")
    assert len(found) == bool(complaint)
    assert complaint in "".join(found)


def test_a_delay_of_a_fifth_trips_what_is_held():
    held = gate.Gate(held_ratio={"strongest": 1.25}, held_share=0.5)
    assert gate.too_slow(figures(1e-3), held, "here") == []
    assert len(gate.too_slow(figures(1.2e-3), held, "here")) == 2


def test_a_time_that_is_no_number_trips_every_threshold():
    every = gate.Gate({"cudnn": 9.0}, {"here": 9.0}, {"strongest": 9.0}, 1e-3)
    assert len(gate.too_slow(figures(math.nan), every, "here")) == 4


def test_nothing_is_faster_than_the_roofline():
    assert gate.too_fast(figures(seconds=2e9 / 4.8e12 * 1.001)) == []
    (complaint,) = gate.too_fast(figures(seconds=2e9 / 4.8e12 * 0.999))
    assert "faster than the roofline: the benchmark would move 4.805 TB/s" in complaint
    (complaint,) = gate.too_fast(figures(peers={"cudnn": 1e-4}))
    assert "its peer cudnn would move 10.000 TB/s" in complaint


@pytest.mark.parametrize(("name", "properties", "expected"), [
    ("NVIDIA H200", {}, 4.8e12),
    ("NVIDIA GH200 480GB", {}, 4.0e12),
    ("NVIDIA H20", {}, 4.0e12),
    ("NVIDIA New", {"memory_clock_rate": 3_201_000, "memory_bus_width": 6144}, 4.917e12),
    ("NVIDIA New", {}, None),
])
def test_the_peak_bandwidth_of_a_device(name, properties, expected):
    found = roofline.peak(name, SimpleNamespace(**properties))
    assert found == (None if expected is None else pytest.approx(expected, rel=1e-3))
    assert roofline.Roofline(1e12, 2e12, found).limit == max(2e12, found or 0)


def test_a_device_names_files():
    assert device.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
