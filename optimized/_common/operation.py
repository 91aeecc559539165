"""Operations of PyTorch whose calls take little of the host's time.

An operation of `torch.library.custom_op` is what torch.compile, fake tensors, and other modes need. Its dispatch takes
the host longer than most launches, some 0.1 ms. Where none of these is active, and no gradients are recorded, the
function behind it does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor

#: Types of arguments of plain calls. A subclass of Tensor may be fake, or have a mode of its own.
_NUMBERS = frozenset({int, float, bool})
_TYPES = _NUMBERS | {Tensor, str, type(None), torch.dtype, torch.device}


class Operation:
    """An operation, and the function that it calls."""

    def __init__(self, name: str, function: Callable[..., Any], mutates_args: Iterable[str]) -> None:
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        self._function = function
        self._operation = torch.library.custom_op(name, function, mutates_args=mutates_args)
        self._signature = signature(function)
        self._names = list(self._signature.parameters)
        self._changed = [self._names.index(one) for one in mutates_args]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or kwargs or not _is_plain(args):
            return self._operation(*args, **kwargs)
        result = self._function(*args)
        if not torch.is_inference_mode_enabled():
            # As the operation does it: a backward pass refuses tensors that were changed.
            torch.autograd.graph.increment_version([args[at] for at in self._changed if args[at] is not None])
        return result

    def arguments_after(self, name: str, named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Arguments of a call behind the one called `name`, in order, from these by name. TypeError if they are not
        those of the next parameters."""
        first = self._names.index(name) + 1
        names = self._names[first:first + len(named)]
        if set(names) != set(named):
            raise TypeError(f"{self.__name__} takes {', '.join(names)} behind {name}, got {', '.join(named)}")
        return tuple(named[one] for one in names)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """As of `torch.library.CustomOpDef`, but the function takes only the arguments that it needs, by their names.
        Operations that return nothing need none."""
        places = [self._names.index(name) for name in signature(function).parameters]

        def fake(*args: Any, **kwargs: Any) -> Any:
            given = self._signature.bind(*args, **kwargs)
            given.apply_defaults()
            values = list(given.arguments.values())
            return function(*(values[at] for at in places))

        self._operation.register_fake(fake)
        return function


def operation(name: str, *, mutates_args: Iterable[str]) -> Callable[[Callable[..., Any]], Operation]:
    """A decorator like `torch.library.custom_op`."""
    return lambda function: Operation(name, function, mutates_args)


def _is_plain(args: tuple[Any, ...]) -> bool:
    """Whether a call has no use for PyTorch's dispatch."""
    return not (
        torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ) and all(type(one) in _TYPES or (type(one) is list and _NUMBERS.issuperset(map(type, one))) for one in args)
