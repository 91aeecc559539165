"""A stand-in for CUDA graphs on the CPU.

Like a graph, it has the operations of one call and the addresses of their tensors, and every number of the host as a
constant. Unlike a list of Python calls, it therefore shows numbers of the host that change from step to step. It has
PyTorch's operators, and Triton's kernels that are launched outside of these. What else the host does is not in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from ....optimized._common import graph
from ....optimized.hf import _captured
from ....reference.contract import arguments

CAPTURING = arguments.capturing

#: Operations whose result the host reads, or that copy from its memory.
READS = (
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
)


def captured(function: Callable[[], object], memory: object) -> Callable[[], None]:
    """As `kvtwin.optimized._common.graph.captured`: records a call, which has no effect, and returns what runs it."""
    recording = Recording()
    with capturing(), torch.inference_mode(False), torch.no_grad():
        launch = GridExecutor.__call__
        watched = mock.patch.object(
            GridExecutor, "__call__", lambda one, *args, **kwargs: recording.launch(partial(launch, one), args, kwargs)
        )
        try:
            with recording, watched:
                function()
        finally:
            recording.undo()
    return recording.replay


def install(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, give `captured` this stand-in. Modules that are imported later must not capture."""
    if device.type != "cpu":
        return
    monkeypatch.setattr(_captured, "DEVICES", ("cpu",))
    monkeypatch.setattr(graph, "captured", captured)
    for module in [one for name, one in sys.modules.items() if name.startswith("kvtwin.")]:
        if getattr(module, "capturing", None) is CAPTURING:
            monkeypatch.setattr(module, "capturing", is_capturing)


@contextmanager
def capturing() -> Iterator[None]:
    """A context in which kvtwin finds that a graph is being captured on the CPU."""
    with mock.patch.object(sys.modules[__name__], "IN_CAPTURE", True):
        yield


IN_CAPTURE = False


def is_capturing(device: torch.device) -> bool:
    """What replaces `kvtwin.reference.contract.arguments.capturing`."""
    return IN_CAPTURE


class Recording(TorchDispatchMode):
    """The operations of a call, with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}     # bytes that the call has changed: where, and which
        self._made: dict[int, Tensor] = {}                      # tensors whose memory is new
        self._inside = False                                    # an operation is running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        for tensor in _written(func, args, kwargs):
            self._keep(tensor)
        given = {_memory(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        self._inside = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._inside = False
        leaves = tree_leaves(result)
        for one in leaves:
            if isinstance(one, Tensor) and _memory(one) not in given:
                self._made[_memory(one)] = one
        self._calls.append((func, args, kwargs, leaves))
        return result

    def launch(self, run: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A kernel is launched."""
        if self._inside:
            return run(*args, **kwargs)
        with _disable_current_modes():
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, Tensor):
                    self._keep(one)
            run(*args, **kwargs)
        self._calls.append((run, args, kwargs, [None]))

    def _keep(self, tensor: Tensor) -> None:
        if _memory(tensor) not in self._made and _memory(tensor) not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._before[_memory(tensor)] = whole, whole.clone()

    def undo(self) -> None:
        """Take back what the call has changed, and poison its results."""
        for whole, before in self._before.values():
            whole.copy_(before)
        for one in self._made.values():
            if one.is_floating_point() and one.numel():
                torch.empty(0, dtype=one.dtype).set_(one.untyped_storage()).fill_(torch.nan)

    @torch.no_grad()
    def replay(self) -> None:
        """Run all operations on the same memory."""
        for func, args, kwargs, leaves in self._calls:
            for old, new in zip(leaves, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and _memory(old) != _memory(new):
                    old.copy_(new)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The arguments whose elements an operation changes."""
    schema = func._schema.arguments
    given = {**{one.name: value for one, value in zip(schema, args, strict=False)}, **kwargs}
    for one in schema:
        if one.alias_info is not None and one.alias_info.is_write:
            yield from (leaf for leaf in tree_leaves(given.get(one.name)) if isinstance(leaf, Tensor))
