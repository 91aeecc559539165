"""Each test of a claim has a change that it must detect. ``tox -e mutants -- claims`` makes the changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvtwin.conformance.lab.mutation import claim_lane, claim_mutants, mutate
from kvtwin.conformance.lab.mutation.claim_lane import Case
from kvtwin.conformance.lab.mutation.claim_mutants import Row
from kvtwin.conformance.lab.mutation.mutants import MutantError

ROWS, KNOWN = claim_mutants.load(), claim_mutants.known_tests()


def test_each_test_of_a_claim_has_one_change():
    assert claim_mutants.without(ROWS, KNOWN) == [], "see docs/contributing/break-things.md"
    assert claim_mutants.problems(ROWS, KNOWN) == []
    assert len({row.mutant.name for row in ROWS}) == len(ROWS), "rows with one change are one row"


def test_each_change_applies_once():
    tree = mutate.here()
    for row in ROWS:
        compile(row.mutant.applied_to(tree.source(row.file)), row.file, "exec")


def test_the_stored_results_are_of_these_changes():
    stored = claim_lane.load()
    assert set(stored) == {row.mutant.name for row in ROWS}, "run: tox -e mutants -- claims"
    for row in ROWS:
        found = stored[row.mutant.name]
        assert (found["tests"], found["kind"]) == (len(row.tests), claim_mutants.kind(row)), row
        assert "undetected" not in found, row


# The rules, on a toy --------------------------------------------------------------------------------------------------

TOY = '''
SIZE, FIGURES = 4, """
one 1.5
two 2.5
"""


def half(x):
    return x / 2


def test_half():
    assert half(SIZE) == 2
    assert 1 + 1 == 2
'''


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    (tmp_path / "conformance" / "toy").mkdir(parents=True)
    (tmp_path / "conformance" / "toy" / "test_toy.py").write_text(TOY)
    return tmp_path


def row(old: str, new: str) -> Row:
    return Row("toy", "conformance/toy/test_toy.py", old, new, ("toy/test_toy.py::test_half",))


@pytest.mark.parametrize(("old", "new", "inside", "kind"), [
    ("x / 2", "x * 2", False, "model"),
    ("SIZE, FIGURES = 4", "SIZE, FIGURES = 6", False, "figures"),
    ("two 2.5", "two 3.5", False, "figures"),
    ("assert half(SIZE) == 2", "assert half(SIZE) == 3", True, "model"),
    ("assert 1 + 1 == 2", "assert 1 + 1 == 3", True, "model"),
])
def test_a_change_of_what_a_test_expects_does_not_count(old, new, inside, kind, toy):
    assert claim_mutants.in_tests(row(old, new), toy) is inside
    assert claim_mutants.kind(row(old, new), toy) == kind


def test_a_row_twice_and_an_unknown_test_are_problems():
    first = ROWS[0]
    assert claim_mutants.problems([first, first], KNOWN) == [f"{test} is in 2 rows" for test in first.tests]
    unknown = replace(first, tests=("longflow/test_none.py::test_none",))
    assert claim_mutants.problems([unknown], KNOWN) == ["longflow/test_none.py::test_none is the test of no claim"]
    assert claim_mutants.without([], ["a"]) == ["a"]


def test_a_file_that_breaks_the_rules_is_refused(tmp_path):
    (tmp_path / claim_mutants.FILE).write_text('[[mutant]]\nfile = "a"\nold = "b"\nnew = "c"\n')
    with pytest.raises(MutantError, match=r"mutant 1: expected file, new, old, tests"):
        claim_mutants.load(tmp_path)


@pytest.mark.parametrize(("result", "proven"), [
    ({"sources": "s", "tests": 1}, True), ({"sources": "other", "tests": 1}, False), ({}, False),
    ({"sources": "s", "tests": 2}, False), ({"sources": "s", "tests": 1, "undetected": ["t"]}, False),
])
def test_a_result_proves_one_change_in_one_state_of_the_sources(result, proven):
    assert Case(row("a", "b"), "toy-1", "s").is_proven({"toy-1": result}) is proven


@pytest.mark.parametrize(("result", "none", "code"), [
    ({"sources": "s", "tests": 1}, [], 0), ({"sources": "s", "tests": 1}, ["t"], 1),
    ({"sources": "s", "tests": 1, "undetected": ["t"], "detail": "passes"}, [], 1),
])
def test_the_exit_code_says_whether_all_tests_detect_their_change(result, none, code, capsys):
    assert claim_lane._report([Case(row("a", "b"), "toy-1", "s")], {"toy-1": result}, none) == code
    assert f"{len(none)} have none" in capsys.readouterr().out
