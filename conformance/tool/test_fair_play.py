"""Implementations that try to look right: the verdict finds each of them, and names what it does."""

from __future__ import annotations

import builtins
import os
import re
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from kvtwin.conformance.cases.case import DecodeCase, WindowCase
from kvtwin.conformance.harness import fair_play, process_watch, verdict
from kvtwin.conformance.harness.impl import Facade, Twins
from kvtwin.conformance.judge import calls, subjects
from kvtwin.conformance.judge.mismatch import Mismatch
from kvtwin.conformance.lab.implementations import exploits, longflow, run
from kvtwin.conformance.lab.implementations.exploits import borrowing, ending, looking, replacing, results
from kvtwin.conformance.lab.implementations.stored import CALLS, FOUND, HARMLESS, Row
from kvtwin.reference.longflow import DecodeResult

FOLDER = Path(exploits.__file__).parent
PROPERTIES = "suite/test_properties.py"


def judged(row: Row, tests: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> verdict.MethodVerdict:
    return run.verdict_of(
        row.method, row.provided(), {}, tests, tmp_path, monkeypatch, PROPERTIES, stranger=FOLDER / "__init__.py"
    )


#: Those that every run judges, one of a kind.
QUICK = (
    borrowing.imports, replacing.TorchEqual, replacing.JudgesCode, looking.Frames, looking.Variable, ending.Skips,
    results.LazyTensor, results.ByVersion, results.ThreeBuffers,
)
ROWS = [pytest.param(row, id=row.id, marks=() if row.exploit in QUICK else pytest.mark.slow) for row in FOUND]


def test_there_are_many_kinds():
    modules = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert modules <= {row.exploit.__module__.rpartition(".")[2] for row in FOUND} and len(FOUND) >= 50
    assert set(QUICK) < {row.exploit for row in FOUND}


@pytest.mark.parametrize("row", ROWS)
def test_it_is_found_and_named(row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = judged(row, row.tests, tmp_path, monkeypatch)
    assert run.wrong(found) == {row.shows}, run.summary_of(found)
    assert row.says in found.properties[row.shows].findings[0]["message"]
    assert found.verdict == verdict.WRONG


@pytest.mark.slow
@pytest.mark.parametrize("row", HARMLESS, ids=lambda row: row.id)
def test_it_is_harmless(row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = judged(row, f"({CALLS} or test_numbers) and decode_attention", tmp_path, monkeypatch)
    assert not run.wrong(found) and found.properties["repeatability"].verdict == verdict.RIGHT, run.summary_of(found)
    assert any(row.says in note for note in found.notes) or not row.says


@pytest.mark.parametrize(("text", "says"), [
    ("torch.equal = lambda *values: True", "theirs replaces torch.equal when it is imported"),
    ("import threading, builtins\nthread = threading.Timer(0, lambda: setattr(builtins, 'abs', max))\n",
     "theirs replaces builtins.abs"),
], ids=["import", "later"])
def test_what_is_replaced_outside_of_calls_is_found_in_the_next_call(text, says, tmp_path, monkeypatch, request):
    request.addfinalizer(lambda: sys.modules.pop("theirs", None))
    (tmp_path / "theirs.py").write_text(f"import torch\n{text}\ndef decode_attention(): return 1, 2, 3\n"
                                        "class longflow: decode_attention = staticmethod(decode_attention)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    equal, absolute = torch.equal, abs
    theirs = Twins("theirs").optimized
    if hasattr(sys.modules["theirs"], "thread"):
        assert theirs.longflow.decode_attention() == (1, 2, 3)
        sys.modules["theirs"].thread.run()
        theirs.guard.after_test()
    assert torch.equal is equal and builtins.abs is absolute, "the judge needs them"
    with pytest.raises(fair_play.Unfair, match=re.escape(says)):
        theirs.longflow.decode_attention()


def test_a_result_in_the_memory_of_an_argument_is_found():
    subject = next(one for one in subjects.every() if str(one) == "snapkv.compress")
    case = WindowCase(tokens=9, budget=9)
    for compress in (results.KeepsAll(), results.loops.compress):
        module = Facade("theirs", types.SimpleNamespace(snapkv=types.SimpleNamespace(compress=compress)))
        shares = compress is not results.loops.compress
        with pytest.raises(Mismatch, match="key lies in the memory of the argument key") if shares else nullcontext():
            calls.leaves_nothing_behind(subject, module.baselines.snapkv, case)


@pytest.mark.parametrize(("late", "wrong"), [(True, True), (False, False)])
def test_a_result_that_is_read_before_its_work_has_ended(late, wrong, monkeypatch):
    """On the CPU, with what a GPU does: work ends when somebody waits for it."""
    waiting = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: [work() for work in waiting])

    def decode_attention(**inputs):
        right = longflow.Decode()(**inputs)
        made = [torch.zeros_like(one) for one in right] if late else right
        waiting.append(lambda: [one.copy_(other) for one, other in zip(made, right, strict=True)])
        return DecodeResult(*made)

    subject = next(one for one in subjects.every() if str(one) == "longflow.decode_attention")
    case = DecodeCase(slots=5)
    inputs, others = calls.copies(subject.inputs(case)), subject.inputs(subject.other(case))
    right = calls.copies(DecodeResult(*longflow.Decode()(**others))._asdict())
    found = calls._unfinished(subject, types.SimpleNamespace(decode_attention=decode_attention), inputs, others)
    assert any(not torch.equal(found[name], tensor) for name, tensor in right.items()) == wrong


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_work_that_is_left_on_another_stream_is_found():
    subject = next(one for one in subjects.every() if str(one) == "longflow.decode_attention")
    module = types.SimpleNamespace(decode_attention=lambda **inputs: DecodeResult(*exploit(**inputs)))
    exploit = results.OnAnotherStream()
    with pytest.raises(Mismatch, match=re.escape(calls.UNFINISHED)):
        calls.leaves_nothing_behind(subject, module, DecodeCase(slots=512, batch=16, device="cuda"))
    exploit = longflow.Decode()
    calls.leaves_nothing_behind(subject, module, DecodeCase(slots=512, batch=16, device="cuda"))


@pytest.mark.parametrize(("file", "root", "below"), [
    ("/home/me/kernels/longflow.py", "/home/me/kernels/", True),
    ("/home/me/other/longflow.py", "/home/me/kernels/", False),
    ("/home/me/.venv/lib/python3.12/site-packages/torch/library.py", "/home/me/", False),
    ("/venv/site-packages/theirs/longflow.py", "/venv/site-packages/theirs/", True),
    ("/home/me/longflow.py", "", False),
    (process_watch.OURS[0] + "interpreter/launch.py", str(Path(process_watch.OURS[0]).parent) + "/", False),
    (f"{FOLDER}/looking.py", f"{FOLDER}/", True),
    (f"{process_watch.STDLIB}/logging/__init__.py", str(Path(process_watch.STDLIB).parents[1]) + "/", False),
])
def test_whose_a_file_is(file, root, below):
    assert process_watch.is_below(file, root) == below


@pytest.mark.parametrize(("file", "part"), [
    ("reference/contract/__init__.py", None), ("reference/contract/arguments.py", None), ("reference/pages.py", None),
    ("reference/contract/thinkv/types.py", None), ("reference/longflow.py", "reference"),
    ("reference/prompt_compression.py", "reference"), ("reference/thinkv/paging.py", "reference"),
    ("optimized/_common/pages.py", "optimized"), ("judge/pages.py", "judge"),
])
def test_which_parts_of_kvtwin_everybody_may_use(file, part):
    folder, _, rest = file.partition("/")
    assert fair_play.part_of(fair_play.PARTS[folder] + rest.replace("/", os.sep)) == part
    assert Path(fair_play.PARTS[folder], rest).is_file()


@pytest.mark.parametrize(("module", "root"), [
    ({"__file__": "/a/theirs/__init__.py", "__path__": ["/a/theirs"]}, "/a/theirs/"),
    ({"__file__": None, "__path__": ["/a/theirs"]}, "/a/theirs/"), ({"__file__": "/a/theirs.py"}, "/a/"),
    ({"__file__": "/venv/site-packages/theirs.py"}, "/venv/site-packages/theirs.py"), ({}, ""),
])
def test_where_the_files_of_an_implementation_are(module, root):
    assert process_watch.root_of(types.SimpleNamespace(**module)) == root


def test_what_a_test_replaces_around_a_call_is_not_the_implementations(monkeypatch):
    theirs = Facade("theirs", types.SimpleNamespace(longflow=types.SimpleNamespace(decode_attention=lambda: (1, 2, 3))))
    theirs.longflow.decode_attention()
    with monkeypatch.context() as inside:
        inside.setattr(torch, "equal", lambda *values: True)
        assert theirs.longflow.decode_attention() == (1, 2, 3)
    theirs.guard.after_test()
    assert theirs.longflow.decode_attention() == (1, 2, 3)
