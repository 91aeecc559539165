"""The comparison with the authors' own code, on a project that the test writes: no checkout is needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvtwin.conformance.lab.authors import __main__ as command
from kvtwin.conformance.lab.authors import lane
from kvtwin.conformance.lab.authors.checkout import Checkout, Project
from kvtwin.conformance.lab.authors.comparison import Comparison, Count, Kept, Outputs, held
from kvtwin.conformance.lab.authors.inputs import state, tokens
from kvtwin.conformance.lab.authors.projects import everyone
from kvtwin.conformance.lab.docs_source import docs_module
from kvtwin.reference.baselines.h2o import H2OConfig, H2OState

COMMIT, OTHER = "a" * 40, "b" * 40
#: The authors' file: its package runs models, its functions decide.
RULE = """
import torch
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb
from . import threshold

class Attention(LlamaAttention):
    pass

def keep(score):
    print("authors print")
    return apply_rotary_pos_emb(score) > threshold
"""
STAND_INS = {"transformers.models.llama.modeling_llama": {"apply_rotary_pos_emb": lambda score: score}}


def loaded(checkout: Checkout):
    return checkout.load("rules.keep", bare={"rules": {"threshold": 0.5}}, stand_ins=STAND_INS)


def project(ours: float, readings: tuple[str, ...] = (), under: float | None = None) -> Project:
    """A project whose rule keeps what scores above 0.5; ours keeps what scores above `ours`, or `under` a reading."""
    def compare(checkout: Checkout) -> Iterator[Comparison]:
        score, module = torch.linspace(0, 1, 11), loaded(checkout)
        plain, explained = Count(), Count()
        plain.add(module.keep(score), score > ours)
        if under is not None:
            explained.add(module.keep(score), score > under)
        yield Comparison("what a rule keeps", "decisions", plain, readings, explained, "a threshold")

    return Project("https://example.org/authors/fake", COMMIT, ("rules/keep.py",), compare)


def broken(_: Checkout) -> Iterator[Comparison]:
    raise RuntimeError("their code fails")


def nothing(_: Checkout) -> Iterator[Comparison]:
    yield from ()


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A folder of checkouts with one project, "fake"."""
    folder = tmp_path / "fake" / "rules"
    folder.mkdir(parents=True)
    folder.joinpath("__init__.py").write_text("import flash_attn_of_old\n")
    folder.joinpath("keep.py").write_text(RULE)
    tmp_path.joinpath("fake", "COMMIT").write_text(f"{COMMIT}\n")
    monkeypatch.setenv(command.FOLDER, str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the command sets it
    return tmp_path


AGREES, KNOWN = 0.5, "h2o.heads"


@pytest.mark.parametrize(("given", "code", "said"), [
    (project(AGREES), 0, r"fake: commit aaaaaaa\n  what a rule keeps: 11 decisions, all agree\n"),
    (project(0.2), 1, r"FAILS, no reading explains the difference: what .*: 11 decisions, 3 differ\n"),
    (project(0.2, (KNOWN,), AGREES), 0, r"3 differ \(readings h2o.heads\); 11 with a threshold: all\n? +agree"),
    (project(0.2, (KNOWN,), 0.3), 1, r"FAILS, 2 of 11 differ under the reading, too"),
    (project(0.2, ("h2o.nonsense",), AGREES), 1, r"FAILS, no such reading: h2o.nonsense"),
    (project(0.2, (KNOWN,)), 1, r"FAILS, nothing was compared"),
    (Project("https://example.org/fake", COMMIT, (), broken), 1, r"broken: RuntimeError: their code fails \(test_"),
    (Project("https://example.org/fake", COMMIT, (), nothing), 1, r"fake: nothing was compared"),
    (Project("https://example.org/fake", OTHER, (), project(AGREES).compare), 0, r"commit aaaaaaa, another than bbbb"),
    (Project("https://example.org/fake", COMMIT, ("rules/gone.py",), broken), 2,
     r"no checkout: .*fake has no rules/gone.py: expected https://example.org/fake"),
    (Project("https://example.org/missing", COMMIT, (), broken), 2,
     r"missing: not there: git clone https://example.org/missing .*/missing && git -C .*/missing checkout a{40}"),
], ids=["agrees", "unexplained", "explained", "left over", "unknown reading", "empty reading", "raises", "empty",
        "another commit", "no checkout", "not there"])  # fmt: skip
def test_what_is_said_and_the_exit_code(root, capfd, given, code, said):
    assert command.main([], [given]) == code
    printed = capfd.readouterr()
    assert re.search(said, printed.out), printed.out
    assert "authors print" not in printed.out
    assert ("Nothing was compared" in printed.err) == (code == 2)


def test_a_project_that_is_not_there_is_no_failure(root, capfd, tmp_path):
    missing = Project("https://example.org/missing", COMMIT, (), broken)
    path = tmp_path / "result.json"
    assert command.main(["--json", str(path)], [project(AGREES), missing]) == 0
    assert "1 of 2 projects, 11 decisions and numbers, 0 failures" in capfd.readouterr().out
    result = json.loads(path.read_text())["projects"]
    assert result["missing"]["status"] == lane.NOT_THERE
    assert result["fake"]["comparisons"][0] | {"judged": 11, "differ": 0} == result["fake"]["comparisons"][0]
    assert command.main(["fake"], [project(AGREES), missing]) == 0
    assert "not there" not in capfd.readouterr().out


@pytest.mark.parametrize(("arguments", "folder", "said"), [
    (["nonsense"], ".", "no project 'nonsense': expected some of fake"),
    ([], "", "KVTWIN_AUTHORS must name the folder with the authors' checkouts, got nothing"),
    ([], "/no/such/folder", "KVTWIN_AUTHORS must name the folder with the authors' checkouts, got /no/such/folder"),
])  # fmt: skip
def test_wrong_usage(root, monkeypatch, capsys, arguments, folder, said):
    monkeypatch.setenv(command.FOLDER, str(root) if folder == "." else folder)
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments, [project(AGREES)])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_loading_leaves_nothing_behind(root):
    """Neither modules, nor paths, nor files; and an installed package is itself again."""
    package = root / "fake"
    before, path, finders = dict(sys.modules), list(sys.path), list(sys.meta_path)
    files = sorted(package.rglob("*"))
    module = loaded(Checkout(package))
    assert module.keep(torch.tensor([0.4, 0.6])).tolist() == [False, True]
    assert issubclass(module.Attention, module.LlamaAttention)
    assert (sys.path, sys.meta_path, sorted(package.rglob("*"))) == (path, finders, files)
    assert {name for name in sys.modules if name.startswith(("transformers", "rules"))} == {
        name for name in before if name.startswith(("transformers", "rules"))
    }
    with pytest.raises(ModuleNotFoundError, match="flash_attn_of_old"):
        Checkout(package).load("rules.keep", stand_ins=STAND_INS)
    assert (sys.path, sys.meta_path) == (path, finders)


def test_the_commit_is_gits_or_stated(root):
    checkout = Checkout(root / "fake")
    assert checkout.commit == COMMIT
    git = ["git", "-C", str(checkout.folder), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "rules"], ["commit", "-qm", "rules"]):
        subprocess.run([*git, *words], check=True)
    found = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert checkout.commit == found != COMMIT
    assert lane._about("", project(AGREES)) == "commit unknown: COMMIT in the folder can state it"


def test_counts():
    count = Count()
    count.add(torch.tensor([1.0, torch.nan, 2.0]), torch.tensor([1.0, torch.nan, torch.nan]))
    assert (count.judged, count.differ) == (3, 1)
    with pytest.raises(ValueError, match="differ in shape"):
        count.add(torch.zeros(2), torch.zeros(3))


def test_tokens_count_where_one_goes():
    """5 tokens, of which 3 stay; then a token that both caches take up; then one for which each gives up another."""
    kept = Kept()
    masks = [[1, 1, 1, 0, 0, 0, 0]] * 2, [[1, 1, 1, 0, 0, 1, 0]] * 2, [[1, 1, 0, 0, 0, 1, 1], [1, 0, 1, 0, 0, 1, 1]]
    for (theirs, ours), (first, end), judged, differ in zip(
        masks, [(0, 5), (5, 6), (6, 7)], [5, 5, 10], [0, 0, 2], strict=True
    ):
        kept.add_held(torch.tensor(theirs) > 0, torch.tensor(ours) > 0, first, end)
        assert (kept.judged, kept.differ) == (judged, differ)
    key = tokens(0, 7, heads=2)[1]
    assert held(key[:, :, [4, 1]], key).nonzero()[:, 2].tolist() == [1, 4, 1, 4]


