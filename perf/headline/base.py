"""What every experiment needs: a clock, a limit of time, the memory that is left, and a file for its figures.

Figures go to disk as soon as they are measured, so that a run that is cut short loses nothing but what is missing.
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

#: What one figure may take: rounds at most, and seconds after which there are no more rounds.
ROUNDS, SECONDS = 7, 0.8
#: Of an experiment, after which nothing more is begun: twice what one took that compiled all of its kernels.
LIMIT = 200.0
#: Of its own byte bound, what a full-KV peer must reach.
LEAST_SHARE = 0.85
#: Kept free beside caches: for workspaces of libraries, and what fragments.
RESERVE = 2 * 2**30

Function = Callable[[], Any]


class Host:
    """A device that has nothing to capture: for tests of these scripts without a GPU. Its times mean nothing."""

    name = "cpu"

    def now(self) -> float:
        return time.perf_counter()

    def capture(self, function: Function) -> Program:
        return Direct(function)

    def cold(self) -> None:
        pass


class Run:
    """One experiment on one device.

    tiny: the same code at sizes that take no time. `record` adds figures under a name; what is impossible or wrong goes
    to `complain`, and fails the run in the end.
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
        """All figures so far; a file that is there is whole at any moment."""
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
        """Whether there is no time left for this; says so."""
        if self.tiny or time.monotonic() - self.started < LIMIT:
            return False
        self.complain(f"{what}: left out, {LIMIT:.0f} s are over")
        return True

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Something that may fail without taking the rest with it; memory is free afterwards."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            yield
        except Exception as error:                             # whatever it is, the others are to be measured
            self.complain(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        finally:
            self.free()

    # Time ------------------------------------------------------------------------------------------------------------

    def seconds(
        self, function: Function, *, what: str, moves: float = 0.0, capture: bool = True, cold: bool = False,
        rounds: int = ROUNDS, repeats: int = 1, check: Callable[[Any], None] | None = None,
    ) -> float:
        """The median time of `function` in a CUDA graph, after one run that does not count.

        moves: bytes that it has to move; faster than memory can is a complaint. cold: with an L2 that holds other
        things, for what is small enough to stay in it. repeats: runs per round, whose mean counts. check: looks at the
        result after timing, and raises AssertionError.
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
            self.complain(f"{what}: faster than the roofline: {moves / seconds / 1e12:.2f} of {limit / 1e12:.2f} TB/s")

    def own_bound(self, what: str, share: float | None) -> None:
        """A peer that keeps everything is a peer only where it comes near the bound that its bytes set."""
        if share is not None and share < LEAST_SHARE:
            self.complain(f"{what} reaches {share:.0%} of its own byte bound, where {LEAST_SHARE:.0%} are wanted")

    def share(self, moves: float, seconds: float) -> float | None:
        """Of the bytes' own bound: what they would take at copy bandwidth, over what was taken."""
        return None if self.roofline is None else moves / self.roofline.copy / seconds

    # Memory ----------------------------------------------------------------------------------------------------------

    def free(self) -> None:
        if self.cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def room(self) -> int:
        """Bytes that a cache may take now."""
        self.free()
        return torch.cuda.mem_get_info(self.device)[0] - RESERVE if self.cuda else 0

    def draw(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normal numbers, the same in every run."""
        return torch.empty(shape, dtype=dtype, device=self.device).normal_(generator=self.generator)


def rows_that_fit(room: int, each: float, most: int) -> int:
    """The largest batch: a multiple of 8 from 64 on, of 4 from 16 on, since products of matrices like that."""
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
    """The integral over lengths of what was measured at some of them, straight lines between."""
    lengths = sorted(points)
    return sum(
        (more - less) * (points[less] + points[more]) / 2 for less, more in itertools.pairwise(lengths)
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
