"""What the accelerator computes itself, if Triton has the sources that it knows: functions of the standard library,
loads and stores without a mask, conversions of bfloat16 and of a kernel's arguments. It gives the same bits as
Triton's interpreter."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvtwin.conformance import interpreter
from kvtwin.conformance.interpreter import arrays, functions, internals, language, launch
from kvtwin.conformance.interpreter.recordings import Recorder

INTERPRETED = interpreter.interprets(triton.language.standard)
if INTERPRETED and not interpreter.prepare().accelerated:
    pytest.skip("the accelerator is off", allow_module_level=True)


def test_other_sources_are_left_alone():
    """Each part is left out for an interpreter with other sources."""
    other = SimpleNamespace(
        _convert_float=len, InterpretedFunction=SimpleNamespace(), tl=SimpleNamespace(core=tl.core),
        _patch_reduce_scan=len, _implicit_cvt=len, TensorHandle=None, interpreter_builder=None, _interpreter=None,
        __name__="other",
    )  # fmt: skip
    before = dict(vars(other))
    language._convert_quickly(other)
    functions.record_functions(other, None)
    launch.remember_arguments(other)
    assert vars(other) == before
    assert not arrays.Compiler(other).methods & {"create_load", "create_store"}
    assert internals.parts_off(other) == list(internals.PARTS)


if INTERPRETED:
    module = sys.modules[interpreter.MODULE]
    recordings = module._patch_builtin.recordings

    def known(sources):
        """Skip a test about sources that this Triton does not have: its results are the interpreter's own."""
        return pytest.mark.skipif(not internals.has_sources(module, sources), reason="this triton has other sources")

    @known(internals.CONVERSIONS)
    @pytest.mark.parametrize("finite", [False, True], ids=["all numbers", "no subnormal numbers"])
    def test_brain_floats_are_converted_as_by_the_interpreter(finite):
        """In both directions, whether subnormal numbers are among them or not."""
        ours, original = module._convert_float, inspect.unwrap(module._convert_float)
        assert ours is not original
        upper = np.arange(2**16, dtype=np.uint16)
        if finite:
            upper = upper[(upper & 0x7F80 != 0) | (upper & 0x7FFF == 0)]
        lower = np.array([0, 1, 0x7FFF, 0x8000, 0xFFFF], np.uint32)
        wide = ((upper.astype(np.uint32) << 16)[:, None] | lower).ravel()
        if finite:
            wide = wide[(wide & 0x7F800000 != 0) | (wide & 0x7FFFFFFF == 0)]
        for given, kinds in ((upper, (tl.bfloat16, tl.float32)), (wide.view(np.float32), (tl.float32, tl.bfloat16))):
            shaped = given[:len(given) // 2 * 2].reshape(-1, 2)
            found, right = (convert(shaped, *kinds, None) for convert in (ours, original))
            assert (found.dtype, found.shape, found.tobytes()) == (right.dtype, right.shape, right.tobytes())

    DTYPES = [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    ]  # fmt: skip
    ARGUMENTS = [
        *(base + step for base in (-(2**63), -(2**31), 0, 2**31, 2**32, 2**63) for step in (-1, 0, 1)),
        *(torch.zeros(3, dtype=dtype) for dtype in DTYPES), True, False, 1.0, None, (1, torch.zeros(2)),
    ]  # fmt: skip

    @known(internals.ARGUMENTS)
    @pytest.mark.parametrize("given", ARGUMENTS, ids=lambda given: str(getattr(given, "dtype", given)))
    def test_arguments_are_converted_as_by_the_interpreter(given):
        """The second time, numbers and types come from the caches."""
        ours, original = module._implicit_cvt, inspect.unwrap(module._implicit_cvt)
        assert ours is not original

        def seen(convert, argument):
            try:
                found = convert(argument)
            except Exception as error:
                return repr(error)
            parts = found if isinstance(found, (tuple, tl.tuple)) else [found]
            return [
                (part.type.name, part.handle.dtype.name, part.handle.data.dtype, part.handle.data.tolist())
                if isinstance(part, tl.tensor) else part for part in parts
            ]  # fmt: skip

        for argument in (given, given[1:] if isinstance(given, torch.Tensor) else given):
            assert seen(ours, argument) == seen(original, argument)

    def test_a_language_that_is_patched_during_a_recording_is_recorded(monkeypatch):
        """Otherwise its functions pass the recorder by in Triton 3.6, and later calls get no recordings."""

        def patched():
            scope = module._LangPatchScope()
            module._patch_builtin(tl.core, module.interpreter_builder, scope)
            try:
                return tl.core.add
            finally:
                scope.restore()

        usual = patched()
        monkeypatch.setattr(module.interpreter_semantic, "builder", Recorder(module.interpreter_builder, []))
        assert patched() is usual

    @triton.jit
    def _library(floats, halves, wholes, mask, out, whole_out, SIZE: tl.constexpr):
        index = tl.arange(0, SIZE)
        square = index[:, None] * SIZE + index[None, :]
        x, half, whole = tl.load(floats + square), tl.load(halves + square), tl.load(wholes + square)
        taken = tl.load(mask + square)
        rows = tl.sum(x, 1) + tl.max(x, 0) + tl.min(half, 1) + tl.sum(half, 0).to(tl.float32)
        rows += tl.sum(x, 1, keep_dims=True) + tl.max(x, 0, keep_dims=True) * 0.5
        rows += tl.sum(tl.sum(x, 1), 0) + tl.max(tl.max(whole, 1), 0) + tl.sum(tl.zeros_like(x) + 1.0, 1)
        tl.store(out + square, rows)
        wholes_found = tl.sum(whole, 0) + tl.argmax(x, 1) + tl.argmin(x, 0) + tl.sum(taken.to(tl.int32), 1)
        best, where = tl.max(x, 1, return_indices=True)
        wholes_found += where + (best > 0).to(tl.int32) + tl.cumsum(tl.sum(whole, 1), 0) + tl.xor_sum(whole, 0)
        tl.store(whole_out + index, wholes_found + tl.cdiv(tl.sum(tl.sum(whole, 0), 0), 3))

    def library(seed):
        draw = torch.Generator().manual_seed(seed)
        floats = torch.randn(8, 8, generator=draw)
        floats[0, :3], floats[3] = torch.tensor([-0.0, 0.0, -0.0]), floats[3] * torch.tensor([-0.0])
        halves = torch.randn(8, 8, generator=draw).half()
        wholes = torch.randint(-9, 9, (8, 8), generator=draw, dtype=torch.int32)
        out, whole_out = torch.zeros(8, 8), torch.zeros(8, dtype=torch.int32)
        _library[(1,)](floats, halves, wholes, floats > 0, out, whole_out, SIZE=8)
        return torch.cat([out.view(torch.int32).flatten(), whole_out])

    @known(internals.REDUCTIONS)
    def test_the_standard_library_computes_the_same_bits_recorded(monkeypatch):
        results = []
        for plain in (True, False, False):  # without recordings; recorded; played
            monkeypatch.setattr(recordings, "plain", plain)
            results.append([library(seed) for seed in range(6)])
        for again in results[1:]:
            assert all(torch.equal(left, right) for left, right in zip(results[0], again, strict=True))
        assert len({result.sum().item() for result in results[0]}) == 6, "the cases must differ"

    @known(internals.REDUCTIONS)
    def test_a_recorded_function_does_not_run_again(monkeypatch):
        library(0)
        reduced = []
        monkeypatch.setattr(module.ReduceOps, "sum", lambda self, input: reduced.append(input))
        library(1)
        assert not reduced, "tl.sum must not reach the interpreter's reduction"

    @triton.jit
    def _copied(source, target, SIZE: tl.constexpr):
        index = tl.arange(0, SIZE)
        tl.store(target + index, tl.load(source + index))
        tl.store(target + SIZE, tl.load(source))

    @known(internals.ACCESSES)
    def test_loads_and_stores_without_a_mask_need_no_builder(monkeypatch):
        source, target = torch.linspace(1, 2, 16), torch.zeros(17)
        _copied[(1,)](source, target, SIZE=16)  # recorded
        asked = []
        for name in ("create_masked_load", "create_masked_store"):
            method = getattr(module.InterpreterBuilder, name)
            monkeypatch.setattr(
                module.InterpreterBuilder, name, lambda *given, method=method: asked.append(method) or method(*given)
            )
        for factor in (1, -2):
            assert torch.equal(target, torch.cat([source, source[:1]]))
            source *= factor
            _copied[(1,)](source, target, SIZE=16)
        assert torch.equal(target, torch.cat([source, source[:1]]))
        assert not asked, "both must be in the recording"

else:

    def test_in_a_process_of_its_own():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--kv-device", "cpu", __file__]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(
            [*command, "--import-mode=importlib"], capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr
