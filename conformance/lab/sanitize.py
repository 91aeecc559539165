"""``python -m kvtwin.conformance.lab.sanitize``: every kernel under the tools of NVIDIA's compute-sanitizer.

memcheck finds accesses outside of allocations, initcheck reads of unwritten global memory, racecheck races in shared
memory, and synccheck wrong barriers. Each tool first has to find a planted fault (faults.py). Then it watches
the calls of launch.py. All torch memory is allocated with cudaMalloc, so that no tensor lies next to another.

Exit code 0: every tool found its fault, every kernel that lab/compile_only.py lists was launched, except for those that
only several ranks launch, and no tool found anything in a kernel of kvtwin. 1: otherwise. 2: compute-sanitizer or the
GPU is missing. What the tools find in torch's kernels is counted and has no effect.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..harness.watch import OPTIONS, PROGRAM, TOOLS, findings


@dataclass(frozen=True)
class Found:
    """The findings of one tool in one program: in the kernels asked for, by name, and in other kernels."""

    ours: dict[str, list[str]]
    others: int
    finished: bool

    def __str__(self) -> str:
        said = [f"{len(texts)} in {name}" for name, texts in self.ours.items()]
        return f"{', '.join(said) or 'nothing'} ({self.others} in other kernels)"


def findings_in(log: str, kernels: Iterable[str]) -> Found:
    """The findings in kernels of these names. A finding starts at the margin; what follows is indented."""
    names = re.compile(r"\b(" + "|".join(map(re.escape, sorted(kernels))) + r")\b")
    ours: dict[str, list[str]] = {}
    others = 0
    for block in findings(log):
        if kernel := names.search(block):
            ours.setdefault(kernel[1], []).append(block)
        else:
            others += 1
    return Found(ours, others, re.search(r"^========= (ERROR|RACECHECK) SUMMARY", log, re.M) is not None)


def run(tool: str | None, module: str, arguments: Sequence[str], logs: Path) -> tuple[int, str]:
    """The exit code and output of a module of this package under a tool, or without one."""
    watched = [] if tool is None else [PROGRAM, "--tool", tool, *OPTIONS]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_INTERPRET": "0"}
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / f"{tool or 'no-tool'}.{module}.log"
    with path.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            [*watched, sys.executable, "-m", f"kvtwin.conformance.lab.{module}", *arguments], env=environment,
            stdout=file, stderr=subprocess.STDOUT, check=False,
        )
    return done.returncode, path.read_text(encoding="utf-8", errors="replace")


def launched_kernels(methods: Sequence[str]) -> set[str]:
    """The kernels that the methods launch, by module and name."""
    command = [sys.executable, "-m", "kvtwin.conformance.lab.compile_only", "--list", "--no-ranks", *methods]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def complaints(tool: str, methods: Sequence[str], kernels: set[str], logs: Path) -> list[str]:
    """Everything that is wrong with one tool's runs."""
    wrong = []
    faults = {"fault_memcheck", "fault_initcheck", "fault_inline"}
    found = findings_in(run(tool, "faults", [tool], logs)[1], faults)
    if not found.ours:
        wrong.append(f"{tool} does not find its planted fault")
    code, log = run(tool, "launch", methods, logs)
    found = findings_in(log, {name.rpartition(".")[2] for name in kernels})
    if code or not found.finished:
        wrong.append(f"{tool}: launch.py ended with exit code {code}: {log[-500:]}")
    if missing := kernels - set(re.findall(r"^(kvtwin\.\S+) \d+$", log, re.M)):
        wrong.append(f"{tool}: these kernels were not launched: {', '.join(sorted(missing))}")
    wrong += [f"{tool}: {text}" for texts in found.ours.values() for text in texts[:3]]
    launches = sum(map(int, re.findall(r"^kvtwin\.\S+ (\d+)$", log, re.M)))
    print(f"{tool}: {len(kernels)} kernels, {launches} launches: {found}", flush=True)
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="default: all")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--logs", type=Path, default=Path("kvtwin-sanitizer"), help="folder (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=len(TOOLS), help="tools at the same time (default: all)")
    chosen = parser.parse_args(arguments)
    if shutil.which(PROGRAM) is None:
        parser.error(f"{PROGRAM} is not on the PATH; it is part of the CUDA toolkit")
    start = time.perf_counter()
    kernels = launched_kernels(chosen.methods)
    # Compile the kernels first: the tools share Triton's cache, and make the compiler slow.
    code, log = run(None, "launch", chosen.methods, chosen.logs)
    if code:
        print(f"launch.py ended with exit code {code} without a tool:\n{log[-2000:]}")
        return 1
    print(f"compiled, {time.perf_counter() - start:.0f} s", flush=True)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        runs = [pool.submit(complaints, tool, chosen.methods, kernels, chosen.logs) for tool in chosen.tools]
    wrong = [text for found in runs for text in found.result()]
    print("\n".join(wrong) if wrong else f"no findings, {time.perf_counter() - start:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
