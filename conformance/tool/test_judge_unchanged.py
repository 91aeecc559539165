"""The check that a call leaves the memory of its arguments as it was."""

from __future__ import annotations

import math

import pytest
import torch

from kvtwin.conformance.cases.layouts import LAYOUTS, lay_out
from kvtwin.conformance.judge import unchanged as module
from kvtwin.conformance.judge.host import to_cpu
from kvtwin.conformance.judge.unchanged import ChangedInput, also, unchanged

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)


def changed(arguments, write):
    """Write inside of the block, and return the message."""
    with pytest.raises(ChangedInput) as error, unchanged(arguments):
        write()
    return str(error.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_element_of_any_layout_is_compared_and_restored(layout):
    tensor = lay_out(torch.ones(2, 2, 3, 4, dtype=torch.float16), layout)
    message = changed({"key": tensor}, lambda: tensor[1, 1, 2, 3:].fill_(2))
    assert "key after the call (an input): " in message and "it was 1.0, and is 2.0" in message
    assert bool((tensor == 1).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_of_any_dtype_is_compared(dtype):
    tensor = torch.zeros(3, 4).to(dtype)
    assert "2 of 12 elements changed, the first at (1, 2)" in changed(
        {"key": tensor}, lambda: tensor[1, 2:].copy_(torch.ones(2))
    )
    with unchanged({"key": tensor}):
        pass


def test_memory_between_and_around_elements_is_compared():
    room = torch.full((4, 6), math.nan)
    view = room[1:3, ::2].fill_(1)
    message = changed({"key": view}, lambda: room[3, 5:].fill_(0))
    assert "memory between or around its elements changed" in message
    assert bool(room[3].isnan().all())


def test_nan_are_compared_by_their_bits():
    tensor = torch.tensor([math.nan, math.nan])
    with unchanged(tensor):
        tensor.copy_(tensor.clone())
    assert "1 of 2" in changed(tensor, lambda: tensor.view(torch.int32)[1:].add_(1))
    zero = torch.zeros(2)
    assert "is -0.0" in changed(zero, zero.neg_)


def test_only_the_elements_of_a_large_storage_are_compared(monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 8)
    room = torch.zeros(8, dtype=torch.bfloat16)
    with unchanged(room[:2]):
        room[4] = 1
    assert "1 of 2" in changed(room[:2], lambda: room[1:2].fill_(3))


def test_tensors_are_found_in_dicts_tuples_and_later_ones():
    one, two, three = torch.zeros(3, 2).unbind()
    changed({"a": (one, [two])}, lambda: two.fill_(1))
    with pytest.raises(ChangedInput, match="hidden"), unchanged({"a": one.clone()}):
        also({"hidden": three.clone()})["hidden"].fill_(1)


def test_of_a_copy_on_the_host_the_original_is_compared():
    original = torch.zeros(2)
    copy = to_cpu(original)
    assert "1 of 2" in changed({"key": copy}, lambda: original[:1].fill_(1))
    with unchanged({"key": copy}):
        copy.fill_(1)  # the call got the original


def test_an_error_of_the_call_is_raised_and_the_memory_restored():
    tensor = torch.zeros(2)
    with pytest.raises(ValueError, match="own"), unchanged({"key": tensor}):
        tensor.fill_(1)
        raise ValueError("own")
    assert not tensor.any()
