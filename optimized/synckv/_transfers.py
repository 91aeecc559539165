"""How keys and values travel between the GPU and the host: at once, or behind the computation, on a stream of its own.

`Transfers` does everything at once, which is what there is on a CPU; tests put others in its place, which delay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ...reference._validate import capturing


class Transfers:
    """What a state asks of who carries its tokens: memory of the host, jobs in order, a wait before their first use.

    A job is a function that launches what it has to on the current stream. It may run any time from `submit` to the
    next `wait`, after all that was launched before `submit`; jobs run one after the other. All of it may be captured in
    a graph, which begins with no job under way, and ends with a `wait`.
    """

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the host that jobs may read and write. MemoryError if there is none."""
        return torch.zeros(shape, dtype=dtype)

    def taken(self, memory: Tensor) -> int:
        """The bytes that `memory`, which was allocated here, takes."""
        return memory.untyped_storage().nbytes()

    def submit(self, job: Callable[[], None]) -> None:
        """Have a job done."""
        job()

    def wait(self) -> None:
        """What is launched from here on finds the jobs done."""

    def release(self) -> None:
        """Jobs are done, for the host too; memory that nobody refers to any more goes back."""


@cache
def side_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """For all layers, of which one is used: tokens come in the order in which layers will ask for them.

    Two, since torch hands out the same 32 streams over and over: the one that a caller computes on, or captures a graph
    on, may be one of these, and transfers would wait in line there. The other one then is free.
    """
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class StreamTransfers(Transfers):
    """On a CUDA device: pinned memory, a side stream, an event before the first use.

    In a capture the side stream becomes a branch of the graph, which forks and joins by events. A capture knows only
    its own: what was under way before it is over, since a capture begins with a synchronisation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._streams = device, side_streams(device)
        self._done: dict[bool, torch.cuda.Event] = {}      # after the last job, by whether it was captured
        self._held: list[Tensor] = []       # else it might go while kernels still read it, of which torch knows nothing

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        try:
            memory = torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            raise MemoryError(str(error).splitlines()[0]) from error
        self._held.append(memory)
        return memory

    def taken(self, memory: Tensor) -> int:
        """torch's allocator of pinned memory gives out blocks of powers of two."""
        return 1 << (super().taken(memory) - 1).bit_length()

    def submit(self, job: Callable[[], None]) -> None:
        captured, current = capturing(self._device), torch.cuda.current_stream(self._device)
        stream = next(stream for stream in self._streams if stream != current)
        stream.wait_stream(current)
        if captured in self._done:
            stream.wait_event(self._done[captured])     # the last job may have gone by the other stream
        with torch.cuda.stream(stream):
            job()
            self._done[captured] = torch.cuda.Event()
            self._done[captured].record()

    def wait(self) -> None:
        captured = capturing(self._device)
        done = self._done.pop(captured, None)
        if not captured:
            self._done.clear()              # also of a capture that came to nothing
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)

    def release(self) -> None:
        for stream in (*self._streams, torch.cuda.current_stream(self._device)):
            stream.synchronize()
        self._done.clear()
        self._held.clear()
        empty = getattr(torch._C, "_host_emptyCache", None)
        if empty is not None:
            empty()

    def __del__(self) -> None:
        for stream in self._streams if self._held else ():
            stream.synchronize()


def transfers_for(device: torch.device) -> Transfers:
    return StreamTransfers(device) if device.type == "cuda" else Transfers()
