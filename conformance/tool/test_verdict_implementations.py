"""The verdict that small right and wrong implementations get: the wrong property, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtwin.conformance.harness import verdict
from kvtwin.conformance.lab.implementations import longflow
from kvtwin.conformance.lab.implementations.run import not_right, summary_of, verdict_of, wrong

pytestmark = [pytest.mark.slow, pytest.mark.first]

#: Verdicts without "bad_input", which the implementations do not check.
PROPERTIES = (
    "accuracy", "decisions", "ties", "repeatability", "independence", "free_slots", "extreme_numbers", "layouts",
)


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that returns the verdict on LongFlow's decode step."""

    def run(function: Any, **declared: Any) -> verdict.MethodVerdict:
        provided = {"decode_attention": function}
        return verdict_of(
            "longflow", provided, declared, "", tmp_path, monkeypatch, "suite/test_properties.py"
        )

    return run


#: Of each implementation the wrong property, and the others that are not right, with the reason.
WRONG: dict[type, tuple[str, dict[str, str]]] = {
    longflow.NoRunningMaximum: ("extreme_numbers", {}),
    longflow.RoundedScores: ("accuracy", {}),
    longflow.FreeSlotsScoreZero: ("free_slots", {}),
    longflow.FreeSlotsAreRead: ("free_slots", {}),
    longflow.TiesByChance: ("ties", {}),
    longflow.SummedInAnyOrder: ("repeatability", {}),
    longflow.NoMaskInTheLastTile: ("free_slots", {}),
    longflow.LastSlotIsNeverChosen: ("decisions", {
        "ties": verdict.NOT_COVERED,  # its test fails in the last slot, whose token is equal to no other
    }),
    longflow.WrongHeadsInOddGroups: ("independence", {}),
    longflow.KeysStridesForValues: ("layouts", {}),
    longflow.RightForContiguousTensors: ("layouts", {}),
    longflow.OneResultBuffer: ("repeatability", {}),
    longflow.InputsAreChanged: ("repeatability", {
        # Every call changes its query, so that each of their tests fails because of repeatability.
        name: verdict.NOT_COVERED for name in PROPERTIES if name != "repeatability"
    }),
    longflow.RememberedByAddress: ("repeatability", {}),
    longflow.RightOnce: ("repeatability", {}),
}


@pytest.mark.parametrize("implementation", WRONG, ids=lambda implementation: implementation.__name__)
def test_the_faulty_property_is_named(implementation, judged):
    found = judged(implementation())
    named, others = WRONG[implementation]
    assert wrong(found) == {named}, summary_of(found)
    assert not_right(found) == others, summary_of(found)
    assert found.verdict == verdict.WRONG


@pytest.mark.parametrize(("healthy", "conventions"), [
    (longflow.Decode, {}), (longflow.Fused, {}), (longflow.SlotsFirst, {}),
    (longflow.AnyOfEquals, {"ties": "any", "free_score": "any"}),
], ids=lambda value: getattr(value, "__name__", None) or ",".join(value))
def test_correct_implementations_are_right(healthy, conventions, judged):
    found = judged(healthy(), **conventions)
    verdicts = {name: found.properties[name].verdict for name in PROPERTIES}
    assert verdicts == dict.fromkeys(PROPERTIES, verdict.RIGHT) | dict.fromkeys(
        [name for name in conventions if name in PROPERTIES], verdict.CONVENTION
    ), summary_of(found)
    assert found.verdict == verdict.RIGHT
