"""Calls of operations of the optimized side: without dispatch where nothing needs it, with the same effect."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvtwin.optimized._common.operation import operation

pytestmark = pytest.mark.kind("laws")


@operation("kvtwin_tests::add", mutates_args=("total", "count"))
def add(total: Tensor, count: Tensor | None, by: int, more: list[int]) -> Tensor:
    total.data.add_(by + sum(more))                            # like a kernel, this counts no version
    if count is not None:
        count.add_(1)
    return total + 1


@add.register_fake
def _(more: list[int], total: Tensor) -> Tensor:
    return total.new_empty((len(more), *total.shape))[0]


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Seeing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Sub(Tensor):
    pass


def dispatched(total: Tensor, count: Tensor | None, by: int = 2, **named: Any) -> bool:
    """Whether a call is dispatched. Its effect is right in either case."""
    before, version = total.clone(), total._version
    with mock.patch.object(add, "_operation", wraps=add._operation) as watched:
        result = add(total, count, by, more=[3], **named) if named else add(total, count, by, [3])
    assert torch.equal(total, before + 5) and torch.equal(result, before + 6)
    assert total._version > version, "a backward pass must find that the tensor has changed"
    return bool(watched.call_count)


def test_without_a_need_there_is_no_dispatch(device):
    with torch.no_grad():
        for count in (torch.zeros(1, device=device), None):
            assert not dispatched(torch.zeros(3, device=device), count)


def test_inference_mode_has_no_versions(device):
    outside = torch.zeros(3, device=device)
    with torch.inference_mode(), mock.patch.object(add, "_operation") as watched:
        for total in (outside, torch.zeros(3, device=device)):
            assert add(total, None, 1, [2]).tolist() == [4, 4, 4]
    assert not watched.called


@pytest.mark.parametrize("context", [torch.enable_grad, Passing, Seeing], ids=["gradients", "dispatch", "function"])
def test_modes_and_gradients_see_the_operation(context: Callable[[], AbstractContextManager[Any]], device):
    with torch.no_grad(), context():
        assert dispatched(torch.zeros(3, device=device), torch.zeros(1, device=device))


def test_subclasses_of_tensors_see_the_operation(device):
    with torch.no_grad():
        assert dispatched(torch.zeros(3, device=device).as_subclass(Sub), None)


def test_fake_tensors_see_the_operation():
    with torch._subclasses.FakeTensorMode():
        fake = torch.zeros(3)
    with torch.no_grad(), mock.patch.object(add, "_operation", wraps=add._operation) as watched:
        assert isinstance(add(fake, None, 1, [2]), torch._subclasses.FakeTensor)
    assert watched.called


def test_vmap_sees_the_operation(device):
    with torch.no_grad(), mock.patch.object(add, "_operation") as watched:
        watched.side_effect = lambda one, *_: one + 1
        found = torch.func.vmap(lambda one: add(one, None, 1, [2]))(torch.zeros(2, 3, device=device))
    assert watched.called and torch.equal(found, torch.ones(2, 3, device=device))


def test_compiled_code_has_the_operation(device):
    seen: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    total = torch.zeros(3, device=device)
    with torch.no_grad():
        found = torch.compile(lambda one: add(one, None, 1, [2]), backend=backend, fullgraph=True)(total)
    assert found.tolist() == [4, 4, 4] and any("kvtwin_tests" in name for name in seen)


def test_a_fake_takes_the_arguments_that_it_names():
    with torch._subclasses.FakeTensorMode(), torch.no_grad():
        assert add(torch.zeros(3), None, 1, [2, 3]).shape == add(torch.zeros(3), None, by=1, more=[2]).shape == (3,)
    with pytest.raises(ValueError, match="scale"):
        add.register_fake(lambda scale: scale)


def test_arguments_of_every_call_are_gathered_by_name():
    assert add.arguments_after("count", {"more": [2], "by": 1}) == (1, [2])
    for wrong in ({"more": [2]}, {"by": 1, "less": [2]}):
        with pytest.raises(TypeError, match="add takes by"):
            add.arguments_after("count", wrong)
