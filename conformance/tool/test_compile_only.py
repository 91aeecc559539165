"""Compiling kernels without a GPU: the report of kernels that the compiler accepts, and of those that it refuses."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvtwin.conformance import discovery
from kvtwin.conformance.lab import compile_only


def run(*arguments, **environment):
    command = [sys.executable, "-m", "kvtwin.conformance.lab.compile_only", *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_kernels_of_a_method_compile(tmp_path):
    """Tests one small method. tox -e compile compiles all of them."""
    done = run("random", "--head-dim", "16", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "evict_kernel" in done.stdout
    assert any(tmp_path.rglob("*.cubin")), "nothing was compiled to machine code"


@pytest.mark.slow
def test_kernels_of_several_ranks_may_be_left_out():
    listed = [
        set(run("synckv", "--list", "--head-dim", "16", *more).stdout.split()) for more in ((), ("--no-ranks",))
    ]
    assert listed[0] - listed[1] == {"kvtwin.optimized.synckv._anticipate_kernels.include_kernel"}
    assert listed[1] < listed[0]


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "blocks"), [("1", "16 64 16"), ("", "64 128 16")])
def test_small_tiles_are_a_choice_on_a_gpu(asked, blocks):
    """The last tile is of large rows: a small tile is never the larger one, which would not fit in shared memory."""
    show = "from kvtwin.optimized._common.launch import key_block; print(*(key_block(*a) for a in %s))"
    said = subprocess.run(
        [sys.executable, "-c", show % [(128, 2, 40), (64, 2, 99), (160, 4, 99)]],
        env={**os.environ, "TRITON_INTERPRET": "0", "KVTWIN_SMALL_TILES": asked}, capture_output=True, text=True,
        check=True,
    )
    assert said.stdout == f"{blocks}\n"


#: Modules that choose a step, below kvtwin.optimized.
CHOOSING = {"longflow": ["longflow._ops"], "keydiff": [], "snapkv": [], "thinkv": []}
CHOOSING |= {name: ["_common.block_cache.step"] for name in ("h2o", "raas", "random", "tova")}


@pytest.mark.parametrize("pair", [pair for pair in discovery.methods() if pair.name in CHOOSING], ids=str)
def test_methods_with_a_step_for_many_heads(pair):
    """KeyDiff and SnapKV evict after the step, so it has one kernel."""
    modules = CHOOSING[pair.name]
    found = compile_only.choosing(pair)
    assert [module.__name__.removeprefix("kvtwin.optimized.") for module in found] == modules
    with compile_only.fused_as(pair, True):
        assert all(module.fused(None, None) is True for module in found)


@pytest.mark.slow
def test_an_unknown_method_is_a_usage_error():
    done = run("none")
    assert done.returncode == 2
    assert "no method none; there are: cake, epikv" in done.stderr


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
    error = "MemoryError: expected at most 232448 bytes of shared memory, got 232449"
    assert compiled.refused == {"some_kernel": error}


def loop(number, order, transposed=True):
    """A dot in a loop, in the compiler's output format."""
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


def at(line, callers, kind, of=1, old=True):
    """An instruction in the compiler's output format, for a line inlined into `callers`, the nearest caller first."""
    place, comment = f".loc\t{of} {line} 20", f"// kernels.py:{line}:20"
    nested = "".join(f" @[ kernels.py:{caller}:4" for caller in callers) + " ]" * len(callers)
    newer = f"{place}, function_name $L__info, inlined_at {of} {callers[0]} 4 {comment}"
    instruction = {"fused": "fma.rn.f32 %r3, %r1, %s, %r2;", "apart": "add.f32 %r3, %r1, %r2;",
                   "less": "sub.ftz.f32 %r3, %r1, %r2;", "other": "mul.f32 %r3, %r1, %r2;"}[kind]
    return f"\t{f'{place} {comment}{nested}' if old else newer}\n\t{instruction}\n"


OURS, HELPERS, ELSEWHERE = 1, 2, 3


@pytest.mark.parametrize("old", [True, False], ids=["callers in a comment", "caller in the directive"])
@pytest.mark.parametrize(
    ("code", "refused"),
    [
        ([(2, [7], "fused"), (2, [8], "fused")], False),
        ([(2, [7], "fused"), (2, [8], "apart")], True),
        ([(2, [7, 9], "less"), (2, [8, 9], "fused")], True),
        ([(2, [7], "fused"), (2, [8], "other")], False),
        ([(2, [7], "fused"), (3, [8], "apart")], False),
        ([(0, [7], "fused"), (0, [8], "apart")], False),
        ([(2, [7], "fused"), (2, [7], "apart"), (2, [8], "fused")], False),
        ([(2, [7], "fused", HELPERS), (2, [8], "apart", HELPERS)], False),
        ([(2, [7], "fused", ELSEWHERE), (2, [8], "apart", ELSEWHERE)], False),
    ],
    ids=["alike", "unlike", "a difference", "no sum", "two lines", "no line", "both in one", "a helper", "not ours"],
)
def test_a_line_that_is_fused_in_one_loop_alone_is_refused(code, refused, old, tmp_path):
    assert refused_of(code, tmp_path, old=old) == ({"x = a * b + c"} if refused else set())


