"""Recordings compiled to functions of arrays: the same bits as the interpreter's builder, for the known methods."""

from __future__ import annotations

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
from kvtwin.conformance.interpreter.arrays import Compiler

INTERPRETED = interpreter.interprets(triton.language.standard)
if INTERPRETED and not interpreter.prepare().accelerated:
    pytest.skip("the accelerator is off", allow_module_level=True)


if not INTERPRETED:

    def test_in_a_process_of_its_own():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--kv-device", "cpu", __file__]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(
            [*command, "--import-mode=importlib"], capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr

else:
    module = sys.modules[interpreter.MODULE]

    def handle(values, kind, dtype=None):
        return module.TensorHandle(np.array(values, dtype=kind), dtype or tl.dtype(kind.replace("float", "fp")))

    def compiled(name, *arguments):
        """The compiled recording of one request, as a function of the arguments that are handles; these handles; the
        builder's result; and the list of calls for which the function fell back to the builder."""
        builder = module.interpreter_builder
        method = getattr(builder, name)
        handles = [argument for argument in arguments if isinstance(argument, module.TensorHandle)]
        real = method(*arguments)
        slow = []

        def otherwise(*given):
            slow.append(given)
            rest = iter(given)
            again = [next(rest) if isinstance(it, module.TensorHandle) else it for it in arguments]
            return SimpleNamespace(handle=method(*again))

        made = object.__new__(tl.tensor)
        vars(made).update(handle=real, type="type", shape="shape", numel="numel", dtype="dtype")

        def place(value):
            return next((i for i, one in enumerate([*handles, real]) if one is value), None)

        player = Compiler(module).player([(method, arguments)], handles, [real], made, place, otherwise)
        return player, handles, real, slow

    def same(left, right):
        assert type(left) is type(right)
        assert left.dtype == right.dtype
        assert left.attr == {}
        assert (left.data.dtype, left.data.shape) == (right.data.dtype, right.data.shape)
        assert left.data.tobytes() == right.data.tobytes()

    ROW, NUMBER = [[1, -2, 3]], [5]
    FLOATS = [[-0.0, np.nan, np.inf], [1.5, -2.25, 1e-45]]
    REQUESTS = [
        ("create_fadd", handle(FLOATS, "float32"), handle(FLOATS, "float32")),
        ("create_fdiv", handle(FLOATS, "float64"), handle(np.negative(FLOATS), "float64")),
        ("create_maxnumf", handle(FLOATS, "float32"), handle(np.negative(FLOATS), "float32")),
        ("create_fcmpOLT", handle(FLOATS, "float32"), handle([[1.0] * 3] * 2, "float32")),
        ("create_and", handle([True, False], "bool", tl.int32), handle([True, True], "bool", tl.int1)),
        ("create_shl", handle(ROW, "int32"), handle([[1, 2, 3]], "int32")),
        ("create_sdiv", handle([7, -7], "int64"), handle([2, 2], "int64")),
        ("create_srem", handle([7, -7], "int64"), handle([2, 2], "int64")),
        ("create_exp2", handle(FLOATS, "float32")),
        ("create_fneg" if hasattr(module.InterpreterBuilder, "create_fneg") else "create_floor",
         handle(FLOATS, "float32")),
        ("create_select", handle([[True], [False]], "bool", tl.int1), handle(FLOATS, "float32"),
         handle(np.negative(FLOATS), "float32")),
        ("create_fp_ext", handle(FLOATS, "float32"), tl.float64),
        ("create_si_to_fp", handle(ROW, "int32"), tl.float16),
        ("create_int_cast", handle([True, False], "bool", tl.int32), tl.int64, False),
        ("create_bitcast", handle(ROW, "int32"), tl.float32),
        ("create_expand_dims", handle(ROW, "int32"), 1),
        ("create_broadcast", handle(ROW, "int32"), [4, 3]),
        ("create_splat", tl.block_type(tl.int32, [2, 4]), handle(NUMBER, "int32")),
        ("create_addptr", handle([64, 128], "uint64", tl.pointer_type(tl.float32)), handle([-1, 2], "int32")),
    ]  # fmt: skip

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    @pytest.mark.parametrize(("name", "arguments"), [pytest.param(name, rest, id=name) for name, *rest in REQUESTS])
    def test_a_request_has_the_builders_answer(name, arguments):
        player, handles, real, slow = compiled(name, *arguments)
        assert player is not None, "this request is not known: have Triton's sources changed?"
        for _ in range(2):
            made = player(*handles)
            same(made.handle, real)
            assert (made.type, made.shape, made.numel, made.dtype) == ("type", "shape", "numel", "dtype")
        assert not slow

    def test_arrays_of_unrecorded_types_use_the_builder():
        player, handles, _, slow = compiled("create_fadd", handle([1.0], "float32"), handle([2.0], "float32"))
        others = [handle([1.0], "float64"), handle([1.0], "float32", tl.int32), handle([1.0], "float16", tl.float32)]
        for other in others:
            made = player(other, handles[1])
            same(made.handle, module.interpreter_builder.create_fadd(other, handles[1]))
        assert len(slow) == len(others)

    def test_rows_are_copied_if_the_result_is_the_whole_block():
        builder, row = module.interpreter_builder, handle([[1, 2]], "int32")
        block = builder.create_broadcast(row, [3, 2])
        answers = [block, builder.create_add(block, block)]
        requests = [(builder.create_broadcast, (row, [3, 2])), (builder.create_add, (block, block))]
        made = object.__new__(tl.tensor)
        made.handle = answers[1]

        def place(value):
            return next((i for i, one in enumerate([row, *answers]) if one is value), None)

        player = Compiler(module).player(requests, [row], answers, made, place, pytest.fail)
        same(player(row).handle, answers[1])

    @pytest.mark.parametrize("more", [
        lambda self, lhs, rhs: self.unary_op(self.binary_op(lhs, rhs, np.add), np.negative),
        lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.add).clone(),
        lambda self, lhs, rhs: (self.binary_op(lhs, rhs, np.subtract), self.binary_op(lhs, rhs, np.add))[1],
        lambda self, lhs, rhs: self.binary_op(rhs, lhs, np.add),
    ])  # fmt: skip
    def test_what_does_more_than_pass_on_a_request_is_left_to_the_builder(monkeypatch, more):
        monkeypatch.setattr(module.InterpreterBuilder, "create_fadd", more)
        assert compiled("create_fadd", handle([1.0], "float32"), handle([2.0], "float32"))[0] is None

    def test_bfloat16_casts_and_bool_sums_use_the_builder():
        half = module.TensorHandle(np.array([0x3F80], dtype=np.uint16), tl.bfloat16)
        assert compiled("create_fp_ext", half, tl.float32)[0] is None
        truths = handle([True, False], "bool", tl.int1)
        assert compiled("create_add", truths, truths)[0] is None

    def test_warnings_are_the_interpreters():
        player, *_ = compiled("create_exp2", handle([1.0], "float32"))
        assert player.__globals__["__name__"] == interpreter.MODULE

    @triton.jit
    def _blocks(pointer, out, number, SIZE: tl.constexpr):
        index = tl.arange(0, SIZE)
        row, column = index[None, :], index[:, None]
        whole = row + column * SIZE + number
        mask = (row < number) & (column <= row)
        values = tl.load(pointer + whole, mask=mask, other=-0.0)
        values = tl.maximum(values, -row.to(tl.float32)) - tl.load(pointer + index)[None, :] * 0.0
        tl.store(out + row + column * SIZE, tl.where(mask, values, number))

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    def test_blocks_of_one_number_or_row_compute_the_same_bits(monkeypatch):
        recordings = sys.modules[interpreter.MODULE]._patch_builtin.recordings
        pointer = torch.linspace(-3, 3, 128)
        pointer[5:9] = torch.tensor([-0.0, 0.0, torch.nan, -torch.inf])
        results = []
        for plain in (True, False, False):
            monkeypatch.setattr(recordings, "plain", plain)
            for number in (0, 3, 8):
                results.append(torch.zeros(8, 8))
                _blocks[(1,)](pointer, results[-1], number, SIZE=8)
        for again in (results[3:6], results[6:]):
            assert all(
                torch.equal(left.view(torch.int32), right.view(torch.int32))
                for left, right in zip(results[:3], again, strict=True)
            )
        assert any(
            "empty" not in play.__globals__ for play in recordings.known["tensor.__add__"].values() if play is not None
        )
