"""A server of verdicts: a process that has collected the tests of a verdict, and forks for each implementation.

Importing torch, Triton and the suite, and collecting the tests, takes longer than most mutants live. The server is a
run of pytest with the command line of ``kvtwin verify --impl`` (verdict_forks.py). For each order it forks a child,
which runs the tests of one method on one implementation, and writes what it found.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from ...interpreter import INTERPRET

FOUND = "result.json"
OUTPUT = "output.txt"
#: Variables that would change what a verdict does.
NOT_FOR_VERDICTS = ("PYTEST_ADDOPTS", "PYTHONPYCACHEPREFIX", "CI")
#: For CUDA in forks: torch counts GPUs without a context, after which a fork could not use CUDA, and processes share
#: the memory of one.
OF_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
#: Signals that a process gets for what it does itself: an invalid access, a damaged heap, an invalid operation.
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


class ServerError(RuntimeError):
    """The server ended."""


class StartError(RuntimeError):
    """The server could not start."""


@dataclass(frozen=True)
class Order:
    """What a child does.

    key: of the answer; module: the implementation; path: its folder, if Python does not find it otherwise; mutated: the
    module of it that counts as unjudged if no test imports it; folder: to work in; environ: variables for the
    implementation; first: tests, or files of them, to begin with, the likeliest first; likely: the property whose tests
    come first; fits: the properties whose failure ends the run, empty: any, None: none does. The child is killed after
    `seconds` of CPU or `wall` seconds.
    """

    key: int | str
    method: str
    module: str
    seed: int
    path: str | None = None
    mutated: str | None = None
    folder: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    first: Sequence[str] = ()
    likely: str = ""
    fits: Sequence[str] | None = ()
    seconds: float = 900
    wall: float = 3600


class Server:
    """The server's process. `start` returns when the tests are collected; `close` ends it."""

    def __init__(
        self, folder: Path, *, device: str = "cpu", profile: str = "default", root: Path | None = None,
        methods: Sequence[str] = (), tests: Sequence[str] = (),
    ) -> None:
        """folder: for what the server writes; root: a folder with a copy of kvtwin, None: that of this process;
        methods: whose tests are collected, by default all; tests: the files of tests to collect, relative to the folder
        of all tests, by default those of a verdict."""
        folder.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, [str(root or ""), os.environ.get("PYTHONPATH")]))
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}  # a fork has no threads but one
        if device == "cpu":  # some cases are larger with a GPU
            environ |= {INTERPRET: "1", "CUDA_VISIBLE_DEVICES": ""}
        else:
            environ = {**OF_CUDA, **environ}
        for name in NOT_FOR_VERDICTS:
            environ.pop(name, None)
        self.output = folder / "server.txt"
        options = {"device": device, "profile": profile, "methods": methods, "tests": tests}
        command = [sys.executable, "-P", "-m", f"{__package__}.verdict_forks", json.dumps(options)]
        with self.output.open("w") as output:
            self._process = subprocess.Popen(
                command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True,
                cwd=folder, start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> dict[str, Any]:
        """Wait for the collection. Returns {"tests": how many, "seconds": how long}. Raises StartError."""
        try:
            return self.answer()
        except ServerError as error:
            raise StartError(str(error)) from None

    def order(self, order: Order) -> None:
        """Have an implementation judged. Raises ServerError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(order)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ServerError(self._said()) from None

    def answer(self) -> dict[str, Any]:
        """The next answer: the order's key, its exit code, seconds of wall time and CPU, and whether its time was over.
        Raises ServerError."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ServerError(self._said())
        found: dict[str, Any] = json.loads(line)
        return found

    def _said(self) -> str:
        self._process.wait()
        said = self.output.read_text(encoding="utf-8", errors="replace")[-3000:]
        return f"the server ended with exit code {self._process.returncode}:\n{said}"

    def close(self) -> None:
        """End the server and all its children."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def read_answer(folder: Path, answer: Mapping[str, Any]) -> dict[str, Any]:
    """What a child wrote in its folder (`verdict_forks.found_by`), which is deleted. If it wrote nothing, why: as
    "crashed" if one of CRASHES ended it, else as "broken"."""
    path, output = folder / FOUND, folder / OUTPUT
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not found:
        said = output.read_text(encoding="utf-8", errors="replace")[-300:] if output.is_file() else ""
        ended = f"did not end within {answer['seconds']:.0f} s" if answer["late"] else f"exit code {answer['code']}"
        crashed = not answer["late"] and -answer["code"] in CRASHES
        found = {"crashed" if crashed else "broken": f"{ended}; {said.strip()}"}
    shutil.rmtree(folder, ignore_errors=True)
    return found
