"""The words of messages in verdicts: no line is cut in the middle of a sentence, and no text is pytest's."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from hypothesis import errors

from kvtwin.conformance.harness import findings, summary, wording
from kvtwin.conformance.judge.mismatch import Mismatch
from kvtwin.conformance.lab.implementations import run

HERE = Path(__file__).parent


@pytest.mark.parametrize(("message", "line"), [
    ("key differs at frame 2:\ntensor([1])", "key differs at frame 2"),
    ("\n  the second line\nthe third", "the second line"),
    (" ", ""), (None, ""), (ValueError("a\nb"), "a"),
    ("x" * 400, "x" * 297 + "..."),
])
def test_the_first_line(message, line):
    assert wording.first_line(message) == line


def test_the_name_of_a_field_is_said_once():
    assert wording.without("slot: row (0,)", "slot") == "row (0,)"
    assert wording.without("slots: 3", "slot") == wording.without("slots: 3", None) == "slots: 3"


def compares():
    found = [3]
    assert len(
        found
    ) == 4


def explains():
    assert not HERE, f"rows differ:\n{3}"


def raises_nothing():
    with pytest.raises(ValueError):
        pass


def raises_nothing_of_several():
    with pytest.raises((ValueError, TypeError)):
        pass


def has_another_message():
    with pytest.raises(ValueError, match="budget"):
        raise ValueError("no")


def fails():
    pytest.fail("said so")


def judges():
    raise Mismatch("slot: row 0\n  more")


def is_flaky():
    raise errors.Flaky("Inconsistent data generation!")


def is_rejected():
    raise errors.UnsatisfiedAssumption("reject() in _refused")


def draws_nothing():
    raise errors.Unsatisfiable("Unable to satisfy assumptions")


def calls_theirs():
    raise KeyError("D")


@pytest.mark.parametrize(("test", "says"), [
    (compares, "expected len( found ) == 4\n  got 1 == 4"),
    (explains, "rows differ:\n  3"),
    (raises_nothing, "expected ValueError, and nothing was raised"),
    (raises_nothing_of_several, "expected any of (ValueError, TypeError), and nothing was raised"),
    (has_another_message, "expected an error whose message matches 'budget', got 'no'"),
    (fails, "said so"), (is_flaky, wording.DIFFERS), (is_rejected, wording.DIFFERS),
    (draws_nothing, "no case of this test could be drawn"),
    (judges, "slot: row 0\n  more"),
    (calls_theirs, f"KeyError: 'D'\n  raised in {__file__}, line "),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_message_is_not_pytests(test, says):
    with pytest.raises(BaseException) as caught:
        test()
    said = wording.plainly(caught.value, HERE)
    assert said == says or (says.endswith(" ") and said.startswith(says))
    assert not run.FOREIGN.search(said.removesuffix(__file__))


def test_what_a_test_found_comes_before_what_hypothesis_says_of_it():
    mismatch = Mismatch("slot: row 0")
    group = errors.FlakyFailure("flaky", [errors.UnsatisfiedAssumption("reject()"), mismatch])
    assert findings._unwrapped(group) is mismatch
    assert wording.differs(findings._unwrapped(errors.FlakyFailure("flaky", [errors.UnsatisfiedAssumption("x")])))
    assert not wording.differs(mismatch)


def test_an_assertion_of_the_implementation_has_its_place():
    with pytest.raises(AssertionError) as caught:
        compares()
    assert wording.plainly(caught.value, HERE / "tests").startswith("AssertionError: assert 1 == 4\n  raised in ")


def test_the_heading_names_the_folder_of_a_package_without_init(tmp_path, monkeypatch):
    (tmp_path / "no_init_here").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert summary.under_test("no_init_here") == f"no_init_here ({tmp_path / 'no_init_here'})"
    assert summary.under_test("json").startswith("json (/")
    monkeypatch.setitem(sys.modules, "made_up", types.ModuleType("made_up"))
    assert summary.under_test("made_up") == "made_up (no file)"
