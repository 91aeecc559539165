"""The mutation runner on a toy package, and that our mutants still apply.

``tox -e mutants`` tests whether the suite kills our mutants, which takes minutes.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kvtwin.conformance import discovery
from kvtwin.conformance.lab.mutation import kill_matrix, mutate
from kvtwin.conformance.lab.mutation import mutants as lists
from kvtwin.conformance.lab.mutation.mutants import Mutant, MutantError
from kvtwin.conformance.lab.mutation.mutate import Lab, Tree, verdict
from kvtwin.conformance.lab.mutation.mutate_probe import is_wrong

MUTANTS = lists.load()

# Our mutants ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_mutant_applies_and_names_tests_that_exist():
    mutate.here().check(MUTANTS)


def test_every_mutant_applies():
    """A change of a shared file may move the lines of any method's mutants."""
    tree = mutate.here()
    for mutant in MUTANTS:
        assert mutant.applied_to(tree.source(mutant.file)) != tree.source(mutant.file), mutant.name


@pytest.mark.slow
def test_every_killer_is_collected():
    """With its parameters: a killer whose id has changed stops a run of mutants before it begins."""
    files = {test.partition("::")[0] for mutant in MUTANTS for test in mutant.killers}
    tree = Path(mutate.__file__).parents[2]
    options = "--collect-only", "-q", "--kv-device=cpu", "-m", "", "-p", "no:cacheprovider", f"--rootdir={tree}"
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *sorted(str(tree / file) for file in files)],
        capture_output=True, text=True, check=True, cwd=tree,
    )
    collected = {line for line in found.stdout.splitlines() if "::" in line}
    named = {test for mutant in MUTANTS for test in mutant.killers if "[" in test}
    assert len(named) > 400
    assert named <= collected, named - collected


def test_there_are_mutants_of_every_method():
    counts = Counter(mutant.method for mutant in MUTANTS)
    pairs = {pair.name for pair in discovery.pairs()}
    assert {pair.name for pair in discovery.built_in()} <= counts.keys() <= {*pairs, "interpreter", "every_method"}
    assert counts["longflow"] + counts["snapkv"] >= 20


def test_no_two_mutants_are_the_same():
    same: dict[str, list[str]] = {}
    for mutant in MUTANTS:
        same.setdefault(mutant.digest, []).append(mutant.name)
    assert [names for names in same.values() if len(names) > 1] == []


@pytest.mark.parametrize("file", sorted({mutant.method for mutant in MUTANTS}))
def test_the_stored_matrix_says_that_these_very_mutants_were_killed(file):
    rows = kill_matrix.stored(kill_matrix.matrix_file(file, lists.HERE))
    mutants = [mutant for mutant in MUTANTS if mutant.method == file]
    assert [(row["name"], row["digest"], row["status"]) for row in rows] == [
        (mutant.name, mutant.digest, "killed") for mutant in mutants
    ], "run: tox -e mutants -- --store"
    for row, mutant in zip(rows, mutants, strict=True):
        assert row["killed_by"]
        assert set(row["killed_by"]) <= set(mutant.killers)


# Files of mutants -----------------------------------------------------------------------------------------------------

FILE = """
control = "test_toy.py::test_two"
[[mutant]]
name = "a"
file = "code/toy.py"
replace = [["x + 1", "x + 2"]]
what = "one too many"
killers = ["test_toy.py::test_add"]
"""


def load(folder: Path, text: str) -> list[Mutant]:
    (folder / "toy").mkdir(exist_ok=True)
    (folder / "toy" / "mutants.toml").write_text(text)
    return lists.load(folder)


def test_load(tmp_path):
    (mutant,) = load(tmp_path, FILE)
    assert mutant == Mutant(
        "a", "toy", "code/toy.py", (("x + 1", "x + 2"),), "one too many", ("test_toy.py::test_add",),
        "test_toy.py::test_two",
    )
    assert replace(mutant, what="else").digest == mutant.digest != replace(mutant, replace=(("x", "y"),)).digest


