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


def made(shared=0, code=""):
    return SimpleNamespace(metadata=SimpleNamespace(shared=shared), asm={"ttgir": code})


class Kernel:
    __name__ = "some_kernel"


def test_what_the_compiler_refuses_is_reported_from_the_inside_out():
    compiled = compile_only.Compiled()

    def refuse(kernel, *arguments, grid, warmup, bad=False, shared=0):
        assert warmup, "nothing may be launched"
        if bad:
            raise ValueError("at 7:8") from TypeError("a loop changes a type")
        return made(shared)

    launch = compiled.instead_of_launching(refuse)
    launch(Kernel(), grid=(1,), warmup=False)
    assert (dict(compiled.done), compiled.refused) == ({"some_kernel": 1}, {})
    launch(Kernel(), grid=(1,), warmup=False, bad=True)
    assert compiled.refused == {"some_kernel": "TypeError: a loop changes a type\nValueError: at 7:8"}
    assert compiled.done["some_kernel"] == 1


def test_a_kernel_that_no_multiprocessor_can_hold_is_refused():
    compiled = compile_only.Compiled()
    launch = compiled.instead_of_launching(
        lambda kernel, *, grid, warmup, shared: made(shared)
    )
    launch(Kernel(), grid=(1,), warmup=False, shared=227 * 1024)
    assert not compiled.refused
    launch(Kernel(), grid=(1,), warmup=False, shared=227 * 1024 + 1)
    assert compiled.refused == {"some_kernel": "MemoryError: 232449 bytes of shared memory, of 232448"}


def loop(number, order, transposed=True):
    """As the compiler writes a loop's dot."""
    types = (f"tensor<16x128xbf16, #ttg.dot_op<{{opIdx = 0, parent = #mma, kWidth = {order}}}>> * "
             f"tensor<128x64xbf16, #ttg.dot_op<{{opIdx = 1, parent = #mma, kWidth = {order}}}>> -> "
             "tensor<16x64xf32, #mma>")
    moved = "tt.trans %load {order = array<i32: 1, 0>}" if transposed else "ttg.local_load %load"
    return f"%k_{number} = {moved} : ... loc(#loc1)\n%logit_{number} = tt.dot %q, %k_{number}, %zero : {types}\n"


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        (loop(1, 2) + loop(2, 2), False),
        (loop(1, 2) + loop(2, 4), True),
        (loop(1, 2) + loop(2, 4, transposed=False), False),
    ],
    ids=["one order", "two", "weights with values, which no tie hangs on"],
)
def test_logits_that_are_summed_in_two_orders_are_refused(code, refused, monkeypatch):
    compiled = compile_only.Compiled()
    launch = compiled.instead_of_launching(lambda kernel, *, grid, warmup: made(code=code))
    launch(Kernel(), grid=(1,), warmup=False)
    said = {"some_kernel": "ArithmeticError: logits of keys 128x64xbf16 are summed in orders ['2', '4']"}
    assert compiled.refused == (said if refused else {})
    compiled.refused.clear()
    monkeypatch.setattr(compile_only, "SUMS_ALONE", ("some_kernel",))
    launch(Kernel(), grid=(1,), warmup=False)
    assert not compiled.refused


STEP = """
import torch
from kvtwin.conformance import compile_only, discovery, tiny
compiled = compile_only.stand_in(90)
pair = {pair.name: pair for pair in discovery.pairs()}["synckv"]
device = torch.device("cpu")
state = tiny.new_state(pair, pair.optimized, device, dtype=torch.bfloat16, head_dim=16)
state.step(*(tensor.bfloat16() for tensor in tiny.token(device, seed=1, head_dim=16)))
assert not compiled.refused, compiled.refused
"""


def test_a_masked_loop_sums_as_one_without_a_mask(tmp_path):
    """Both are in a step of SyncKV: a mask is read from bytes, and the compiler took keys for as narrow."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", STEP], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [compile_only.key_orders(path.read_text()) for path in tmp_path.rglob("attend_kernel.ttgir")]
    assert found == [{"16x128xbf16": {"2"}}], "or this test sees nothing"


def test_the_interpreter_has_nothing_to_compile(monkeypatch):
    from kvtwin.optimized import _launch

    monkeypatch.setattr(_launch, "INTERPRETED", True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        compile_only.stand_in(90)
