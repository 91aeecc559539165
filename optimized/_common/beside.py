"""Work that runs on a GPU at the same time as a prompt's attention.

cuDNN's kernel is one program on each multiprocessor, with all of its shared memory, until the end. So only what starts
before it can run beside it, and it should take few multiprocessors: the attention starts on the others.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ...reference._validate import capturing

#: One stream per device.
_streams: dict[torch.device, torch.cuda.Stream] = {}


def fork(device: torch.device) -> torch.cuda.Stream | None:
    """A stream whose work begins behind what was launched so far. None if all work has to be on the current one: on the
    CPU, in a CUDA graph's capture and under torch.compile."""
    if device.type != "cuda" or torch.compiler.is_compiling() or capturing(device):
        return None
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    _streams[device].wait_stream(torch.cuda.current_stream(device))
    return _streams[device]


def on(side: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """A context that launches on a stream that `fork` returned. What its work reads and writes must be allocated before
    `fork`, and not be freed before `join`; memory that it allocates must not be used outside."""
    return nullcontext() if side is None else torch.cuda.stream(side)


def join(side: torch.cuda.Stream | None) -> None:
    """From here on, the current stream waits for `side`."""
    if side is not None:
        torch.cuda.current_stream(side.device).wait_stream(side)
