"""Helpers for tests of SyncKV with offload: steps launched or in CUDA graphs, and transfers that are late, slow, or
record their stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from kvtwin.conformance.cases.graphs import capture
from kvtwin.optimized.synckv import SyncKVState
from kvtwin.optimized.synckv._transfers import StreamTransfers, Transfers
from kvtwin.reference.synckv import HeadClusters, SyncKVConfig

CLUSTERS = HeadClusters((0, 0, 0), (1,))
SIZES: dict[str, Any] = {"batch": 1, "query_heads": 3, "key_value_heads": 3, "head_dim": 16}
OPTIONS = {"k": 3, "stride": 2, "clusters": 1, "max_tokens": 14, "scale": 1.0}
PROMPT, STEPS = 6, 6


def tokens(seed: int, device: torch.device, *time: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 3, *time, 16, generator=generator).to(device) for _ in range(3)]


def new(device: torch.device, *, offload: bool = True, **options: Any) -> Any:
    config = SyncKVConfig(**{**OPTIONS, **options}, offload=offload)
    return SyncKVState(config, CLUSTERS, **SIZES, dtype=torch.float32, device=device)


def played(
    state: Any, device: torch.device, form: int = 0, around: Callable[[Any], Any] = lambda state: nullcontext()
) -> list[Tensor]:
    """Outputs and chosen sets of a prompt and some steps.

    form: the number of steps in a graph, or 0 to launch steps directly. around(state): a context for each launch.
    """
    static, graph = [tokens(2, device) for _ in range(form or 1)], None
    held: list[Tensor] = []
    if form:
        as_in_a_graph(state, device)
    if form and device.type == "cuda":
        graph, held = captured(state, static)
    frames = [state.prefill(*tokens(1, device, PROMPT))]
    for first in range(0, STEPS, form or 1):
        for number, given in enumerate(static):
            for place, tensor in zip(given, tokens(2 + first + number, device), strict=True):
                place.copy_(tensor)
        with around(state):
            if graph is None:
                held = [frame for given in static for frame in (state.step(*given), state.chosen)]
            else:
                graph.replay()
        frames += [frame.clone() for frame in held]
    return frames[:1 + 2 * STEPS]


def as_in_a_graph(state: Any, device: torch.device) -> None:
    """Make steps launch what a graph would contain. As in a graph, each step waits for the previous step's
    transfers."""
    state._expect_replays()
    if device.type != "cuda":
        state._settle = lambda: None


def captured(state: Any, static: list[list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of steps, and an output and the chosen sets for each step. The state is empty afterwards."""
    for given in static * 2:                                # compiles the kernels
        state.step(*given)
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        held = [frame for given in static for frame in (state.step(*given), state.chosen)]
        state.join()
    state.reset()
    return graph, held


class Replayed(SyncKVState):
    """A state whose steps, except the first, are replays of a graph. Without a GPU, steps run as in a graph."""

    graph: Any = None

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        given = (query, key, value)
        assert self._offload is not None
        if self._offload.bank is None or self.device.type != "cuda":
            return super().step(*given)
        if self.graph is None:
            sizes = self.sizes._asdict()
            del sizes["slots"]
            other = SyncKVState(self.config, self.head_clusters, **sizes, dtype=self.dtype, device=self.device)
            other._expect_replays()
            for _ in range(2):                              # compiles the kernels
                other.step(*given)
            kept = {name: value.clone() for name, value in vars(self).items() if isinstance(value, Tensor)}
            self.inputs = [tensor.clone() for tensor in given]
            self._expect_replays()
            self.graph = torch.cuda.CUDAGraph()
            with capture(self.graph):
                self.output = super().step(*self.inputs)
                self.join()
            for name, value in kept.items():
                assert torch.equal(value, getattr(self, name)), f"capturing the graph changed {name}"
        for place, tensor in zip(self.inputs, given, strict=True):
            place.copy_(tensor)
        self.graph.replay()
        return self.output.clone()


def assert_same(frames: list[Tensor], expected: list[Tensor]) -> None:
    assert len(frames) == len(expected)
    for number, (one, other) in enumerate(zip(frames, expected, strict=True)):
        assert torch.equal(one, other), f"frame {number}"


class Late(Transfers):
    """Transfers that run as late as possible: when they are waited for. `spoil` is called after each submission."""

    def __init__(self, spoil: Callable[[], None] = lambda: None) -> None:
        self.jobs: list[Callable[[], None]] = []
        self.spoil, self.late = spoil, 0

    def submit(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)
        self.spoil()

    def wait(self) -> None:
        self.late += len(self.jobs)
        while self.jobs:
            self.jobs.pop(0)()

    def release(self) -> None:
        self.wait()


def synchronize(device: torch.device) -> None:
    """Wait until all launched work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def with_transfers(state: Any, transfers: Transfers) -> Any:
    """Replace the transfers of the state. Its own transfers still allocate memory."""
    own = state._offload.transfers
    transfers.allocate = own.allocate  # type: ignore[method-assign]
    transfers.own = own  # type: ignore[attr-defined]
    state._offload.transfers = transfers
    return state


class Slow(StreamTransfers):
    """Transfers that take far longer than a step."""

    def submit(self, job: Callable[[], None]) -> None:
        def slow() -> None:
            torch.cuda._sleep(20_000_000)
            job()
            torch.cuda._sleep(20_000_000)

        super().submit(slow)


class Noted(StreamTransfers):
    """Transfers that record the stream of each job."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.streams: list[torch.cuda.Stream] = []

    def submit(self, job: Callable[[], None]) -> None:
        def noted() -> None:
            self.streams.append(torch.cuda.current_stream())
            job()

        super().submit(noted)


class Both:
    """Several layers as one state for `played`: runs them in turn and concatenates their results."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers

    def __setattr__(self, name: str, value: Any) -> None:
        for layer in self.__dict__.get("layers", ()):
            setattr(layer, name, value)
        if "layers" not in self.__dict__:
            self.__dict__[name] = value

    def _expect_replays(self) -> None:
        for layer in self.layers:
            layer._expect_replays()

    def prefill(self, *given: Tensor) -> Tensor:
        return torch.cat([layer.prefill(*given) for layer in self.layers])

    def step(self, *given: Tensor) -> Tensor:
        return torch.cat([layer.step(*given) for layer in self.layers])

    @property
    def chosen(self) -> Tensor:
        return torch.cat([layer.chosen for layer in self.layers])

    def join(self) -> None:
        for layer in self.layers:
            layer.join()

    def reset(self) -> None:
        for layer in self.layers:
            layer.reset()
