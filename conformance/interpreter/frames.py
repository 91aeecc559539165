"""Reserve space for the frames of an interpreted launch, so that calls below it are fast at any depth.

CPython allocates the frames of Python functions in chunks of 16 KB. It maps a chunk when a call enters it, and unmaps
the chunk when the call returns. A loop whose calls cross the end of a chunk makes two system calls per iteration.
Triton's interpreter, which runs some hundred frames below pytest and Hypothesis, did so in nearly every operation and
took twice as long. A chunk is as large as its first frame requires, so one large frame makes space for all calls below
it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

SLOTS = 70_000  # 8 bytes each: more than half of 1 MB, so that the chunk has 1 MB and nearly half of it stays free


def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)`` at the beginning of a chunk of 1 MB."""
    __tracebackhide__ = True
    return function(*args, **kwargs)


call.__code__ = call.__code__.replace(co_stacksize=SLOTS)


def reserve_frames(interpreter: ModuleType) -> None:
    """Run each launch of a kernel at the beginning of a chunk."""
    executor = interpreter.GridExecutor
    launch = executor.__call__

    @wraps(launch)
    def launch_with_space(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return call(launch, self, *args, **kwargs)

    executor.__call__ = launch_with_space
