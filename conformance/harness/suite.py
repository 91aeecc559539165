"""The part of the plugin that runs kvtwin's tests: markers, statistics of each test, summary and report."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest

from .. import capabilities, discovery, interpreter, stats
from ..cases import draws, failures, gpu_memory
from ..judge.fields import MissingField
from ..own_methods import MethodError
from ..refusals import EnvironmentLimit, NotProvided
from . import environment, fair_play, findings, kernel_keys, naming, options, results, start, summary, survival, verdict
from .enough import check_decided, dtypes_of, least_of
from .impl import Facade, Twins, environment_limit, not_run
from .order import put_in_order
from .report import build_report, write_report
from .results import FACTS
from .sarif import write_sarif

NOTHING_TO_REPORT: dict[int, str] = {
    pytest.ExitCode.INTERRUPTED: "the run was interrupted", pytest.ExitCode.NO_TESTS_COLLECTED: "no test ran",
}
MARKERS = (
    "kind(name): the kind of the test: equivalence (the default), laws, claims, golden or bad_input",
    "claim(id): the test checks this claim of the ledger in papers/<method>/claims.toml",
    "main: with the claims' tests, all that a quick verification of all methods runs",
    "whole: part of the whole suite alone; kvtwin verify does not run it",
    "first: long on a GPU, mostly to compile kernels; a run of several processes begins with it",
    "property(name, slots='any'): the property of an implementation that the test judges: judge/subjects.py; "
    "slots='fixed': of a state whose tokens stay in their slots",
    "limits: about what kvtwin's own kernels do not take. Not run on other implementations, which may take it",
    "slow: a test over two seconds long of the suite itself, of stored results or of imports; `tox` leaves it out, and "
    ".ci/run does not",
    "slow_on_cpu: a long test of kernels, of which a GPU says more: `slow` in Triton's interpreter alone",
    "served(long=False, small=False): a test of sizes that people serve, which a GPU alone can hold; deselected on the "
    "CPU, and a long one also on kvtwin's own implementation with the profile gpu; small ones share the GPU's memory",
    "method(name): the tested method, if neither the folder nor a parameter names it",
)
WARNINGS = (
    # A skips file for the whole suite may be used with a part of the suite.
    "default::kvtwin.conformance.harness.options.UnmatchedEntryWarning",
    # From numpy, about masked lanes of a block: the kernel discards their results.
    "ignore::RuntimeWarning:triton.runtime.interpreter",
    # From Hypothesis, about arguments with many cases in them, which no test prints.
    "ignore:Generating overly large repr:hypothesis.errors.HypothesisWarning",
    # From pytest-benchmark, when tests run in several processes; the suite measures no times.
    "ignore:Benchmarks are automatically disabled",
    # From transformers 5.24 and later, about the name that the tests use, since older releases know no other.
    "ignore:.past_key_values. is deprecated:FutureWarning",
    # From torch, when a test is the first to import torch.compile's inductor.
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning",
)
#: The exit statuses of pytest that a verdict on somebody else's implementation replaces.
JUDGED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
#: The name of the JUnit property that holds the property that a test judges.
JUNIT_PROPERTY = "kvtwin_property"
STATS = pytest.StashKey[stats.Stats]()


def _release_memory() -> None:
    """Free the memory of a finished test, since test processes may share a GPU, and let others have their turn."""
    cases = sys.modules.get("kvtwin.conformance.cases.case")
    if cases is None:
        return
    import torch

    cases.forget()
    if gpu_memory.is_locked_here():
        gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()
    gpu_memory.release()


#: Python's garbage collector starts after so many new objects. The interpreter makes 700, the default, in 1 ms.
GARBAGE = 20_000


def _unfreeze(*threshold: int) -> None:
    gc.unfreeze()
    gc.set_threshold(*threshold)
    Suite.frozen = False


class Suite:
    """Registered by plugin.py for runs that include kvtwin's tests."""

    frozen: ClassVar[bool] = False  #: whether a run of this process keeps what it collected from the garbage collector

    def __init__(self, config: pytest.Config) -> None:
        """Decide the backend before anything imports triton. Raises pytest.UsageError."""
        self.config = config
        options.check(config)
        try:
            discovery.pairs()
        except MethodError as error:
            raise pytest.UsageError(str(error)) from None
        for marker in MARKERS:
            config.addinivalue_line("markers", marker)
        for line in WARNINGS:
            config.addinivalue_line("filterwarnings", line)
        self.backend = environment.choose(config.getoption("kv_device"))
        try:
            self.interpreter = interpreter.prepare()
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        self.interpreter_shown = False
        environment.set_up_hypothesis(config)
        if config.getoption("kv_update_golden") and not hasattr(config, "workerinput"):
            _record_goldens()
        self.implementation: str | None = config.getoption("kv_impl")
        self.twins = Twins(self.implementation)
        if isinstance(self.twins.optimized, Facade):
            chosen = options.methods(config) or {pair.name for pair in discovery.pairs()}
            start.check(self.twins.optimized, chosen, options.required(config))
        self.supported = {pair.name: self._supported(pair.name) for pair in discovery.pairs()}
        self.collector = results.Collector()
        self.verdicts: dict[str, verdict.MethodVerdict] = {}
        if self.implementation is not None:
            failures.replay_with(self.implementation, self.backend.device.type)
        self.watch = survival.start() if self.implementation is not None else None
        self.written: list[str] = []
        path, log = options.report_path(config), options.sarif_path(config)
        fair_play.reports[:] = [] if path is None else [str(path.with_suffix(end)) for end in (".html", ".json")]
        fair_play.reports += [] if log is None else [str(log)]
        self.freezes = not Suite.frozen  # a run inside a test leaves it to the run around it
        if self.freezes:
            # after pytest's own cleanup, which collects garbage once more
            config.add_cleanup(functools.partial(_unfreeze, *gc.get_threshold()))

    def _supported(self, method: str) -> capabilities.Capabilities:
        """What the implementation under test declares for a method. Raises pytest.UsageError."""
        try:
            return self.twins.capabilities(method)
        except TypeError as error:
            raise pytest.UsageError(f"{naming.impl()} {self.implementation}: {error}") from None
        except ImportError:  # the tests that need the module report it
            return capabilities.DEFAULT

    def _is_declared(self, item: pytest.Item) -> bool:
        """False for tests of wrong arguments if the implementation does not validate its arguments, and for tests of
        ties in states with slots in another order than kvtwin's, which decides ties by slot, of the slots, and of ties
        made by hand if it decides them otherwise."""
        supported = self.supported.get(item.stash[FACTS]["method"], capabilities.DEFAULT)
        judged = item.stash[FACTS]["judges"]
        mark = item.get_closest_marker("property")
        if mark is not None and mark.kwargs.get("slots") == "fixed" and supported.slot_order != "fixed":
            return False
        subject = getattr(getattr(item, "callspec", None), "params", {}).get("subject")
        if judged == "ties" and supported.ties != "lowest" and subject is None:
            return False  # a case made by hand has one answer
        if judged == "ties" and supported.slot_order != "fixed":
            from ..judge.subjects import StateSubject

            return not isinstance(subject, StateSubject)
        return supported.validates_arguments or judged != "bad_input"

    def pytest_report_header(self) -> list[str]:
        self.interpreter_shown = True
        return environment.header(self.backend, summary.under_test(self.implementation), self.interpreter)

    # Modules and collected tests live until the end, so exclude them from garbage collection.
    # (This also keeps cycles left over from collection, and hides all of it from gc.get_objects.)
    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, Any, Any]:
        if not self.backend.interpreter:
            kernel_keys.compute_keys()
        enabled = gc.isenabled()
        gc.disable()
        try:
            return (yield)
        finally:
            if self.freezes:
                gc.freeze()
                Suite.frozen = True
                if self.backend.interpreter:
                    gc.set_threshold(GARBAGE, *gc.get_threshold()[1:])
            if enabled:
                gc.enable()

    # First: before -k and other plugins deselect tests, so that entries for those tests have a match. The order comes
    # last, since pytest-xdist counts the tests that remain.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None, Any, Any]:
        self._select(config, items)
        result = yield
        put_in_order(items)
        return result

    def _select(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Apply the options that select tests, and mark tests."""
        options.apply_entries(config, items)
        for item in items:
            item.stash[FACTS] = results.classify(item)
            if self.backend.interpreter and item.get_closest_marker("slow_on_cpu") is not None:
                item.add_marker("slow")
        on_cpu, short = self.backend.device.type == "cpu", self.implementation is None and draws.shares_kernels()
        _keep(config, items, lambda item: not any(
            on_cpu or (short and mark.kwargs.get("long")) for mark in item.iter_markers("served")
        ))
        methods = options.methods(config)
        if methods is not None:
            _keep(config, items, lambda item: item.stash[FACTS]["method"] in methods)
        if self.implementation is not None:
            _keep(config, items, lambda item: item.get_closest_marker("limits") is None and self._is_declared(item))
        if config.getoption("kv_properties"):
            _keep(config, items, _judges_a_property)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        supported = self.supported.get(item.stash[FACTS]["method"], capabilities.DEFAULT)
        if item.stash[FACTS]["judges"] is not None:
            item.user_properties.append((JUNIT_PROPERTY, item.stash[FACTS]["judges"]))
        if self.watch is not None:
            self.watch.test(item.nodeid, item.stash[FACTS])
        with stats.collect() as item.stash[STATS], capabilities.use(supported):
            try:
                return (yield)
            finally:
                _release_memory()
                if isinstance(self.twins.optimized, Facade):
                    self.twins.optimized.guard.after_test()
                if self.watch is not None:
                    self.watch.idle()

    # Called by pytest-xdist, if it is there, in the controlling process.
    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: Any) -> None:
        folder = survival.folder()
        if folder is not None:
            survival.explain(report, report.node.gateway.id, folder)

    # Outermost: a test fails as vacuous only if it passed otherwise.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        from hypothesis.errors import Unsatisfiable

        counted = item.stash[STATS]
        try:
            outcome = yield
        except Unsatisfiable:
            if not counted.refused:
                raise
            # The implementation refused every example.
            raise not_run(counted.refused) from None
        except MissingField as error:
            raise NotProvided(str(error)) from None
        except Exception as error:
            limit = environment_limit(error) if self.implementation is not None else None
            if limit is None:
                raise
            raise EnvironmentLimit(limit) from None
        check_decided(
            counted, self.implementation, least_of(item, self.implementation)[1],
            served=item.get_closest_marker("served") is not None,
        )
        return outcome

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        test = pyfuncitem.obj
        least = least_of(pyfuncitem, self.implementation)
        decided = functools.partial(
            draws.until_decided, test, findings.test_id(pyfuncitem), *least, dtypes_of(pyfuncitem, self.implementation)
        )
        on_gpu = self.backend.device.type == "cuda"
        pyfuncitem.obj = functools.partial(gpu_memory.when_memory_is_free, decided) if on_gpu else decided
        try:
            with gpu_memory.between_examples(test, _release_memory) if on_gpu else nullcontext():
                return (yield)
        finally:
            pyfuncitem.obj = test

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        made = yield
        error = call.excinfo.value if call.excinfo else None
        facts = item.stash[FACTS]
        fails = made.failed or hasattr(made, "wasxfail")
        if fails and error is not None and call.when == "call":
            facts = facts | {"finding": findings.finding_of(item, error, facts["judges"], self.twins)}
        results.annotate(made, error, facts, item.stash[STATS])
        return made

    # First: pytest itself would report "skipped".
    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        if results.is_not_provided(report):
            return "not provided", "n", "NOT PROVIDED"
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.collector.add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collector.add_collection_error(report)

    # First: pytest-xdist and others read the exit status.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(self.config, "workerinput"):
            return
        device = self.backend.device.type
        self.verdicts = verdict.judge(
            self.collector.results, self.supported, device=device, own=self.implementation is None,
            required=options.required(self.config),
        )
        if self.implementation is not None and exitstatus in JUDGED and not self.config.option.collectonly:
            session.exitstatus = exitstatus = verdict.exit_status(self.verdicts)
        path = options.report_path(self.config)
        if path is not None and exitstatus in NOTHING_TO_REPORT:  # an earlier report stays
            self.written = [f"{path} is not written: {NOTHING_TO_REPORT[exitstatus]}"]
        elif path is not None:
            found = build_report(
                self.collector.results, self.verdicts, backend=self.backend, implementation=self.implementation,
                arguments=self.config.invocation_params.args, exit_status=exitstatus, seed=environment.seed(),
            )
            try:
                self.written = write_report(found, path)
            except OSError as error:  # the verdict is still printed
                self.written = [f"{path} is not written: {error.strerror}"]
        log = options.sarif_path(self.config)
        if log is not None and exitstatus in NOTHING_TO_REPORT:
            self.written.append(f"{log} is not written: {NOTHING_TO_REPORT[exitstatus]}")
        elif log is not None:
            folder = self.config.invocation_params.dir
            try:
                write_sarif(self.verdicts, log, modules=self._modules, folder=folder, exit_status=exitstatus)
                self.written.append(str(log))
            except OSError as error:
                self.written.append(f"{log} is not written: {error.strerror}")

    def _modules(self, method: str) -> tuple[Any, ...]:
        """What has a method's functions in the implementation under test, and the module around it."""
        if isinstance(self.twins.optimized, Facade):
            return self.twins.optimized.module(method), sys.modules[str(self.implementation)]
        return tuple(pair.optimized for pair in discovery.methods() if pair.name == method)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        verbose = self.config.get_verbosity() > 0
        if self.implementation is None or verbose:
            summary.write(terminalreporter, self.collector.results, self.implementation)
        if self.implementation is None and any(result.judges for result in self.collector.results):
            terminalreporter.write_line(summary.verdict_line(self.verdicts))
        if self.implementation is not None and self.collector.results:
            summary.write_verdicts(
                terminalreporter, self.verdicts, self.implementation, verbose=verbose, device=self.backend.device.type,
                seed=environment.seed(),
            )
        # A quiet run has no header.
        if self.interpreter is not None and not self.interpreter.in_order and not self.interpreter_shown:
            terminalreporter.write_line(environment.interpreter_line(self.interpreter))
        if self.written:
            terminalreporter.write_line(f"kvtwin report: {', '.join(self.written)}")


def _keep(config: pytest.Config, items: list[pytest.Item], wanted: Callable[[pytest.Item], bool]) -> None:
    """Deselect the other items."""
    kept = [item for item in items if wanted(item)]
    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = kept


def _judges_a_property(item: pytest.Item) -> bool:
    """True for a test that judges a property of the implementation under test."""
    return item.stash[FACTS]["judges"] is not None


def _record_goldens() -> None:
    command = [sys.executable, "-m", "kvtwin.fixtures.record"]
    if subprocess.run(command, check=False).returncode:
        raise pytest.UsageError(f"--kv-update-golden: {' '.join(command)} failed")
