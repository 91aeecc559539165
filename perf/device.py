"""Time on a CUDA device: events for a clock, graphs for launches, a flush for a cold cache.

`Device` is all that the harness asks of a device, so that its own tests run it on a made-up one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

import torch

#: Ways to leave L2 without the benchmark's data: holding written lines, or holding lines that were only read.
COLD = ("dirty", "clean")


class Program(Protocol):
    """Something that can be run again and again; `result` is what the last run returned."""

    result: Any

    def run(self) -> None: ...


class Device(Protocol):
    """name: like nvidia-h200, as in the names of baselines."""

    name: str

    def now(self) -> Any:
        """A point in time; the later one minus the earlier one gives seconds."""

    def capture(self, function: Callable[[], Any]) -> Program:
        """`function` as a program that costs the host next to nothing."""

    def cold(self) -> None:
        """Empty the cache of what the next program will read."""


class Instant:
    """A point on the device's time line. It lies between what the stream was given before and what it is given next."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: Instant) -> float:
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


class Direct:
    """A function launched as it is: for what cannot be captured. Its launches count where the host is slower."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.result: Any = None

    def run(self) -> None:
        self.result = self._function()


class Graph:
    """A function captured in a CUDA graph, after three warm-up calls on a side stream. `result` is written in place."""

    def __init__(self, function: Callable[[], Any]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                function()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.result = function()

    def run(self) -> None:
        self._graph.replay()


class Cuda:
    """The current CUDA device.

    cold: what `cold` does. "dirty" writes a buffer, so a benchmark starts with an L2 full of lines that memory has not
    seen yet, as after a kernel that wrote a lot; writing them back takes bandwidth from the first microseconds. "clean"
    then reads another buffer, as after a kernel that read weights.
    """

    def __init__(self, cold: str = COLD[0]) -> None:
        self.name = slug(torch.cuda.get_device_name())
        self._clean = cold == "clean"
        cache = torch.cuda.get_device_properties().L2_cache_size
        # So much, too, that the host has queued the benchmark before the device is done with the flush.
        self._written = torch.empty(max(4 * cache, 2**29), dtype=torch.uint8, device="cuda")
        self._read = torch.zeros(max(cache, 2**25), dtype=torch.float32, device="cuda")
        self._sum = torch.zeros((), dtype=torch.float32, device="cuda")

    def now(self) -> Instant:
        return Instant()

    def capture(self, function: Callable[[], Any]) -> Program:
        return Graph(function)

    def cold(self) -> None:
        self._written.zero_()
        if self._clean:
            torch.sum(self._read, dim=0, out=self._sum)


def slug(name: str) -> str:
    """A device's name as part of a file's: NVIDIA H200 -> nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
