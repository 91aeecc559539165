"""The harness of perf/ on the CPU: times come from a simulated device, and everything else is real.

perf/ is not in the wheel, so these tests run in a source tree only. perf/test_gate.py has the tests that need a GPU.
"""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch._dynamo  # pytester forgets what a run imports, and a second import of this one registers operators twice

from kvtwin.conformance.tool.perf_source import PERF, perf_module

pytest_plugins = ["pytester"]

if not (PERF / "conftest.py").is_file():
    pytest.skip("perf/ is not in the wheel", allow_module_level=True)

gate, report = perf_module("gate"), perf_module("report")


# ---- runs on a simulated device --------------------------------------------------------------------------------------

CONFTEST = """
import pytest
from kvtwin_perf.conftest import *
from kvtwin_perf.device import Direct
from kvtwin_perf.roofline import Roofline

class Fake:
    '''A device whose clock moves when it is told to: a flush takes a second.'''
    name = "fake"
    time = 0.0

    def now(self):
        return self.time

    def capture(self, function):
        program = Direct(function)
        program.run()
        program.result = function()
        return program

    def cold(self):
        self.time += 1.0

@pytest.fixture(scope="session")
def gpu():
    return Fake()

@pytest.fixture(scope="session")
def roofline(gpu):
    return Roofline(copy=4e12, read=4.2e12, peak=4.8e12)
"""

BENCH = """
import pytest
import torch

@pytest.fixture
def takes(gpu):
    def make(milliseconds, writes=1.0):
        result = torch.zeros(3)
        def run():
            gpu.time += milliseconds / 1e3
            if writes:
                result.fill_(writes)
            return result
        return run
    return make

def is_one(result):
    assert bool((result == 1).all()), "not one"

def test_good(device_benchmark, takes):
    found = device_benchmark(
        takes(1.0), moves=2 * 10**9, verify=is_one, verify_peer=is_one,
        peers={"cudnn": takes(0.8), "flash": takes(2.0)}, peers_move=10**9, references={"eager": takes(100.0)},
    )
    assert found is None or found.seconds == pytest.approx(1e-3)

@pytest.mark.benchmark(group="mine")
def test_slow(device_benchmark, takes):
    device_benchmark(takes(1.2), moves=2 * 10**9, verify=is_one, peers={"cudnn": takes(0.8)})

def test_wrong(device_benchmark, takes):
    device_benchmark(takes(1.0, writes=2.0), moves=2 * 10**9, verify=is_one, gated=False)

def test_unwritten(device_benchmark, takes):
    scores = torch.ones(2)
    device_benchmark(
        takes(1.0), moves=2 * 10**9, verify=lambda result: is_one(scores), poison=[scores], gated=False
    )

def test_wrong_peer(device_benchmark, takes):
    device_benchmark(
        takes(1.0), moves=2 * 10**9, verify=is_one, verify_peer=is_one, peers={"cudnn": takes(0.8, writes=3.0)},
        gated=False,
    )

def test_fast(device_benchmark, takes):
    device_benchmark(takes(0.4), moves=2 * 10**9, verify=is_one, gated=False)

def test_new(device_benchmark, takes):
    device_benchmark(takes(1.0), moves=2 * 10**9, verify=is_one)

def test_informs(device_benchmark, takes, gpu):
    waits, ended = [], [gpu.time]

    def busy(run):
        def call():
            waits.append(gpu.time - ended[0])
            result = run()
            ended[0] = gpu.time
            return result
        return call

    options = {"moves": 2 * 10**9, "verify": is_one, "before": lambda: None, "gated": False}
    with pytest.raises(ValueError, match="before must be None"):
        device_benchmark(takes(50.0), **options)
    device_benchmark(busy(takes(50.0)), peers={"cudnn": busy(takes(60.0))}, capture=False, **options)
    # Before each call, the device is busy for as many flushes.
    assert {round(wait) for wait in waits} == {33}
"""

THRESHOLDS = """
["good".bar]
ratio.cudnn = 1.3
milliseconds.fake = 1.1
["slow".held]
ratio.strongest = 1.25
share = 0.5
"""

OUTCOMES = {
    "good": "passes", "informs": "none", "slow": "FAILS", "new": "FAILS",
    "wrong": "WRONG", "unwritten": "WRONG", "wrong_peer": "WRONG", "fast": "WRONG",
}


@pytest.fixture
def session(pytester, monkeypatch):
    """Run BENCH. Returns its outcome and its JSON, which is also in run.json."""
    # This machine may have a GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # pytest-benchmark measures nothing in an xdist worker, which this process may be.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makeconftest(CONFTEST)
    Path("bench_fake.py").write_text(BENCH)
    Path("thresholds").mkdir()
    Path("thresholds/fake.toml").write_text(THRESHOLDS)

    def run(*arguments: str, bench: str = "bench_fake.py") -> tuple[pytest.RunResult, dict]:
        result = pytester.runpytest_inprocess(
            bench, "-p", "no:cacheprovider", "--benchmark-storage=file://stored",
            # Not --benchmark-json: old versions leave that file open, for which this process would blame another test.
            "--benchmark-columns=median", "--benchmark-save=run", *arguments,
        )
        stored = sorted(Path("stored").rglob("*.json"))
        if stored:
            shutil.copy(stored[-1], "run.json")
        return result, json.loads(Path("run.json").read_text()) if stored else {}

    pytest.importorskip("pytest_benchmark", reason="the benchmarks need pytest-benchmark")
    return run


