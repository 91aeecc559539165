"""Shared parts of the experiments: timing, a time limit, free memory, and a file for the figures.

Figures are written as soon as they are measured, so that an interrupted run keeps them.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..device import Cuda, Direct, Program
from ..roofline import Roofline, measure

#: Limits for one figure: the number of rounds, and the seconds after which no round begins.
ROUNDS, SECONDS = 7, 0.8
#: Seconds after which an experiment begins no new part. ThinKV's, the longest, took 300 when it compiled its kernels.
LIMIT = 400.0
#: The minimum share of its byte bound that a full-KV peer must reach.
LEAST_SHARE = 0.85
#: Bytes that caches leave free, for library workspaces and fragmentation.
RESERVE = 2 * 2**30

Function = Callable[[], Any]


class Host:
    """A fake device for tests of these scripts without a GPU. Its times are meaningless."""

    name = "cpu"

    def now(self) -> float:
        return time.perf_counter()

    def capture(self, function: Function) -> Program:
        return Direct(function)

    def cold(self) -> None:
        pass


class Run:
    """One experiment on one device.

    tiny: run the same code at tiny sizes. `record` adds figures under a name. `complain` records impossible or wrong
    results; a run with complaints fails at its end.
    """

    def __init__(self, name: str, out: Path, device: str | torch.device, *, tiny: bool = False) -> None:
        self.name, self.out, self.tiny = name, out, tiny
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.gpu: Any = Cuda() if self.cuda else Host()
        self.roofline: Roofline | None = measure(self.gpu) if self.cuda and not tiny else None
        self.started = time.monotonic()
        self.figures: dict[str, Any] = {}
        self.complaints: list[str] = []
        self.finished = False
        self.generator = torch.Generator(self.device).manual_seed(60)
        self.free()

    # Figures ---------------------------------------------------------------------------------------------------------

    def record(self, name: str, figures: Mapping[str, Any]) -> None:
        self.figures[name] = {**self.figures.get(name, {}), **figures}
        print(f"{self.name}: {name}: " + ", ".join(f"{key} {_short(value)}" for key, value in figures.items()))
        self.write()

    def complain(self, text: str) -> None:
        print(f"{self.name}: {text}")
        self.complaints.append(text)
        self.write()

    def write(self) -> None:
        """Write all figures so far. The file is replaced atomically, so it is always complete."""
        self.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({
            "experiment": self.name, "machine": machine(), "tiny": self.tiny,
            "roofline": None if self.roofline is None else self.roofline.as_dict(),
            "finished": self.finished, "seconds": round(time.monotonic() - self.started, 1),
            "figures": self.figures, "complaints": self.complaints,
        }, indent=1)
        part = self.out / f"{self.name}.json.part"
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(self.out / f"{self.name}.json")

    def late(self, what: str) -> bool:
        """Whether the time limit is reached, which is a complaint."""
        if self.tiny or time.monotonic() - self.started < LIMIT:
            return False
        self.complain(f"{what}: skipped, the time limit of {LIMIT:.0f} s is reached")
        return True

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the experiment. An exception becomes a complaint and does not stop the other parts. Memory is freed
        afterwards."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            yield
        except Exception as error:                             # any error: the other parts must still run
            self.complain(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        finally:
            self.free()

    # Time ------------------------------------------------------------------------------------------------------------

    def seconds(
        self, function: Function, *, what: str, moves: float = 0.0, capture: bool = True, cold: bool = False,
        rounds: int = ROUNDS, repeats: int = 1, check: Callable[[Any], None] | None = None,
    ) -> float:
        """The median time of `function` in a CUDA graph, after one warm-up run.

        moves: the minimum bytes that it reads and writes; exceeding the memory bandwidth is a complaint. cold: flush L2
        before each round, for functions whose data fit into L2. repeats: runs per round, whose mean is the round's
        time. check(result): runs after timing and raises AssertionError if the result is wrong.
        """
        program = self.gpu.capture(function) if capture else Direct(function)
        if not self.tiny:
            program.run()
        samples: list[float] = []
        began = time.monotonic()
        while len(samples) < (1 if self.tiny else rounds) and (not samples or time.monotonic() - began < SECONDS):
            if cold:
                self.gpu.cold()
            start = self.gpu.now()
            for _ in range(1 if self.tiny else repeats):
                program.run()
            samples.append((self.gpu.now() - start) / (1 if self.tiny else repeats))
        seconds = statistics.median(samples)
        if check is not None:
            try:
                check(program.result)
            except AssertionError as error:
                self.complain(f"{what}: wrong after timing: {error}")
        self.possible(what, seconds, moves)
        return seconds

    def possible(self, what: str, seconds: float, moves: float) -> None:
        limit = None if self.roofline is None else self.roofline.limit
        if limit is not None and moves > limit * seconds:
            self.complain(
                f"{what}: faster than the roofline: {moves / seconds / 1e12:.2f} TB/s, the limit is "
                f"{limit / 1e12:.2f} TB/s"
            )

    def own_bound(self, what: str, share: float | None) -> None:
        """Complain if a full-KV peer is far from its byte bound: it would be too weak for a fair comparison."""
        if share is not None and share < LEAST_SHARE:
            self.complain(f"{what} reaches {share:.0%} of its own byte bound, expected at least {LEAST_SHARE:.0%}")

    def share(self, moves: float, seconds: float) -> float | None:
        """The share of the byte bound: the time for `moves` bytes at copy bandwidth, divided by `seconds`."""
        return None if self.roofline is None else moves / self.roofline.copy / seconds

    # Memory ----------------------------------------------------------------------------------------------------------

    def free(self) -> None:
        if self.cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def room(self) -> int:
        """Bytes that are free for a cache."""
        self.free()
        return torch.cuda.mem_get_info(self.device)[0] - RESERVE if self.cuda else 0

    def draw(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normal numbers, the same in every run."""
        return torch.empty(shape, dtype=dtype, device=self.device).normal_(generator=self.generator)


def rows_that_fit(room: int, each: float, most: int) -> int:
    """The largest batch that fits. From 64 on it is a multiple of 8, from 16 on of 4, which suits matrix products."""
    rows = min(most, int(room // each))
    unit = 8 if rows >= 64 else 4 if rows >= 16 else 1
    return max(1, rows // unit * unit)


@cache
def machine() -> dict[str, Any]:
    """The device and the versions that a time depends on."""
    from ..conftest import pytest_benchmark_generate_machine_info

    found: dict[str, Any] = pytest_benchmark_generate_machine_info()
    return {name: value for name, value in found.items() if not name.startswith("pytest")}


def trapezoid(points: Mapping[int, float]) -> float:
    """The integral over lengths of a quantity that was measured at some of them, with linear interpolation."""
    lengths = sorted(points)
    return sum(
        (more - less) * (points[less] + points[more]) / 2 for less, more in itertools.pairwise(lengths)
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
