"""Running the suite on an implementation in this process."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import core, settings

from ... import Capabilities, __main__, plugin
from ...cases import draws
from ...harness import environment, fair_play, verdict
from ...interpreter import INTERPRET

# Imported before any test runs: what a run in this process imports first, pytester removes from sys.modules, and the
# next run would get a second copy of its classes.
from ...judge import attribution, properties  # noqa: F401

#: Of each test, at most: enough to judge each property, and few enough for many implementations.
EXAMPLES = 4


def verdict_of(
    method: str, provided: dict[str, Any], declared: dict[str, Any], keyword: str, folder: Path,
    monkeypatch: pytest.MonkeyPatch, file: str = "suite", *, stranger: Path | None = None,
) -> verdict.MethodVerdict:
    """The verdict of the tests that match `keyword`, as for ``kvtwin verify METHOD --impl=theirs --device=cpu``.

    Implementations have no kernels. So they are judged on the CPU, even in a process that compiles kernels for a GPU.

    provided: functions and states by name; declared: the arguments of `Capabilities`. Reports are written to `folder`.
    file: the path of the tests in this package. stranger: the file of an implementation that must not use kvtwin's;
    None: it may, as kvtwin's own modules may.
    """
    module = types.ModuleType("theirs")
    if stranger is None:
        monkeypatch.setattr(fair_play, "OWN", (*fair_play.OWN, "theirs"))
    else:
        module.__file__ = str(stranger)
    setattr(module, method, types.SimpleNamespace(**provided))
    setattr(module, "CAPABILITIES", Capabilities(**{"validates_arguments": False, **declared}))  # noqa: B010
    monkeypatch.setitem(sys.modules, "theirs", module)
    monkeypatch.setenv(INTERPRET, "1")
    monkeypatch.setattr(environment, "_check_triton", lambda **_: None)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(draws, "is_quick", lambda: False)  # of this profile, only the number of examples is meant
    monkeypatch.setattr(core, "global_force_seed", None)  # the same verdict with every --hypothesis-seed
    options = __main__.parser().parse_args(
        [method, "--impl=theirs", "--device=cpu", "--jobs=1", "--hypothesis-profile=quick"]
    )
    options.required = [method]
    found: dict[str, verdict.MethodVerdict] = {}

    class Keep:
        """It also gives the profile to tests that were imported before, with the profile of the run around this one."""

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            quick = settings.get_profile("quick")
            for test in {getattr(item, "obj", None) for item in session.items}:
                own = getattr(test, draws.SETTINGS, None)
                if own is not None:
                    few = min(own.max_examples, EXAMPLES)
                    monkeypatch.setattr(test, draws.SETTINGS, settings(
                        own, max_examples=few, phases=quick.phases, derandomize=quick.derandomize, database=None,
                    ))

        def pytest_unconfigure(self, config: pytest.Config) -> None:
            found.update(config.pluginmanager.get_plugin("kvtwin-suite").verdicts)  # type: ignore[union-attr]

    profile = settings.get_current_profile_name()
    try:
        _, *arguments = __main__.pytest_arguments(options)
        pytest.main([str(plugin.HERE / file), *arguments, "-p", "no:xdist", "-k", keyword], plugins=[Keep()])
    finally:
        settings.load_profile(profile)
    assert not foreign_texts(found[method]), foreign_texts(found[method])
    return found[method]


#: Words of Hypothesis, pytest and pytest-xdist, and the values that pytest adds to an assertion.
FOREIGN = re.compile(
    r"hypothesis|falsifying|failing test case|flaky|inconsistent data|unsatisfi|reject\(\)|pytest|did not raise|"
    r"internalerror|xdist|worker 'gw|node down|^assert |\n\s*assert |\+  where", re.IGNORECASE
)


def foreign_texts(found: verdict.MethodVerdict) -> list[str]:
    """The texts of a verdict that have words of other tools: reasons, messages, refusals and notes. Commands that run
    a test again name pytest, and are left out, as is fair play, which names what an implementation calls."""
    texts = [one.why for one in found.properties.values()]
    texts += [str(finding.get(key)) for name, one in found.properties.items() if name != properties.FAIR_PLAY
              for finding in one.findings for key in ("message", "error")]
    texts += [*found.refused, *found.notes, *found.missing]
    return [text for text in texts if FOREIGN.search(re.sub("raised in .*, line", "", text))]  # paths have any words


def wrong(found: verdict.MethodVerdict) -> set[str]:
    """The wrong properties that are no consequence of another."""
    return {name for name, one in found.properties.items() if one.verdict == verdict.WRONG and one.follows is None}


def not_right(found: verdict.MethodVerdict) -> dict[str, str]:
    """The verdicts that are not "right", other than those of `wrong`, of their consequences, of what a convention
    settles, and of properties that no test judged."""
    return {
        name: one.verdict for name, one in found.properties.items()
        if one.verdict not in (verdict.RIGHT, verdict.CONVENTION) and not one.findings
        and not one.why.startswith(("no test of it ran", "no test called it"))
    }


def summary_of(found: verdict.MethodVerdict) -> dict[str, Any]:
    """The verdict on each property, for messages of failed tests."""
    return {name: (one.verdict, one.cases, one.why, one.findings[:1]) for name, one in found.properties.items()}
