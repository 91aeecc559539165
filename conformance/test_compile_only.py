"""Compiling kernels without a GPU: what it reports of those that the compiler takes, and of those that it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvtwin.conformance import compile_only


def run(*arguments, **environment):
    command = [sys.executable, "-m", "kvtwin.conformance.compile_only", *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_kernels_of_a_method_compile(tmp_path):
    """One small method; all of them: tox -e compile."""
    done = run("random", "--head-dim", "16", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "choose_kernel" in done.stdout
    assert any(tmp_path.rglob("*.cubin")), "nothing was compiled down to machine code"


def test_an_unknown_method_is_a_usage_error():
    done = run("none")
    assert done.returncode == 2
    assert "no method none; there are: epikv, h2o" in done.stderr


class Kernel:
    __name__ = "some_kernel"


def test_what_the_compiler_refuses_is_reported_from_the_inside_out():
    compiled = compile_only.Compiled()

    def refuse(kernel, *arguments, grid, warmup, bad=False, shared=0):
        assert warmup, "nothing may be launched"
        if bad:
            raise ValueError("at 7:8") from TypeError("a loop changes a type")
        return SimpleNamespace(metadata=SimpleNamespace(shared=shared))

    launch = compiled.instead_of_launching(refuse)
    launch(Kernel(), grid=(1,), warmup=False)
    assert (dict(compiled.done), compiled.refused) == ({"some_kernel": 1}, {})
    launch(Kernel(), grid=(1,), warmup=False, bad=True)
    assert compiled.refused == {"some_kernel": "TypeError: a loop changes a type\nValueError: at 7:8"}
    assert compiled.done["some_kernel"] == 1


def test_a_kernel_that_no_multiprocessor_can_hold_is_refused():
    compiled = compile_only.Compiled()
    launch = compiled.instead_of_launching(
        lambda kernel, *, grid, warmup, shared: SimpleNamespace(metadata=SimpleNamespace(shared=shared))
    )
    launch(Kernel(), grid=(1,), warmup=False, shared=227 * 1024)
    assert not compiled.refused
    launch(Kernel(), grid=(1,), warmup=False, shared=227 * 1024 + 1)
    assert compiled.refused == {"some_kernel": "MemoryError: 232449 bytes of shared memory, of 232448"}


def test_the_interpreter_has_nothing_to_compile(monkeypatch):
    from kvtwin.optimized import _launch

    monkeypatch.setattr(_launch, "INTERPRETED", True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        compile_only.stand_in(90)
