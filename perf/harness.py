"""Times, checks and gates a benchmark: the value of the fixture `device_benchmark`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from . import gate
from .device import Device, Direct, Program
from .gate import Figures, Gate
from .roofline import Roofline

ROUNDS = 100
#: Flushes of the L2 cache before a call that is not captured: 16 GB, 4 ms at the 4 TB/s of an H200, longer than the
#: launches of a prompt.
FLUSHES = 32
#: Rounds of a reference, after one warm-up round. References may be a hundred times slower.
REFERENCE_ROUNDS = 3

Function = Callable[[], Any]


class DeviceBenchmark:
    """Times a function and its peers on the device, checks its results, and compares the figures with the gates.

    benchmark: pytest-benchmark's fixture, whose timer must be `device.now`. gates: the gates of the method, by
    benchmark name; none at all for a method that was not measured yet, and None if its file is missing. name: the name
    of this benchmark.
    """

    def __init__(
        self, benchmark: Any, device: Device, roofline: Roofline, gates: Mapping[str, Gate] | None, name: str
    ) -> None:
        self._benchmark = benchmark
        self._device = device
        self._roofline = roofline
        self._gates = gates
        self._name = name

    def __call__(
        self, function: Function, *, moves: int, verify: Callable[[Any], None],
        peers: Mapping[str, Function] | None = None, peers_move: int = 0,
        verify_peer: Callable[[Any], None] | None = None, references: Mapping[str, Function] | None = None,
        poison: Iterable[Tensor] = (), capture: bool = True, gated: bool = True,
        before: Function | None = None, rounds: int = ROUNDS,
    ) -> Figures | None:
        """Time `function` in a CUDA graph with device events and a cold L2. The result is the median of the rounds.

        moves, peers_move: the minimum bytes that the function, and each peer, read and write. verify(result): runs
        after timing and raises AssertionError if the function's last result or a side effect is wrong. verify_peer: the
        same for a peer. peers: also captured, and timed in turns with the function, so that all have the same clocks.
        references: slower implementations, launched without a graph. poison: buffers besides the result that the
        function must fill; they are set to NaN before every round. capture=False: launch the function and its peers
        without a graph. gated=False: the benchmark needs no thresholds, but its results must be right. before: called
        before every round of a function that is not captured, and not timed. rounds: how many are timed, after a fifth
        as many. What is not captured is launched while the device does other work, as in a model: launches count where
        they take longer than the device.

        The figures are in benchmark.extra_info and in the JSON, even if the test fails. Returns the figures, or None
        with --benchmark-disable, which only checks the results.
        """
        load = self._device.capture if capture else Direct
        if before is not None:
            if capture:
                raise ValueError("before must be None for a captured function, which is called several times")
            before()
        program: Program = load(function)
        rivals = {name: load(peer) for name, peer in (peers or {}).items()}
        times: dict[str, list[tuple[Any, Any]]] = {name: [] for name in rivals}
        warmup = rounds // 5
        filled = [*poison, *_floating(program.result)]

        def prepare() -> None:
            # Do not synchronize here: the device must have queued work when the measured region begins.
            for name, rival in rivals.items():
                self._occupy(capture)
                times[name].append(self._timed(rival))
            if before is not None:
                before()
            for tensor in filled:
                tensor.fill_(torch.nan)
            self._occupy(capture)
            self._device.cold()

        self._benchmark.pedantic(program.run, setup=prepare, rounds=rounds, warmup_rounds=warmup)
        wrong = self._wrong(program, rivals, verify, verify_peer)
        if self._benchmark.disabled:
            _fail(wrong)
            return None
        figures = Figures(
            self._benchmark.stats["median"], moves, self._roofline,
            {name: _median(samples[warmup:]) for name, samples in times.items()}, peers_move or moves,
            {name: self._reference(slow) for name, slow in (references or {}).items()},
        )
        slow = self._too_slow(figures) if gated else []
        wrong += gate.too_fast(figures)
        self._benchmark.extra_info.update(
            figures.as_dict(), captured=capture, gated=gated, right=not wrong, complaints=wrong + slow,
        )
        _fail(wrong + slow)
        return figures

    def _occupy(self, captured: bool) -> None:
        """Give the device work for the time of a call's launches."""
        for _ in range(0 if captured else FLUSHES):
            self._device.cold()

    def _timed(self, program: Program) -> tuple[Any, Any]:
        self._device.cold()
        start = self._device.now()
        program.run()
        return start, self._device.now()

    def _reference(self, function: Function) -> float:
        program = Direct(function)
        return _median([self._timed(program) for _ in range(1 + REFERENCE_ROUNDS)][1:])

    def _wrong(
        self, program: Program, rivals: Mapping[str, Program], verify: Callable[[Any], None],
        verify_peer: Callable[[Any], None] | None,
    ) -> list[str]:
        """Complaints about the results of the last round. Peers run once more, on the current inputs."""
        found = _complaint("", verify, program)
        for name, rival in rivals.items():
            if verify_peer is not None:
                rival.run()
                found += _complaint(f", peer {name}", verify_peer, rival)
        return found

    def _too_slow(self, figures: Figures) -> list[str]:
        if self._gates is not None and not self._gates:                # the file of a method that was not measured yet
            return []
        if self._gates is None or self._name not in self._gates:
            return [f"no thresholds for {self._name!r}"]
        return gate.too_slow(figures, self._gates[self._name], self._device.name)


def _median(samples: list[tuple[Any, Any]]) -> float:
    return statistics.median(end - start for start, end in samples)


def _complaint(whose: str, verify: Callable[[Any], None], program: Program) -> list[str]:
    try:
        verify(program.result)
    except AssertionError as error:
        return [f"wrong after timing{whose}: {error or type(error).__name__}"]
    return []


def _floating(result: Any) -> Iterator[Tensor]:
    """The floating-point tensors in a program's result: a tensor, or nested tuples and lists of tensors."""
    if isinstance(result, Tensor):
        if result.is_floating_point():
            yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _floating(part)


def _fail(complaints: list[str]) -> None:
    if complaints:
        pytest.fail("\n".join(complaints), pytrace=False)
