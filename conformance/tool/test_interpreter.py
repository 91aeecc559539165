"""The accelerated interpreter patches Triton's language once per kernel, and computes the same results as without it.

If this run compiles its kernels, these tests run in a separate process.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from kvtwin.conformance import interpreter
from kvtwin.conformance.interpreter import frames, language

INTERPRETED = interpreter.interprets(triton.language.standard)
ACCELERATED = INTERPRETED and interpreter.prepare().accelerated


@triton.jit
def _largest(x):
    return tl.max(x, 0)


@triton.jit
def _shifted(x):
    return tl.exp2(x - _largest(x))


@triton.jit
def _kernel(source, target, count, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    x = tl.load(source + index, mask=index < count, other=-float("inf"))
    tl.store(target + index, _shifted(x) / tl.sum(_shifted(x), 0), mask=index < count)


@triton.jit
def _counting_kernel(count, target):
    total = 0
    for _ in range(0, tl.load(count)):
        total += 2
    tl.store(target, total)


@triton.jit
def _masked_kernel(source, target, count, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    x = tl.load(source + index, mask=(index < 3) & (count > 1), other=7)
    tl.store(target + index, x, mask=(index < 4) & (count > 0))
    tl.atomic_add(target + index, 2.0, mask=(index < 2) & (count < 2))


def run(count: int = 5) -> torch.Tensor:
    x = torch.linspace(-3, 4, count)
    target = torch.full_like(x, torch.nan)
    _kernel[(1,)](x, target, count, SIZE=8)
    return target


@pytest.fixture
def rounds(monkeypatch):
    """Counts how often the language is patched. At first it is patched at every call; `once` patches it once per
    kernel."""
    module = sys.modules[interpreter.MODULE]
    original = inspect.unwrap(module._patch_lang)
    seen = []

    def counted(fn):
        seen.append(fn.__name__)
        return original(fn)

    monkeypatch.setattr(module, "_patch_lang", counted)
    return SimpleNamespace(
        seen=seen, once=lambda: monkeypatch.setattr(module, "_patch_lang", language._once(counted, tl))
    )


class Sized:
    """Stands in for a Triton type: it has attributes that follow from the size, and one of its own."""

    made = 0

    def __init__(self, own, size):
        Sized.made += 1
        self.own, self.double = own, 2 * size


def kept_class(kept=frozenset({"double"}), own=lambda own, size: {"own": own}):
    body = {"__init__": language._kept(Sized.__init__, lambda own, size: size or None, set(kept), own)}
    return type("Kept", (Sized,), body)


def test_attributes_are_made_once_for_each_size():
    kind, Sized.made = kept_class(), 0
    objects = [kind("a", 3), kind("b", 3), kind("c", 4), kind("d", 0), kind("e", 0), kind(own="f", size=3)]
    assert [(it.own, it.double) for it in objects] == [("a", 6), ("b", 6), ("c", 8), ("d", 0), ("e", 0), ("f", 6)]
    assert Sized.made == 5, "only the second object of size 3 must be cached; objects without a key are not"


@pytest.mark.parametrize("changed", [{"kept": {"double", "more"}}, {"own": lambda own, size: {"own": [own]}}])
def test_a_class_with_other_attributes_is_made_as_ever(changed):
    kind, Sized.made = kept_class(**changed), 0
    assert [kind(own, 3).own for own in "abc"] == ["a", "b", "c"]
    assert Sized.made == 3


class Operand:
    """Stands in for a Triton tensor: it has a type with a name, and a handle with data."""

    def __init__(self, name, data=0.0):
        self.type = SimpleNamespace(name=name, scalar=SimpleNamespace(name=name.split()[-1]))
        self.handle = SimpleNamespace(data=torch.tensor(data).numpy())


def promoted(lhs, rhs, flag=False):
    """Stands in for the conversion of operands: a number becomes a tensor, and "wide" and "narrow" both become wide."""
    promoted.calls += 1
    both = [side if isinstance(side, Operand) else Operand("number", float(side)) for side in (lhs, rhs)]
    if {side.type.name for side in both} >= {"wide", "narrow"}:
        both = [side if side.type.name == "wide" else Operand("wide") for side in both]
    return tuple(both)


def test_operands_that_stay_as_they_are_are_asked_about_once():
    alike, promoted.calls = language._unchanged_pair(promoted, Operand), 0
    a, b, wide = Operand("narrow"), Operand("narrow"), Operand("wide")
    assert alike(a, b) == alike(b, a)[::-1] == (a, b)
    assert promoted.calls == 1
    assert alike(a, b, True) == (a, b)
    assert promoted.calls == 2, "another option may change the operands"
    for _ in range(2):
        left, right = alike(wide, a)
        assert left is wide
        assert right.type.name == "wide"
    assert promoted.calls == 4, "changed operands must be converted every time, as their data differ"


def test_operands_of_different_shapes_are_broadcast_and_not_checked_again():
    def broadcast(lhs, rhs):
        shape = max(lhs.type.name, rhs.type.name).split()[0]
        return tuple(Operand(f"{shape} {side.type.scalar.name}", side.handle.data) for side in (lhs, rhs))

    def checked(lhs, rhs):
        checked.calls += 1
        return broadcast(lhs, rhs)

    alike, checked.calls = language._unchanged_pair(checked, Operand, broadcast), 0
    for data in (1.0, 2.0):
        made = alike(Operand("1x1 half", data), Operand("4x4 whole", 3.0))
        assert [(side.type.name, float(side.handle.data)) for side in made] == [("4x4 half", data), ("4x4 whole", 3.0)]
    assert checked.calls == 1


def test_numbers_are_made_tensors_once_for_each_value_and_kind():
    alike, promoted.calls = language._unchanged_pair(promoted, Operand), 0
    a, nan = Operand("narrow"), float("nan")
    numbers = [1, 1.0, True, 2.5, -2.5, float("inf")]
    made = [alike(a, number)[1] for number in numbers] + [alike(number, a)[0] for number in numbers]
    assert len(set(map(id, made))) == promoted.calls == 12
    assert [alike(a, number)[1] for number in numbers] + [alike(number, a)[0] for number in numbers] == made
    assert promoted.calls == 12
    assert alike(Operand("wide"), 1)[1] is not made[0]
    assert [str(float(alike(a, zero)[1].handle.data)) for zero in (0.0, -0.0, 0.0)] == ["0.0", "-0.0", "0.0"]
    assert alike(a, nan)[1] is not alike(a, nan)[1]
    with pytest.raises(ValueError, match="read-only"):
        made[0].handle.data[...] = 7


accelerated = pytest.mark.skipif(not ACCELERATED, reason="the accelerator is off")

if INTERPRETED:

    @triton.jit
    def _arithmetic(source, target, SIZE: tl.constexpr):
        index = tl.arange(0, SIZE)
        x = tl.load(source + index)
        small = (x * 0.0 + 2.5).to(tl.float16) * 3
        whole = (index + 2147483647) - 1  # wraps
        signs = (1 - x) * -0.0 + (x > 0) * 1
        tl.store(target + index, small + whole % 7 + signs / (2 * x) + tl.where(x > 1, 1, -0.0))

    @accelerated
    def test_arithmetic_is_the_same_without_what_is_kept(monkeypatch):
        x = torch.tensor([-2.0, -0.0, 0.5, 3.0])
        kept, plain = torch.zeros(2, 4), torch.zeros(4)
        for row in kept:
            _arithmetic[(1,)](x, row, SIZE=4)
        semantic = sys.modules[interpreter.MODULE].interpreter_semantic
        assert set(language.OPERANDS) <= vars(semantic).keys()
        for name in language.OPERANDS:
            monkeypatch.delattr(semantic, name)
        _arithmetic[(1,)](x, plain, SIZE=4)
        assert torch.equal(kept.view(torch.int32), plain.view(torch.int32).expand(2, -1))

    @accelerated
    def test_types_of_one_shape_are_made_once():
        types = [tl.block_type(tl.float32, [4, 8]), tl.block_type(tl.int1, [4, 8]), tl.block_type(tl.float32, (4, 8))]
        assert types[0].shape is types[2].shape
        assert types[0] == types[2] != types[1]
        assert [it.element_ty for it in types] == [tl.float32, tl.int1, tl.float32]
        assert [int(it.numel) for it in types] == [32] * 3
        one, other = (tl.tensor(handle, types[0]) for handle in ("one", "other"))
        assert (one.handle, other.handle) == ("one", "other")
        assert one.shape is other.shape
        assert one.dtype is other.dtype is tl.float32

    def test_a_kernel_patches_once_and_computes_the_same(rounds):
        plain, without = run(), len(rounds.seen)
        rounds.once()
        run()  # the first kernel in a process may patch what the modules of device functions see
        rounds.seen.clear()
        assert torch.equal(run(), plain)
        assert rounds.seen == ["_kernel"]
        assert without > 4, "the device functions patched nothing, so the accelerator has nothing to skip"

    def test_the_language_is_put_back_also_when_a_kernel_fails(rounds):
        rounds.once()
        original = tl.load
        with pytest.raises(Exception, match="NoneType"):
            _kernel[(1,)](None, torch.empty(1), 1, SIZE=8)
        assert tl.load is original
        rounds.seen.clear()
        run()
        assert "_kernel" in rounds.seen, "the kernel after a failed one must patch again"

    @accelerated
    def test_a_launch_has_space_for_its_frames():
        with pytest.raises(Exception, match="NoneType") as caught:
            _kernel[(1,)](None, torch.empty(1), 1, SIZE=8)
        below = [entry.frame.raw.f_code for entry in caught.traceback]
        assert frames.call.__code__ in below
        assert frames.call.__code__.co_stacksize * 8 > 2**19, "a chunk of less than 1 MB"

    def test_loaded_numbers_are_scalars():
        """Triton 3.6 converts an array of one dimension to an index, which numpy 2.4 refuses."""
        target = torch.zeros(1, dtype=torch.int32)
        _counting_kernel[(1,)](torch.tensor([3], dtype=torch.int32), target)
        assert target.tolist() == [6]

    @pytest.mark.parametrize(("count", "expected"), [(0, [2, 2, 0, 0, 0]), (1, [9, 9, 7, 7, 0]), (2, [1, 1, 1, 7, 0])])
    def test_a_comparison_of_numbers_is_a_mask(count, expected):
        """Triton makes a block of integers of it, which Triton 3.9 refuses as a mask."""
        for _ in range(2):  # recorded, then played
            target = torch.zeros(5)
            _masked_kernel[(1,)](torch.ones(8), target, count, SIZE=8)
            assert target.tolist() == expected

    @accelerated
    def test_the_accelerator_is_in_force_here():
        patch = sys.modules[interpreter.MODULE]._patch_lang
        assert inspect.unwrap(patch) is not patch

else:

    def test_in_a_process_of_its_own():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--kv-device", "cpu", __file__]
        done = subprocess.run([*command, "--import-mode=importlib"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "skipped" not in done.stdout
