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


def made(shared=0, code="", machine=""):
    return SimpleNamespace(metadata=SimpleNamespace(shared=shared), asm={"ttgir": code, "ptx": machine})


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


def at(line, caller, kind, of=1, old=True):
    """As the compiler writes an instruction of a line that is inlined where another line calls it."""
    place, comment = f".loc\t{of} {line} 20", f"// kernels.py:{line}:20"
    called = f"{place} {comment} @[ kernels.py:{caller}:4 ]"
    instruction = {"fused": "fma.rn.f32 %r3, %r1, %s, %r2;", "apart": "add.f32 %r3, %r1, %r2;",
                   "less": "sub.ftz.f32 %r3, %r1, %r2;", "other": "mul.f32 %r3, %r1, %r2;"}[kind]
    return f"\t{called if old else f'{place}, function_name $L__info, inlined_at {of} {caller} 4 {comment}'}\n" \
           f"\t{instruction}\n"


@pytest.mark.parametrize("old", [True, False], ids=["callers in a comment", "caller in the directive"])
@pytest.mark.parametrize(
    ("code", "refused"),
    [
        ([(2, 7, "fused"), (2, 8, "fused")], False),
        ([(2, 7, "fused"), (2, 8, "apart")], True),
        ([(2, 7, "less"), (2, 8, "fused")], True),
        ([(2, 7, "fused"), (2, 8, "other")], False),
        ([(2, 7, "fused"), (3, 8, "apart")], False),
        ([(2, 7, "fused"), (2, 7, "apart"), (2, 8, "fused")], False),
        ([(2, 7, "fused", 2), (2, 8, "apart", 2)], False),
    ],
    ids=["alike", "unlike", "a difference", "no sum", "two lines", "both in one place", "not a file of ours"],
)
def test_a_line_that_is_fused_in_one_loop_alone_is_refused(code, refused, old, monkeypatch, tmp_path):
    (tmp_path / "ours").mkdir()
    for folder in (tmp_path / "ours", tmp_path):
        (folder / "kernels.py").write_text("def tile():\n    x = a * b + c\n    y = a + c\n")
    machine = "".join(at(*each, old=old) for each in code)
    machine += f'.file\t1 "{tmp_path / "ours" / "kernels.py"}"\n.file\t2 "{tmp_path / "kernels.py"}"\n'
    compiled = compile_only.Compiled()
    compiled.folder = tmp_path / "ours"
    launch = compiled.instead_of_launching(lambda kernel, *, grid, warmup: made(machine=machine))
    launch(Kernel(), grid=(1,), warmup=False)
    said = "ArithmeticError: fused with a product in one loop and not in another: ['x = a * b + c']"
    assert compiled.refused == ({"some_kernel": said} if refused else {})
    monkeypatch.setattr(compile_only, "SUMMED", ("x = a * b + c",))
    compiled.refused.clear()
    launch(Kernel(), grid=(1,), warmup=False)
    assert not compiled.refused


STEP = """
import sys
import torch
from kvtwin.conformance import compile_only, discovery, tiny
compiled = compile_only.stand_in(90)
pair = {pair.name: pair for pair in discovery.pairs()}[sys.argv[1]]
device = torch.device("cpu")
state = tiny.new_state(pair, pair.optimized, device, dtype=torch.bfloat16, head_dim=16)
state.step(*(tensor.bfloat16() for tensor in tiny.token(device, seed=1, head_dim=16)))
assert not compiled.refused, compiled.refused
"""


def compiled_step(method, kind, folder):
    """The code, of this kind, of what attend_kernel was compiled to for a method's step."""
    environment = {
        **os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1",
    }
    command = [sys.executable, "-c", STEP, method]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [path.read_text() for path in folder.rglob(f"attend_kernel.{kind}")]


def test_a_masked_loop_sums_as_one_without_a_mask(tmp_path):
    """Both are in a step of SyncKV: a mask is read from bytes, and the compiler took keys for as narrow."""
    found = [compile_only.key_orders(code) for code in compiled_step("synckv", "ttgir", tmp_path)]
    assert found == [{"16x128xbf16": {"2"}}], "or this test sees nothing"


def test_a_masked_loop_rounds_as_one_without_a_mask(tmp_path):
    """Both are in a step of LongFlow: scores were the product with the scale, rounded in one of them, and a norm."""
    folder = compile_only.Compiled().folder
    found = [compile_only.fused_here_only(code, folder) for code in compiled_step("longflow", "ptx", tmp_path)]
    assert found == [set(compile_only.SUMMED)], "or this test sees nothing"


def test_the_interpreter_has_nothing_to_compile(monkeypatch):
    from kvtwin.optimized import _launch

    monkeypatch.setattr(_launch, "INTERPRETED", True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        compile_only.stand_in(90)
