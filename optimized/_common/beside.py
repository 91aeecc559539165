"""Work that runs on a GPU at the same time as a prompt's attention.

The attention of a long prompt fills all multiprocessors. What a method computes from the prompt besides, such as which
tokens to keep, takes small kernels, most of them on few multiprocessors. On a stream of high priority their programs
start whenever some of the attention's end, so that they hardly delay it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch

from ...reference._validate import capturing

#: One stream per device. Work on it begins behind an event of the caller's stream, which waits for its end.
_streams: dict[torch.device, torch.cuda.Stream] = {}


def mark(device: torch.device, *, alone: bool = False) -> torch.cuda.Event | None:
    """The event before the attention, which `beside` waits for. None if all work has to be on one stream: if asked for
    with `alone`, on the CPU, in a CUDA graph's capture and under torch.compile."""
    if alone or device.type != "cuda" or torch.compiler.is_compiling() or capturing(device):
        return None
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(device))
    return ready


def beside(ready: torch.cuda.Event | None, device: torch.device) -> AbstractContextManager[object]:
    """A context for work that needs what was launched before `ready`, and nothing that was launched after it. What is
    launched behind the context waits for this work."""
    return nullcontext() if ready is None else _Beside(ready, device)


class _Beside:
    def __init__(self, ready: torch.cuda.Event, device: torch.device) -> None:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device, priority=-1)
        self._side, self._outer = _streams[device], torch.cuda.current_stream(device)
        self._side.wait_event(ready)
        self._context = torch.cuda.stream(self._side)

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, trace)
        self._outer.wait_stream(self._side)
