"""The verdict's own kill matrix, on a small implementation, and that its stored results are of our mutants."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kvtwin.conformance.lab.docs_source import docs_module
from kvtwin.conformance.lab.mutation import mutants as lists
from kvtwin.conformance.lab.mutation import mutate, verdict_copies, verdict_matrix, verdict_results
from kvtwin.conformance.lab.mutation.mutants import Mutant, MutantError
from kvtwin.conformance.lab.mutation.verdict_copies import PACKAGE, Subject
from kvtwin.conformance.lab.mutation.verdict_matrix import Bench, Run, row_of_run
from kvtwin.conformance.lab.mutation.verdict_results import (
    BROKEN,
    CRASHED,
    NOT_COVERED,
    OUTSIDE,
    RIGHT,
    UNFIT,
    VALID,
    WRONG,
    Row,
)
from kvtwin.conformance.lab.mutation.verdict_server import FOUND, Order, ServerError, read_answer

MUTANTS = lists.load()
NAMES = verdict_copies.names()

# Judging --------------------------------------------------------------------------------------------------------------

CODE = '''
import os

from kvtwin.conformance import Capabilities
from kvtwin.conformance.lab.implementations.longflow import Decode

from . import unused

CAPABILITIES = Capabilities(validates_arguments=False)


class Mine(Decode):
    def choose(self, rank, held, spared):
        return super().choose(rank, held, spared)


def decode_attention(query, key, value, occupied, **options):
    return Mine()(query, key, value, occupied, **options)
'''
CHOICE = "super().choose(rank, held, spared)"
HIGHEST = "super().choose(-rank, held, spared)"


def mutant(name: str, old: str = CHOICE, new: str = HIGHEST, file: str = "longflow", **options) -> Mutant:
    return Mutant(
        name, "longflow", f"optimized/{file}.py", ((old, new),), f"what {name} is", ("test_x.py::test_x",), "test_y.py",
        **options,
    )


JUDGED = {
    "unchanged": None,
    "highest": mutant("highest"),
    "no-change": mutant("no-change", CHOICE, f"+{CHOICE}"),
    "aborts": mutant("aborts", CHOICE, "os.abort()"),
    "loops": mutant("loops", CHOICE, "[0 for _ in iter(int, 1)]"),
    "no-module": mutant("no-module", "from . import unused", "from . import absent"),
    "fits": mutant("fits", fits=("ties", "decisions")),
    "does-not-fit": mutant("does-not-fit", fits=("bad_input",)),
    "never-imported": mutant("never-imported", "1", "2", file="spare"),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """The rows of all that is judged, by their names in JUDGED. One server judges them, two at a time; another the
    mutant that does not end, which may take less time than others need on a busy machine."""
    sources, root = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("bench")
    here = mutate.here()
    folders = {side: sources / side for side in verdict_copies.SIDES}
    for folder in folders.values():
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    files = {"longflow": CODE, "unused": "", "spare": "1\n"}
    for name, text in files.items():
        (folders["optimized"] / f"{name}.py").write_text(text)
    tree = replace(here, folders={**here.folders, **folders})
    run = Run(jobs=2, seed=0, profile="quick", seconds=600.0, sources="s", hints={})
    bench = Bench(tree, root, run, judge=here, tests=("suite/test_properties.py",))
    subjects = {name: Subject("longflow", "optimized", one) for name, one in JUDGED.items()}
    found = {row.name: row for row in bench.judge([one for name, one in subjects.items() if name != "loops"])}
    run.seconds = 6.0
    found |= {row.name: row for row in bench.judge([subjects["loops"]])}
    assert not list(root.glob("work-*")), "the folders of mutants are deleted"
    return {name: found[subject.name] for name, subject in subjects.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status", "properties"), [
    ("unchanged", RIGHT, ()), ("no-change", RIGHT, ()), ("highest", WRONG, ("decisions",)),
    ("fits", WRONG, ("decisions",)), ("aborts", CRASHED, ()), ("loops", BROKEN, ()), ("no-module", BROKEN, ()),
    ("never-imported", OUTSIDE, ()),
])
def test_verdicts(name, status, properties, rows):
    row = rows[name]
    assert (row.status, row.properties) == (status, properties), row
    assert row.method == "longflow" and row.sources == "s" and row.seconds > 0 and row.cpu > 0


@pytest.mark.slow
def test_a_run_ends_at_the_first_property_that_is_wrong_and_fits(rows):
    highest, other, right = rows["highest"], rows["does-not-fit"], rows["unchanged"]
    assert highest.test.startswith("suite/test_properties.py::") and highest.error == "Mismatch"
    assert 0 < highest.tests < right.tests and 0 < highest.cases < right.cases
    assert other.status == UNFIT and other.tests == right.tests
    assert "decisions" in other.properties and len(other.properties) > 1


@pytest.mark.slow
def test_a_broken_run_says_why(rows):
    assert "exit code -6" in rows["aborts"].detail
    assert "did not end within 6 s" in rows["loops"].detail and rows["loops"].seconds >= 6
    assert "cannot import name 'absent'" in rows["no-module"].detail
    assert f"imports {PACKAGE}.spare" in rows["never-imported"].detail


class FragileServer:
    """Stands in for a server, and ends whenever a mutant runs that aborts."""

    started = 0

    def __init__(self, *_: Path, **__: object) -> None:
        FragileServer.started += 1
        self.running: list[Order] = []

    def start(self) -> dict:
        return {"tests": 1, "seconds": 0.0}

    def order(self, order: Order) -> None:
        self.running.append(order)

    def answer(self) -> dict:
        for order in self.running:
            if "abort" in Path(order.path, PACKAGE, "longflow.py").read_text():
                raise ServerError("it ended")
        order = self.running.pop(0)
        Path(order.folder, FOUND).write_text(json.dumps(found(verdict="right")))
        return {"key": order.key, "code": 0, "late": False, "seconds": 1.0, "cpu": 1.0}

    def close(self) -> None: ...


def test_a_mutant_that_ends_the_server_does_not_end_the_run(tmp_path, monkeypatch):
    (tmp_path / "optimized").mkdir()
    (tmp_path / "optimized" / "longflow.py").write_text(CODE)
    folders = {"optimized": tmp_path / "optimized", "reference": tmp_path / "optimized"}
    bench = Bench(mutate.Tree("toy", folders), tmp_path / "bench", Run(3, 0, "quick", 60.0, "s", {}))
    monkeypatch.setattr(verdict_matrix, "Server", FragileServer)
    monkeypatch.setattr(FragileServer, "started", 0)
    changes = dict.fromkeys(["a", "deadly", "b", "c", "deadly too", "d"], HIGHEST)
    changes |= dict.fromkeys(["deadly", "deadly too"], "os.abort()")
    subjects = [Subject("longflow", "optimized", mutant(name, new=new)) for name, new in changes.items()]
    rows = {row.name: row for row in bench.judge(subjects)}
    assert {name: rows[name].status for name in changes} == {
        name: BROKEN if "deadly" in name else RIGHT for name in changes
    }
    assert rows["deadly"].detail == "the server ended twice while this ran"
    assert FragileServer.started <= 6


@pytest.mark.parametrize(("code", "late", "status"), [
    (-signal.SIGSEGV, False, CRASHED), (-signal.SIGABRT, False, CRASHED), (-signal.SIGKILL, True, BROKEN),
    (-signal.SIGXCPU, False, BROKEN), (1, False, BROKEN),
])
def test_a_run_that_crashes_is_told_from_one_that_ends_otherwise(code, late, status, tmp_path):
    result = read_answer(tmp_path, {"code": code, "late": late, "seconds": 1.0})
    subject = Subject("longflow", "optimized", mutant("m"))
    assert row_of_run(subject, result, sources="s", seconds=1.0, cpu=2.0).status == status


# What is judged -------------------------------------------------------------------------------------------------------


def test_a_sample_has_mutants_of_each_method_in_proportion():
    sample = verdict_matrix.sample_of(MUTANTS, 350, 0)
    assert len(sample) == 350 and sample == [one for one in MUTANTS if one in sample]
    everyone, counts = Counter(one.method for one in MUTANTS), Counter(one.method for one in sample)
    for method, count in everyone.items():
        assert abs(counts[method] - 350 * count / len(MUTANTS)) <= 2
    smaller = verdict_matrix.sample_of(MUTANTS, 25, 0)
    assert set(smaller) < set(sample) and len({one.method for one in smaller}) == len(everyone)
    assert verdict_matrix.sample_of(MUTANTS, 350, 1) != sample
    assert verdict_matrix.sample_of(MUTANTS, None, 0) == verdict_matrix.sample_of(MUTANTS, 10**6, 0) == MUTANTS


def test_parts_have_every_mutant_once():
    parts = [verdict_matrix.part_of(MUTANTS, f"{number}/8") for number in range(1, 9)]
    assert sorted(one.name for part in parts for one in part) == sorted(one.name for one in MUTANTS)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for text in ("0/8", "9/8", "8", "a/b", "1/0"):
        with pytest.raises(MutantError, match="--part must be I/N"):
            verdict_matrix.part_of(MUTANTS, text)


@pytest.mark.parametrize("arguments", [["nothing"], ["--only", "nothing"], ["--part", "2"]])
def test_wrong_arguments_are_refused(arguments, capsys, tmp_path):
    assert verdict_matrix.main([*arguments, "--results", str(tmp_path / "r.jsonl")]) == 2
    assert "nothing" in capsys.readouterr().err or "--part" in arguments


# Results --------------------------------------------------------------------------------------------------------------


def found(**facts) -> dict:
    counted = {"tests": 3, "cases": 4, "decisive": 5}
    return {"verdict": "right", "open": [], **counted, "imported": True, "found": [], **facts}


def wrong(*names: str, error: str = "Mismatch") -> list[dict]:
    return [
        {"property": name, "test": f"t{number}", "error": error, "message": "m", "case": None}
        for number, name in enumerate(names)
    ]


@pytest.mark.parametrize(("fits", "what", "status", "properties", "test"), [
    ((), found(), RIGHT, (), ""),
    ((), found(verdict="not covered", open=["decisions"]), NOT_COVERED, (), ""),
    ((), found(imported=False), OUTSIDE, (), ""),
    ((), {"broken": "no"}, BROKEN, (), ""),
    (("ties",), {"crashed": "exit code -11"}, CRASHED, (), ""),
    ((), found(found=wrong("state")), WRONG, ("state",), "t0"),
    (("ties",), found(found=wrong("state")), UNFIT, ("state",), "t0"),
    (("ties",), found(found=wrong("state", "ties")), WRONG, ("ties", "state"), "t1"),
    (("ties",), found(), RIGHT, (), ""),
    ((), found(found=wrong("state", error="RuntimeError")), WRONG, ("state",), "t0"),
    ((), found(found=wrong("state", error="NameError")), BROKEN, (), "t0"),
])
def test_rows(fits, what, status, properties, test):
    subject = Subject("longflow", "optimized", mutant("m", fits=fits))
    row = row_of_run(subject, what, sources="s", seconds=1.0, cpu=2.0)
    assert (row.status, row.properties, row.test) == (status, properties, test)
    assert verdict_results.row_of(row.as_dict()) == row


def row(name: str, status: str, method: str = "longflow", **facts) -> Row:
    return Row(name, method, "optimized", status, "longflow", what="what", sources="s", **facts)


def test_a_file_of_lines_may_be_cut_off(tmp_path):
    path = tmp_path / "r.jsonl"
    assert verdict_results.read(path) == []
    rows = [row("a", RIGHT), row("b", WRONG, properties=("ties",)), row("a", WRONG, seconds=1.5)]
    for one in rows:
        verdict_results.append(path, one)
    with path.open("a") as file:
        file.write('{"name": "c", "met')
    assert verdict_results.read(path) == [rows[2], rows[1]], "the last line of a mutant counts"


def test_a_mutant_with_a_result_of_the_present_sources_is_not_judged_again(tmp_path, monkeypatch, capsys):
    """Without a server, which would be needed to judge anything."""
    one = next(one for one in MUTANTS if one.method == "tova" and one.file.startswith("optimized/"))
    monkeypatch.setattr(verdict_matrix, "Bench", None)
    options = argparse.Namespace(seed=0, profile="default")
    sources = verdict_matrix._sources(mutate.here(), options)
    path = tmp_path / "r.jsonl"
    baseline = Subject("tova", "optimized")
    verdict_results.append(path, Row(baseline.name, "tova", "optimized", RIGHT, sources=sources))
    done = row(one.name, RIGHT, "tova")
    verdict_results.append(path, replace(done, digest=one.digest, sources=sources))
    arguments = ["--only", one.name, "--results", str(path)]
    assert verdict_matrix.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "0 to judge, 2 are in" in printed and f"right       tova: {one.name} (what)" in printed
    with pytest.raises(TypeError, match="not callable"):
        verdict_matrix.main([*arguments, "--seed", "1"])
    for changed in ({"digest": "0", "sources": sources}, {"digest": one.digest, "sources": "0"}):
        verdict_results.append(path, replace(done, **changed))
        with pytest.raises(TypeError, match="not callable"):
            verdict_matrix.main(arguments)


def test_sums_by_method():
    rows = [
        *(row(f"w{number}", WRONG, "snapkv", properties=("ties", "state")) for number in range(9)),
        row("u", UNFIT, "snapkv", properties=("state",)), row("o", OUTSIDE, "snapkv"),
        row("r", RIGHT), row("n", NOT_COVERED), row("b", BROKEN), row("c", CRASHED),
        Row("base", "snapkv", "optimized", RIGHT),
    ]
    longflow, snapkv, everything = verdict_results.shares(rows)
    assert (longflow.method, longflow.judged, longflow.found) == ("longflow", 4, 1)
    assert (snapkv.judged, snapkv.found, snapkv.properties) == (10, 9, Counter(ties=9))
    assert (everything.judged, everything.found) == (14, 10)
    # of 9 in 10: the limits p with P(X >= 9) = 0.025 and P(X <= 9) = 0.025
    low, high = snapkv.interval
    assert 10 * low**9 * (1 - low) + low**10 == pytest.approx(0.025) and 1 - high**10 == pytest.approx(0.025)
    assert {one.name for one in verdict_results.not_found(rows)} == {"u", "r", "n", "b"}
    said = verdict_results.summary([*rows, Row("copy", "snapkv", "optimized", WRONG, properties=("ties",))])
    assert "90.0% (55% to 100%)" in said and "not found: 4" in said and "outside: 1" in said
    assert "the copy is not right: copy: wrong ties" in said


def test_stored_results(tmp_path):
    path = tmp_path / "stored.json"
    assert verdict_results.stored(path) == []
    rows = [row("b", WRONG, detail="a case"), row("a", RIGHT, detail="x"), Row("base", "snapkv", "optimized", RIGHT)]
    verdict_results.store(rows, ["a", "b", "c"], seed=3, profile="default", path=path)
    assert verdict_results.stored(path) == [rows[1], replace(rows[0], detail="")]
    about = json.loads(path.read_text())
    assert about["seed"] == 3 and about["schema"] == verdict_results.SCHEMA and "torch" in about["versions"]
    assert sum('"status"' in line for line in path.read_text().splitlines()) == 2, "expected one line per mutant"


def test_the_page_shows_the_sums_and_names_what_is_not_found(monkeypatch):
    generate = docs_module("generate", "its page shows the stored results")
    pages = importlib.import_module(f"{generate.__name__}.verdict_matrix")
    rows = [
        *(row(f"w{number}", WRONG, properties=("free_slots", "state"), cpu=float(number)) for number in range(3)),
        row("alive", RIGHT), row("slow", RIGHT, "tova"), row("wave", NOT_COVERED, "tova"),
        row("o", OUTSIDE, detail="it changes a cache"),
    ]
    monkeypatch.setattr(verdict_results, "stored", lambda: rows)
    monkeypatch.setattr(verdict_results, "reasons", lambda: {
        "slow": (VALID, "it is slower"), "wave": (OUTSIDE, "it needs a GPU"), "w0": (VALID, "found all the same"),
    })
    page = pages.verdict_matrix_page()
    assert f"Stored: 7 of {len(MUTANTS):,} mutants." in page
    for line in (
        "| longflow | 4 | 3 | 75.0% (19% to 99%) | 0 | 0 | 1 | 0 | 0 | 0 | 1 |",
        "| tova | 0 | 0 | - | 0 | 0 | 0 | 0 | 0 | 1 | 1 |",
        "the share would be 60.0%", "| all | 4 | 3 | 75.0% (19% to 99%) | 0 | 0 | 1 | 0 | 0 | 1 | 2 |",
        "| free slots | 3 |", "| state | 0 |", "within 1.0 s of CPU", "| longflow | `alive` | what | right |",
        "| tova | `slow` | what | it is slower |", "it changes a cache (1): `o`.", "it needs a GPU (1): `wave`.",
    ):
        assert line in page, line
    assert "`w0`" not in page
    monkeypatch.setattr(verdict_results, "stored", list)
    assert "No results are stored." in pages.verdict_matrix_page()


# Ours -----------------------------------------------------------------------------------------------------------------


def test_stored_results_are_of_our_mutants():
    digests = {one.name: one.digest for one in MUTANTS}
    for one in verdict_results.stored():
        assert digests.get(one.name) == one.digest, f"{one.name} has changed: judge it again, and --store"


def test_reasons_are_of_mutants_that_are_not_found():
    named = set(verdict_results.reasons())
    assert named <= {one.name for one in MUTANTS}
    assert not named & {one.name for one in verdict_results.stored() if one.status == WRONG}


def test_a_mutant_says_which_properties_fit(tmp_path):
    path = Path(tmp_path, "longflow", "mutants.toml")
    path.parent.mkdir()
    text = (
        'control = "t.py::c"\n[[mutant]]\nname = "a"\nfile = "optimized/x.py"\nreplace = [["x", "y"]]\nwhat = "w"\n'
        'killers = ["t.py::k"]\n'
    )
    path.write_text(text + 'fits = ["ties", "state"]\n')
    assert lists.load(tmp_path)[0].fits == ("ties", "state")
    path.write_text(text)
    assert lists.load(tmp_path)[0].fits == ()
    for fits in ('"ties"', '["tie"]'):
        path.write_text(f"{text}fits = {fits}\n")
        with pytest.raises(MutantError, match="a: fits must be a list of accuracy, decisions, ties, "):
            lists.load(tmp_path)
