"""The verdict on implementations that provide quantizers and selectors alone, right and wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtwin.conformance.harness import verdict
from kvtwin.conformance.lab.implementations import quantizers, selectors, synckv, thinkv
from kvtwin.conformance.lab.implementations.run import not_right, summary_of, verdict_of, wrong

pytestmark = pytest.mark.slow

PROPERTIES = "suite/test_properties.py"
KIVI = {"quantize": quantizers.Quantize(), "dequantize": quantizers.Dequantize()}
QUEST = {"page_bounds": selectors.Bounds(), "page_scores": selectors.Scores(), "select_pages": selectors.Select()}
SYNCKV = {
    "initial_sets": synckv.Sets(), "anticipate": synckv.Anticipate(), "head_similarity": synckv.Similarity(),
    "cluster_heads": synckv.Cluster(),
}
#: Method, what it provides, right, and the properties that are not judged, since it has nothing of the kind.
RIGHT: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("kivi", KIVI, ("free_slots",)),
    ("kivi", {"quantize": quantizers.ByReciprocals()}, ("free_slots",)),
    ("kivi", {"quantize": quantizers.InDouble()}, ("free_slots",)),
    ("pm_kvq", {"quantize": quantizers.PMQuantize()}, ("free_slots",)),
    ("quest", QUEST, ()),
    ("synckv", SYNCKV, ("accuracy",)),
    ("thinkv", {"quantize": thinkv.Quantize()}, ("free_slots",)),
]
#: Method, what is changed in the right functions, the properties that are wrong, and others that are not right.
WRONG: list[tuple[str, dict[str, Any], str, dict[str, str]]] = [
    ("kivi", {"quantize": quantizers.HalvesUp()}, "ties", {}),
    ("kivi", {"quantize": quantizers.Floors()}, "decisions", {}),
    ("kivi", {"quantize": quantizers.LosesTheLargestCode()}, "decisions", {"ties": verdict.NOT_COVERED}),
    # Both also say of other groups than the right one that float16 cannot hold them.
    ("kivi", {"quantize": quantizers.ScalesByTheLargest()}, "accuracy extreme_numbers", {}),
    ("kivi", {"quantize": quantizers.ScaleBeforeItIsStored()}, "decisions extreme_numbers", {}),
    ("kivi", {"quantize": quantizers.ConstantIsNaN()}, "extreme_numbers", {}),
    ("kivi", {"quantize": quantizers.OtherAxis()}, "accuracy", {"ties": verdict.NOT_COVERED}),
    ("kivi", {"quantize": quantizers.LastGroupIsDropped()}, "accuracy", {}),
    ("kivi", {"quantize": quantizers.InHalfPrecision()}, "accuracy", {}),
    ("kivi", {"quantize": quantizers.Contiguous()}, "layouts", {}),
    ("kivi", {"dequantize": quantizers.MinimumFirst()}, "accuracy", {}),
    ("pm_kvq", {"quantize": quantizers.PMHalvesUp()}, "ties", {}),
    ("quest", {"page_bounds": selectors.ZerosAreKeys()}, "free_slots", {}),
    ("quest", {"page_bounds": selectors.FreeSlotsAreKeys()}, "free_slots", {}),
    ("quest", {"page_bounds": selectors.LastPageIsIgnored()}, "free_slots", {}),
    ("quest", {"page_bounds": selectors.LargestMagnitude()}, "accuracy", {}),
    ("quest", {"page_scores": selectors.OneBound()}, "accuracy", {}),
    ("quest", {"select_pages": selectors.BestFirst()}, "decisions", {"ties": verdict.NOT_COVERED}),
    ("quest", {"select_pages": selectors.LastOfEquals()}, "ties", {}),
    ("quest", {"select_pages": selectors.LastPageCompetes()}, "decisions", {}),
    ("quest", {"select_pages": selectors.AllPagesCompete()}, "free_slots", {}),
    ("thinkv", {"quantize": thinkv.Truncates()}, "decisions", {}),
    ("thinkv", {"quantize": thinkv.HalvesUp()}, "ties", {"decisions": verdict.NOT_COVERED}),  # all cases have halves
    ("thinkv", {"quantize": thinkv.LastGroupIsWhole()}, "accuracy", {}),
    ("synckv", {"initial_sets": synckv.BestFirst()}, "decisions", {}),
    ("synckv", {"anticipate": synckv.StaticAgain()}, "decisions", {}),
    ("synckv", {"head_similarity": synckv.ShareOfK()}, "decisions free_slots", {}),
    ("synckv", {"cluster_heads": synckv.LabelsFromOne()}, "decisions", {}),
    ("synckv", {"cluster_heads": synckv.LastOfTwo()}, "decisions", {}),
    ("synckv", {"cluster_heads": synckv.BeginsWithTheLast()}, "decisions", {}),
    ("synckv", {"cluster_heads": synckv.LastOfEquals()}, "ties", {}),
]


def _kind(functions: dict[str, Any]) -> str:
    return type(next(iter(functions.values()))).__name__


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def judge(method: str, provided: dict[str, Any]) -> verdict.MethodVerdict:
        return verdict_of(method, provided, {}, method, tmp_path, monkeypatch, PROPERTIES)

    return judge


@pytest.mark.parametrize(
    ("method", "provided", "lacking"), RIGHT, ids=[f"{row[0]}-{_kind(row[1])}" for row in RIGHT]
)
def test_right_functions_are_right(method, provided, lacking, judged):
    found = judged(method, provided)
    assert found.verdict == verdict.RIGHT, summary_of(found)
    assert not wrong(found) and not_right(found) == dict.fromkeys(lacking, verdict.NOT_COVERED), summary_of(found)


@pytest.mark.parametrize(
    ("method", "changed", "named", "others"), WRONG,
    ids=[f"{row[0]}-{_kind(row[1])}" for row in WRONG],
)
def test_the_ill_is_named(method, changed, named, others, judged):
    provided, lacking = next(row[1:] for row in RIGHT if row[0] == method and row[1].keys() >= changed.keys())
    found = judged(method, {**provided, **changed})
    assert wrong(found) == set(named.split()), summary_of(found)
    assert not_right(found) == dict.fromkeys(lacking, verdict.NOT_COVERED) | others, summary_of(found)
    assert found.verdict == verdict.WRONG