@pytest.mark.parametrize(
    ("one", "other", "refused"),
    [([7, 8, 9], [7, 8, 10], True), ([7, 8], [6, 8], False), ([7, 8], [6, 9], False), ([7, 8], [6, 7, 8], False)],
    ids=["in two loops", "for two things", "in two loops for two things", "from deeper down"],
)
def test_helpers_are_compared_where_they_do_the_same(one, other, refused, tmp_path):
    """Only the output of Triton up to 3.8 shows this."""
    code = [(2, one, "fused", HELPERS), (2, other, "apart", HELPERS)]
    assert refused_of(code, tmp_path) == ({"x = a * b + c"} if refused else set())


def refused_of(code, folder, old=True):
    """The lines for which a kernel with this code is refused."""
    (folder / "ours").mkdir(exist_ok=True)
    files = {OURS: folder / "ours/kernels.py", HELPERS: folder / "ours/numerics.py", ELSEWHERE: folder / "kernels.py"}
    for path in files.values():
        path.write_text("def tile():\n    x = a * b + c\n    y = a + c\n")
    machine = "".join(at(*each, old=old) for each in code)
    machine += "".join(f'.file\t{number} "{path}"\n' for number, path in files.items())
    compiled = compile_only.Compiled()
    compiled.folder = folder / "ours"
    launch = compiled.instead_of_launching(lambda kernel, *, grid, warmup: made(machine=machine))
    launch(Kernel(), grid=(1,), warmup=False)
    if not compiled.refused:
        return set()
    said, lines = compiled.refused["some_kernel"].split(": ", 2)[::2]
    assert said == "ArithmeticError"
    return set(ast.literal_eval(lines))


STEP = """
import sys
import torch
import triton.language as tl
from kvtwin.conformance import discovery
from kvtwin.conformance.lab import compile_only
from kvtwin.conformance.cases import tiny
from kvtwin.optimized._common import numerics
if "plain product" in sys.argv:
    numerics._PTX = tl.constexpr(False)
compiled = compile_only.stand_in(90)
pair = {pair.name: pair for pair in discovery.pairs()}[sys.argv[1]]
device = torch.device("cpu")
state = tiny.new_state(pair, pair.optimized, device, dtype=torch.bfloat16, head_dim=16)
state.step(*(tensor.bfloat16() for tensor in tiny.token(device, seed=1, head_dim=16)))
assert not compiled.refused, compiled.refused
"""


def run_step(method, folder, *options):
    """Compile the kernels of a method's step. "plain product": `multiply` does not prevent fusion."""
    environment = {
        **os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1",
    }
    command = [sys.executable, "-c", STEP, method, *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def compiled_step(method, kind, folder):
    """The code of this kind that attend_kernel was compiled to for a method's step."""
    done = run_step(method, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [path.read_text() for path in folder.rglob(f"attend_kernel.{kind}")]


@pytest.mark.slow
def test_a_masked_loop_sums_as_one_without_a_mask(tmp_path):
    """SyncKV's step has both loops. The mask is loaded from bytes, and the compiler once treated keys as equally
    narrow."""
    found = [compile_only.key_orders(code) for code in compiled_step("synckv", "ttgir", tmp_path)]
    assert found == [{"16x128xbf16": {"2"}}], "or this test sees nothing"


@pytest.mark.slow
def test_a_masked_loop_rounds_as_one_without_a_mask(tmp_path):
    """LongFlow's step has both loops. Without `multiply`, the product with the scale is rounded in one loop only."""
    assert run_step("longflow", tmp_path).returncode == 0
    plain = run_step("longflow", tmp_path, "plain product")
    assert "attend_kernel': \"ArithmeticError: fused with a product in one loop and not in another" in plain.stderr


@pytest.mark.parametrize(("code", "found"), [
    ("div.rn.f32 %f3, %f1, %f2;\n\tstmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r2};", {"div.rn.f32"}),
    ("sqrt.rn.f32 %f3, %f1;\n\t@%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1];", {"sqrt.rn.f32"}),
    ("rcp.rn.f64 %fd2, %fd1;\n\t@%p1 stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r2};", {"rcp.rn.f64"}),
    ("div.full.f32 %f3, %f1, %f2;\n\tstmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r2};", set()),
    ("div.rn.f32 %f3, %f1, %f2;\n\tst.shared.b32 [%r1], %r2;", set()),
], ids=["division", "root", "reciprocal", "one way", "no matrix"])
def test_whole_warps_access_no_matrix_where_lanes_may_diverge(code, found):
    compiled = compile_only.Compiled()
    launch = compiled.instead_of_launching(lambda kernel, *, grid, warmup: made(machine=f"\t{code}\n"))
    launch(Kernel(), grid=(1,), warmup=False)
    refused = f"RuntimeError: lanes may diverge in {sorted(found)}, and whole warps access matrices"
    assert compiled.refused == ({"some_kernel": refused} if found else {})


def test_the_interpreter_has_nothing_to_compile(monkeypatch):
    from kvtwin.optimized._common import launch as _launch

    monkeypatch.setattr(_launch, "INTERPRETED", True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        compile_only.stand_in(90)
