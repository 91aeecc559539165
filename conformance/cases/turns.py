"""Tests that take gigabytes of a GPU's memory take turns: one at a time, over all processes that test on that GPU.

Several of them at once, in the processes of pytest-xdist, may need more memory than the GPU has.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

fcntl: Any
try:
    import fcntl
except ImportError:  # not on POSIX: there are no turns
    fcntl = None

#: Seconds to wait for memory before each further call.
PAUSES = (2, 10, 30)

_held: dict[str, IO[str]] = {}


def take(name: str) -> None:
    """Wait until no other process holds the turn `name`, and hold it until `give_back`."""
    if fcntl is None or name in _held:
        return
    file = (Path(tempfile.gettempdir()) / f"kvtwin-{os.getuid()}-{name}.lock").open("a")
    fcntl.flock(file, fcntl.LOCK_EX)  # the system gives it back if the process ends
    _held[name] = file


def take_memory_of(device: torch.device) -> None:
    """Take the turn of a GPU's memory. The GPU is known by its UUID, since CUDA_VISIBLE_DEVICES may renumber it."""
    take(f"memory-{getattr(torch.cuda.get_device_properties(device), 'uuid', device.index)}")


def when_memory_is_free(test: Callable[..., None], /, *arguments: Any, **named: Any) -> None:
    """Call a test. If the processes that share its GPU leave it too little memory, take the turn of the GPU's memory,
    wait until they need less, and call it again, up to len(PAUSES) times."""
    __tracebackhide__ = True
    for pause in PAUSES if shares_its_gpu() else ():
        try:
            test(*arguments, **named)
        except torch.OutOfMemoryError:
            pass  # what its frames hold is free outside of this block only
        else:
            return
        gc.collect()
        torch.cuda.empty_cache()
        take_memory_of(torch.device("cuda", torch.cuda.current_device()))
        time.sleep(pause)
    test(*arguments, **named)


def shares_its_gpu() -> bool:
    """Whether other processes of this run may test on the same GPU."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1 and torch.cuda.is_initialized()


def held() -> bool:
    """Whether this process holds a turn."""
    return bool(_held)


def give_back() -> None:
    """Give back every turn that this process holds."""
    while _held:
        _held.popitem()[1].close()
