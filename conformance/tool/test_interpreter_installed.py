"""Kernels use the arithmetic of interpreter/arithmetic.py, and an interpreter that may not use it is detected."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvtwin.conformance import interpreter
from kvtwin.conformance.interpreter import arithmetic, elementary
from kvtwin.conformance.tool.interpreter_cases import NAN, numbers, same

INTERPRETED = interpreter.interprets(triton.language.standard)


def test_unreviewed_numpy_functions_are_reported(monkeypatch, tmp_path):
    (tmp_path / "another_interpreter.py").write_text("def dot(a, b):\n    return np.einsum('ij,jk', a, b)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import another_interpreter

    found = arithmetic.problems(another_interpreter)
    assert found[0] == "its interpreter uses numpy.einsum"
    assert found[1:] == [f"{name} has another source" for name in arithmetic.SOURCES]
    assert arithmetic.problems(SimpleNamespace()) == ["its interpreter has no source"]
    line = str(interpreter.Prepared("plain", "9.0", (), tuple(found)))
    assert line == (
        "plain (KVTWIN_INTERPRETER=plain); results may depend on this CPU: its interpreter uses numpy.einsum "
        "(and 3 more)"
    )


if INTERPRETED:

    def test_installed_triton_has_no_unreviewed_functions():
        assert arithmetic.problems(sys.modules[interpreter.MODULE]) == []

    def test_the_interpreter_has_these_functions_for_numpys():
        its = sys.modules[interpreter.MODULE].np
        loaded = {name for name in vars(np) if name in vars(its)}  # numpy 1.26 loads some modules at their first use
        replaced = {name for name in loaded if getattr(its, name) is not getattr(np, name)}
        assert replaced == {
            "matmul", "sum", "maximum", "minimum", "fmax", "fmin", "max", "min", "nanmax", "nanmin", "clip", "exp",
            "exp2", "log", "log2", "sin", "cos",
        }  # fmt: skip
        assert not [name for name in replaced if getattr(its, name).__module__.startswith("numpy")]

    @triton.jit
    def _everything(a, b, floats, wholes, ROWS: tl.constexpr, INNER: tl.constexpr):
        row, inner = tl.arange(0, ROWS), tl.arange(0, INNER)
        x = tl.load(a + row[:, None] * INNER + inner[None, :])
        y = tl.load(b + inner[:, None] * ROWS + row[None, :])
        out = floats + row
        tl.store(out + 0 * ROWS, tl.sum(x, 1))
        tl.store(out + 1 * ROWS, tl.sum(y, 0))
        tl.store(out + 2 * ROWS, tl.sum(x) + row * 0.0)
        tl.store(out + 3 * ROWS, tl.max(x, 1))
        tl.store(out + 4 * ROWS, tl.min(x, 1))
        first = tl.load(a + row * INNER)
        second = tl.load(a + row * INNER + 1)
        tl.store(out + 5 * ROWS, tl.exp2(first))
        tl.store(out + 6 * ROWS, tl.exp(first))
        tl.store(out + 7 * ROWS, tl.log2(tl.abs(first)))
        tl.store(out + 8 * ROWS, tl.log(tl.abs(first)))
        tl.store(out + 9 * ROWS, tl.sin(first))
        tl.store(out + 10 * ROWS, tl.cos(first))
        tl.store(out + 11 * ROWS, tl.erf(first))
        tl.store(out + 12 * ROWS, tl.rsqrt(tl.abs(first)))
        tl.store(out + 13 * ROWS, tl.maximum(first, second))
        tl.store(out + 14 * ROWS, tl.minimum(first, second))
        tl.store(out + 15 * ROWS, tl.clamp(first, second, tl.abs(second)))
        tl.store(wholes + row, (first * 1e9).to(tl.int32))
        product = tl.dot(x, y, input_precision="ieee")
        tl.store(floats + 16 * ROWS + row[:, None] * ROWS + row[None, :], product)

    @pytest.mark.parametrize("rows", [16, 32])
    @pytest.mark.parametrize("times", [1, 3])  # recorded, then played
    def test_kernels_compute_with_this_arithmetic(rows, times):
        inner = 64
        a, b = numbers(rows, np.float32, rows, inner), numbers(rows + 1, np.float32, inner, rows)
        a[:4, :2] = [[0.0, -0.0], [-0.0, 0.0], [-0.0, -0.0], [NAN, 1.0]]
        for _ in range(times):
            floats, wholes = torch.zeros(16 * rows + rows * rows), torch.zeros(rows, dtype=torch.int32)
            _everything[(1,)](torch.from_numpy(a), torch.from_numpy(b), floats, wholes, ROWS=rows, INNER=inner)
        whole = np.zeros(rows, np.float32) + arithmetic.total(a)
        first, second = a[:, 0].copy(), a[:, 1].copy()
        fmax, fmin = (getattr(sys.modules[interpreter.MODULE].np, name) for name in _extremes_of_this_triton())
        low, high = second, np.abs(second)
        expected = [
            arithmetic.total(a, 1), arithmetic.total(b, 0), whole, arithmetic.nanmax(a, 1), arithmetic.nanmin(a, 1),
            elementary.exp2(first), elementary.exp(first), elementary.log2(np.abs(first)),
            elementary.log(np.abs(first)), elementary.sin(first), elementary.cos(first), elementary.erf(first),
            elementary.rsqrt(np.abs(first)), fmax(first, second), fmin(first, second), fmin(fmax(first, low), high),
        ]
        for line, (found, right) in enumerate(zip(floats[:16 * rows].numpy().reshape(16, rows), expected, strict=True)):
            assert same(found, right), line
        zeros = np.zeros((rows, rows), np.float32)
        assert same(floats[16 * rows:].numpy().reshape(rows, rows), arithmetic.dot(a, b, dtype=np.float32) + zeros)
        assert wholes.tolist() == arithmetic.to_integer(first * np.float32(1e9), np.dtype(np.int32)).tolist()

    def _extremes_of_this_triton():
        """The functions for tl.maximum and tl.minimum of floats. From triton 3.8 on, they return the number if one
        operand is NaN."""
        builder = sys.modules[interpreter.MODULE].InterpreterBuilder
        names = builder.create_maxnumf.__code__.co_names + builder.create_minnumf.__code__.co_names
        return [name for name in names if name in ("maximum", "minimum", "fmax", "fmin")]
