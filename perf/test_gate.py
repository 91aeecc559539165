"""Tests the gate on a device: a decode step passes its thresholds, and the same step with 20 % more time fails.

The test starts three runs: one measures, one is gated by these figures, and one is gated by them with a delay in its
graph. conformance/tool/test_perf_gate.py has the tests that need no GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

# Import bench_longflow once here: the inner runs discard their imports, but operators can be registered only once.
from . import bench_longflow, report
from .device import Device

assert bench_longflow

pytest_plugins = ["pytester"]

DELAY = 0.2

CONFTEST = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parent.parent)!r})
from {__package__}.conftest import *
"""

# Runs in the test's folder. A file sets the delay and whether the benchmark is gated.
BENCH = f"""
import json, pathlib
import torch
from {__package__} import bench_longflow as bench
from {__package__}.bench_longflow import draw
from {__package__}.peers import decode_peers

SHAPE = bench.Shape(16, 32, 3200)
SETTINGS = json.loads(pathlib.Path("settings.json").read_text())

def test_step(device_benchmark, draw):
    state = bench.empty_state(SHAPE, SHAPE.slots)
    state.prefill(*bench.prompt(SHAPE, SHAPE.slots - 1, draw))
    query, key, value = (draw(SHAPE.batch, heads, SHAPE.head_dim) for heads in (32, 8, 8))
    rows = bench.rows_checked(SHAPE.batch)

    def step():
        output = state.step(query, key, value)
        torch.cuda._sleep(SETTINGS["cycles"])
        return output

    device_benchmark(
        step if SETTINGS["cycles"] else lambda: state.step(query, key, value), moves=SHAPE.step_bytes,
        verify=lambda output: bench.check_step(state, query, key, value, output, rows), poison=[state.score],
        peers=decode_peers(query, state.key, state.value), peers_move=SHAPE.attention_bytes, gated=SETTINGS["gated"],
    )
"""


def run(pytester: pytest.Pytester, **settings: object) -> tuple[pytest.RunResult, dict]:
    """Run BENCH; return its outcome and its JSON."""
    Path("settings.json").write_text(json.dumps(settings))
    # --benchmark-json would leave its file open in old versions, which causes a warning in some other test.
    result = pytester.runpytest_inprocess(
        "bench_delay.py", "--benchmark-save=run", "--benchmark-storage=file://stored", "-p", "no:cacheprovider",
    )
    return result, json.loads(sorted(Path("stored").rglob("*.json"))[-1].read_text())


def cycles_per_second(gpu: Device) -> float:
    """The current frequency of the clock that torch.cuda._sleep counts."""
    cycles = 20_000_000
    program = gpu.capture(lambda: torch.cuda._sleep(cycles))
    program.run()
    start = gpu.now()
    program.run()
    return cycles / (gpu.now() - start)


def test_a_delay_of_a_fifth_trips_the_gate(pytester, gpu):
    Path("conftest.py").write_text(CONFTEST)
    Path("bench_delay.py").write_text(BENCH)
    first, measured = run(pytester, cycles=0, gated=False)
    first.assert_outcomes(passed=1)
    thresholds = Path("thresholds/delay.toml")
    thresholds.parent.mkdir()
    measured["benchmarks"][0]["extra_info"]["gated"] = True
    thresholds.write_text("\n".join(report.held(measured)))

    again, _ = run(pytester, cycles=0, gated=True)
    again.assert_outcomes(passed=1)

    seconds = measured["benchmarks"][0]["stats"]["median"]
    delayed, slow = run(pytester, cycles=int(DELAY * seconds * cycles_per_second(gpu)), gated=True)
    delayed.assert_outcomes(failed=1)
    delayed.stdout.fnmatch_lines(["*more than 5% worse than*"])
    delayed.stdout.fnmatch_lines(["*of the copy bandwidth, more than 5% below*"])
    info = slow["benchmarks"][0]["extra_info"]
    assert info["right"], info["complaints"]
    assert 1 + DELAY - 0.05 < slow["benchmarks"][0]["stats"]["median"] / seconds < 1 + DELAY + 0.15
