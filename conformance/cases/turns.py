"""Tests that take gigabytes of a GPU's memory take turns: one at a time, over all processes that test on that GPU.

Several of them at once, in the processes of pytest-xdist, may need more memory than the GPU has.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import IO, Any

import torch

fcntl: Any
try:
    import fcntl
except ImportError:  # not on POSIX: there are no turns
    fcntl = None

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


def held() -> bool:
    """Whether this process holds a turn."""
    return bool(_held)


def give_back() -> None:
    """Give back every turn that this process holds."""
    while _held:
        _held.popitem()[1].close()
