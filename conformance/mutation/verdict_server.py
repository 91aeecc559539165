"""A fork server for verdict_matrix.py: it collects the tests of a verdict once and forks a process for each mutant.

Importing torch, Triton and the suite, and collecting the tests, takes longer than most mutants live. The server is a
run of pytest with the command line of ``kvtwin verify --impl``, on an empty implementation. After the collection it
runs no test: for each order it forks a child, which imports the mutated implementation, keeps the tests of its method,
runs them, and writes what it found.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import importlib.metadata
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .mutants import is_of
from .verdict_copies import PACKAGE

PROFILE = "verdict"
TURN = 0.05  # seconds between two looks for ended children
PR_SET_PDEATHSIG = 1  # of prctl(2)
#: The files whose tests come first, after those that are likely to find a mutant.
FIRST = ("test_properties.py", "test_lockstep.py", "test_laws.py")


class ServerError(RuntimeError):
    """The server ended."""


class StartError(RuntimeError):
    """The server could not start."""


# The client ---------------------------------------------------------------------------------------------------------


class Server:
    """The server's process. `start` returns when the tests are collected; `close` ends it."""

    def __init__(self, root: Path, folder: Path, *, seed: int, profile: str, tests: Sequence[str] = ()) -> None:
        """root: a folder with a copy of kvtwin; folder: for what the server writes; tests: the files of tests to
        collect, relative to the folder of all tests, by default those of a verdict."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PACKAGE).mkdir(exist_ok=True)
        (folder / PACKAGE / "__init__.py").write_text("", encoding="utf-8")
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": path}
        environ["CUDA_VISIBLE_DEVICES"] = ""  # torch cannot use CUDA after a fork, and some cases are larger with a GPU
        for name in ("PYTEST_ADDOPTS", "PYTHONPYCACHEPREFIX", "CI"):
            environ.pop(name, None)
        self.output = folder / "server.txt"
        command = [sys.executable, "-P", "-m", __name__, "--seed", str(seed), "--profile", profile, *tests]
        with self.output.open("w") as output:
            self._process = subprocess.Popen(
                command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True,
                cwd=folder, start_new_session=True,
            )

    def start(self) -> dict[str, Any]:
        """Wait for the collection. Returns {"tests": how many, "seconds": how long}. Raises StartError."""
        try:
            return self.answer()
        except ServerError as error:
            raise StartError(str(error)) from None

    def order(self, **what: Any) -> None:
        """Judge an implementation, see `Order`. Raises ServerError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ServerError(self._said()) from None

    def answer(self) -> dict[str, Any]:
        """The next answer: the order's number, its exit code and seconds, and whether its time was over. Raises
        ServerError."""
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