@pytest.mark.parametrize(("old", "new", "says"), [
    ('what = "one too many"', "", r"toy/mutants.toml: a: unknown \[\], missing \['what'\]"),
    ('what = "one', 'crahs = true\nwhat = "one', "unknown .*crahs"),
    ('[["x + 1", "x + 2"]]', '["x + 1", "x + 2"]', "replace must be a list of"),
    ('control = "test_toy.py::test_two"', "", "neither the mutant nor the file has a control"),
    ('what = "one', 'class = "z"\nwhat = "one', "class must be one of a, b, c, d, e, f, g, got 'z'"),
    ("test_two", "test_add", "the control is one of the killers"),
    (FILE, FILE + FILE.replace('control = "test_toy.py::test_two"', ""), "names must be unique: a"),
])
def test_a_file_that_breaks_the_rules_is_refused(old, new, says, tmp_path):
    with pytest.raises(MutantError, match=says):
        load(tmp_path, FILE.replace(old, new))


# Running --------------------------------------------------------------------------------------------------------------

CODE = """
import os

def add(x):
    return x + 1

def two():
    return 2
"""
TESTS = """
import pytest
from toy.code import toy

def test_two():
    assert toy.two() == 2

@pytest.mark.parametrize("x", [0, 1])
def test_add(x):
    assert toy.add(x) == x + 1

def test_type():
    assert isinstance(toy.add(1), int)
"""
ADD, TYPE = "test_toy.py::test_add", "test_toy.py::test_type"


@pytest.fixture
def tree(tmp_path) -> Tree:
    folders = {"code": tmp_path / "sources" / "code", "tests": tmp_path / "sources" / "tests"}
    for folder in folders.values():
        folder.mkdir(parents=True)
    (folders["code"] / "toy.py").write_text(CODE)
    (folders["tests"] / "test_toy.py").write_text(TESTS)
    return Tree("toy", folders, tests="tests", linked=(), arguments=())


def toy(old: str, new: str, killers: tuple[str, ...] = (ADD,), **options) -> Mutant:
    return Mutant("m", "toy", "code/toy.py", ((old, new),), "", killers, "test_toy.py::test_two", **options)


@pytest.mark.slow
def test_mutants_in_processes_of_their_own(tree, tmp_path):
    """Mutants that are killed, survive, cannot run, or end by a signal. The sources do not change."""
    with Lab(tree, tmp_path) as lab:
        _all_kinds(lab)
    assert (tree.folders["code"] / "toy.py").read_text() == CODE


@pytest.mark.slow
def test_mutants_leave_no_byte_code_for_each_other(tree, tmp_path, monkeypatch):
    """The byte code of two mutants of the same name, size and second could not be told apart."""
    prefix = tmp_path / "prefix"
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(prefix))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    with Lab(tree, tmp_path) as lab:
        assert lab.run(toy("x + 1", "x + 2", (ADD, TYPE))).status == "killed"
    assert not prefix.exists()


def _all_kinds(lab: Lab) -> None:
    assert lab.baseline([ADD, TYPE]) > 0
    killed = lab.run(toy("x + 1", "x + 2", (ADD, TYPE)), "sources")
    assert (killed.status, killed.killed_by, killed.let_live) == ("killed", (ADD,), (TYPE,))
    assert killed.sources == "sources"
    broken = lab.run(toy("x + 1", "y + 1"))
    assert broken.status == "broken" and "NameError" in broken.detail
    crashed = lab.run(toy("return x + 1", "os.abort()", crash=True))
    assert (crashed.status, crashed.killed_by) == ("killed", (ADD,))
    with pytest.raises(MutantError, match="the suite fails without mutants"):
        lab.baseline(["test_toy.py::test_nothing"])


