"""Calls that do not return: the verdict survives them, names the case, and judges the rest in another process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvtwin.conformance.harness import survival

#: Right, but for calls with more than nine slots.
MODULE = """
import ctypes, os, sys, types
from kvtwin.conformance.lab.implementations.longflow import Decode

def decode_attention(query, key, value, occupied, **options):
    if key.shape[2] > 9:
        {how}
    return Decode()(query, key, value, occupied, **options)

longflow = types.ModuleType("theirs.longflow")
longflow.decode_attention = decode_attention
"""
NAME = "theirs.longflow.decode_attention"


@pytest.mark.parametrize(("how", "says"), [
    pytest.param("os.abort()", "ended its process: an abort, an exit or a signal", id="abort", marks=pytest.mark.slow),
    pytest.param("os._exit(0)", "ended its process", id="exit", marks=pytest.mark.slow),
    pytest.param("ctypes.string_at(0)", "ended its process", id="signal", marks=pytest.mark.slow),
    # Past the end of a tensor that ends where its memory ends.
    pytest.param("ctypes.c_byte.from_address(key.data_ptr() + key.nbytes).value", "ended its process", id="over-read",
                 marks=pytest.mark.slow),
    pytest.param("sys.exit(3)", "calls sys.exit(3)", id="sys.exit", marks=pytest.mark.slow),
    pytest.param("while True: pass", "did not return within 3 s", id="loop", marks=pytest.mark.slow),
    pytest.param("raise MemoryError('no room')", "out of memory: no room", id="memory", marks=pytest.mark.slow),
])
def test_a_call_that_does_not_return_is_wrong_and_the_rest_is_judged(tmp_path, how, says):
    (tmp_path / "theirs.py").write_text(MODULE.format(how=how))
    command = [sys.executable, "-m", "kvtwin"]
    tests = "(test_numbers_are_within_their_bounds or test_large_tensors) and decode_attention-output and not paged"
    ran = subprocess.run(
        [*command, "verify", "longflow", "--impl=theirs", "--device=cpu", "-j1", "--call-limit=3", "-k",
         tests, "--hypothesis-profile=brief", "--report=found.json"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    report = json.loads((tmp_path / "found.json").read_text())
    found = report["verdicts"]["longflow"]["survives"]
    assert (found["verdict"], found["subject"]) == ("wrong", "longflow.decode_attention")
    assert found["message"].startswith(NAME) and says in found["message"]
    assert [cause["property"] for cause in report["overall"]["longflow"]["causes"]] == ["survives"]
    if says.startswith(("ended", "did not")):
        assert "slots=17" in found["case"] and ("layout='guarded'" in found["case"]) == ("c_byte" in how)
    assert "slots=" in found["case"] and f"survives: {NAME}" in ran.stdout
    assert "Traceback" not in ran.stderr and "Fatal Python error" not in ran.stderr
    if how.startswith(("while", "os._exit")):  # the command does what the call does
        return
    replay = found["replay"].replace("kvtwin", " ".join(command), 1).split()
    again = subprocess.run(replay, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode != 0, "the saved case must show it again"


@pytest.mark.slow
def test_a_slow_implementation_is_judged_for_a_time(tmp_path):
    slow = MODULE.format(how="pass").replace("    return", "    time.sleep(0.2)\n    return")
    (tmp_path / "theirs.py").write_text(f"import time\n{slow}")
    ran = subprocess.run(
        [sys.executable, "-m", "kvtwin", "verify", "longflow", "--impl=theirs", "--device=cpu", "-j1",
         "--time-limit=50", "-k", "test_properties and decode_attention", "--report=found.json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )
    assert ran.returncode == 6, ran.stdout + ran.stderr
    report = json.loads((tmp_path / "found.json").read_text())
    verdicts = {name: one["verdict"] for name, one in report["verdicts"]["longflow"].items()}
    assert {"right", "not covered"} <= {*verdicts.values()} <= {"right", "not covered", "convention"}
    (note,) = report["coverage"]["longflow"]["notes"]
    assert note == f"{NAME} is not called after 50 s, the time of the run (--time-limit)"
    assert f"{NAME} within 50 s (--time-limit)" in ran.stdout


def test_an_end_counts_for_its_property_and_a_loop_for_several(tmp_path, monkeypatch, request):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    watch = survival.Watch(tmp_path, 100.0)
    request.addfinalizer(watch.trace.close)

    def called(judges, name=NAME):
        watch.test("t.py::t", {"judges": judges})
        with watch.call(name):
            pass
        watch.idle()

    called("accuracy")
    assert json.loads((tmp_path / "gw0.json").read_text()) == {
        "test": "t.py::t", "facts": {"judges": "accuracy"}, "call": NAME, "case": None,
    }
    ends = tmp_path / survival.ENDS
    ends.write_text(f"{NAME} accuracy\n")
    with pytest.raises(pytest.skip.Exception, match="ends its process"):
        called("accuracy")
    called("ties")
    called("accuracy", "theirs.longflow.compress")
    ends.write_text(f"{NAME} accuracy\n" * survival.OF_A_LOOP + f"{NAME} state\n" * survival.OF_A_LOOP)
    with pytest.raises(pytest.skip.Exception):
        called("ties")


@pytest.mark.parametrize(("message", "ends"), [
    ("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be", True),
    ("CUDA error: operation not permitted when stream is capturing\nSearch for", False),
    ("CUDA error: operation failed due to a previous error during capture\nSearch for", False),
])
def test_an_error_of_the_gpu_ends_the_process_and_one_of_a_capture_does_not(tmp_path, monkeypatch, message, ends):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    codes = []
    monkeypatch.setattr(survival.os, "_exit", codes.append)
    watch = survival.Watch(tmp_path, 100.0)
    watch.test("t.py::t", {"judges": "repeatability"})
    with pytest.raises(RuntimeError, match="CUDA error"), watch.call(NAME):
        raise type("AcceleratorError", (RuntimeError,), {})(message)
    watch.trace.close()
    assert codes == [1] * ends


def test_a_process_that_ended_elsewhere_is_reported_as_it_is(tmp_path):
    report = pytest.TestReport("t.py::t", ("t.py", 1, "t"), {}, "failed", "worker crashed", "call")
    survival.explain(report, "gw0", tmp_path)
    (tmp_path / "gw0.json").write_text('{"test": "another"}')
    survival.explain(report, "gw0", tmp_path)
    assert report.longrepr == "worker crashed" and not (tmp_path / survival.ENDS).exists()
