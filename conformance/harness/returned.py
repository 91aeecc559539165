"""What the functions of an implementation under test return, as kvtwin's result types with plain tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..judge.fields import Missing
from .fair_play import Unfair


def normalise(value: Any, result: type[tuple[Any, ...]], name: str) -> Any:
    """Convert ``value`` to the NamedTuple ``result``: its fields by attribute, by key, or in order.

    A field that is absent or None becomes a `Missing`, unless None is its default. Raises TypeError, which fails the
    test, if all of them are, or if a tuple has another length.
    """
    fields: Sequence[str] = result._fields  # type: ignore[attr-defined]
    if isinstance(value, result):
        found = list(value)
    elif isinstance(value, Mapping):
        found = [value.get(field) for field in fields]
    elif any(hasattr(value, field) for field in fields):
        found = [getattr(value, field, None) for field in fields]
    elif isinstance(value, (tuple, list)) and len(value) == len(fields):
        found = list(value)
    else:
        found = []
    if all(one is None for one in found):
        shape = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
        raise TypeError(
            f"{name} returned a {type(value).__name__}{shape}; expected an object, or a mapping, with "
            f"{', '.join(fields)}, or a tuple of these {len(fields)} in this order (None for a missing one)"
        )
    optional = result._field_defaults  # type: ignore[attr-defined]
    return result(*(
        Missing(f"{name}: {field}") if one is None and field not in optional else as_tensor(one)
        for field, one in zip(fields, found, strict=True)
    ))


def as_tensor(value: Any) -> Any:
    """A tensor, or an array of another library, as a plain tensor, with the same memory where that is possible;
    anything else as it is. Raises Unfair for objects that only look like a tensor."""
    import torch
    import torch.utils.dlpack

    if isinstance(value, torch.Tensor):
        return plain(value)
    if isinstance(value, type):
        return value
    if hasattr(value, "__dlpack__"):
        with suppress(BufferError, RuntimeError, TypeError):  # read-only arrays, or a type that DLPack lacks
            return torch.utils.dlpack.from_dlpack(value)
    if hasattr(value, "__array__"):
        return torch.tensor(value.__array__())
    if hasattr(value, "double"):  # what the judge calls first
        raise Unfair(f"returns an object of {_name(type(value))} in place of a tensor")
    return value


def plain(tensor: Any) -> Any:
    """The tensor without the class, attributes and hooks that it may have. Raises Unfair if its operations are code of
    its own, which might compute it when it is compared."""
    import torch

    own = [name for name in vars(tensor) if hasattr(torch.Tensor, name)]
    if own:
        raise Unfair(f"returns a tensor with a {own[0]} of its own")
    kind = type(tensor)
    if kind is torch.Tensor:
        return tensor.detach()
    replaced = next(_replaced(kind), None)
    if replaced:
        raise Unfair(f"returns a tensor of {_name(kind)}, which has {replaced} of its own; expected a torch.Tensor")
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


#: What the classes of tensors may have without other operations.
HARMLESS = ("__init__", "__new__", "__repr__", "__str__", "__doc__", "__module__", "__slots__", "__dict__", "__hash__",
            "__reduce_ex__", "__deepcopy__", "__weakref__", "__init_subclass__", "__setstate__", "__annotations__")


def _replaced(kind: type) -> Iterator[str]:
    """The names of what a subclass of Tensor has in place of Tensor's own."""
    import torch

    for owner in kind.__mro__[:kind.__mro__.index(torch.Tensor)]:
        for name, value in vars(owner).items():
            if name in HARMLESS or not hasattr(torch.Tensor, name):
                continue
            if name != "__torch_function__" or value is not torch._C._disabled_torch_function_impl:
                yield name


def check_attributes(state: Any) -> None:
    """Raises Unfair if a state holds tensors that `plain` refuses."""
    import torch

    for value in vars(state).values() if hasattr(state, "__dict__") else ():
        if isinstance(value, torch.Tensor) and (type(value) is not torch.Tensor or vars(value)):
            plain(value)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


