"""The table of pairs found by length and depth: its questions, the share of tokens of each method, and its plot."""

from __future__ import annotations

import hashlib
import json
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from markupsafe import escape

from kvtwin.conformance.harness.page import details, page
from kvtwin.conformance.lab.report_sample import sample
from kvtwin.fixtures import needle, needle_plot
from kvtwin.fixtures.accuracy import FULL
from kvtwin.fixtures.load import load_bytes, load_model
from kvtwin.fixtures.needle import Plan
from kvtwin.fixtures.stored import stored_result

pytestmark = [pytest.mark.whole, pytest.mark.first]

SVG = "{http://www.w3.org/2000/svg}"
METHODS = {FULL, "snapkv", "keydiff", "streaming_llm", needle.REROTATED, "synckv, stride 5", "synckv, stride 1"}


@dataclass(frozen=True)
class Tiny(Plan):
    lengths: tuple[int, ...] = (72, 96)
    depths: tuple[float, ...] = (0.0, 1.0)
    questions: int = 1
    block_size: int = 48


# Questions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [256, 2048])
def test_needle_is_at_its_depth(length: int) -> None:
    """The question repeats the pair's key, which occurs nowhere else. The answer is its value. The pair is between
    complete lines."""
    plan = Plan(questions=4)
    asked = needle.questions(plan, length)
    assert [one.task for one in asked] == [f"{depth:.2f}" for depth in plan.depths for _ in range(4)]
    for one in asked:
        text, ((start, stop),) = one.document.tokens.tobytes(), one.answers
        assert (len(text), start, stop) == (length, length - 3, length)
        context, question = text[: plan.prompt(length)], text[plan.prompt(length) : start]
        assert question[:1] + question[-1:] == b"?="
        assert context.count(question[1:]) == 1
        at = context.index(question[1:])
        assert context[at : at + 8] == question[1:] + text[start:] + b"\n"
        assert context[at - 1 :][:1] == context[-1:] == b"\n"
        # The pair is between two lines: pairs have 8 bytes, lines of text up to 30, and padding fills up the last one.
        assert abs(at - float(one.task) * (plan.prompt(length) - 8)) <= 30 + 8


def test_the_same_plan_asks_the_same() -> None:
    one, other, third = (needle.questions(Plan(questions=2, seed=seed), 256) for seed in (0, 0, 1))
    assert [a.document.tokens.tobytes() for a in one] == [b.document.tokens.tobytes() for b in other]
    assert one[0].document.tokens.tobytes() != third[0].document.tokens.tobytes()
    assert len({a.document.tokens.tobytes() for a in one}) == len(one)


# Shares of tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", Plan.lengths)
@pytest.mark.parametrize("stride", Plan.strides)
def test_synckv_has_the_same_share_as_the_others(length: int, stride: int) -> None:
    """The representative has all tokens, and the others have the chosen ones and a stride of new ones. Together this is
    at most half of the tokens of four heads, and less only by rounding down."""
    config = needle.synckv_config(Plan(), length, 4, stride)
    held = length + 3 * (config.k + stride)
    assert Fraction(2 * length - 3, 4 * length) <= Fraction(held, 4 * length) <= Fraction(1, 2)
    with pytest.raises(ValueError, match="k must be at least 1"):
        needle.synckv_config(Plan(share=4), length, 4, stride)


@pytest.mark.slow
def test_clusters_are_of_each_layer() -> None:
    found = needle.clusters_of(load_model(torch.float32, "cpu"), Tiny(), 72)
    assert [(len(one.labels), len(one.representatives)) for one in found] == [(4, 1)] * 8


@pytest.mark.slow
def test_every_cell_is_counted_and_shown() -> None:
    tiny = needle.evaluate(Tiny())          # references on the CPU: on a GPU this takes minutes and judges no kernel
    cells = {(cell["method"], cell["length"], cell["depth"]): cell for cell in tiny["cells"]}
    assert set(cells) == {(method, length, depth) for method in METHODS for length in (72, 96) for depth in (0.0, 1.0)}
    assert len(cells) == len(tiny["cells"])
    for (method, length, _), cell in cells.items():
        assert cell["questions"] == 1
        assert cell["accuracy"] == cell["right"]
        assert cell["resident"] == 1 if method == FULL else 0.5 - 3 / (4 * length) <= cell["resident"] <= 0.5
    assert json.loads(json.dumps(tiny)) == tiny
    check_shown(tiny)


# Table and heatmap ---------------------------------------------------------------------------------------------------


def check_shown(result: dict[str, Any]) -> None:
    """Assert that table and heatmap have the numbers of the JSON, and that the heatmap is well-formed and
    self-contained."""
    lines = needle_plot.table(result).split("\n\n")[0].splitlines()[1:]
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    text = needle_plot.svg(result)
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert not {"href", "src", "script"} & set(text.replace("=", " ").replace("<", " ").split())
    groups = [group for group in root.iter(f"{SVG}g") if group.get("class") == "value"]
    values = iter([mark.text for group in groups for mark in group])
    plan = result["plan"]
    for method in needle_plot.methods(result):
        for length in plan["lengths"]:
            found = [cell["accuracy"] for cell in needle_plot.at(result, method, length)]
            name, _, shown = lines.pop(0).rpartition(f"  {length}  ")
            assert name.strip() == method
            assert [int(cell) for cell in shown.replace("%", "").split()][1:] == [round(100 * one) for one in found]
            assert [next(values) for _ in found] == [f"{100 * one:.0f}" for one in found]
    assert lines == []
    assert next(values, None) is None
    shown_texts = {mark.text for mark in root.iter(f"{SVG}text")}
    assert {*needle_plot.methods(result), *map(str, plan["lengths"])} <= shown_texts
    assert [group.get("class") for group in root.iter(f"{SVG}g")].count("cell") == len(result["cells"])


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    found = stored_result("needle")
    assert found is not None, "fixtures/needle.json and .svg: see python -m kvtwin.fixtures.needle --help"
    return found[0]


def test_the_stored_result_is_whole_and_is_what_is_drawn(stored: dict[str, Any]) -> None:
    """It agrees with the plan, except for the number of questions and the lengths, which the result itself states."""
    plan, asked = stored["plan"], ("lengths", "questions")
    assert plan == json.loads(json.dumps(asdict(Plan()))) | {name: plan[name] for name in asked}
    places = {(cell["method"], cell["length"], cell["depth"]) for cell in stored["cells"]}
    assert len(places) == len(stored["cells"])
    assert places == {(name, at, depth) for name in METHODS for at in plan["lengths"] for depth in plan["depths"]}
    assert stored["schema_version"] == needle_plot.SCHEMA_VERSION
    assert stored["model_sha256"] == hashlib.sha256(load_bytes("model/model.safetensors")).hexdigest()
    for cell in stored["cells"]:
        assert cell["questions"] == plan["questions"] >= 8
        assert cell["accuracy"] == cell["right"] / cell["questions"]
    check_shown(stored)
    assert stored_result("needle") == (stored, needle_plot.svg(stored))


def test_the_report_has_the_stored_heatmap_and_table(stored: dict[str, Any]) -> None:
    shown = page(sample([], implementation=None))
    assert stored_result("needle")[1] in shown
    for row in needle_plot.cells(stored):
        assert all(escape(cell) in shown for cell in row)


def test_a_tree_without_a_stored_result_has_no_part_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(details, "stored_result", lambda name: None)
    assert details.stored_results() == []


# The command line ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--questions", "0"], ["--length", "20"], ["--length", "5000"]])
def test_bad_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        needle.main(arguments)
    assert error.value.code == 2
