"""Processes that take turns: cases/turns.py."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kvtwin.conformance.cases import layouts, turns
from kvtwin.conformance.harness import suite

#: Elsewhere there are no turns to test: `take` returns at once.
posix = pytest.mark.skipif(turns.fcntl is None, reason="turns are locks of fcntl, which only POSIX systems have")

OTHER = """
from kvtwin.conformance.cases import turns
print("asks", flush=True)
turns.take("of-this-test")
print("holds", flush=True)
"""


@pytest.fixture(autouse=True)
def no_turn():
    turns.give_back()
    yield
    turns.give_back()


@posix
def test_another_process_waits_until_the_turn_is_given_back(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(turns.tempfile, "tempdir", str(tmp_path))
    turns.take("of-this-test")
    turns.take("of-this-test")  # again in this process: no wait
    with subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "asks\n"
            with pytest.raises(subprocess.TimeoutExpired):
                other.wait(0.5)
            turns.give_back()
            assert other.communicate(timeout=60) == ("holds\n", None)
        finally:
            other.kill()  # it would wait for ever if the turn was not given back


def test_gigabytes_of_a_gpu_are_allocated_in_turn(monkeypatch):
    taken = []
    monkeypatch.setattr(turns, "take_memory_of", taken.append)
    monkeypatch.setattr(torch, "empty", lambda count, dtype, device: count)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert layouts.untouched(7, torch.float16, torch.device("cuda", 0)) == 7
    assert taken == [torch.device("cuda", 0)]


@pytest.mark.parametrize(("processes", "short", "called"), [
    (2, 2, 3), (2, 3, 4), (2, 4, "error"), (1, 1, "error"), (1, 0, 1),
])
def test_a_test_is_called_again_when_other_processes_left_it_no_memory(monkeypatch, processes, short, called):
    monkeypatch.setattr(turns, "shares_its_gpu", lambda: processes > 1)
    monkeypatch.setattr(turns, "take_memory_of", lambda device: None)
    monkeypatch.setattr(turns.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    calls = []

    def allocates(number, *, name):
        calls.append((number, name))
        if len(calls) <= short:
            raise torch.OutOfMemoryError("CUDA out of memory")

    if called == "error":
        with pytest.raises(torch.OutOfMemoryError):
            turns.when_memory_is_free(allocates, 7, name="it")
    else:
        turns.when_memory_is_free(allocates, 7, name="it")
        assert calls == [(7, "it")] * called


@posix
def test_the_suite_gives_turns_back_after_a_test(tmp_path, monkeypatch):
    monkeypatch.setattr(turns.tempfile, "tempdir", str(tmp_path))
    turns.take("of-one-test")
    assert turns.held()
    suite._release_memory()
    assert not turns.held()
