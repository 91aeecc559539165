"""Transfers of keys and values between the GPU and the host: immediate, or on a stream parallel to the computation.

`Transfers` is immediate and is used on a CPU. Tests replace it by transfers that delay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ...reference.contract.arguments import capturing


class Transfers:
    """What a state needs for its transfers: host memory, jobs in order, and a wait before their results are used.

    A job is a function that launches its work on the current stream. It may run at any time from `submit` to the next
    `wait`, after everything launched before `submit`. Jobs run one after the other. All of this can be captured in a
    graph; the capture must begin without pending jobs and end with a `wait`.
    """

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate host memory that jobs can read and write. MemoryError if there is none."""
        return torch.zeros(shape, dtype=dtype)

    def taken(self, memory: Tensor) -> int:
        """The size in bytes of `memory`, which was allocated here."""
        return memory.untyped_storage().nbytes()

    def submit(self, job: Callable[[], None]) -> None:
        """Schedule a job."""
        job()

    def wait(self) -> None:
        """Order everything that is launched after this call behind the jobs."""

    def release(self) -> None:
        """Wait on the host for all jobs, and free memory without references."""


@cache
def side_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Streams for all layers, which use one of them, so that tokens arrive in the order in which layers need them.

    There are two, because torch hands out the same 32 streams repeatedly. The stream that a caller computes or captures
    on may be one of these, and transfers would queue behind its work. Then the other one is used.
    """
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class StreamTransfers(Transfers):
    """Transfers on a CUDA device: pinned memory, a side stream, and an event before the first use.

    In a capture, the side stream becomes a branch of the graph, which forks and joins by events. A capture tracks only
    its own jobs: earlier ones have ended, since a capture begins with a synchronization.
    """

    by_address = ("_allocated",)            # see Offload

    def __init__(self, device: torch.device) -> None:
        self._device, self._streams = device, side_streams(device)
        self._done: dict[bool, torch.cuda.Event] = {}      # of the last job, by whether it was captured
        self._allocated: list[Tensor] = []  # keeps memory alive for kernels, which torch does not track

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        try:
            memory = torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            raise MemoryError(str(error).splitlines()[0]) from error
        self._allocated.append(memory)
        return memory

    def taken(self, memory: Tensor) -> int:
        """The size in bytes; torch's allocator of pinned memory returns blocks of powers of two."""
        return 1 << (super().taken(memory) - 1).bit_length()

    def submit(self, job: Callable[[], None]) -> None:
        captured, current = capturing(self._device), torch.cuda.current_stream(self._device)
        stream = next(stream for stream in self._streams if stream != current)
        stream.wait_stream(current)
        if captured in self._done:
            stream.wait_event(self._done[captured])     # the last job may be on the other stream
        with torch.cuda.stream(stream):
            job()
            self._done[captured] = torch.cuda.Event()
            self._done[captured].record()

    def wait(self) -> None:
        captured = capturing(self._device)
        done = self._done.pop(captured, None)
        if not captured:
            self._done.clear()              # also of a capture that failed
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)

    def release(self) -> None:
        for stream in (*self._streams, torch.cuda.current_stream(self._device)):
            stream.synchronize()
        self._done.clear()
        self._allocated.clear()
        empty = getattr(torch._C, "_host_emptyCache", None)
        if empty is not None:
            empty()

    def __del__(self) -> None:
        for stream in self._streams if self._allocated else ():
            stream.synchronize()


def transfers_for(device: torch.device) -> Transfers:
    return StreamTransfers(device) if device.type == "cuda" else Transfers()
