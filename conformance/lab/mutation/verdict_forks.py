"""The process of a `verdict_server.Server`: a run of pytest that forks for each order, instead of running its tests.

It collects the tests on an implementation without restrictions. CUDA cannot be used in a fork of a process that has
used it, so this one does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ... import __main__ as command
from ... import discovery, plugin
from ...harness import environment, fair_play, findings, results, suite, verdict
from ...harness.impl import Twins
from .mutants import is_of
from .verdict_copies import PACKAGE
from .verdict_server import FOUND, OUTPUT, Order

PROFILE = "verdicts"
TURN = 0.05  # seconds between two looks for ended children
PR_SET_PDEATHSIG = 1  # of prctl(2)


@dataclass
class Child:
    order: Order
    process: int
    started: float
    late: bool = False


class Forks:
    """The pytest plugin of the server, and of its children after the fork."""

    def __init__(self, orders: int, answers: int, profile: str) -> None:
        """orders, answers: file descriptors; profile: of Hypothesis, for the number of examples."""
        self.orders, self.answers, self.profile = orders, answers, profile
        self.children: dict[int, Child] = {}
        self.started = time.monotonic()

    # First: before Hypothesis's plugin looks for the profile. Shrinking would take most of the time.
    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        from hypothesis import Phase, settings

        plugin.pytest_configure(config)  # registers the suite's profiles; a second call does nothing
        settings.register_profile(
            PROFILE, settings.get_profile(self.profile), database=None, phases=(Phase.explicit, Phase.generate),
            report_multiple_bugs=False,
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Serve, instead of running tests."""
        if session.testsfailed:
            raise session.Failed("the tests of the verdict cannot be collected")
        _warm_up(_suite_of(session.config))
        self._say(tests=len(session.items), seconds=round(time.monotonic() - self.started, 1))
        text, done = b"", False
        while not done or self.children:
            ready = [] if done else select.select([self.orders], [], [], TURN)[0]
            if ready:
                read = os.read(self.orders, 1 << 16)
                done = not read
                *lines, text = (text + read).split(b"\n")
                for line in lines:
                    self._fork(Order(**json.loads(line)), session)
            elif done:
                for child in self.children.values():
                    _kill(child.process)
                time.sleep(TURN)
            self._reap()
        return True

    def _fork(self, order: Order, session: pytest.Session) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads, which libraries may have started
            process = os.fork()
        if process:
            self.children[process] = Child(order, process, time.monotonic())
        else:
            os.close(self.answers)
            os.close(self.orders)
            _become_verdict(session, order)

    def _reap(self) -> None:
        now = time.monotonic()
        for process, child in list(self.children.items()):
            found, status, used = os.wait4(process, os.WNOHANG)
            if not found:
                if now - child.started > child.order.wall:
                    child.late = True
                    _kill(process)
                continue
            del self.children[process]
            _kill_group(process)  # what it started and left
            self._say(
                key=child.order.key, code=os.waitstatus_to_exitcode(status), late=child.late,
                seconds=round(now - child.started, 2), cpu=round(used.ru_utime + used.ru_stime, 2),
            )

    def _say(self, **what: Any) -> None:
        os.write(self.answers, (json.dumps(what) + "\n").encode())


def _warm_up(running: suite.Suite) -> None:
    """Import what each child would import again. Raises RuntimeError if the children cannot use CUDA."""
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError("to collect the tests has used CUDA, which a fork then cannot use")
    if running.backend.interpreter:
        from ....optimized.baselines import snapkv

        # The first call of an operator imports a thousand modules of torch.
        snapkv.window_score(torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 2, 16))


def _kill(process: int) -> None:
    """Kill a child, which was not waited for, and the processes that it started."""
    _kill_group(process)
    os.kill(process, signal.SIGKILL)  # it may not have made its group yet


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


# In a child ---------------------------------------------------------------------------------------------------------