@pytest.mark.parametrize(("mutant", "says"), [
    (toy("x + 3", "x + 2"), r"code/toy.py: expected this text exactly once, found it 0 times: 'x \+ 3'"),
    (toy("return", "yield"), "exactly once, found it 2 times"),
    (toy("x + 1", "x + 1"), "changes nothing"),
    (toy("x + 1", "x +"), "m: invalid syntax"),
    (toy("x + 1", "x + 2", ("test_toy.py::test_subtract",)), "test test_toy.py::test_subtract does not exist"),
    (replace(toy("x", "y"), file="code/other.py"), "file code/other.py does not exist"),
])
def test_mutants_that_cannot_be_applied_are_named(mutant, says, tree):
    with pytest.raises(MutantError, match=f"toy.toml: m: .*{says}|{says}"):
        tree.check([mutant])


def said(**outcomes: str) -> list[dict[str, str]]:
    names = {"two": "test_toy.py::test_two", "add0": f"{ADD}[0]", "add1": f"{ADD}[1]", "type": TYPE}
    return [{"test": names[name], "outcome": outcome} for name, outcome in outcomes.items()]


BOTH = toy("x", "y", (ADD, TYPE))


@pytest.mark.parametrize(("mutant", "facts", "code", "status", "killed_by"), [
    (BOTH, said(two="passed", add0="passed", add1="wrong", type="passed"), 1, "killed", (ADD,)),
    (BOTH, said(two="passed", add0="passed", add1="passed", type="passed"), 0, "survived", ()),
    (BOTH, said(two="passed", add0="error", add1="passed", type="passed"), 1, "broken", ()),
    (BOTH, said(two="passed", add0="error", add1="passed", type="wrong"), 1, "killed", (TYPE,)),
    (BOTH, said(two="wrong"), 1, "broken", ()),
    (BOTH, said(add0="wrong", add1="wrong", type="wrong"), 1, "broken", ()),
    (BOTH, [{"broken": "does not import"}], 1, "broken", ()),
    (BOTH, said(two="passed", add0="started"), -signal.SIGSEGV, "broken", ()),
    (replace(BOTH, crash=True), said(two="passed", add0="started"), -signal.SIGSEGV, "killed", (ADD,)),
    (replace(BOTH, crash=True), said(two="passed", add0="started"), -signal.SIGXCPU, "broken", ()),
    (replace(BOTH, crash=True), said(two="started"), -signal.SIGSEGV, "broken", (),),
    (replace(BOTH, crash=True), said(two="passed", add0="wrong", add1="passed", type="passed"), 1, "killed", (ADD,)),
])
def test_verdict(mutant, facts, code, status, killed_by):
    found = verdict(mutant, facts, code)
    assert found["status"] == status
    assert status != "killed" or found["killed_by"] == killed_by
    assert bool(found["detail"]) == (status == "broken")


def test_errors_that_kill_a_mutant():
    assert is_wrong(AssertionError()) and is_wrong(pytest.fail.Exception("did not raise"))
    assert is_wrong(ExceptionGroup("flaky", [ValueError(), AssertionError()]))
    assert not is_wrong(NameError()) and not is_wrong(ExceptionGroup("flaky", [ValueError()]))


# The matrix -----------------------------------------------------------------------------------------------------------


def digests(mutants):
    return {(mutant.method, mutant.name): mutant.digest for mutant in mutants}


def result(name: str, status: str, **options) -> mutate.Result:
    fields = {"killed_by": (), "let_live": (), "seconds": 1.0, **options}
    return kill_matrix.Result(name, "toy", "", "code/toy.py", digest=BOTH.digest, status=status, **fields)


def test_matrix():
    lines = kill_matrix.matrix([
        result("one", "killed", killed_by=(ADD,), let_live=(TYPE,)), result("second", "survived", let_live=(ADD,)),
    ]).splitlines()
    assert lines[:2] == [f" 1 {ADD}", f" 2 {TYPE}"]
    assert [line.split() for line in lines[3:]] == [
        [], ["12"], ["one", "killed", "#o", "1.0", "s"], ["second", "survived", "o.", "1.0", "s"],
    ]


