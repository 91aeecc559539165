"""The pytest plugin in a mutant's process (see mutate.py): it records the outcome of each test.

A test kills a mutant if it finds a *wrong* result: a failed assertion, an error of the judge, a missing exception.
Other errors do not count: any test detects a kernel that cannot run, for example because of a NameError.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

#: JSON with the order of mutate.py: log, seconds of CPU, control ("": none), module (None: no mutant), source.
ORDER = "KVTWIN_MUTANT"
PROFILE = "mutants"

#: Exceptions of a test whose code under test is wrong. Failed: an expected exception was not raised; JudgeError: the
#: oracle is the reference, which may be the mutant; OpCheckError: from torch's opcheck.
WRONG = {"AssertionError", "Failed", "JudgeError", "OpCheckError"}


def is_wrong(error: BaseException) -> bool:
    """Whether a test's exception means a wrong result, and not that the code could not run."""
    if isinstance(error, BaseExceptionGroup):  # from Hypothesis, for a flaky example
        return any(is_wrong(inner) for inner in error.exceptions)
    return any(kind.__name__ in WRONG for kind in type(error).__mro__)


class Probe:
    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.log = Path(order["log"])

    def note(self, **fact: Any) -> None:
        """Write one line immediately, since the next test may end the process."""
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fact) + "\n")

    def is_control(self, nodeid: str) -> bool:
        return f"/{nodeid}".endswith(f"/{self.order['control']}") if self.order["control"] else False

    # First: before Hypothesis's plugin looks for the profile. It has no shrinking, which would take most of the time.
    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        from hypothesis import Phase, settings

        settings.register_profile(
            PROFILE, settings.get_profile("ci"), phases=(Phase.explicit, Phase.generate), report_multiple_bugs=False
        )
        seconds = self.order["seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: not self.is_control(item.nodeid))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Check that the mutated module can be imported, and that it comes from the mutated copy."""
        if self.order["module"] is None:
            return
        try:
            file = importlib.import_module(self.order["module"]).__file__
        except Exception as error:
            self.note(broken=f"does not import: {error!r}")
            session.shouldstop = "does not import"
            return
        if file is None or not Path(file).samefile(self.order["source"]):
            self.note(broken=f"{self.order['module']} was imported from {file}, not from the copy")
            session.shouldstop = "another copy is tested"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.note(broken=f"cannot collect {report.nodeid}: {report.longreprtext.splitlines()[-1]}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note(test=nodeid, outcome="started")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        made = yield
        if call.when == "call" or not made.passed:
            error = call.excinfo.value if call.excinfo else None
            outcome = made.outcome if not made.failed else "wrong" if error and is_wrong(error) else "error"
            message = f"{type(error).__name__}: {error}" if error else ""
            self.note(test=item.nodeid, outcome=outcome, message=message[:2000])
            if outcome != "passed" and self.is_control(item.nodeid):
                item.session.shouldstop = "the control fails"
        return made


# Loaded by -p in every process that mutate.py starts, and in no other.
def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if ORDER in os.environ:
        pluginmanager.register(Probe(json.loads(os.environ[ORDER])), "kvtwin-mutant")
