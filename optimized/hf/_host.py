"""What the host knows of a cache: the attributes of the cache, its layers, their states, and all that these consist of.

A forward pass in a CUDA graph changes only what is on the GPU. The host's part of the pass runs once, in the capture.
`advances` compares the attributes before and after it: a pass may add to numbers, and a replay adds the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...reference.hf.cache_adapter_contents import PACKAGE as PACKAGE
from ...reference.hf.cache_adapter_contents import flat
from ...reference.hf.cache_adapter_contents import parts as parts

SIMPLE = (int, float, str, bytes, type(None), torch.dtype, torch.device)


class NotReplayable(Exception):
    """A replay would not do what the pass does. The message says why."""


class Advance(NamedTuple):
    """The attribute `name` of an object, of which these are the attributes, and what a pass adds to it."""

    attributes: dict[str, Any]
    name: str
    by: int


def places(objects: Iterable[object]) -> tuple[Any, ...]:
    """Where the tensors of these objects are, except those that kernels find by addresses on the device (`by_address`):
    such as host memory, which may be other memory after a reset."""
    held = (
        value for one in objects for name, value in vars(one).items() if name not in getattr(one, "by_address", ())
    )
    tensors = (value for value in flat(held) if isinstance(value, Tensor))
    return tuple((tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors)


class Snapshot:
    """The attributes of the objects that a cache consists of, at one time."""

    def __init__(self, cache: object) -> None:
        self._saved = [(vars(one), {name: _copied(value) for name, value in vars(one).items()}) for one in parts(cache)]

    def restore(self) -> None:
        """Give all attributes their values of that time. Elements of tensors are left as they are."""
        for attributes, saved in self._saved:
            attributes.clear()
            attributes.update(saved)

    def advances(self) -> list[Advance]:
        """The numbers that have changed since. NotReplayable if anything else has."""
        found = []
        for attributes, saved in self._saved:
            for name in attributes.keys() | saved.keys():
                before, now = saved.get(name), attributes.get(name)
                if type(before) is type(now) is int and before != now:
                    found.append(Advance(attributes, name, now - before))
                elif not _same(before, now):
                    raise NotReplayable(f"a pass changes the attribute {name}, which is no number")
        return found


def _copied(value: Any) -> Any:
    """The value, in a container of its own."""
    return type(value)(value) if type(value) in (list, set, dict) else value


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, SIMPLE):
        return bool(one == other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, set) and one == other
