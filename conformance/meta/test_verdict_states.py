"""The verdict that small right and wrong states get: the wrong property, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtwin.conformance.harness import verdict
from kvtwin.conformance.meta.patients import longflow_states, run


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that runs tests of a method in this process, and returns the verdict."""

    def judge(method: str, provided: dict[str, Any], keyword: str, **declared: Any) -> verdict.MethodVerdict:
        return run.verdict_of(method, provided, declared, keyword, tmp_path, monkeypatch)

    return judge


# LongFlow ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "patient", [longflow_states.CountsOnAfterReset, longflow_states.IgnoresReorder],
    ids=lambda patient: patient.__name__,
)
def test_the_ill_of_a_state_is_named(patient, judged):
    found = judged("longflow", {"LongFlowState": patient}, "laws or keeps_step")
    assert run.wrong(found) == {"state"}, run.shown(found)


def test_a_right_state_is_right(judged):
    found = judged("longflow", {"LongFlowState": longflow_states.LongFlow}, "laws or lockstep or LongFlowState")
    names = ("accuracy", "decisions", "free_slots", "repeatability", "state")
    assert {name: found.properties[name].verdict for name in names} == dict.fromkeys(names, verdict.RIGHT), (
        run.shown(found)
    )
    assert found.verdict == verdict.RIGHT
