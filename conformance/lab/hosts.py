"""``python -m kvtwin.conformance.lab.hosts``: check that the verdict does not depend on the machine.

A host is this machine with one property changed that differs between machines: the BLAS kernels, the instruction sets
of numpy and torch, the number of threads, the version of numpy, or the interpreter without its accelerator. Each host
runs, in separate processes, the tests whose verdict could depend on it. Hosts that this CPU cannot run are reported and
skipped. Exit code 0 if every host that ran is green, 1 if not, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy

from .. import plugin

CORES = ("Prescott", "Nehalem", "Sandybridge", "Haswell", "Zen", "SkylakeX", "Cooperlake", "SapphireRapids")
CAPABILITIES = ("default", "avx2", "avx512")
#: For -k, tests with equal operands: of the interpreter, of ties, and of exact results. "_tie", since "tie" is also a
#: part of "properties".
TIES = "interpreter or exact or _tie or equal"
#: The tests above, and those that compare two runs of a state or a function, or a state with float64.
SELECTED = f"{TIES} or test_laws or test_properties or lockstep"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
#: Prints which kernels compute products; dies from a signal if the CPU lacks an instruction.
PROBE = """
import numpy, torch
x = numpy.ones((64, 64), "f")
y = torch.randn(64, 64)
print(float((x @ x).sum()) + float((y @ y).exp().sum() * 0), torch.backends.cpu.get_cpu_capability())
"""


@dataclass(frozen=True)
class Host:
    """``variables`` of the environment; ``tests`` for pytest's -k, "" for the whole suite; ``numpy`` to install."""

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    tests: str = SELECTED
    numpy: str | None = None


@dataclass
class Outcome:
    host: Host
    verdict: str  # "green", "red" or "cannot run here"
    detail: str = ""
    seconds: float = 0.0


def hosts() -> list[Host]:
    """All hosts, in the order in which they run."""
    made = [Host(f"blas-{core}", {"OPENBLAS_CORETYPE": core}) for core in CORES]
    made += [Host("numpy-baseline", {"NPY_DISABLE_CPU_FEATURES": " ".join(dispatched_features())})]
    made += [Host(f"torch-{name}", {"ATEN_CPU_CAPABILITY": name}) for name in CAPABILITIES]
    made += [Host(f"threads-{count}", dict.fromkeys(THREADS, str(count))) for count in (1, 2)]
    made += [Host("numpy-oldest", numpy=f"numpy=={oldest('numpy')}"), Host("numpy-newest", numpy="numpy")]
    return [*made, Host("interpreter-plain", {"KVTWIN_INTERPRETER": "plain"}, tests="")]


def dispatched_features() -> list[str]:
    """The CPU features that numpy uses here beyond its baseline."""
    package = "numpy._core" if numpy.__version__ >= "2" else "numpy.core"
    core = importlib.import_module(f"{package}._multiarray_umath")
    return [name for name in core.__cpu_dispatch__ if core.__cpu_features__.get(name)]


def oldest(name: str) -> str:
    """The lowest version of a requirement that kvtwin allows."""
    for requirement in importlib.metadata.requires("kvtwin") or []:
        found = re.match(rf"{name}>=([0-9.]+)", requirement)
        if found:
            return found[1]
    raise LookupError(f"kvtwin requires no minimum version of {name}")


def probe(environment: dict[str, str]) -> tuple[bool, str]:
    """Whether this CPU can run a host, and which kernels compute products there."""
    command = [sys.executable, "-c", PROBE]
    run = subprocess.run(
        command, env=environment | {"OPENBLAS_VERBOSE": "2"}, capture_output=True, text=True, check=False
    )
    if run.returncode < 0:
        return False, f"this CPU lacks an instruction (signal {-run.returncode})"
    if run.returncode:
        return False, (run.stderr.strip().splitlines() or ["it does not start"])[-1]
    core = re.search(r"Core: (\S+)", run.stdout + run.stderr)
    return True, f"BLAS kernels {core[1] if core else 'unknown'}, torch {run.stdout.split()[-1]}"


def install(requirement: str, folder: Path) -> str | None:
    """Install numpy into `folder`; "numpy" alone installs the newest version. Returns pip's error, if any."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
    # Ignore tox's constraints, which pin the version of numpy.
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    run = subprocess.run([*command, requirement], env=environment, capture_output=True, text=True, check=False)
    return None if run.returncode == 0 else (run.stderr.strip().splitlines() or ["pip failed"])[-1]


def run_host(host: Host, arguments: Sequence[str], folder: Path) -> Outcome:
    """Run the tests of one host."""
    environment = {**os.environ, **host.variables, "PYTHONUNBUFFERED": "1"}
    if host.numpy is not None:
        problem = install(host.numpy, folder / host.name)
        if problem is not None:
            return Outcome(host, "cannot run here", problem)
        paths = [str(folder / host.name), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    able, detail = probe(environment)
    if not able:
        return Outcome(host, "cannot run here", detail)
    command = [sys.executable, "-m", "pytest", str(plugin.HERE), "-q", "-p", "no:cacheprovider"]
    command += [*(["-k", host.tests] if host.tests else []), *arguments]
    start, log = time.monotonic(), folder / f"{host.name}.log"
    with log.open("w", encoding="utf-8") as file:
        ran = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    lines = log.read_text(encoding="utf-8").splitlines()
    totals = [line.strip("= ") for line in lines if re.search(r"\d+ (passed|failed)", line)]
    detail = f"{totals[-1] if totals else 'no test ran'}; {detail}"
    if ran.returncode:
        detail += "\n    " + "\n    ".join(lines[-40:])
    return Outcome(host, "red" if ran.returncode else "green", detail, time.monotonic() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvtwin.conformance.lab.hosts",
        description="Run the tests whose verdict could depend on the machine, on simulated other machines. "
        "Other arguments go to pytest.",
    )
    parser.add_argument("--only", metavar="NAMES", help="run these hosts only, comma-separated")
    parser.add_argument("--ties", action="store_true", help="run only the tests of ties and of the interpreter")
    parser.add_argument("--list", action="store_true", help="print the hosts and their settings")
    parser.add_argument("--hypothesis-profile", default="quick", metavar="NAME", help="default: %(default)s")
    given, others = parser.parse_known_args(arguments)
    every = {host.name: host for host in hosts()}
    names = list(every) if given.only is None else given.only.split(",")
    unknown = [name for name in names if name not in every]
    if unknown:
        parser.error(f"--only: unknown host {unknown[0]!r}; expected one of {', '.join(every)}")
    chosen = [every[name] for name in names]
    if given.ties:
        chosen = [Host(host.name, host.variables, TIES, host.numpy) for host in chosen]
    if given.list:
        for host in chosen:
            change = ", ".join(f"{name}={value}" for name, value in host.variables.items()) or host.numpy
            print(f"{host.name:22} {change}")
        return 0
    options = ["--kv-device=cpu", f"--hypothesis-profile={given.hypothesis_profile}", *others]
    folder = Path(tempfile.mkdtemp(prefix="kvtwin-hosts-"))
    outcomes = []
    try:
        for host in chosen:
            outcome = run_host(host, options, folder)
            outcomes.append(outcome)
            print(f"{host.name:22} {outcome.verdict:16} {outcome.seconds:5.0f} s  {outcome.detail}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    verdicts = [outcome.verdict for outcome in outcomes]
    print(", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("green", "red", "cannot run here")))
    return 1 if "red" in verdicts or "green" not in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