def test_results_of_a_part_are_stored_among_those_of_the_rest(tmp_path):
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "mutants.toml").touch()
    path, everyone = folder / "mutants.json", [replace(BOTH, name=name) for name in ("b", "a", "c")]
    gone = replace(BOTH, name="gone")
    first = [result(name, "killed", killed_by=(ADD,)) for name in ("a", "b", "gone")]
    kill_matrix.store(first, digests([*everyone, gone]), tmp_path)
    kill_matrix.store([result("c", "killed"), result("a", "survived")], digests(everyone), tmp_path)
    assert [(row["name"], row["status"]) for row in kill_matrix.stored(path)] == [
        ("b", "killed"), ("a", "survived"), ("c", "killed"),
    ]
    assert sum('"status"' in line for line in path.read_text().splitlines()) == 3, "expected one line per mutant"
    changed = [replace(BOTH, name="b", file="code/new.py"), *everyone[1:]]
    kill_matrix.store([result("c", "killed")], digests(changed), tmp_path)
    names = [row["name"] for row in kill_matrix.stored(path)]
    assert names == ["a", "c"], "results of another substitution must be removed"
    record = json.loads(path.read_text())
    assert record["schema"] == kill_matrix.SCHEMA and {"python", "torch", "triton"} <= record["versions"].keys()
    assert {path.name for path in folder.iterdir()} == {"mutants.toml", "mutants.json"}


def test_sources_are_the_mutated_file_and_the_test_files(tree):
    (tree.folders["tests"] / "test_other.py").write_text(TESTS)
    one, other = toy("x", "y", (TYPE,)), toy("x", "y", (ADD, "test_other.py::test_type"))
    first = tree.sources(one), tree.sources(other)
    assert first[0] != first[1] and first[0] == tree.sources(replace(one, name="else", killers=(ADD,)))
    (tree.folders["code"] / "more.py").write_text("")
    assert (tree.sources(one), tree.sources(other)) == first, "another file has no part in it"
    for file, of_one in ((tree.folders["tests"] / "test_other.py", False), (tree.folders["code"] / "toy.py", True)):
        file.write_text(f"{file.read_text()}\n")
        assert tree.sources(other) != first[1] and (tree.sources(one) != first[0]) == of_one
    file = tree.folders["tests"] / "test_toy.py"
    before = tree.sources(one)
    file.write_text(f"{file.read_text()}\n")
    assert tree.sources(one) != before


@pytest.mark.parametrize(("change", "proven"), [
    ({}, True), ({"status": "survived"}, False), ({"digest": "0"}, False), ({"sources": "0"}, False),
    ({"sources": None}, False), ({"name": "other"}, False),
])
def test_a_result_holds_only_for_the_present_sources(change, proven):
    row = {"name": "m", "digest": BOTH.digest, "sources": "1", "status": "killed"} | change
    row = {key: value for key, value in row.items() if value is not None}
    assert mutate.without_proof([BOTH], {"m": "1"}, [row]) == ([] if proven else [BOTH])


def test_only_mutants_without_a_result_run_again(capsys, monkeypatch):
    mutant = next(mutant for mutant in MUTANTS if mutant.method == "quest")
    row = {"name": mutant.name, "digest": mutant.digest, "sources": mutate.here().sources(mutant), "status": "killed"}
    monkeypatch.setattr(mutate, "_stored", lambda method: [row] if method == "quest" else [])
    assert mutate.main(["quest", "--only", mutant.name, "--stale"]) == 0
    assert capsys.readouterr().out == "all stored results are of the present sources\n"


def test_unknown_names_are_refused(capsys):
    assert mutate.main(["--only", "no-such-mutant"]) == 2
    assert "no such method or mutant: no-such-mutant; methods: cake, epikv, " in capsys.readouterr().err
