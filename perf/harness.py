"""How a benchmark is timed, checked and judged: what the fixture `device_benchmark` gives."""

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
WARMUP = 20
#: Rounds of a reference, which may be a hundred times slower, after one to warm up.
REFERENCE_ROUNDS = 3

Function = Callable[[], Any]


class DeviceBenchmark:
    """Times a function on the device, beside its peers, checks what it computed, and holds the figures to their gates.

    benchmark: pytest-benchmark's fixture, whose timer must be `device.now`. gates: of the benchmark's method, by
    benchmark; name: this one's.
    """

    def __init__(
        self, benchmark: Any, device: Device, roofline: Roofline, gates: Mapping[str, Gate], name: str
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
    ) -> Figures | None:
        """Time `function` in a CUDA graph, with a cold L2, by events on the device; the median of the rounds counts.

        moves, peers_move: bytes that the function, and each peer, must move at least. verify(result): after timing,
        raises AssertionError if the function's last result, or what it left elsewhere, is wrong; verify_peer likewise.
        peers: captured too, and timed in turns with the function, so that both see the same clocks. references: slow
        ones, out of competition, launched as they are. poison: buffers that the function must fill, besides those that
        it returns; they hold NaN before every round. capture=False: launch the function and its peers as they are.
        gated=False: for information; it need not have thresholds, but it must be right.

        The figures are in benchmark.extra_info, and so in the JSON, also where the test fails. Returns them, or None
        with --benchmark-disable, which checks the results only.
        """
        load = self._device.capture if capture else Direct
        program: Program = load(function)
        rivals = {name: load(peer) for name, peer in (peers or {}).items()}
        rounds: dict[str, list[tuple[Any, Any]]] = {name: [] for name in rivals}
        filled = [*poison, *_floating(program.result)]

        def prepare() -> None:
            # Nothing here may wait for the device: it must have work queued when the measured region begins.
            for name, rival in rivals.items():
                rounds[name].append(self._timed(rival))
            for tensor in filled:
                tensor.fill_(torch.nan)
            self._device.cold()

        self._benchmark.pedantic(program.run, setup=prepare, rounds=ROUNDS, warmup_rounds=WARMUP)
        wrong = self._wrong(program, rivals, verify, verify_peer)
        if self._benchmark.disabled:
            _fail(wrong)
            return None
        figures = Figures(
            self._benchmark.stats["median"], moves, self._roofline,
            {name: _median(samples[WARMUP:]) for name, samples in rounds.items()}, peers_move or moves,
            {name: self._reference(slow) for name, slow in (references or {}).items()},
        )
        slow = self._too_slow(figures) if gated else []
        wrong += gate.too_fast(figures)
        self._benchmark.extra_info.update(
            figures.as_dict(), captured=capture, gated=gated, right=not wrong, complaints=wrong + slow,
        )
        _fail(wrong + slow)
        return figures

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
        """What is wrong with the results of the last round; a peer runs once more, on the inputs as they are now."""
        found = _complaint("", verify, program)
        for name, rival in rivals.items():
            if verify_peer is not None:
                rival.run()
                found += _complaint(f", peer {name}", verify_peer, rival)
        return found

    def _too_slow(self, figures: Figures) -> list[str]:
        if self._name not in self._gates:
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
    """The floating tensors of a captured program's result: a tensor, a tuple of some, or something else."""
    if isinstance(result, Tensor):
        if result.is_floating_point():
            yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _floating(part)


def _fail(complaints: list[str]) -> None:
    if complaints:
        pytest.fail("\n".join(complaints), pytrace=False)