def test_a_run(session):
    """One benchmark per outcome: which of them fail, why, and their entries in the JSON and the table."""
    result, run = session()
    result.assert_outcomes(passed=2, failed=6)
    info = {report.title(benchmark["name"]): benchmark["extra_info"] for benchmark in run["benchmarks"]}
    assert info.keys() == OUTCOMES.keys()
    assert {name: report._verdict(found) for name, found in info.items()} == OUTCOMES
    complaints = {name: "\n".join(found["complaints"]) for name, found in info.items()}
    assert complaints["good"] == complaints["informs"] == ""
    assert "more than 5% worse than 1.25" in complaints["slow"]
    assert "0.417 of the copy bandwidth" in complaints["slow"]
    assert "wrong after timing: not one" in complaints["wrong"]
    assert "wrong after timing: not one" in complaints["unwritten"]
    assert "wrong after timing, peer cudnn: not one" in complaints["wrong_peer"]
    assert "faster than the roofline: the benchmark would move 5.000 TB/s" in complaints["fast"]
    assert complaints["new"] == "no thresholds for 'new'"

    good = info["good"]
    # Flushes take a second each, and are not part of any figure.
    assert good["milliseconds"] == pytest.approx(1.0)
    assert (good["peers"]["cudnn"]["ratio"], good["peers"]["cudnn"]["milliseconds"]) == pytest.approx((1.25, 0.8))
    assert good["references"]["eager"]["milliseconds"] == pytest.approx(100.0)
    assert (good["strongest"], good["share_of_copy"]) == ("cudnn", pytest.approx(0.5))
    stats = run["benchmarks"][0]["stats"]
    assert (stats["rounds"], stats["median"]) == (100, pytest.approx(1e-3))
    assert {benchmark["group"] for benchmark in run["benchmarks"]} == {None, "mine"}

    assert run["machine_info"].keys() >= {"gpu", "driver", "cuda", "torch", "triton"}
    assert "node" not in run["machine_info"]
    assert run["kvtwin"]["roofline"]["limit"] == 4.8e12
    assert "bench_fake.py" in run["kvtwin"]["command"]
    for line in ("*kvtwin on no GPU*", "memory, TB/s: copy 4.000, *", "| good *1.25x cudnn (0.8000)*passes*"):
        result.stdout.fnmatch_lines([line])


def test_a_baseline_from_a_run_and_a_run_against_a_baseline(session, capsys):
    session("-k", "good or informs")
    assert report.main(["run.json", "--write-baseline", "baseline.json"]) == 0
    assert "| good " in capsys.readouterr().out
    text = Path("baseline.json").read_text()
    stored = json.loads(text)
    assert [benchmark["name"] for benchmark in stored["benchmarks"]] == ["test_good", "test_informs"]
    assert "data" not in stored["benchmarks"][0]["stats"]
    assert stored["benchmarks"][0]["extra_info"]["peers"]["flash"]["milliseconds"] == 2.0
    assert stored["machine_info"]["torch"] == metadata.version("torch")
    assert str(Path.cwd()) not in text

    # The figures of the headline experiments, which are not benchmarks, are in the same folder and are kept.
    Path("baseline.json").write_text(json.dumps(stored | {"headline": {"gpu": "some"}}))
    assert report.main(["run.json", "--write-baseline", "baseline.json"]) == 0
    assert json.loads(Path("baseline.json").read_text()) == stored | {"headline": {"gpu": "some"}}

    result, _ = session("-k", "good", "--benchmark-compare=baseline.json", "--benchmark-compare-fail=median:5%")
    result.assert_outcomes(passed=1, deselected=7)
    for line in ("test_good (NOW) *", "test_good (baseline*"):
        result.stdout.fnmatch_lines([line])
    for benchmark in stored["benchmarks"]:
        benchmark["stats"]["median"] *= 0.9
    Path("baseline.json").write_text(json.dumps(stored))
    result, _ = session("-k", "good", "--benchmark-compare=baseline.json", "--benchmark-compare-fail=median:5%")
    assert result.ret != 0
    result.stderr.fnmatch_lines(["*Performance has regressed*"])
    stored["machine_info"]["gpu"] = "NVIDIA H200"
    Path("baseline.json").write_text(json.dumps(stored))
    result, _ = session("-k", "good", "--benchmark-compare=baseline.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--benchmark-compare: the stored run is from NVIDIA H200, this machine has None*"])


