"""The ledger and the tests name each other, the docs show the ledger, and an invalid ledger is refused."""

from __future__ import annotations

import re

import pytest

from kvtwin.conformance import discovery, ledger
from kvtwin.conformance.meta.docs_source import docs_module

CLAIM = """
[[claim]]
id = "LF-3"
where = "eq. 12"
statement = "a | b"
assumptions = ""
verdict = "holds"
test = "longflow/test_longflow_claims.py::test_effect"
"""
FALSE = """
[[claim]]
id = "LF-4b"
where = "eq. 13"
statement = "two\\n  lines"
assumptions = "n >= 2"
verdict = "false"
corrected = "the opposite"
test = ["longflow/test_longflow_claims.py::test_bound", "longflow/test_longflow_claims.py::test_sharp"]
"""
TESTS = """
import pytest

@pytest.mark.claim("LF-3")
def test_effect(): pass

@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.claim("LF-4b"))])
def test_bound(x): pass

@pytest.mark.kind("claims")
@pytest.mark.claim("LF-4b")
def test_sharp(): pass

def test_other(): pass
"""


@pytest.fixture
def folder(tmp_path):
    def make(toml: str = CLAIM + FALSE, tests: str = TESTS):
        tmp_path.joinpath("longflow").mkdir(exist_ok=True)
        tmp_path.joinpath("longflow/claims.toml").write_text(toml)
        tmp_path.joinpath("longflow/test_longflow_claims.py").write_text(tests)
        return tmp_path

    return make


def test_every_claim_has_its_tests_and_every_marker_its_claim():
    assert ledger.problems(ledger.load(), ledger.marks()) == []


def test_every_method_has_a_ledger():
    """Every method of the five papers. The papers of the baselines, which these compare with, are not examined."""
    own = {pair.name for pair in discovery.methods() if not pair.path.startswith("baselines.")}
    assert own <= {claim.method for claim in ledger.load()}
    assert len(own) >= 2


def test_the_docs_show_the_ledger():
    """The page of all claims has the whole table. The page of a method has only the claims of that method."""
    generate = docs_module("generate", "its pages show the claims")
    claims = ledger.load()
    assert ledger.table(claims) in generate.results.claims_page()
    for method in {claim.method for claim in claims}:
        own = [claim for claim in claims if claim.method == method]
        shown = generate.methods.claims(method)
        assert shown.startswith(ledger.table(own) + "\n")
        assert not any(f"| {claim.id} |" in shown for claim in claims if claim.method != method)


def test_load(folder):
    first, second = ledger.load(folder())
    assert (first.id, first.method, first.verdict, first.corrected) == ("LF-3", "longflow", "holds", "")
    assert first.tests == ("longflow/test_longflow_claims.py::test_effect",)
    assert second.statement == "two lines"
    assert len(second.tests) == 2


def test_ledger_and_markers_that_agree(folder):
    place = folder()
    assert ledger.problems(ledger.load(place), ledger.marks(place)) == []


@pytest.mark.parametrize(
    ("toml", "tests", "problem"),
    [
        (CLAIM, TESTS, "test_bound is marked with LF-4b, which is in no ledger"),
        (CLAIM + FALSE, TESTS.replace('@pytest.mark.claim("LF-3")', ""), "LF-3: its test .*_effect is not marked with"),
        (CLAIM.replace("_effect", "_gone") + FALSE, TESTS, r"LF-3: its test .*test_gone is not marked with it"),
        (CLAIM + FALSE, TESTS.replace("def test_other", '@pytest.mark.claim("LF-3")\ndef test_other'),
         "LF-3: .*::test_other is marked with it, but its 'test' does not say so"),
    ],
)  # fmt: skip
def test_ledger_and_markers_that_disagree(folder, toml, tests, problem):
    place = folder(toml, tests)
    found = ledger.problems(ledger.load(place), ledger.marks(place))
    assert any(re.search(problem, line) for line in found), found


@pytest.mark.parametrize(
    ("toml", "complaint"),
    [
        (CLAIM + CLAIM, "ids used twice: LF-3"),
        (CLAIM.replace("LF-3", "LF3"), "an id looks like"),
        (CLAIM.replace('"holds"', '"true"'), "verdict 'true' is none of holds, holds-if, false, inconsistent"),
        (CLAIM.replace('"holds"', '"false"'), "says in 'corrected' what is true"),
        (CLAIM.replace('where = "eq. 12"', ""), "where must be a string, got None"),
        (CLAIM.replace('"eq. 12"', "12"), "where must be a string, got 12"),
        (CLAIM.replace('"a | b"', '" "'), "statement is empty"),
        (CLAIM + 'note = "x"', "unknown keys: note"),
        (CLAIM.replace("::test_effect", ""), "test must be"),
        (CLAIM.replace('test = "longflow/test_longflow_claims.py::test_effect"', "test = []"), "test must be"),
        (CLAIM + '[other]\nx = 1', "expected .*claim.* tables only"),
        ("", "found nothing"),
        ("[[claim]", "longflow/claims.toml: "),
    ],
)  # fmt: skip
def test_a_broken_ledger_is_refused(folder, toml, complaint):
    with pytest.raises(ledger.LedgerError, match=complaint):
        ledger.load(folder(toml))


def test_table(folder):
    """There is one table per method with one row per claim, and no cell can break the table."""
    made = ledger.table(ledger.load(folder()))
    assert made.startswith("**longflow**, 2 claims: 1 hold, 1 are false.\n")
    assert "| LF-3 | eq. 12 | a \\| b | holds |  |" in made
    assert "| LF-4b | eq. 13 | two lines | false | the opposite |" in made
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 6 for line in made.splitlines()[2:])
    assert ledger.table([]) == ""


def test_main_prints_the_table(capsys):
    assert ledger.main([]) == 0
    assert capsys.readouterr().out == ledger.table(ledger.load()) + "\n"


def test_main_says_which_ledger_is_broken(folder, monkeypatch, capsys):
    place = folder(CLAIM + CLAIM)
    load = ledger.load
    monkeypatch.setattr(ledger, "load", lambda: load(place))
    assert ledger.main([]) == 1
    assert "ids used twice: LF-3" in capsys.readouterr().err
