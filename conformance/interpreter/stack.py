"""Reserve space on Python's frame stack, so that deep calls in a loop are as fast as shallow ones.

CPython allocates the frames of Python functions in chunks of 16 KB. It maps a chunk when a call enters it, and unmaps
the chunk when the call returns. A loop whose calls cross the end of a chunk makes two system calls per iteration.
Triton's interpreter, which runs some hundred frames below pytest and Hypothesis, did so in nearly every operation and
took twice as long. A chunk is as large as its first frame requires, so one large frame makes space for all calls below
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SLOTS = 70_000  # 8 bytes each: more than half of 1 MB, so that the chunk has 1 MB and nearly half of it stays free


def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)`` at the beginning of a chunk of 1 MB."""
    __tracebackhide__ = True
    return function(*args, **kwargs)


call.__code__ = call.__code__.replace(co_stacksize=SLOTS)
