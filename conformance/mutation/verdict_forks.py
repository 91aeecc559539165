"""Verdicts in forks: the tests are imported and collected once, and a process is forked for each implementation.

A verdict of ``kvtwin verify METHOD --impl MODULE`` begins with some seconds of imports and collection. Here a pytest
plugin takes the place of pytest's loop over tests: each fork changes the implementation under test, keeps the method's
tests, runs them in their order, and writes a record. CUDA cannot be used in a fork of a process that has used it, so
the process that forks does not.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from .. import plugin
from ..harness import environment, results, suite, verdict
from ..harness.impl import Twins
from ..interpreter import INTERPRET

PROFILE = "verdicts"
#: Asks torch to count GPUs without a context, after which CUDA can be used in a fork.
COUNT_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
#: How many processes share a GPU's memory, for cases/turns.py.
SHARED = "PYTEST_XDIST_WORKER_COUNT"


@dataclass(frozen=True)
class Order:
    """A verdict to be made. key: of its record. environ: variables for the implementation. first: stop at the first
    failure; likely: the property whose tests then come first. seconds: of CPU, at most."""

    key: str
    method: str
    module: str
    seed: int
    environ: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    first: bool = True
    likely: str = ""
    seconds: int = 900


class Forks:
    """A pytest plugin that makes a verdict for each order, `jobs` at a time, instead of running tests.

    done(record): called in the order in which they end. The record has the order's key, `verdict` ("right", "wrong",
    "not covered", or "broken" if the process ended without one), `property`, `test` and `message` of the first failure,
    `tests` and `cases` until then, and `seconds`.
    """

    def __init__(self, orders: Sequence[Order], jobs: int, done: Callable[[dict[str, Any]], None]) -> None:
        self.orders, self.jobs, self.done = orders, jobs, done
        self.ended = False

    # Before Hypothesis's plugin looks for the profile.
    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        from hypothesis import Phase, settings

        # That of a verdict but for shrinking and the database: a failure is counted as it is found.
        settings.register_profile(
            PROFILE, settings.get_profile("default"), phases=(Phase.explicit, Phase.generate), database=None,
            report_multiple_bugs=False,
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        import torch

        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        if torch.cuda.is_initialized():
            raise session.Interrupted("to collect the tests has used CUDA, which a fork then cannot use")
        waiting, running = list(reversed(self.orders)), dict[int, tuple[Order, Path]]()
        with tempfile.TemporaryDirectory(prefix="kvtwin-verdicts-") as folder:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    order = waiting.pop()
                    place = Path(tempfile.mkdtemp(dir=folder))
                    sys.stdout.flush()
                    child = os.fork()
                    if child == 0:
                        os.environ[SHARED] = str(self.jobs)
                        _become_verdict(session, order, place)
                    running[child] = order, place
                child, status = os.wait()
                if child in running:
                    self.done(_record(*running.pop(child), os.waitstatus_to_exitcode(status)))
        self.ended = True
        return True


def _record(order: Order, place: Path, code: int) -> dict[str, Any]:
    """What a fork has written, and else why it has not."""
    path = place / "record.json"
    if code == 0 and path.is_file():
        made: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    else:
        output = place / "output.txt"
        said = output.read_text(encoding="utf-8", errors="replace").strip() if output.is_file() else ""
        why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        made = {"verdict": "broken", "message": f"{why}: {said[-1000:]}"}
    shutil.rmtree(place)
    return {"key": order.key, "seed": order.seed, **made}


def _become_verdict(session: pytest.Session, order: Order, place: Path) -> None:
    """Make the verdict, write its record, and end the process; does not return."""
    code = 70
    try:
        with (place / "output.txt").open("w", encoding="utf-8") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.chdir(place)
        os.environ.update(order.environ)
        resource.setrlimit(resource.RLIMIT_CPU, (order.seconds, order.seconds + 5))
        record = _verdict_of(session, order)
        (place / "record.json").write_text(json.dumps(record), encoding="utf-8")
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _verdict_of(session: pytest.Session, order: Order) -> dict[str, Any]:
    from ..cases import failures

    begun = time.monotonic()
    hypothesis: Any = importlib.import_module("hypothesis.core")
    hypothesis.global_force_seed = order.seed
    running: suite.Suite = session.config.pluginmanager.get_plugin(plugin.SUITE)  # type: ignore[assignment]
    device = running.backend.device.type
    session.config.option.kv_impl = running.implementation = order.module
    failures.replay_with(order.module, device)
    running.twins = Twins(order.module)
    running.supported = {name: running.twins.capabilities(name) for name in running.supported}
    running.collector = results.Collector()
    items = [item for item in session.items if item.stash[suite.FACTS]["method"] == order.method]
    items = [item for item in items if running._is_declared(item)]
    if order.first:
        items.sort(key=lambda item: (
            item.stash[suite.FACTS]["judges"] != order.likely, item.get_closest_marker("served") is None
        ))
    for item, following in zip(items, [*items[1:], None], strict=True):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if order.first and any(result.failed for result in running.collector.results[-1:]):
            break
    found = running.collector.results
    starved = [result.message for result in found if "out of memory" in result.message.lower()]
    if starved:  # other processes have it: nothing is known
        raise MemoryError(starved[0].splitlines()[0])
    made = verdict.judge(found, running.supported, device=device, required=[order.method])[order.method]
    return {
        "verdict": made.verdict, **_first_failure(found), "tests": sum(result.touched for result in found),
        "cases": sum(one.cases for one in made.properties.values()), "seconds": round(time.monotonic() - begun, 2),
    }


def _first_failure(found: Sequence[results.Result]) -> dict[str, Any]:
    for result in found:
        if result.failed:
            named = result.finding.get("property", result.judges)
            return {"property": named, "test": result.nodeid, "message": result.message.splitlines()[0][:300]}
    return {}


def _arguments(device: str, methods: Sequence[str]) -> list[str]:
    """The command line of a verdict on a module without restrictions, whose tests include those of all others."""
    from .. import __main__

    chosen = __main__.parser().parse_args([
        *methods, "--impl=kvtwin.reference", f"--device={device}", "--jobs=1", f"--hypothesis-profile={PROFILE}",
        "--seed=0",
    ])
    chosen.required = []
    arguments = __main__.pytest_arguments(chosen)
    return [one for one in arguments if not one.startswith("--kv-report")] + ["-p", "no:xdist", "-s"]


def run(orders: Sequence[Order], *, device: str, jobs: int, done: Callable[[dict[str, Any]], None]) -> None:
    """Make all verdicts, `jobs` at a time. device: "cpu" or "cuda". Raises RuntimeError if the tests cannot be
    collected, or if collecting them has used CUDA."""
    if device == "cpu":
        os.environ[INTERPRET] = "1"  # before anything imports triton
    else:
        os.environ[COUNT_BY_NVML] = "1"
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # processes share the memory
    import torch

    torch.set_num_threads(1)  # a fork has no threads but one
    forks = Forks(orders, jobs, done)
    choose = environment.choose
    try:
        if device == "cuda":
            environment.choose = _chosen_without_cuda
        methods = list(dict.fromkeys(order.method for order in orders))
        status = pytest.main(_arguments(device, methods), plugins=[forks])
    finally:
        environment.choose = choose
    if not forks.ended:
        raise RuntimeError(f"not all verdicts were made: pytest ended with {status!r}")


def _chosen_without_cuda(requested: str | None) -> environment.Backend:
    """`environment.choose` for CUDA, without its use: the forks find out whether there is a GPU."""
    import torch

    return environment.Backend(torch.device("cuda", 0), False, "a GPU", "as the forks use it")

