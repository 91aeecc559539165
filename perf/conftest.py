"""pytest and pytest-benchmark on a CUDA device: fixtures, the machine's data in the JSON of a run, and the table."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from . import gate, report
from .device import COLD, Cuda, Device
from .harness import DeviceBenchmark
from .roofline import Roofline, measure

HERE = Path(__file__).resolve().parent
PACKAGES = ("kvtwin", "torch", "triton", "pytest", "pytest-benchmark")
ROOFLINE = pytest.StashKey[Roofline]()
MEASURED = pytest.StashKey[list[dict[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("kvtwin", "kvtwin").addoption(
        "--perf-cold", choices=COLD, default=COLD[0],
        help="L2 contents after the flush before every round: written lines (the default) or lines that were only read",
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to run without a GPU: a skip would look like a pass."""
    if session.config.option.collectonly or not any(HERE in item.path.parents for item in session.items):
        return
    if not session.config.pluginmanager.has_plugin("benchmark"):
        raise pytest.UsageError("the benchmarks need pytest-benchmark: python -m pip install 'kvtwin[perf]'")
    if not torch.cuda.is_available():
        raise pytest.UsageError(f"the benchmarks need a CUDA device, but torch {torch.__version__} finds none")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise pytest.UsageError("TRITON_INTERPRET is set: kernels would be interpreted, not compiled; unset it")


# ---- fixtures --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest) -> Device:
    """The device that the benchmarks run on."""
    return Cuda(request.config.getoption("perf_cold", COLD[0]))


@pytest.fixture(scope="session")
def roofline(gpu: Device) -> Roofline:
    """This device's memory bandwidths, measured once per run."""
    return measure(gpu)


@pytest.fixture
def device_timer(request: pytest.FixtureRequest, gpu: Device) -> None:
    """Make pytest-benchmark use the device's clock, with the other settings of the test's marker."""
    marker = request.node.get_closest_marker("benchmark")
    settings = dict(marker.kwargs) if marker else {}
    request.node.add_marker(pytest.mark.benchmark(**settings | {"timer": gpu.now}), append=False)


@pytest.fixture
def device_benchmark(
    request: pytest.FixtureRequest, device_timer: None, benchmark: Any, gpu: Device, roofline: Roofline
) -> Iterator[DeviceBenchmark]:
    """See DeviceBenchmark.__call__. The gates of bench_<name>.py are in thresholds/<name>.toml, or in
    thresholds/<method>.toml for a test with a parameter `method`."""
    request.config.stash[ROOFLINE] = roofline
    method = getattr(request.node, "callspec", None) and request.node.callspec.params.get("method")
    path = request.path.parent / "thresholds" / f"{method or request.path.stem.removeprefix('bench_')}.toml"
    gates = gate.load(path) if path.exists() else None
    yield DeviceBenchmark(benchmark, gpu, roofline, gates, report.title(request.node.name, method or ""))
    measured = {"name": request.node.name, "extra_info": benchmark.extra_info}
    request.config.stash.setdefault(MEASURED, []).append(measured)
    # Free graphs and their memory pools before the next benchmark allocates.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- machine data in pytest-benchmark's JSON -------------------------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_generate_machine_info() -> dict[str, Any]:
    """The device and the versions that a time depends on. Contains nothing that names the host."""
    here = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if here else None,
        "driver": _driver() if here else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
    }


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_compare_machine_info(machine_info: dict[str, Any], compared_benchmark: dict[str, Any]) -> None:
    """Refuse to compare times of different devices. Different versions are comparable, and pytest-benchmark shows
    them."""
    theirs = compared_benchmark["machine_info"].get("gpu")
    if theirs != machine_info["gpu"]:
        ours = machine_info["gpu"]
        raise pytest.UsageError(f"--benchmark-compare: the stored run is from {theirs}, this machine has {ours}")


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    measured = config.stash.get(ROOFLINE, None)
    output_json["kvtwin"] = {
        "command": " ".join(["python -m pytest", *map(str, config.invocation_params.args)]),
        "roofline": None if measured is None else measured.as_dict(),
        "cold_l2": config.getoption("perf_cold", COLD[0]),
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0] if answer.stdout else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        # The package may be importable without being installed, on PYTHONPATH.
        return getattr(sys.modules.get(package), "__version__", None)


# ---- the table -------------------------------------------------------------------------------------------------------


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    measured: list[dict[str, Any]] = config.stash.get(MEASURED, [])
    found = report.rows(measured)
    if found:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        terminalreporter.section(f"kvtwin on {name}")
        for line in [report.roofline_line(config.stash[ROOFLINE].as_dict()), *report.table(found)]:
            terminalreporter.write_line(line)
