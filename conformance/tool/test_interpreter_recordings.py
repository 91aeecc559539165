"""The requests of a Triton language function are recorded once, and replaying them gives the same bits."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from kvtwin.conformance import interpreter
from kvtwin.conformance.interpreter.recordings import MOST_RECORDINGS, RECORDED, Recordings

INTERPRETED = interpreter.interprets(triton.language.standard)
accelerated = pytest.mark.skipif(
    INTERPRETED and not interpreter.prepare().accelerated, reason="the accelerator is off"
)


class Handle:
    def __init__(self, data):
        self.data, self.dtype = data, "wide"


class Tensor:
    def __init__(self, handle, name):
        self.handle, self.type = handle, SimpleNamespace(name=name)


class Builder:
    """Stands in for the interpreter's builder: its methods record their calls and compute on numbers."""

    options = SimpleNamespace(debug=False)

    def __init__(self):
        self.asked = []

    def get_number(self, value):
        self.asked.append("get_number")
        return Handle(value)

    def create_add(self, lhs, rhs):
        self.asked.append("create_add")
        return Handle(lhs.data + rhs.data)

    def create_program_id(self):
        self.asked.append("create_program_id")
        return Handle(len(self.asked))


def made(member):
    """`member` with a recording, and its builder."""

    class Other:
        pass

    core = SimpleNamespace(tensor=Tensor, constexpr=type("constexpr", (), {}), dtype=Other, pointer_type=Other)
    core.block_type = Other
    semantic = SimpleNamespace(builder=Builder())
    recordings = Recordings(semantic, SimpleNamespace(core=core))
    return recordings.with_recordings(member), semantic.builder


def plus(lhs, number, _semantic):
    """Add a number to a tensor."""
    plus.calls += 1
    other = _semantic.builder.get_number(number)
    return Tensor(_semantic.builder.create_add(lhs.handle, other), lhs.type.name)


def test_a_function_is_called_once_for_each_kind_of_arguments():
    recorded, builder = made(plus)
    plus.calls = 0
    for value in (1.0, 2.0, 3.0):
        sums = recorded(Tensor(Handle(value), "wide"), 5)
        assert (sums.handle.data, sums.type.name) == (value + 5, "wide")
        assert type(sums.handle) is Handle
    assert plus.calls == 1
    assert builder.asked == ["get_number"] + 3 * ["create_add"], "the number must be requested only once"
    recorded(Tensor(Handle(1.0), "narrow"), 5)
    assert plus.calls == 2, "another type needs another recording"
    assert recorded(Tensor(Handle(1.0), "wide"), number=5).handle.data == 6
    assert plus.calls == 3, "an argument by name needs another recording"


def test_equal_numbers_of_different_types_are_distinct():
    recorded, _ = made(plus)
    plus.calls = 0
    numbers = [1, True, 1.0, 0.0, -0.0, 0, False, float("nan")]
    for number in (*numbers, float("nan")):
        recorded(Tensor(Handle(1.0), "wide"), number)
    assert plus.calls == len(numbers), "NaN must have only one recording"
    assert str(recorded(Tensor(Handle(-0.0), "wide"), -0.0).handle.data) == "-0.0"
    assert str(recorded(Tensor(Handle(-0.0), "wide"), 0.0).handle.data) == "0.0"


@pytest.mark.parametrize(
    "looks",
    [
        lambda x: bool(x.handle),
        lambda x: bool(x.handle.data),
        lambda x: x.handle.data.real > 1,
        lambda x: x.handle.dtype == "wide",
    ],
)
def test_a_function_that_looks_at_values_is_not_recorded(looks):
    def member(x, _semantic):
        member.calls += 1
        return Tensor(_semantic.builder.create_add(x.handle, x.handle), "wide") if looks(x) else x

    recorded, _ = made(member)
    member.calls = 0
    for value in (3.0, 0.0, 3.0, 1.5):
        x = Tensor(Handle(value), "wide")
        assert recorded(x).handle.data == (2 * value if looks(x) else value)
    assert member.calls == 4


def test_varying_results_are_not_recorded():
    def program(_semantic):
        return Tensor(_semantic.builder.create_program_id(), "whole")

    recorded, _ = made(program)
    assert [recorded().handle.data for _ in range(3)] == [1, 2, 3]

    def pair(x, y, _semantic):
        pair.calls += 1
        return Tensor(_semantic.builder.create_add(x.handle, y[0].handle), "wide"), x

    recorded, _ = made(pair)
    pair.calls = 0
    x = Tensor(Handle(1.0), "wide")
    for _ in range(2):
        both = recorded(x, (x,))
        assert [type(it.handle) for it in both] == [Handle, Handle]
    assert pair.calls == 2

    def split(x, _semantic):
        pair.calls += 1
        return x, Tensor(_semantic.builder.create_add(x.handle, x.handle), "wide")

    recorded, _ = made(split)
    for _ in range(2):
        assert [it.handle.data for it in recorded(x)] == [1, 2]
    assert pair.calls == 4


