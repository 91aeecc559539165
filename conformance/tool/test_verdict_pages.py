"""The verdict on functions over pages and over FP8: the wrong property, and no other; and what it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvtwin.conformance.harness import verdict
from kvtwin.conformance.lab.implementations import longflow, longflow_pages
from kvtwin.conformance.lab.implementations.run import not_right, summary_of, verdict_of, wrong
from kvtwin.reference import keydiff

pytestmark = pytest.mark.slow

#: Verdicts without "bad_input", which the implementations do not check, and "traces", which are not in pages.
PROPERTIES = (
    "accuracy", "decisions", "ties", "repeatability", "independence", "free_slots", "extreme_numbers", "layouts",
)


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that returns the verdict on some functions of a method."""

    def run(
        keyword: str = "", declared: dict[str, Any] | None = None, method: str = "longflow", **functions: Any
    ) -> verdict.MethodVerdict:
        return verdict_of(
            method, functions, declared or {}, keyword, tmp_path, monkeypatch, "suite/test_properties.py"
        )

    return run


#: Of each implementation the wrong properties.
OVER_PAGES: dict[type, str] = {
    longflow_pages.LastPageIsNotRead: "accuracy",
    longflow_pages.LastPageIsReadToItsEnd: "free_slots",
    longflow_pages.FreeSlotsInPagesAreRead: "free_slots",
    longflow_pages.FirstRowsPages: "independence",
    longflow_pages.PagesInOrder: "accuracy independence",  # it reads pages of other rows
    longflow_pages.RightForContiguousPages: "layouts",
    longflow_pages.PagesAreChanged: "repeatability",
    longflow_pages.NoValueScale: "accuracy",
    longflow_pages.KeyScaleForValues: "accuracy",
    longflow_pages.ScaleOfTheFirstHead: "independence",
}
OVER_FP8 = (longflow_pages.NoKeyScale, longflow_pages.ScaledNumbersAreRounded, longflow_pages.E5m2IsReadAsE4m3)


@pytest.mark.parametrize("implementation", OVER_PAGES, ids=lambda implementation: implementation.__name__)
def test_the_faulty_property_over_pages_is_named(implementation, judged):
    found = judged("paged", paged_decode_attention=implementation())
    named = set(OVER_PAGES[implementation].split())
    assert wrong(found) == named, summary_of(found)
    # Of several rows or heads, as most cases have, nothing else can be right, nor of a call that changes its pages.
    assert named & {"independence", "repeatability"} or not not_right(found), summary_of(found)


@pytest.mark.parametrize("implementation", OVER_FP8, ids=lambda implementation: implementation.__name__)
def test_numbers_over_fp8_are_judged(implementation, judged):
    """All that is wrong is wrong over FP8 alone."""
    found = judged(decode_attention=implementation())
    assert wrong(found) == {"accuracy"}, summary_of(found)
    assert {one["subject"] for one in found.properties["accuracy"].findings} == {"longflow.decode_attention[fp8]"}


@pytest.mark.parametrize("declared", [{}, {"page_sizes": (16,), "fp8": ("float8_e4m3fn",), "dtypes": ("bfloat16",)}])
def test_right_functions_over_pages_and_fp8_are_right(declared, judged):
    over_pages = longflow_pages.OnlyPagesOf16 if declared else longflow_pages.Paged
    found = judged(
        declared=declared, decode_attention=longflow_pages.Scaled(), paged_decode_attention=over_pages()
    )
    verdicts = {name: found.properties[name].verdict for name in PROPERTIES}
    assert verdicts == dict.fromkeys(PROPERTIES, verdict.RIGHT), summary_of(found)
    assert found.judged == [
        "decode_attention", "decode_attention[fp8]", "paged_decode_attention", "paged_decode_attention[fp8]"
    ]
    assert found.not_provided == ["not provided: theirs.longflow.LongFlowState",
                                  "not provided: theirs.longflow.compress_prefill"]
    assert not found.refused


def test_pages_and_fp8_need_not_be_provided(judged):
    found = judged(decode_attention=longflow.Fused())  # **options say nothing about FP8
    assert found.verdict == verdict.RIGHT
    assert found.judged == ["decode_attention"]
    assert [one.rpartition(".")[2] for one in found.not_provided] == [
        "LongFlowState", "compress_prefill", "decode_attention over FP8", "paged_decode_attention"
    ]
    found = judged(paged_decode_attention=longflow_pages.PagedWithoutScales(), declared={"fp8": ()})
    assert found.verdict == verdict.RIGHT and found.judged == ["paged_decode_attention"], summary_of(found)
    assert "fp8 = none" in found.outside


def no_fp8(key: Any, **options: Any) -> Any:
    if key.dtype.itemsize == 1:
        raise TypeError("key.dtype must be float32, float16 or bfloat16")
    return keydiff.score(key, **options)


def score_of_codes(key: Any, **options: Any) -> Any:
    return keydiff.score(key.view(torch.uint8).float() if key.dtype.itemsize == 1 else key, **options)


def paged_score_of_codes(pages: Any, occupied: Any, **options: Any) -> Any:
    key = pages.key_cache
    key = key.view(torch.uint8).float() if key.dtype.itemsize == 1 else key
    return keydiff.paged_score(pages._replace(key_cache=key, value_cache=key), occupied, **options)


def test_keydiff_need_not_take_fp8(judged):
    """It has no parameters that say so: TypeError does."""
    found = judged(method="keydiff", score=no_fp8)
    assert found.judged == ["score"] and not wrong(found), summary_of(found)
    assert "not provided: theirs.keydiff.score over FP8" in found.not_provided


@pytest.mark.parametrize(("name", "function"), [("score", score_of_codes), ("paged_score", paged_score_of_codes)])
def test_keydiff_over_fp8_is_judged(name, function, judged):
    found = judged(method="keydiff", **{name: function})
    assert wrong(found) == {"accuracy"}, summary_of(found)
    assert {one["subject"] for one in found.properties["accuracy"].findings} == {f"keydiff.{name}[fp8]"}
