"""What a call must leave as it was: the whole memory of its arguments, bit by bit.

The memory of a tensor is its storage: what lies in free slots, in padding, in pages that no row has, between strides
and around a slice counts as well. NaN are compared by their bits. Changed memory is restored, so that the case can be
judged and saved as the call got it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from .host import ORIGINAL
from .mismatch import Mismatch, fail

#: Of a larger storage only the elements are compared: the layout "far" reserves gigabytes that nothing is written to.
MOST_BYTES = 2**30
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ChangedInput(Mismatch):
    """A call changed the memory of one of its arguments."""


class _Watched:
    """A tensor, and a copy of its memory."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.tensor = name, tensor
        self.memory = _bits(tensor)
        if tensor.untyped_storage().nbytes() <= MOST_BYTES:
            self.memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self.copy = self.memory.clone()

    def change(self) -> str | None:
        """What changed, None if nothing did. Undoes it."""
        if torch.equal(self.memory, self.copy):
            return None
        what = self._difference()
        self.memory.copy_(self.copy)
        return what

    def _difference(self) -> str:
        tensor, before = self.tensor, self.copy
        if self.memory.shape != tensor.shape or self.memory.stride() != tensor.stride():  # the bytes of a storage
            before = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
                before.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            )
        different = _bits(tensor) != _bits(before)
        if not bool(different.any()):
            return "memory between or around its elements changed"
        at = tuple(different.nonzero()[0].tolist())
        old = before.view(tensor.dtype)[at].item()
        return (
            f"{int(different.sum())} of {different.numel()} elements changed, the first at {at}: it was {old!r}, "
            f"and is {tensor[at].item()!r}"
        )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


_watched: ContextVar[list[_Watched] | None] = ContextVar("kvtwin_watched", default=None)


@contextmanager
def unchanged(arguments: Any, when: str = "after the call (an input)") -> Iterator[None]:
    """Inside the ``with`` block, a function is called with these arguments: a tensor, or a dict, list or tuple of them.

    Raises ChangedInput afterwards if their memory changed. A call that raises an error is not judged; the memory is
    restored as well.
    """
    watched = [_Watched(name, tensor) for name, tensor in _named("argument", arguments)]
    token = _watched.set(watched)
    try:
        yield
    finally:
        _watched.reset(token)
        changes = {one.name: change for one in watched if (change := one.change()) is not None}
    for name, change in changes.items():
        fail(f"{name} {when}: {change}; a call must not change its arguments", ChangedInput)


def also(arguments: dict[str, Any]) -> dict[str, Any]:
    """Watch further arguments of the same call, which are made inside of `unchanged`. Returns them."""
    watched = _watched.get()
    if watched is not None:
        watched += [_Watched(name, tensor) for name, tensor in _named("argument", arguments)]
    return arguments


def _named(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a value, by name; in place of copies on the CPU, those on a GPU that a call gets."""
    if isinstance(value, Tensor):
        yield name, getattr(value, ORIGINAL, (value,))[0]
    elif isinstance(value, dict):
        for own, one in value.items():
            yield from _named(str(own), one)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from _named(name, dict(zip(value._fields, value, strict=True)))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _named(name, one)
