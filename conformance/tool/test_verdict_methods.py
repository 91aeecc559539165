"""The verdict on small implementations of other methods than LongFlow, right and wrong, and on kvtwin's reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtwin.conformance import discovery
from kvtwin.conformance.harness import verdict
from kvtwin.conformance.lab.implementations import others
from kvtwin.conformance.lab.implementations.run import not_right, summary_of, verdict_of, wrong

pytestmark = pytest.mark.slow

PROPERTIES = "suite/test_properties.py"
#: Method -> what it provides, right, and the properties that are not judged, with the reason.
RIGHT: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "keydiff": ({"evict": others.Evict()}, {}),
    "snapkv": ({"compress": others.Compress()}, {}),
    "streaming_llm": ({"keep": others.Keep()}, {"accuracy": verdict.NOT_COVERED}),  # it returns no numbers
}
#: Method -> what it provides, the properties that are wrong, and the others that are not right, with the reason.
WRONG: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {
    # The cases with equal keys have other keys, too, of which the wrong ones are evicted.
    "keydiff": ({"evict": others.LosesTheSign()}, "decisions", {"ties": verdict.NOT_COVERED}),
    # In two cases of independence no plainer case shows the wrong choice, so they count as a cause of their own.
    "snapkv": ({"compress": others.PoolsTheWindow()}, "decisions independence", {"ties": verdict.NOT_COVERED}),
    "h2o": ({"H2OState": others.SumsStayInSlots}, "accuracy", {"ties": verdict.NOT_COVERED}),
    # It returns no numbers. In the failing cases with free slots the tokens are in another order than their slots.
    "streaming_llm": ({"keep": others.SinksBySlot()}, "decisions", {
        "accuracy": verdict.NOT_COVERED, "free_slots": verdict.NOT_COVERED,
    }),
}
DECLARED: dict[str, dict[str, Any]] = {"keydiff": {"options": others.KEYDIFF}}
SEVEN = ("longflow", "keydiff", "thinkv", "snapkv", "h2o", "tova", "streaming_llm")
METHODS = [pair.name for pair in discovery.methods() if pair.name in SEVEN]
MATRIX_PRODUCTS = [name for name in ("longflow", "snapkv", "h2o", "tova") if name in METHODS]


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def judge(method: str, provided: dict[str, Any]) -> verdict.MethodVerdict:
        return verdict_of(method, provided, DECLARED.get(method, {}), method, tmp_path, monkeypatch, PROPERTIES)

    return judge


@pytest.mark.parametrize("method", RIGHT)
def test_a_right_function_is_right(method, judged):
    provided, lacking = RIGHT[method]
    found = judged(method, provided)
    assert found.verdict == verdict.RIGHT, summary_of(found)
    assert not wrong(found) and not_right(found) == lacking, summary_of(found)


@pytest.mark.parametrize("method", WRONG)
def test_the_ill_is_named(method, judged):
    provided, named, lacking = WRONG[method]
    found = judged(method, provided)
    assert wrong(found) == set(named.split()), summary_of(found)
    assert not_right(found) == lacking, summary_of(found)


def test_a_function_that_clears_the_callers_padding_is_wrong_about_free_slots(judged):
    found = judged("snapkv", {"compress": others.ClearsPadding()})
    assert wrong(found) == {"free_slots"}, summary_of(found)
    assert not not_right(found), summary_of(found)
    first = found.properties["free_slots"].findings[0]
    assert first["message"].startswith("key after the call (an input): ") and "kvtwin replay" in first["replay"]


@pytest.mark.parametrize("method", METHODS)
def test_the_reference_passes_as_an_implementation(method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All functions and states, with every property."""
    pair = next(pair for pair in discovery.methods() if pair.name == method)
    provided = {name: getattr(pair.reference, name) for name in pair.exports}
    # Attention of several queries is a matrix product, which may round equal keys differently.
    declared = {"validates_arguments": True} | ({"ties": "any"} if method in MATRIX_PRODUCTS else {})
    found = verdict_of(method, provided, declared, method, tmp_path, monkeypatch)
    assert found.verdict == verdict.RIGHT, summary_of(found)
    others = {name: one.verdict for name, one in found.properties.items() if one.verdict != verdict.RIGHT}
    assert others == ({"ties": verdict.CONVENTION} if method in MATRIX_PRODUCTS else {}), summary_of(found)
