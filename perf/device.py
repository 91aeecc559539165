"""Timing on a CUDA device: events as the clock, graphs instead of launches, and a flush of the L2 cache.

`Device` is the interface that the harness needs, so that the tests of the harness can use a fake device.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

import torch

#: The contents of L2 after a flush: written lines, or lines that were only read.
COLD = ("dirty", "clean")


class Program(Protocol):
    """Something that can run repeatedly; `result` is the result of the last run."""

    result: Any

    def run(self) -> None: ...


class Device(Protocol):
    """name: as in the names of baselines, for example nvidia-h200."""

    name: str

    def now(self) -> Any:
        """A point in time. The difference of two is in seconds."""

    def capture(self, function: Callable[[], Any]) -> Program:
        """`function` as a program with almost no host overhead."""

    def cold(self) -> None:
        """Evict the data of the next program from the cache."""


class Instant:
    """A point in the device's time: after all work enqueued so far, and before the work enqueued next."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: Instant) -> float:
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


class Direct:
    """A function that is launched without a graph, if it cannot be captured. Its time may include launch overhead."""

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

    cold: what the method `cold` does. "dirty" writes a buffer, so that L2 is full of modified lines, as after a kernel
    that writes a lot. Writing them back takes bandwidth during the first microseconds. "clean" then also reads another
    buffer, as after a kernel that reads weights.
    """

    def __init__(self, cold: str = COLD[0]) -> None:
        self.name = slug(torch.cuda.get_device_name())
        self._clean = cold == "clean"
        cache = torch.cuda.get_device_properties().L2_cache_size
        # The flush must also last long enough for the host to enqueue the benchmark.
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
    """A device's name for use in file names: NVIDIA H200 -> nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
