"""Locks of a GPU's memory, over processes: cases/gpu_memory.py."""

from __future__ import annotations

import select
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases import gpu_memory, layouts
from kvtwin.conformance.harness import suite, survival
from kvtwin.conformance.refusals import EnvironmentLimit

pytest_plugins = ["pytester"]

#: Elsewhere there are no locks to test: `lock` returns at once.
posix = pytest.mark.skipif(gpu_memory.fcntl is None, reason="the locks are fcntl's, which only POSIX systems have")

OTHER = """
import sys
from kvtwin.conformance.cases import gpu_memory
print("asks", flush=True)
gpu_memory.lock("of-this-test", at_once=int(sys.argv[1]))
print("holds", flush=True)
sys.stdin.readline()
"""


def other(at_once: int = 1) -> subprocess.Popen:
    """Another process, which asks for the lock, says that it holds it, and ends after a line of input."""
    return subprocess.Popen(
        [sys.executable, "-c", OTHER, str(at_once)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )


def says(process: subprocess.Popen, line: str, seconds: float = 60) -> bool:
    """Whether the process prints this line within the time."""
    ready = select.select([process.stdout], [], [], seconds)[0]
    return bool(ready) and process.stdout.readline().decode().split() == [line]


@pytest.fixture(autouse=True)
def unlocked():
    gpu_memory.release()
    yield
    gpu_memory.release()


@pytest.mark.slow_on_cpu  # only tests on a GPU lock memory
@posix
def test_another_process_waits_until_the_lock_is_released(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(gpu_memory.tempfile, "tempdir", str(tmp_path))
    gpu_memory.lock("of-this-test")
    gpu_memory.lock("of-this-test")  # again in this process: no wait
    with other() as process:
        try:
            assert says(process, "asks")
            assert not says(process, "holds", 0.5)
            gpu_memory.release()
            assert says(process, "holds")
        finally:
            process.kill()  # it would wait for ever if the lock was not released


@pytest.mark.slow_on_cpu
@posix
def test_a_lock_admits_as_many_processes_as_it_says(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(gpu_memory.tempfile, "tempdir", str(tmp_path))
    gpu_memory.lock("of-this-test", at_once=2)
    with other(2) as second:
        try:
            assert says(second, "asks")
            assert says(second, "holds")
            with other(2) as third:
                try:
                    assert says(third, "asks")
                    assert not says(third, "holds", 0.5)
                    second.kill()
                    assert says(third, "holds")
                finally:
                    third.kill()
        finally:
            second.kill()


@pytest.mark.parametrize(("gigabytes", "processes"), [(16, 1), (79, 2), (140, 4)])
def test_the_memory_of_a_gpu_says_how_many_processes_may_lock_it(monkeypatch, gigabytes, processes):
    taken = []
    monkeypatch.setattr(gpu_memory, "lock", lambda name, at_once: taken.append((name, at_once)))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="7", total_memory=gigabytes * 2**30)
    )
    gpu_memory.lock_memory(torch.device("cuda", 0))
    assert taken == [("memory-7", processes)]


def test_a_lock_is_released_before_the_next_case(tmp_path, monkeypatch):
    """The cases that Hypothesis draws for one test; the lock of the last one is released after the test."""
    monkeypatch.setattr(gpu_memory.tempfile, "tempdir", str(tmp_path))
    cases = []

    @settings(max_examples=4, database=None, deadline=None)
    @given(st.integers())
    def test(number):
        cases.append(gpu_memory.is_locked_here())
        gpu_memory.lock("of-one-case")

    before = test.hypothesis.inner_test
    with gpu_memory.between_examples(test, suite._release_memory):
        test()
    assert len(cases) == 4
    assert not any(cases)
    assert gpu_memory.is_locked_here() == (gpu_memory.fcntl is not None)
    assert test.hypothesis.inner_test is before


@pytest.mark.slow_on_cpu
def test_the_suite_releases_locks_between_cases(pytester):
    """In a run of pytest on a GPU: the second case of a test finds no lock."""
    pytester.makeconftest("""
        import dataclasses
        import torch
        from kvtwin.conformance.harness.options import SUITE

        def pytest_collection_finish(session):
            suite = session.config.pluginmanager.get_plugin(SUITE)
            suite.backend = dataclasses.replace(suite.backend, device=torch.device("cuda"))
    """)
    pytester.makepyfile("""
        from hypothesis import given, settings, strategies as st
        from kvtwin.conformance.cases import case, gpu_memory

        @settings(max_examples=3, database=None)
        @given(st.integers())
        def test_cases(number):
            assert not gpu_memory.is_locked_here()
            gpu_memory._held["of this test"] = open(__file__)
    """)
    pytester.runpytest_subprocess("--kv-device=cpu", "-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_gigabytes_of_a_gpu_are_allocated_under_a_lock(monkeypatch):
    taken = []
    monkeypatch.setattr(gpu_memory, "lock_memory", taken.append)
    monkeypatch.setattr(torch, "empty", lambda count, dtype, device: count)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert layouts.untouched(7, torch.float16, torch.device("cuda", 0)) == 7
    assert taken == [torch.device("cuda", 0)]


LACK = torch.OutOfMemoryError("CUDA out of memory")
TAKEN = gpu_memory.TakenMemory("it ran out of the GPU's memory, of which other processes hold 40 GiB")


@pytest.mark.parametrize(("processes", "short", "raised", "called"), [
    (2, 2, LACK, 3), (2, 3, LACK, 4), (2, 4, LACK, torch.OutOfMemoryError), (1, 1, LACK, torch.OutOfMemoryError),
    (1, 0, LACK, 1), (2, 3, TAKEN, 4), (2, 4, TAKEN, EnvironmentLimit), (1, 1, TAKEN, EnvironmentLimit),
    (2, 1, ExceptionGroup("flaky", [ValueError(), LACK]), 2), (2, 1, ValueError("another error"), ValueError),
    (2, 4, ExceptionGroup("flaky", [ValueError(), TAKEN]), EnvironmentLimit),
    (2, 4, ExceptionGroup("flaky", [ValueError(), LACK]), ExceptionGroup),
])
def test_a_test_is_called_again_when_other_processes_left_it_no_memory(monkeypatch, processes, short, raised, called):
    monkeypatch.setattr(gpu_memory, "shares_its_gpu", lambda: processes > 1)
    monkeypatch.setattr(gpu_memory, "lock_memory", lambda device: None)
    monkeypatch.setattr(gpu_memory.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    calls = []

    def allocates(number, *, name):
        calls.append((number, name))
        if len(calls) <= short:
            raise raised

    if isinstance(called, type):
        with pytest.raises(called):
            gpu_memory.when_memory_is_free(allocates, 7, name="it")
    else:
        gpu_memory.when_memory_is_free(allocates, 7, name="it")
        assert calls == [(7, "it")] * called


@pytest.mark.parametrize(("free", "mine", "raised"), [
    (10, 80, survival.EndsCall), (10, 64, type(TAKEN)), (0, 100, survival.EndsCall), (90, 0, survival.EndsCall),
])
def test_an_implementation_is_to_blame_for_the_memory_that_it_has_taken_itself(monkeypatch, free, mine, raised):
    monkeypatch.setattr(survival, "_uses_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: mine)
    with pytest.raises(raised, match="^theirs"), survival.ending_calls("theirs"):
        raise LACK


@posix
def test_the_suite_releases_locks_after_a_test(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_memory.tempfile, "tempdir", str(tmp_path))
    gpu_memory.lock("of-one-test")
    assert gpu_memory.is_locked_here()
    suite._release_memory()
    assert not gpu_memory.is_locked_here()