def _become_verdict(session: pytest.Session, order: Order) -> NoReturn:
    """Make the verdict, write what was found, and end the process."""
    try:
        running = _suite_of(session.config)
        _settle(order, running.backend.device.type)
        judge_another(running, session.config, order)
        _run(chosen(session.items, running, order), running, order)
        found = found_by(running, order)
    except BaseException:
        traceback.print_exc()
        found = {"broken": f"no verdict: {traceback.format_exc(limit=-2)[-1500:]}"}
    path = Path(order.folder, FOUND)
    path.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
    path.with_suffix(".part").rename(path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _settle(order: Order, device: str) -> None:
    """Give the process what the order says: its group, output, limits, folder and variables."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the server, however it ends
    with open(os.devnull) as nothing, open(os.path.join(order.folder, OUTPUT), "w") as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    seconds = int(order.seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    os.chdir(order.folder)
    os.environ.update(order.environ)
    if device == "cpu":  # on a GPU, processes take turns by files that lie in one folder
        tempfile.tempdir = order.folder
    if order.path is not None:
        sys.path.insert(0, order.path)
        importlib.invalidate_caches()


def judge_another(running: suite.Suite, config: pytest.Config, order: Order) -> None:
    """Let a configured suite judge the order's implementation. Raises pytest.UsageError if it cannot be imported."""
    from ...cases import failures

    hypothesis: Any = importlib.import_module("hypothesis.core")
    hypothesis.global_force_seed = order.seed
    fair_play.OWN = ("kvtwin", PACKAGE)  # a copy of a side, which may use what the side uses
    config.option.kv_impl = running.implementation = order.module
    failures.replay_with(order.module, running.backend.device.type)
    running.twins = Twins(order.module)
    running.supported = {pair.name: running._supported(pair.name) for pair in discovery.pairs()}
    running.collector = results.Collector()


def chosen(items: Sequence[pytest.Item], running: suite.Suite, order: Order) -> list[pytest.Item]:
    """The tests of the order's method, those of `first` in front; with a likely property, those of that property, at
    sizes that people serve before others."""
    def place(item: pytest.Item) -> tuple[int, bool, bool]:
        test = findings.test_id(item)
        found = next((number for number, name in enumerate(order.first) if is_of(test, name)), len(order.first))
        if not order.likely:
            return found, False, False
        return found, item.stash[results.FACTS]["judges"] != order.likely, item.get_closest_marker("served") is None

    own = [item for item in items if item.stash[results.FACTS]["method"] == order.method]
    return sorted(filter(running._is_declared, own), key=place)


def _run(items: Sequence[pytest.Item], running: suite.Suite, order: Order) -> None:
    """Run the tests until a property is wrong that fits."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        for result in running.collector.results[-1:]:
            if result.failed and order.fits is not None and (not order.fits or _property(result) in order.fits):
                return


def _property(result: results.Result) -> str | None:
    """The property that a failed test found wrong."""
    found: str | None = result.finding.get("property", result.judges)
    return found


def found_by(running: suite.Suite, order: Order) -> dict[str, Any]:
    """What a run found: the verdict, how much was judged, and the tests that failed with what each found. Raises
    MemoryError if other processes have the memory that a test needs: nothing is known then."""
    made = running.collector.results
    starved = [result.message for result in made if "out of memory" in result.message.lower()]
    if starved:
        raise MemoryError(starved[0].splitlines()[0])
    device = running.backend.device.type
    judged = verdict.judge(made, running.supported, device=device, required=[order.method])[order.method]
    return {
        "verdict": judged.verdict, "open": judged.open, "tests": len(made),
        "touched": sum(result.touched for result in made),
        "cases": sum(result.cases or 0 for result in made),
        "judged": sum(one.cases for one in judged.properties.values()),
        "decisive": sum(result.decisive for result in made),
        "imported": order.mutated is None or order.mutated in sys.modules,
        "found": [
            {
                "property": _property(result), "test": result.nodeid, "error": result.finding.get("error", ""),
                "message": (result.message or "-").splitlines()[0][:300], "case": result.finding.get("case"),
            }
            for result in made if result.failed
        ],
    }


def _suite_of(config: pytest.Config) -> suite.Suite:
    found: Any = config.pluginmanager.get_plugin(plugin.SUITE)
    return found


# The process --------------------------------------------------------------------------------------------------------


def _arguments(device: str, methods: Sequence[str], tests: Sequence[str]) -> list[str]:
    """pytest's command line: that of ``kvtwin verify --impl`` on a module without restrictions, whose tests include
    those of all others."""
    options = command.parser().parse_args([
        *methods, "--impl", discovery.REFERENCE, "--device", device, "--jobs", "1", "--seed", "0",
        "--hypothesis-profile", PROFILE,
    ])
    options.required, options.methods = [], methods or [pair.name for pair in discovery.built_in()]
    made = [one for one in command.pytest_arguments(options) if not one.startswith("--kv-report")]
    if tests:
        made = [*(str(plugin.HERE / test) for test in tests), *made[1:]]  # the first one is the folder of all tests
    if not any(one.name == plugin.NAME for one in importlib.metadata.entry_points(group="pytest11")):
        made += ["-p", plugin.__name__]  # kvtwin is not installed, but on the path
    return [*made, "-s"]


def _chosen_without_cuda(requested: str | None) -> environment.Backend:
    """`environment.choose` for CUDA, without its use: the forks find out whether there is a GPU."""
    import torch

    return environment.Backend(torch.device("cuda", 0), False, "a GPU", "as the forks use it")


def main() -> int:
    options = json.loads(sys.argv[1])
    # Separate descriptors for orders and answers: what tests print, or read, must not mix with them.
    orders, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    if options["device"] == "cuda":
        environment.choose = _chosen_without_cuda
    forks = Forks(orders, answers, options["profile"])
    return int(pytest.main(_arguments(options["device"], options["methods"], options["tests"]), plugins=[forks]))


if __name__ == "__main__":
    sys.exit(main())
