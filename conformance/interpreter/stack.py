"""Room on the interpreter's stack, so that deep calls in a loop cost what shallow ones do.

CPython keeps the frames of Python functions in chunks of 16 KB, which it maps and unmaps as calls enter and leave them.
A loop whose calls cross the end of a chunk pays two system calls for each: Triton's interpreter, some hundred frames
below pytest and Hypothesis, does so in nearly every operation, and took twice the time for it. A chunk is as large
as its first frame needs, so one frame that asks for much makes room for all that follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SLOTS = 70_000  # of 8 bytes: more than half of 1 MB, so that the chunk has 1 MB and the other half is free


def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, at the beginning of a chunk of 1 MB."""
    __tracebackhide__ = True
    return function(*args, **kwargs)


call.__code__ = call.__code__.replace(co_stacksize=SLOTS)
