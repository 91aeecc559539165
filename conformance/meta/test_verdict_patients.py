"""The verdict that small right and wrong implementations get: the wrong property, and no other."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from kvtwin.conformance import Capabilities, __main__
from kvtwin.conformance.harness import verdict
from kvtwin.conformance.meta.patients import longflow

#: Verdicts without "bad_input", which the patients do not check.
PROPERTIES = (
    "accuracy", "decisions", "ties", "repeatability", "independence", "free_slots", "extreme_numbers", "layouts",
)


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that runs the property tests of LongFlow in this process, and returns the verdict."""

    def run(function: Any, **declared: Any) -> verdict.MethodVerdict:
        module = types.ModuleType("patient")
        module.longflow = types.SimpleNamespace(decode_attention=function)
        module.CAPABILITIES = Capabilities(validates_arguments=False, **declared)
        monkeypatch.setitem(sys.modules, "patient", module)
        monkeypatch.chdir(tmp_path)
        options = __main__.parser().parse_args(
            ["longflow", "--impl=patient", "--device=cpu", "--jobs=1", "--hypothesis-profile=quick"]
        )
        options.required = options.methods
        found: dict[str, verdict.MethodVerdict] = {}

        class Keep:
            def pytest_unconfigure(self, config: pytest.Config) -> None:
                found.update(config.pluginmanager.get_plugin("kvtwin-suite").verdicts)

        profile = settings.get_current_profile_name()
        try:
            pytest.main([*__main__.pytest_arguments(options), "-p", "no:xdist", "-k", "properties"], plugins=[Keep()])
        finally:
            settings.load_profile(profile)
        return found["longflow"]

    return run


def shown(found: verdict.MethodVerdict) -> dict[str, Any]:
    return {name: (one.verdict, one.why, one.findings[:1]) for name, one in found.properties.items()}


WRONG = {
    longflow.NoRunningMaximum: {"extreme_numbers"},
    longflow.RoundedScores: {"accuracy"},
    longflow.FreeSlotsScoreZero: {"free_slots"},
    longflow.FreeSlotsAreRead: {"free_slots"},
    longflow.TiesByChance: {"ties"},
    longflow.SummedInAnyOrder: {"repeatability"},
    longflow.NoMaskInTheLastTile: {"free_slots"},
    longflow.LastSlotIsNeverChosen: {"decisions"},
    longflow.WrongHeadsInOddGroups: {"independence"},
    longflow.KeysStridesForValues: {"layouts"},
    longflow.RightForContiguousTensors: {"layouts"},
    longflow.OneResultBuffer: {"repeatability"},
    longflow.InputsAreChanged: {"repeatability"},
    longflow.RememberedByAddress: {"repeatability"},
    longflow.RightOnce: {"repeatability"},
}


@pytest.mark.parametrize("patient", WRONG, ids=lambda patient: patient.__name__)
def test_the_ill_is_named(patient, judged):
    found = judged(patient())
    wrong = {name for name, one in found.properties.items() if one.verdict == verdict.WRONG and one.follows is None}
    assert wrong == WRONG[patient], shown(found)
    assert found.verdict == verdict.WRONG


@pytest.mark.parametrize(("healthy", "conventions"), [
    (longflow.Decode, {}), (longflow.Fused, {}), (longflow.SlotsFirst, {}),
    (longflow.AnyOfEquals, {"ties": "any", "free_score": "any"}),
], ids=lambda value: getattr(value, "__name__", None) or ",".join(value))
def test_a_right_one_is_right(healthy, conventions, judged):
    found = judged(healthy(), **conventions)
    verdicts = {name: found.properties[name].verdict for name in PROPERTIES}
    assert verdicts == dict.fromkeys(PROPERTIES, verdict.RIGHT) | dict.fromkeys(
        [name for name in conventions if name in PROPERTIES], verdict.CONVENTION
    ), shown(found)
    assert found.verdict == verdict.RIGHT
