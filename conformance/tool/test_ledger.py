"""The ledger and the tests name each other, the docs show the ledger, and an invalid ledger is refused."""

from __future__ import annotations

import re

import pytest

from kvtwin.conformance import discovery, ledger
from kvtwin.conformance.lab.docs_source import DOCS, docs_module

VERSION = """version = "arXiv 1"
code = "https://host/name, commit 0123"
"""
CLAIM = """
[[claim]]
id = "LF-3"
where = "eq. 12"
quote = "the words | of the paper"
statement = "a | b"
assumptions = ""
verdict = "holds"
test = "longflow/test_longflow_claims.py::test_effect"
"""
FALSE = """
[[claim]]
id = "LF-4b"
where = "eq. 13"
quote = ["some words", "and\\n  others"]
statement = "two\\n  lines"
assumptions = "n >= 2"
verdict = "false"
corrected = "the opposite"
defence = "it is a misprint"
test = ["longflow/test_longflow_claims.py::test_bound", "longflow/test_longflow_claims.py::test_sharp"]
"""
OURS = """
[[claim]]
id = "LF-5"
where = "eq. 13, corrected"
statement = "the opposite"
assumptions = "n >= 3"
verdict = "ours"
test = "longflow/test_longflow_claims.py::test_opposite"

[[omitted]]
where = "section 9"
quote = "fast | everywhere"
why = "not measured"
"""
MISPRINT = """
[[claim]]
id = "LF-6"
where = "eq. 14"
quote = "some words"
statement = "one index"
assumptions = ""
verdict = "misprint"
corrected = "another index"
released = "name/file.py has the other index"
test = "longflow/test_longflow_claims.py::test_index"
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
    def make(toml: str = CLAIM + FALSE, tests: str = TESTS, version: str = VERSION):
        tmp_path.joinpath("longflow").mkdir(exist_ok=True)
        tmp_path.joinpath("longflow/claims.toml").write_text(version + toml)
        tmp_path.joinpath("longflow/test_longflow_claims.py").write_text(tests)
        return tmp_path

    return make


def test_every_claim_has_its_tests_and_every_marker_its_claim():
    assert ledger.problems(ledger.load(), ledger.marks()) == []


def test_every_method_has_a_ledger():
    """Every method of the five papers. The papers of the baselines, which these compare with, are not examined."""
    own = {pair.name for pair in discovery.built_in() if not pair.path.startswith("baselines.")}
    assert own <= {claim.method for claim in ledger.load()}
    assert len(own) >= 2


def test_the_docs_show_the_ledger():
    """The page of all claims has the whole table. The page of a method has only the claims of that method."""
    generate = docs_module("generate", "its pages show the claims")
    claims, omitted = ledger.load(), ledger.omitted()
    judged = ledger.sources()
    page = generate.results.claims_page()
    assert generate.results.anchored(ledger.table(claims, omitted, judged)) in page
    assert all(f"| [{claim.id}]{{#{claim.id.lower()}}} |" in page for claim in claims), "links lead to the claims"
    for method in {claim.method for claim in claims}:
        own = [claim for claim in claims if claim.method == method]
        shown = generate.methods.claims(method)
        assert shown.startswith(ledger.table(own, [one for one in omitted if one.method == method], judged) + "\n")
        assert f"\nJudged: {judged[method].version}." in shown
        assert not any(f"| {claim.id} |" in shown for claim in claims if claim.method != method)


def test_the_page_for_users_names_every_claim_that_is_not_true():
    """docs/explanation/claims.md has every false and inconsistent claim among what does not hold, every misprint apart,
    and no other name."""
    docs_module("generate", "the page is one of them")
    sections = re.split(r"^## ", (DOCS / "explanation" / "claims.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    known = {claim.id for claim in ledger.load()}
    page = dict(section.split("\n", 1) for section in sections[1:])
    own, misprints = ({claim.method: set() for claim in ledger.load()} for _ in range(2))
    for claim in ledger.load():
        own[claim.method] |= {claim.id} if claim.verdict in ("false", "inconsistent") else set()
        misprints[claim.method] |= {claim.id} if claim.verdict == "misprint" else set()
    page = {name.lower().replace("-", "_"): text for name, text in page.items()}
    assert page.keys() == own.keys()
    for name, text in page.items():
        apart = re.findall(r"^\*\*Misprints\.\*\*.*?(?=\n\n|\Z)", text, flags=re.MULTILINE | re.DOTALL)
        before, after = re.sub(r"^\*\*Misprints\.\*\*.*?(?=\n\n|\Z)", "", text, flags=re.MULTILINE | re.DOTALL).split(
            "**What does not hold.**"
        )
        named = [set(re.findall(r"[A-Z]{2}-\d+[a-z]?", part)) for part in (before, after, "".join(apart))]
        assert set.union(*named) <= known
        assert not own[name] & named[0]
        assert own[name] <= named[1], name
        assert misprints[name] <= named[2] and not misprints[name] & (named[0] | named[1]), name


def test_load(folder):
    first, second = ledger.load(folder())
    assert (first.id, first.method, first.verdict, first.corrected) == ("LF-3", "longflow", "holds", "")
    assert first.tests == ("longflow/test_longflow_claims.py::test_effect",)
    assert first.quotes == ("the words | of the paper",)
    assert second.statement == "two lines"
    assert second.quotes == ("some words", "and others")
    assert second.defence == "it is a misprint"
    assert len(second.tests) == 2


def test_omissions_are_parsed(folder):
    (one,) = ledger.omitted(folder(CLAIM + OURS))
    assert (one.method, one.where, one.quote, one.why) == ("longflow", "section 9", "fast | everywhere", "not measured")
    assert ledger.omitted(folder(CLAIM)) == ()


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
        (CLAIM.replace('"holds"', '"true"'), "verdict 'true' is none of holds, holds-if, false, "),
        (CLAIM.replace('"holds"', '"false"'), "'false' needs 'corrected'"),
        (CLAIM.replace('"holds"', '"gap"'), "'gap' needs 'corrected'"),
        (CLAIM.replace('"holds"', '"misprint"'), "'misprint' needs 'corrected'"),
        (MISPRINT + 'defence = "it is a misprint"', "'defence' is for the verdicts false and inconsistent"),
        (MISPRINT.replace("name/file.py has", "it has"), "'released' must name the file"),
        (CLAIM.replace('"holds"', '"unproven"'), "'unproven' needs 'corrected'"),
        (FALSE.replace('"false"', '"holds"'), "'defence' is for the verdicts false and inconsistent"),
        (FALSE.replace('defence = "it is a misprint"', ""), "'defence' is for the verdicts false and inconsistent"),
        (CLAIM + 'lost = "the number"', "either 'quote' or 'lost'"),
        (CLAIM.replace('quote = "the words | of the paper"', ""), "either 'quote' or 'lost'"),
        (CLAIM.replace('"holds"', '"ours"'), "'ours' has neither"),
        (CLAIM.replace('"the words | of the paper"', "[]"), "quote must be a string or a list of strings"),
        (CLAIM.replace('"the words | of the paper"', '["a", " "]'), "quote must be a string or a list of strings"),
        (CLAIM.replace('where = "eq. 12"', ""), "where must be a string, got None"),
        (CLAIM.replace('"eq. 12"', "12"), "where must be a string, got 12"),
        (CLAIM.replace('"a | b"', '" "'), "statement is empty"),
        (CLAIM + 'note = "x"', "unknown keys: note"),
        (CLAIM.replace("::test_effect", ""), "test must be"),
        (CLAIM.replace('test = "longflow/test_longflow_claims.py::test_effect"', "test = []"), "test must be"),
        (CLAIM + '[other]\nx = 1', "expected .*claim.* tables only"),
        (OURS[OURS.index("[[omitted"):], "found version, code, omitted"),
        ("", "found version, code"),
        ("[[claim]", "longflow/claims.toml: "),
    ],
)  # fmt: skip
def test_a_broken_ledger_is_refused(folder, toml, complaint):
    with pytest.raises(ledger.LedgerError, match=complaint):
        ledger.load(folder(toml))


@pytest.mark.parametrize(
    ("version", "complaint"),
    [
        ("", "version must be a string, got None"),
        (VERSION.replace("arXiv 1", " "), "version is empty"),
        (VERSION.splitlines()[0] + "\n", "'released' needs 'code' at the top of the file: LF-6"),
    ],
)
def test_a_ledger_says_what_it_judges(folder, version, complaint):
    assert ledger.sources(folder(MISPRINT)) == {"longflow": ledger.Source("arXiv 1", "https://host/name, commit 0123")}
    with pytest.raises(ledger.LedgerError, match=complaint):
        ledger.load(folder(MISPRINT, version=version))


@pytest.mark.parametrize(
    ("toml", "complaint"),
    [
        (OURS.replace("quote", "words"), "omitted 1: unknown keys: words"),
        (OURS.replace('"fast | everywhere"', '""'), "omitted 1: quote is empty"),
        (OURS.replace('why = "not measured"', ""), "omitted 1: why must be a string, got None"),
    ],
)
def test_a_broken_omission_is_refused(folder, toml, complaint):
    with pytest.raises(ledger.LedgerError, match=complaint):
        ledger.omitted(folder(toml))


def test_table(folder):
    """The paper's claims, its misprints, our statements and what is left out are in tables of their own. No cell breaks
    its table."""
    place = folder(CLAIM + FALSE + MISPRINT + OURS)
    made = ledger.table(ledger.load(place), ledger.omitted(place), ledger.sources(place))
    assert made.startswith(
        "**longflow**, 2 claims: 1 hold, 1 are false.\n\n"
        "Judged: arXiv 1. Released code: https://host/name, commit 0123.\n"
    )
    assert "**longflow**, misprints, which are not counted as claims:" in made
    assert (
        "| LF-6 | eq. 14 | one index \u201csome words\u201d "
        "| another index As released: name/file.py has the other index |"
    ) in made
    assert "| LF-3 | eq. 12 | a \\| b \u201cthe words \\| of the paper\u201d | holds |  |" in made
    assert (
        "| LF-4b | eq. 13 | two lines \u201csome words\u201d \u201cand others\u201d | false "
        "| Assumed: n >= 2. the opposite In its defence: it is a misprint |"
    ) in made
    assert "**longflow**, 1 statements of ours, which correct or complete the paper's:" in made
    assert "| LF-5 | eq. 13, corrected | the opposite Assumed: n >= 3. |" in made
    assert "**longflow**, 1 statements of the paper that are not checked here:" in made
    assert "| section 9 | \u201cfast \\| everywhere\u201d | not measured |" in made
    bars = [len(re.findall(r"(?<!\\)\|", line)) for line in made.splitlines() if line.startswith("|")]
    assert bars == [6] * 4 + [5] * 3 + [4] * 3 + [4] * 3
    assert ledger.table([]) == ""


def test_quotes_are_shown_verbatim(folder):
    r"""Markdown would take `_{a}_` and `*` for emphasis."""
    place = folder(CLAIM.replace('"the words | of the paper"', r"'$x_{a}_{b}$ \in R*'"))
    assert r"\$x\_{a}\_{b}\$ \\in R\*" in ledger.table(ledger.load(place))


def test_assumptions_of_what_holds_are_shown(folder):
    for verdict in ("holds", "holds-if"):
        toml = CLAIM.replace('assumptions = ""', 'assumptions = "n > 1"').replace('"holds"', f'"{verdict}"')
        made = ledger.table(ledger.load(folder(toml + 'corrected = "so"')))
        assert f"| {ledger.VERDICTS[verdict]} | Assumed: n > 1. so |" in made


def test_lost_words_are_named(folder):
    place = folder(CLAIM.replace('quote = "the words | of the paper"', 'lost = "the factor"'))
    assert "| a \\| b (Lost: the factor) |" in ledger.table(ledger.load(place))


def test_counts_name_our_statements_and_misprints_apart(folder):
    assert ledger.counts(ledger.load(folder(CLAIM + FALSE + OURS))) == "1 hold, 1 are false; 1 statements of ours hold"
    assert ledger.counts(ledger.load(folder(OURS))) == "1 statements of ours hold"
    assert ledger.counts(ledger.load(folder(CLAIM + MISPRINT))) == "1 hold; 1 misprint"
    two = MISPRINT + MISPRINT.replace("LF-6", "LF-7")
    assert ledger.counts(ledger.load(folder(two + OURS))) == "2 misprints; 1 statements of ours hold"


def test_the_readme_counts_as_the_ledger_does():
    """Its line on LongFlow, which it cuts off."""
    own = [claim for claim in ledger.load() if claim.method == "longflow"]
    said = sum(claim.verdict not in ledger.APART for claim in own)
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^claims of longflow: .*(?=, \.\.\.$)", readme, re.MULTILINE)
    assert f"claims of longflow: {said} of {said} checked: {ledger.counts(own)}".startswith(shown)


def test_main_prints_the_table(capsys):
    assert ledger.main([]) == 0
    assert capsys.readouterr().out == ledger.table(ledger.load(), ledger.omitted(), ledger.sources()) + "\n"


def test_main_says_which_ledger_is_broken(folder, monkeypatch, capsys):
    place = folder(CLAIM + CLAIM)
    load = ledger.load
    monkeypatch.setattr(ledger, "load", lambda: load(place))
    assert ledger.main([]) == 1
    assert "ids used twice: LF-3" in capsys.readouterr().err
