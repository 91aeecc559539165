"""Long commands show a bar on a terminal, and nothing where stderr is a pipe or a file."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from fractions import Fraction

import pytest

from kvtwin.conformance import cli
from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.lab.mutation import mutate
from kvtwin.fixtures import accuracy_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def replay(folder, monkeypatch, count: int) -> int:
    files = [str(folder / f"{number}.safetensors") for number in range(count)]
    for file in files:
        DecodeCase(batch=1, key_value_heads=1, group=1, head_dim=16, slots=3).save(file)
    return cli.main(["replay", *files, "--impl", "kvtwin.reference"])


def accuracy(folder, monkeypatch, count: int) -> int:
    answers = {"recall": {"accuracy": 0.25, "standard_error": None, "right": 1, "queries": 4, "documents": 1}}
    row = accuracy_of.Row("keydiff", "evict", 8, Fraction(1, 2), theirs=answers, reference=answers)
    theirs = types.ModuleType("theirs")
    theirs.keydiff = types.SimpleNamespace(evict=print)
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    monkeypatch.setattr(accuracy_of, "SHARES", (2,) * count)
    monkeypatch.setattr(accuracy_of, "questions", lambda plan: [])
    monkeypatch.setattr(accuracy_of, "_of_method", lambda *_: [row] * count)
    return cli.main(["accuracy", "--impl", "theirs"])


def mutation(folder, monkeypatch, count: int) -> int:
    """With a tree and a lab that run nothing."""
    mutant = mutate.Mutant("m", "toy", "", (), "", ("test",), "control")
    result = mutate.Result("m", "toy", "", "", "", "killed", ("test",), (), 1.0)
    lab = types.SimpleNamespace(baseline=lambda tests: 1.0, run=lambda mutant, sources: result)
    monkeypatch.setattr(mutate, "everyone", lambda: [mutant] * count)
    tree = types.SimpleNamespace(check=lambda mutants: None, sources=lambda mutant: "")
    monkeypatch.setattr(mutate, "here", lambda: tree)
    monkeypatch.setattr(mutate, "Lab", lambda tree, root: contextlib.nullcontext(lab))
    return mutate.main([])


@pytest.mark.parametrize(("command", "line"), [
    (replay, "decode_attention: right"), (accuracy, "keydiff.evict, budget 8"), (mutation, "killed   m"),
], ids=["replay", "accuracy", "mutation"])
def test_a_bar_is_on_a_terminal_only(command, line, tmp_path, monkeypatch):
    """The lines of the command are the same in each case. A single thing has no bar."""
    shown = {}
    for name, stderr, count in (("terminal", Terminal(), 2), ("pipe", io.StringIO(), 2), ("one", Terminal(), 1)):
        stdout = io.StringIO()
        with monkeypatch.context() as patch, contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            assert command(tmp_path, patch, count) == 0
        shown[name] = stdout.getvalue(), stderr.getvalue()
    assert " 1/2 [" in shown["terminal"][1]
    assert "[" not in shown["pipe"][1] and "\r" not in shown["pipe"][1] + shown["one"][1]
    assert shown["terminal"][0] == shown["pipe"][0]
    assert "".join(shown["pipe"]).count(line) == 2 * "".join(shown["one"]).count(line) > 0