def test_the_number_of_recordings_is_limited(monkeypatch):
    monkeypatch.setattr("kvtwin.conformance.interpreter.recordings.MOST_RECORDINGS", 2)
    assert MOST_RECORDINGS > 1000
    recorded, _ = made(plus)
    plus.calls = 0
    x = Tensor(Handle(1.0), "wide")
    for _ in range(2):
        assert [recorded(x, number).handle.data for number in (1, 2, 3)] == [2, 3, 4]
    assert plus.calls == 4


def test_a_function_that_fails_leaves_everything_as_it_was():
    def fails(x, _semantic):
        assert _semantic.builder is not builder, "the call must be recorded each time, as it has no recording"
        raise ValueError("no")

    recorded, builder = made(fails)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            recorded(Tensor(Handle(1.0), "wide"))
    assert not builder.asked


if INTERPRETED:

    @triton.jit
    def _of_all_kinds(floats, halves, wholes, mask, flag, out, half_out, count, scale, SIZE: tl.constexpr):
        index = tl.arange(0, SIZE)
        row = tl.program_id(0) * SIZE
        inside = index < count
        x = tl.load(floats + row + index, mask=inside, other=-0.0)
        half = tl.load(halves + row + index).to(tl.float32)
        whole = tl.load(wholes + row + index, mask=inside, other=3)
        chosen = tl.load(mask + index) & inside | (whole % 3 == 1)
        one = tl.load(flag, mask=count > 4, other=count - 2)  # the value of `other` is read: it is 0 at first
        table = tl.where(chosen[:, None], x[None, :] - half[:, None], whole[:, None] // 2) * scale
        table += tl.dot(table, tl.trans(table)) + one
        table = tl.maximum(table, tl.abs(x)[None, :].to(tl.float16)) / (tl.exp2(-tl.abs(half)) + 0.5)[:, None]
        bits = (whole << 2 ^ whole >> 1) - ~whole
        tl.store(out + row * SIZE + index[:, None] * SIZE + index[None, :], table, mask=inside[:, None] & (x < 2))
        tl.store(half_out + row + index, half * bits + tl.sum(table, 0) + tl.max(x, 0))
        tl.store(half_out + row + SIZE - 1, -one, mask=count == 4)

    def _arguments(seed):
        draw = torch.Generator().manual_seed(seed)
        floats = torch.randn(2, 8, generator=draw)
        floats[:, 1] = -0.0
        floats[0, 2] = torch.inf
        return {
            "floats": floats, "halves": torch.randn(2, 8, generator=draw).bfloat16(),
            "wholes": torch.randint(-9, 9, (2, 8), generator=draw), "mask": torch.rand(8, generator=draw) < 0.5,
            "flag": torch.tensor([seed % 2]), "out": torch.zeros(2, 8, 8), "half_out": torch.zeros(2, 8).half(),
            "count": 2 + seed % 5, "scale": (-0.0, 1.5, -2.0)[seed % 3],
        }  # fmt: skip

    @accelerated
    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinities, on purpose
    def test_a_kernel_computes_the_same_bits_with_and_without_recordings(monkeypatch):
        recordings = sys.modules[interpreter.MODULE]._patch_builtin.recordings
        results = []
        for plain in (True, False, False):  # without recordings; recorded in part; played
            monkeypatch.setattr(recordings, "plain", plain)
            results.append([])
            for seed in range(12):
                case = _arguments(seed)
                _of_all_kinds[(2,)](**case, SIZE=8)
                results[-1] += [case["out"].view(torch.int32), case["half_out"].view(torch.int16)]
        for again in results[1:]:
            assert all(torch.equal(left, right) for left, right in zip(results[0], again, strict=True))
        assert len({result.sum().item() for result in results[0]}) > 12, "the cases must differ"

    HALF = tl.constexpr(0.5)

    @triton.jit
    def _half_more(x, out, SIZE: tl.constexpr):
        i = tl.arange(0, SIZE)
        number = tl.load(x + i)
        tl.store(out + i, number + HALF * number)

    def test_a_product_with_a_constant_is_no_constant():
        """Outside of the compiler, constexpr * tensor is a constexpr that holds the tensor."""
        for value in (1.0, 3.0, 5.0):
            out = torch.zeros(4)
            _half_more[(1,)](torch.full((4,), value), out, SIZE=4)
            assert out.tolist() == [1.5 * value] * 4

    @accelerated
    def test_functions_that_kernels_call_are_recorded():
        _of_all_kinds[(2,)](**_arguments(1), SIZE=8)
        known = sys.modules[interpreter.MODULE]._patch_builtin.recordings.known
        for name in ("tensor.__add__", "tensor.__lt__", "tensor.__getitem__", "where", "load", "store", "arange"):
            assert any(play is not None for play in known[name].values()), name

    def test_every_name_is_one_of_the_language():
        assert not [name for name in RECORDED if not any(hasattr(it, name) for it in (tl, tl.math, tl.tensor))]