@pytest.mark.parametrize(("error", "differ"), [(0.0, 0), (1e-7, 0), (1e-4, 32)])
def test_outputs_agree_within_the_bound_of_float32(error, differ):
    query, key, value = tokens(0, 9, heads=2)
    cache, other = (state(H2OState, H2OConfig(4, block_size=8), query, key) for _ in range(2))
    for each in (cache, other):
        each.prefill(*(tensor[:, :, :8] for tensor in (query, key, value)))
    output = other.step(query[:, :, 8], key[:, :, 8], value[:, :, 8])
    outputs = Outputs()
    outputs.add_step(cache, [tensor[:, :, 8:] for tensor in (query, key, value)], output.flatten(1)[:, None] + error)
    assert (outputs.judged, outputs.differ) == (32, differ)


def test_the_stored_result_is_of_every_project_and_explained():
    """At the commits that the comparisons were written for, and with the readings that there are now."""
    result = json.loads(Path(command.__file__).with_name("authors.json").read_text())
    projects, known = everyone(), lane.known_readings()
    assert result["schema"] == command.SCHEMA
    assert set(result["projects"]) == {one.name for one in projects}
    for one in projects:
        stored = result["projects"][one.name]
        assert re.fullmatch(r"[0-9a-f]{40}", one.commit)
        assert (stored["commit"], stored["status"]) == (one.commit, lane.COMPARED)
        assert stored["comparisons"]
        for each in stored["comparisons"]:
            counts = Count(each["judged"], each["differ"]), Count(each["judged_under"], each["differ_under"])
            again = Comparison(each["what"], each["unit"], counts[0], tuple(each["readings"]), counts[1], each["how"])
            assert not again.fault(known), each["what"]
            assert bool(each["differ"]) == bool(each["readings"]), "a reading that nothing needs"


def test_the_page_has_the_counts():
    generate = docs_module("generate", "its page shows the result")
    result = {
        "date": "2026-01-01", "versions": {"torch": "2"}, "projects": {"fake": {
            "repository": "https://example.org/fake", "note": "commit aaaaaaa", "comparisons": [
                {"what": "rule", "unit": "decisions", "judged": 1100, "differ": 3, "readings": ["h2o.heads"],
                 "how": "a threshold", "judged_under": 1200, "differ_under": 0},
                {"what": "numbers", "unit": "numbers", "judged": 7, "differ": 0, "readings": [], "how": "",
                 "judged_under": 0, "differ_under": 0},
            ],
        }},
    }
    page = generate.authors.authors_page(result)
    assert "| rule | 1,100 decisions | 3 | [`h2o.heads`](../methods/h2o.md) | 0 of 1,200: a threshold |" in page
    assert "Of 1,107 decisions and numbers of 1 projects, 3 differ" in page
    assert "under these readings, none of them" in page
    assert generate.results.result_pages()["authors"] == generate.authors.authors_page()