# The server ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """What a child does.

    number: of the order; implementation: the folder of `PACKAGE`; method: to judge; folder: to work in, where
    result.json goes; module: the mutated one; first: tests to begin with, the likeliest first; fits: the properties
    whose failure ends the run, empty: any; seconds: of wall time and of CPU, after which it is killed.
    """

    number: int
    implementation: str
    method: str
    folder: str
    module: str | None
    first: tuple[str, ...]
    fits: tuple[str, ...]
    seconds: float


@dataclass
class Child:
    order: Order
    process: int
    started: float
    late: bool = False


class Forks:
    """The pytest plugin of the server, and of its children after the fork."""

    def __init__(self, orders: int, answers: int) -> None:
        """orders, answers: file descriptors."""
        self.orders, self.answers = orders, answers
        self.children: dict[int, Child] = {}
        self.started = time.monotonic()
        self.order: Order | None = None  # of a child
        self.session: pytest.Session | None = None

    # First: before Hypothesis's plugin looks for the profile. Shrinking would take most of the time.
    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        from hypothesis import Phase, settings

        from .. import plugin

        plugin.pytest_configure(config)  # registers the suite's profiles; a second call does nothing
        settings.register_profile(
            PROFILE, settings.get_profile(config.getoption("kv_profile_of_mutants")), database=None,
            phases=(Phase.explicit, Phase.generate), report_multiple_bugs=False,
        )

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        parser.addoption("--kv-profile-of-mutants", default="default", help=argparse.SUPPRESS)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Serve, instead of running tests. In a child, return None, so that pytest runs the tests that are left."""
        if session.testsfailed:
            raise session.Failed("the tests of the verdict cannot be collected")
        _warm_up()
        self._say(tests=len(session.items), seconds=round(time.monotonic() - self.started, 1))
        text, done = b"", False
        while not done or self.children:
            ready = [] if done else select.select([self.orders], [], [], TURN)[0]
            if ready:
                read = os.read(self.orders, 1 << 16)
                done = not read
                *lines, text = (text + read).split(b"\n")
                for line in lines:
                    if self._fork(Order(**json.loads(line)), session):
                        return None
            elif done:
                for child in self.children.values():
                    _kill(child.process)
                time.sleep(TURN)
            self._reap()
        return True

    def _fork(self, order: Order, session: pytest.Session) -> bool:
        """Start a child. True in the child, once it is ready to run its tests."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads, which libraries may have started
            process = os.fork()
        if process:
            self.children[process] = Child(order, process, time.monotonic())
            return False
        try:
            self._become(order, session)
        except BaseException:
            traceback.print_exc()
            self._finish({"broken": f"cannot start: {traceback.format_exc(limit=-2)[-1500:]}"})
        return True

    def _reap(self) -> None:
        now = time.monotonic()
        for process, child in list(self.children.items()):
            found, status, used = os.wait4(process, os.WNOHANG)
            if not found:
                if now - child.started > child.order.seconds:
                    child.late = True
                    _kill(process)
                continue
            del self.children[process]
            _kill_group(process)  # what it started and left
            self._say(
                number=child.order.number, code=os.waitstatus_to_exitcode(status), late=child.late,
                seconds=round(now - child.started, 2), cpu=round(used.ru_utime + used.ru_stime, 2),
            )

    def _say(self, **what: Any) -> None:
        os.write(self.answers, (json.dumps(what) + "\n").encode())

    # In a child -----------------------------------------------------------------------------------------------------

    def _become(self, order: Order, session: pytest.Session) -> None:
        """Make this process a run of pytest on the order's implementation, with the tests of its method."""
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the server, however it ends
        self.order, self.session = order, session
        os.close(self.answers)
        os.close(self.orders)
        with open(os.devnull) as nothing, open(os.path.join(order.folder, "output.txt"), "w") as output:
            os.dup2(nothing.fileno(), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        seconds = int(order.seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        os.chdir(order.folder)
        tempfile.tempdir = order.folder
        sys.path.insert(0, order.implementation)
        del sys.modules[PACKAGE]
        importlib.invalidate_caches()
        suite = _suite_of(session.config)
        session.config.option.kv_required = order.method
        judge_another(suite, session.config)
        session.items[:] = chosen(session.items, order.method, order.first)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """End the run when a property is wrong that fits."""
        if self.order is None or self.session is None or not report.failed:
            return
        found = getattr(report, "kvtwin", {})
        wrong = found.get("finding", {}).get("property", found.get("judges"))
        if not self.order.fits or wrong in self.order.fits:
            self.session.shouldstop = "a property is wrong"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.order is not None:
            self._finish(found_by(_suite_of(session.config), self.order))

    def pytest_internalerror(self, excrepr: Any) -> None:
        if self.order is not None:
            self._finish({"broken": f"pytest: {str(excrepr)[-1500:]}"})

    def _finish(self, result: dict[str, Any]) -> None:
        assert self.order is not None
        path = Path(self.order.folder, "result.json")
        path.with_suffix(".part").write_text(json.dumps(result), encoding="utf-8")
        path.with_suffix(".part").rename(path)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _warm_up() -> None:
    """Call an operator: the first call of one imports a thousand modules of torch, which each child would do again."""
    import torch

    from ...optimized.baselines import snapkv

    snapkv.window_score(torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 2, 16))


def _kill(process: int) -> None:
    """Kill a child, which was not waited for, and the processes that it started."""
    _kill_group(process)
    os.kill(process, signal.SIGKILL)  # it may not have made its group yet


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _suite_of(config: pytest.Config) -> Any:
    from .. import plugin

    return config.pluginmanager.get_plugin(plugin.SUITE)


def judge_another(suite: Any, config: pytest.Config) -> None:
    """Let a configured suite judge what `PACKAGE` now is. Raises pytest.UsageError if it cannot be imported."""
    from .. import discovery
    from ..harness.impl import Twins

    suite.twins = Twins(suite.implementation)
    suite.supported = {pair.name: suite._supported(pair.name) for pair in discovery.pairs()}


def chosen(items: Sequence[pytest.Item], method: str, first: Sequence[str]) -> list[pytest.Item]:
    """The tests of a method, those of `first` in front, then those of `FIRST`."""
    from ..harness import findings, suite

    def place(item: pytest.Item) -> tuple[int, int]:
        test, file = findings.test_id(item), item.path.name
        found = next((number for number, name in enumerate(first) if is_of(test, name)), len(first))
        return found, FIRST.index(file) if file in FIRST else len(FIRST)

    return sorted((item for item in items if item.stash[suite.FACTS]["method"] == method), key=place)


def found_by(suite: Any, order: Order) -> dict[str, Any]:
    """What a run found: the verdict, the wrong properties, and the test that found each first."""
    results = suite.collector.results
    judged = suite.verdicts[order.method]
    made: dict[str, Any] = {
        "verdict": judged.verdict, "open": judged.open, "tests": len(results),
        "cases": sum(result.cases or 0 for result in results),
        "decisive": sum(result.decisive for result in results),
        "imported": order.module is None or order.module in sys.modules,
    }
    found: list[dict[str, Any]] = []
    for result in results:
        wrong = result.finding.get("property", result.judges)
        if result.failed:
            found.append({
                "property": wrong, "test": result.nodeid, "error": result.finding.get("error", ""),
                "message": (result.message or "-").splitlines()[0][:300], "case": result.finding.get("case"),
            })
    return made | {"found": found}


def _arguments(seed: int, profile: str, tests: Sequence[str]) -> list[str]:
    """pytest's command line: that of ``kvtwin verify --impl PACKAGE``, for the tests of all methods, or for these."""
    from .. import __main__ as command
    from .. import discovery, plugin

    options = command.parser().parse_args([
        "--impl", PACKAGE, "--device", "cpu", "--jobs", "1", "--seed", str(seed), "--hypothesis-profile", PROFILE,
        "--report", "unused.json",
    ])
    options.required, options.methods = [], [pair.name for pair in discovery.built_in()]
    made = [one for one in command.pytest_arguments(options) if not one.startswith("--kv-report")]
    if tests:
        made = [*(str(plugin.HERE / test) for test in tests), *made[1:]]  # the first one is the folder of all tests
    if not any(one.name == plugin.NAME for one in importlib.metadata.entry_points(group="pytest11")):
        made += ["-p", plugin.__name__]  # kvtwin is not installed, but on the path
    return [*made, "-s", f"--kv-profile-of-mutants={profile}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--profile", required=True)
    parser.add_argument("tests", nargs="*")
    options = parser.parse_args()
    # Separate descriptors for orders and answers: what tests print, or read, must not mix with them.
    orders, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.path.insert(0, os.getcwd())
    return int(pytest.main(_arguments(options.seed, options.profile, options.tests), plugins=[Forks(orders, answers)]))


if __name__ == "__main__":
    sys.exit(main())
