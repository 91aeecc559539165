"""Each method with a paper names its readings; their options exist; the docs show them; broken files are refused."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

from kvtwin.conformance import discovery, readings
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.lab.docs_source import docs_module
from kvtwin.conformance.ledger import LedgerError

ONE = """
[[reading]]
id = "shared-slot"
where = "section 3.4"
quote = "the words | of the paper"
ours = "one\\n  slot"
others = "one per head"
option = ["per_head=True", 'quantize(scale_rule="mse", group=...)']
"""
TWO = """
[[reading]]
id = "ties"
where = "eq. 6"
lost = "the order"
ours = "the lowest slot"
others = "any slot"
option = ""
why = "the twins must agree"
"""
READINGS = readings.load()
OPTIONS = [(one, option) for one in READINGS for option in one.options]


@pytest.fixture
def folder(tmp_path):
    def make(toml: str = ONE + TWO, place: str = "longflow"):
        tmp_path.joinpath(place).mkdir(parents=True, exist_ok=True)
        tmp_path.joinpath(place, "readings.toml").write_text(toml)
        return tmp_path

    return make


def test_every_method_with_a_paper_names_its_readings():
    """And no other. No file has readings of an unknown method."""
    named = {one.method for one in READINGS}
    assert named == {pair.name for pair in discovery.built_in() if pair.has_paper}


@pytest.mark.parametrize(("one", "option"), OPTIONS, ids=[f"{one.method}-{option}" for one, option in OPTIONS])
def test_every_option_exists_and_is_not_the_default(one, option):
    (pair,) = (pair for pair in discovery.built_in() if pair.name == one.method)
    name, given = readings.arguments(option)
    if name:
        assert name in pair.exports, f"{one.method} exports no {name}"
        assert set(given) <= set(inspect.signature(getattr(pair.reference, name)).parameters)
        return
    assert pair.config is not None
    assert set(given) <= {field.name for field in dataclasses.fields(pair.config)}
    needed = checkers.required(one.method) | checkers.with_budget(one.method, 1024)  # enough tokens for every option
    default, other = pair.config(**needed), pair.config(**needed | given)
    assert all(getattr(other, name) != getattr(default, name) for name in given), f"{option} is the default"


def test_the_docs_show_the_readings_of_each_method():
    generate = docs_module("generate", "its pages show the readings")
    for pair in discovery.built_in():
        own = [one for one in READINGS if one.method == pair.name]
        shown = "".join(generate.methods.readings(pair.name))
        assert (readings.table(own) in shown) if own else not shown
        assert len(re.findall(r"^\|", shown, flags=re.MULTILINE)) == (len(own) + 2 if own else 0)


def test_load(folder):
    first, second = readings.load(folder())
    assert (first.id, first.method, first.where, first.ours) == ("shared-slot", "longflow", "section 3.4", "one slot")
    assert first.quotes == ("the words | of the paper",)
    assert first.options == ("per_head=True", 'quantize(scale_rule="mse", group=...)')
    assert (second.quotes, second.lost, second.options) == ((), "the order", ())
    assert second.why == "the twins must agree"


def test_methods_may_use_the_same_id(folder):
    folder(ONE, "longflow")
    assert [one.method for one in readings.load(folder(ONE, "keydiff"))] == ["keydiff", "longflow"]


def test_only_baselines_may_have_no_quote(folder):
    toml = TWO.replace('lost = "the order"', "")
    (one,) = readings.load(folder(toml, "tova"))
    assert (one.method, one.quotes, one.lost) == ("tova", (), "")
    with pytest.raises(LedgerError, match="only a baseline may have neither"):
        readings.load(folder(toml))


def test_arguments():
    assert readings.arguments("per_head=True") == ("", {"per_head": True})
    assert readings.arguments('calibrate(layers=8, grid=...)') == ("calibrate", {"layers": 8, "grid": ...})


def test_table(folder):
    """No cell breaks the table."""
    head, _, first, second = readings.table(readings.load(folder())).splitlines()
    assert head == "| where | the paper | here | other readings | option |"
    assert first == (
        "| section 3.4 | \u201cthe words \\| of the paper\u201d | one slot | one per head "
        '| `per_head=True`, or `quantize(scale_rule="mse", group=...)` |'
    )
    assert second == "| eq. 6 | (Lost: the order) | the lowest slot | any slot | None: the twins must agree |"


@pytest.mark.parametrize(
    ("toml", "complaint"),
    [
        (ONE + ONE, "longflow/readings.toml: ids used twice: shared-slot"),
        (ONE.replace("shared-slot", "Shared slot"), "an id looks like"),
        (ONE.replace('where = "section 3.4"', ""), "shared-slot: where must be a string, got None"),
        (ONE.replace('others = "one per head"', 'others = " "'), "others is empty"),
        (ONE + 'lost = "a number"', "either 'quote' or 'lost'"),
        (ONE.replace("quote", "words"), "unknown keys: words"),
        (ONE.replace('"the words | of the paper"', "[]"), "quote must be a string or a list"),
        (ONE + 'why = "none"', "'why' is for a reading without an option"),
        (TWO.replace('why = "the twins must agree"', ""), "'why' is for a reading without an option"),
        (TWO.replace('option = ""', ""), "option must be a string or a list of strings, got None"),
        (ONE.replace("per_head=True", "per_head"), "option must be like 'name=value', got 'per_head'"),
        (ONE.replace("per_head=True", "per_head=yes"), "option must be like 'name=value'"),
        (ONE.replace("per_head=True", "per_head="), "option must be like 'name=value'"),
        (ONE.replace("per_head=True", "quantize()"), "option must be like 'name=value'"),
        (ONE.replace("per_head=True", "**more"), "option must be like 'name=value'"),
        (ONE + "[other]\nx = 1", "expected .*reading.* tables only, found reading, other"),
        ("", "found nothing"),
        ("[[reading]", "longflow/readings.toml: "),
    ],
)  # fmt: skip
def test_a_broken_file_is_refused(folder, toml, complaint):
    with pytest.raises(LedgerError, match=complaint):
        readings.load(folder(toml))