def test_a_wrong_run_becomes_no_baseline(session, capsys):
    session("-k", "good or wrong")
    assert report.main(["run.json", "--write-baseline", "baseline.json"]) == 1
    assert "wrong after timing" in capsys.readouterr().err
    assert not Path("baseline.json").exists()


def test_a_run_of_some_benchmarks_replaces_these_in_a_baseline(session, capsys):
    session("-k", "good or informs")
    assert report.main(["run.json", "--write-baseline", "baseline.json"]) == 0
    whole = json.loads(Path("baseline.json").read_text())
    whole["headline"] = "kept"
    Path("baseline.json").write_text(json.dumps(whole))
    _, run = session("-k", "good")
    run["benchmarks"][0]["stats"]["median"] = 7.0
    run["datetime"] = "later"
    Path("run.json").write_text(json.dumps(run))
    assert report.main(["run.json", "--write-baseline", "baseline.json", "--part"]) == 0
    after = json.loads(Path("baseline.json").read_text())
    [good], [other] = ([one for one in after["benchmarks"] if ("good" in one["name"]) is it] for it in (True, False))
    assert good["stats"]["median"] == 7.0
    assert good["extra_info"]["run"]["datetime"] == "later"
    assert other in whole["benchmarks"]
    assert (after["headline"], after["datetime"]) == ("kept", whole["datetime"])

    whole["machine_info"]["gpu"] = "another"
    Path("baseline.json").write_text(json.dumps(whole))
    assert report.main(["run.json", "--write-baseline", "baseline.json", "--part"]) == 1
    assert "the baseline is from another" in capsys.readouterr().err


def test_what_was_reached_becomes_thresholds(session, capsys):
    """For every gated benchmark, even slow ones: the bars decide what is too slow."""
    session("-k", "good or slow or informs")
    capsys.readouterr()
    assert report.main(["run.json", "--held"]) == 0
    Path("held.toml").write_text(capsys.readouterr().out)
    found = gate.load(Path("held.toml"))
    assert found == {
        "good": gate.Gate(held_ratio={"strongest": 1.25}, held_share=0.5),
        "slow": gate.Gate(held_ratio={"strongest": 1.5}, held_share=0.417),
    }


DELAYED = """
import pathlib
from bench_fake import takes

def test_step(device_benchmark, takes):
    settings = pathlib.Path("settings").read_text().split()
    device_benchmark(
        takes(float(settings[0])), moves=2 * 10**9, verify=lambda result: None, peers={"cudnn": takes(0.8)},
        gated=settings[1] == "gated",
    )
"""


@pytest.mark.parametrize(("delay", "passes"), [(0.0, True), (0.04, True), (0.06, False), (0.2, False)])
def test_a_delay_trips_the_gate_that_an_earlier_run_left(session, capsys, delay, passes):
    """A run, its levels as thresholds, and a slower run. With more than 5 % it fails for both of its ratios."""
    Path("bench_delay.py").write_text(DELAYED)
    Path("settings").write_text("1.0 free")
    _, measured = session(bench="bench_delay.py")
    measured["benchmarks"][0]["extra_info"]["gated"] = True
    Path("run.json").write_text(json.dumps(measured))
    capsys.readouterr()
    assert report.main(["run.json", "--held"]) == 0
    Path("thresholds/delay.toml").write_text(capsys.readouterr().out)

    Path("settings").write_text(f"{1 + delay} gated")
    result, run = session(bench="bench_delay.py")
    result.assert_outcomes(passed=int(passes), failed=int(not passes))
    info = run["benchmarks"][0]["extra_info"]
    assert info["right"]
    assert info["milliseconds"] == pytest.approx(1 + delay)
    assert len(info["complaints"]) == (0 if passes else 2)


def test_without_timing_results_are_still_checked(session):
    result, _ = session("--benchmark-disable", "-k", "good or wrong or slow or fast")
    result.assert_outcomes(passed=3, failed=2, deselected=3)


def test_without_a_gpu_the_run_stops(pytester, monkeypatch):
    """It does not skip, because skipped benchmarks look like passed ones."""
    pytest.importorskip("pytest_benchmark", reason="the benchmarks need pytest-benchmark")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = pytester.runpytest_inprocess(
        str(PERF), "-p", "no:cacheprovider", "-o", "python_files=bench_*.py", "--benchmark-storage=file://stored",
        # pytest warns that this process has already imported the tree.
        "-o", "filterwarnings=ignore",
    )
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*the benchmarks need a CUDA device*"])


@pytest.mark.parametrize(("command", "expected"), [
    ("python -m pytest perf --benchmark-json=/tmp/a/b.json", "python -m pytest perf --benchmark-json=b.json"),
    ("python -m pytest /work/tree/perf -k step", "python -m pytest perf -k step"),
    ("python -m pytest perf/bench_longflow.py", "python -m pytest perf/bench_longflow.py"),
])
def test_baselines_hold_no_paths(command, expected):
    assert report.without_paths(command) == expected
