"""Recordings of the functions of Triton's standard library (recordings.py): sum, max, argmax, cdiv and others.

These are device functions: Python functions that call language functions. What they request from the builder depends on
the types of their tensors and on their other arguments. So a recording can hold all requests of a call, and replaying
it skips their Python code. A reduction computes on an array in the interpreter, without a request to the builder; while
a call is recorded, it becomes a request.

Kernels' own device functions have no recordings. They are called with too many combinations of types, and most of them
read the value of a tensor, such as the bound of a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

import numpy as np

from . import internals
from .recordings import MOST_RECORDINGS, Recorder, Recordings, Refused, real_of


def record_functions(interpreter: ModuleType, recordings: Recordings) -> None:
    """Make recordings of the standard library, if the interpreter's reductions are those that are known."""
    if not internals.has_sources(interpreter, internals.REDUCTIONS):
        return
    kind, language = interpreter.InterpretedFunction, interpreter.tl
    original, standard = kind.__call__, language.standard.__name__

    @wraps(original)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        recorded = vars(self).get("_kvtwin_recorded")
        if recorded is None:
            recorded = partial(original, self)
            if self.fn.__module__ == standard:
                recorded = recorded_function(recordings, recorded)
            self._kvtwin_recorded = recorded
        return recorded(*arguments, **named)

    kind.__call__ = call
    patch, reductions = interpreter._patch_reduce_scan, Reductions(interpreter)

    @wraps(patch)
    def patch_reduce_scan(scope: Any) -> None:
        patch(scope)
        for owner in (language, language.core):
            for name in ("reduce", "associative_scan"):
                scope.set_attr(owner, name, partial(_requested, recordings, reductions, getattr(owner, name)))

    interpreter._patch_reduce_scan = patch_reduce_scan  # type: ignore[attr-defined]


def recorded_function(recordings: Recordings, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with recordings. The first call with a key records one; later ones play it."""
    known: dict[tuple[Any, ...], Callable[..., Any] | None] = {}

    def member(*arguments: Any, _semantic: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    def call(*arguments: Any, **named: Any) -> Any:
        if recordings.plain:
            return function(*arguments, **named)
        try:
            key, handles = recordings.key(arguments, named)
        except Refused:
            return function(*arguments, **named)
        play = known.get(key)
        if play is not None:
            return play(*handles)
        if key in known or len(known) >= MOST_RECORDINGS:
            return function(*arguments, **named)
        returned, known[key] = recordings.record(member, arguments, named, handles, several=True)
        return returned

    return call


def _requested(
    recordings: Recordings, reductions: Reductions, function: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Call a reduction or scan. While a call is recorded, make it a request."""
    recorder = recordings.semantic.builder
    if type(recorder) is not Recorder:
        return function(*arguments, **named)
    given, *rest = arguments
    tensors: tuple[Any, ...] = given if type(given) is tuple else (given,)
    attributes: list[dict[str, Any]] = [tensor.__dict__ for tensor in tensors]

    def of_handles(*handles: Any) -> Any:
        made = tuple(map(recordings.tensor_of, handles, attributes))
        return function(made if given is tensors else made[0], *rest, **named)

    def request(*handles: Any) -> Any:
        returned = of_handles(*handles)
        return tuple([part.handle for part in returned]) if type(returned) is tuple else returned.handle

    handles = tuple(tensor.handle for tensor in tensors)
    returned = of_handles(*map(real_of, handles))
    if type(returned) is not tuple:
        quick = reductions.reduction_of(function, returned.handle, *rest, **named)
        return recordings.tensor_of(recorder.add(quick or request, handles, returned.handle), vars(returned))
    answers = recorder.add(request, handles, tuple([part.handle for part in returned]))
    return tuple(recordings.tensor_of(answer, vars(part)) for answer, part in zip(answers, returned, strict=True))


class Reductions:
    """The reductions of one interpreter whose computation this module knows."""

    def __init__(self, interpreter: ModuleType) -> None:
        standard, numpy = interpreter.tl.standard, interpreter.np
        self.handle = interpreter.TensorHandle
        self.functions = {
            standard._sum_combine: numpy.sum, standard._elementwise_max: numpy.nanmax,
            standard._elementwise_min: numpy.nanmin,
        }

    def reduction_of(
        self, function: Callable[..., Any], real: Any, axis: Any, combine_fn: Any, keep_dims: bool = False
    ) -> Callable[[Any], Any] | None:
        """The reduction of one tensor, as a function of its handle that makes a handle like `real`. None for others."""
        compute = self.functions.get(combine_fn) if function.__name__ == "_new_reduce" else None
        if compute is None:
            return None
        new, handles, kind, dtype = object.__new__, self.handle, real.data.dtype, real.dtype

        def request(handle: Any) -> Any:
            found = compute(handle.data, axis=axis, keepdims=keep_dims)
            made = new(handles)
            made.data = found if type(found) is np.ndarray and found.dtype is kind else np.array(found, kind, ndmin=1)
            made.dtype, made.attr = dtype, {}
            return made

        return request
