"""SyncKV's benchmarks: decode steps, averaged over a stride, against full attention.

One graph contains a stride of steps, including an anticipation with its selection. The peers run as many steps. k is a
fifteenth of all tokens, so 30 % of the keys and values are resident, representative heads included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from statistics import median
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.judge import bounds
from kvtwin.conformance.judge.compare import assert_within
from kvtwin.optimized import synckv
from kvtwin.optimized.synckv import _offload
from kvtwin.optimized.synckv._transfers import StreamTransfers, Transfers
from kvtwin.reference.contract.synckv.types import SyncKVConfig

from .device import Device
from .peers import decode_peers

pytestmark = pytest.mark.benchmark(group="synckv")

DEVICE = "cuda"
DTYPE = torch.bfloat16
ITEM = DTYPE.itemsize
STRIDE = 5
SHARE = 15
#: Room for the tokens that warm-up, rounds and verification append.
SPARE = 2048


class Shape(NamedTuple):
    """B, tokens, Hq, Hkv, D."""

    batch: int
    tokens: int
    query_heads: int = 32
    key_value_heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        return f"B{self.batch}-n{self.tokens // 1024}K"

    @property
    def full_bytes(self) -> int:
        """Bytes of one step of full attention: keys, values, queries and outputs."""
        cache = 2 * self.batch * self.key_value_heads * self.tokens * self.head_dim
        return (cache + 2 * self.batch * self.query_heads * self.head_dim) * ITEM

    def step_bytes(self, clusters: int) -> int:
        """Bytes of one step: all tokens of the representative heads, and the chosen tokens of the others."""
        seen = clusters * self.tokens + (self.key_value_heads - clusters) * (self.tokens // SHARE)
        return (2 * self.batch * seen + 2 * self.batch * self.query_heads) * self.head_dim * ITEM


GATED = Shape(8, 2**17)
OTHERS = (Shape(1, 2**17), Shape(4, 2**17), Shape(8, 2**14), Shape(8, 2**16))


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(50)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=DTYPE, device=DEVICE, generator=generator)

    return normal


def empty(shape: Shape, stride: int = STRIDE, **options: Any) -> synckv.SyncKVState:
    config = SyncKVConfig(shape.tokens // SHARE, stride=stride, max_tokens=shape.tokens + SPARE, **options)
    return synckv.SyncKVState(
        config, batch=shape.batch, query_heads=shape.query_heads, key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim, dtype=DTYPE, device=DEVICE,
    )


def filled(shape: Shape, draw: Callable[..., Tensor], stride: int = STRIDE) -> synckv.SyncKVState:
    """A state of random tokens."""
    state = empty(shape, stride)
    for row in range(shape.batch):
        for tensor in (state.key, state.value):
            tensor[row, :, :shape.tokens] = draw(shape.key_value_heads, shape.tokens, shape.head_dim)
    mark_as_prompt(state, shape)
    return state


def mark_as_prompt(state: synckv.SyncKVState, shape: Shape) -> None:
    """Mark the stored tokens as a prompt whose static sets are evenly spaced tokens."""
    state.occupied[:, :shape.tokens] = True
    fixed = state.static.shape[-1]
    state.static.copy_(torch.arange(fixed, device=DEVICE) * (shape.tokens // fixed))
    state._fixed[..., state.static[0, 0]] = True
    state._chosen[..., :fixed] = state.static
    state._begin(shape.tokens)


def verify_step(state: synckv.SyncKVState, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check the sets, which must have k distinct tokens. Then take one more step and compare the output of the last row
    with float64 attention over the tokens that its heads may see."""
    chosen, since = state.chosen, int(state._counters[2])
    assert bool((chosen >= 0).all()), "fewer than k tokens are chosen"
    assert bool((chosen.diff(dim=-1) > 0).all()), "a token is chosen twice"
    seen = state.tokens_seen + 1
    output = state.step(query, key, value)
    representatives, labels = state.head_clusters.representatives, list(state.head_clusters.labels)
    visible = torch.zeros(1, len(representatives), seen, dtype=torch.bool, device=DEVICE)
    visible = visible.scatter(-1, chosen[-1:], True)[:, labels]                            # [1, Hkv, seen]
    visible[..., since:] = True
    visible[:, list(representatives)] = True
    case = DecodeCase.of(query[-1:], state.key[-1:, :, :seen], state.value[-1:, :, :seen], visible, per_head=True)
    assert_within(output[-1:], case.attention.output[:, :, 0], bounds.decode_output(case), what="output")


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Full attention as in transformers' eager mode, which repeats keys and values for each query head."""
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    logit = query[:, :, None] @ key.transpose(2, 3) * key.shape[-1] ** -0.5
    return (logit.softmax(-1, dtype=torch.float32).to(query.dtype) @ value)[:, :, 0]


def repeated(function: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(function() for _ in range(STRIDE))


def stride_benchmark(device_benchmark, draw, shape: Shape, gated: bool) -> None:
    state = filled(shape, draw)
    query = draw(shape.batch, shape.query_heads, shape.head_dim)
    key, value = (draw(shape.batch, shape.key_value_heads, shape.head_dim) for _ in range(2))
    keys, values = (tensor[:, :, :shape.tokens] for tensor in (state.key, state.value))
    exact = DecodeCase.of(query[-1:], keys[-1:], values[-1:])

    def verify_peer(outputs: tuple[Tensor, ...]) -> None:
        assert_within(
            outputs[-1][-1:].flatten(1), exact.attention.output[:, :, 0].flatten(1),
            bounds.decode_output(exact).flatten(1), what="peer's output",
        )

    figures = device_benchmark(
        repeated(lambda: state.step(query, key, value)), moves=STRIDE * shape.step_bytes(state.config.clusters),
        verify=lambda _: verify_step(state, query, key, value),
        peers={name: repeated(peer) for name, peer in decode_peers(query, keys, values).items()},
        peers_move=STRIDE * shape.full_bytes, verify_peer=verify_peer,
        references={"eager": repeated(lambda: eager(query, keys, values))}, gated=gated,
    )
    if gated and figures is not None:
        faster = figures.references["eager"] / figures.seconds
        assert faster >= 8, f"{faster:.2f} times as fast as eager attention, expected at least 8"


def test_stride(device_benchmark, draw):
    stride_benchmark(device_benchmark, draw, GATED, gated=True)


@pytest.mark.parametrize("shape", OTHERS, ids=str)
def test_other_strides(device_benchmark, draw, shape):
    """Other shapes. Not gated."""
    stride_benchmark(device_benchmark, draw, shape, gated=False)


def test_anticipation(device_benchmark, draw):
    """A step with an anticipation (a stride of one), beside torch.topk for the selection alone. Not gated."""
    shape = GATED
    state = filled(shape, draw, stride=1)
    query = draw(shape.batch, shape.query_heads, shape.head_dim)
    key, value = (draw(shape.batch, shape.key_value_heads, shape.head_dim) for _ in range(2))
    keys = state.key[:, [0, 4], :shape.tokens]
    scores = (query.unflatten(1, (8, -1))[:, [0, 4]] @ keys.transpose(2, 3)).amax(2).float()
    device_benchmark(
        lambda: state.step(query, key, value), moves=shape.step_bytes(state.config.clusters),
        verify=lambda _: verify_step(state, query, key, value),
        references={"topk": lambda: scores.topk(shape.tokens // SHARE)}, gated=False,
    )


# ---- offload ---------------------------------------------------------------------------------------------------------

LAYERS = 32
HIDDEN, INNER = 4096, 14336
OFFLOADED = Shape(4, 2**17)
#: Radians by which queries rotate between anticipations. About 0.8 of the chosen tokens then stay the same.
DRIFT = 0.45
#: Rounds of `interleaved_times`, which measures the share of the transfer time that is hidden.
TURNS = 15


def phase_of(layer: int) -> int:
    """Layers anticipate at different steps. In the last step of a stride, the last of them is layer 28 of 32, so that
    its transfer can finish while the remaining layers compute: a graph must end without pending transfers."""
    return (layer + 3) % STRIDE


class Bank(StreamTransfers):
    """Pinned memory that all layers share, since 51 GB would take longer to allocate than the benchmark. Decoded tokens
    may therefore belong to another layer. The conformance suite checks the results of offloaded states."""

    memory: ClassVar[list[Tensor]] = []

    def __init__(self) -> None:
        super().__init__(torch.device(DEVICE, torch.cuda.current_device()))
        self._given = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._given += 1
        if len(self.memory) < self._given:
            self.memory.append(super().allocate(shape, dtype))
        return self.memory[self._given - 1]


class InLine(Transfers):
    """Transfers on the computing stream."""


class Skipped(Transfers):
    """No transfers, as if they took no time."""

    def submit(self, job: Callable[[], None]) -> None:
        pass


class Stack:
    """Decode steps of a model's layers without their norms: projections, attention, MLP. All layers share weights,
    which are larger than L2. Queries are given, so that their drift is known."""

    def __init__(self, shape: Shape, draw: Callable[..., Tensor]) -> None:
        self.shape = shape
        width = shape.key_value_heads * shape.head_dim
        sizes = {
            "q": (HIDDEN, HIDDEN), "k": (width, HIDDEN), "v": (width, HIDDEN), "o": (HIDDEN, HIDDEN),
            "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER),
        }
        self.weight = {name: draw(*size) * size[1] ** -0.5 for name, size in sizes.items()}
        self.start = draw(shape.batch, HIDDEN)
        self.axes = [draw(shape.batch, shape.query_heads, shape.head_dim) for _ in range(2)]
        self.angle = torch.zeros((), device=DEVICE)

    def rotated_query(self) -> Tensor:
        """The queries of the next stride. Their angle is stored on the device, so that graph replays advance it."""
        self.angle += DRIFT
        return (self.angle.cos() * self.axes[0] + self.angle.sin() * self.axes[1]).to(DTYPE)

    def run(self, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor], query: Tensor) -> Tensor:
        """One token through all layers."""
        x, weight, shape = self.start, self.weight, self.shape
        for layer in range(LAYERS):
            linear(x, weight["q"])
            key, value = (
                linear(x, weight[name]).view(shape.batch, shape.key_value_heads, shape.head_dim) for name in "kv"
            )
            x = x + linear(attend(layer, query, key, value).flatten(1), weight["o"])
            x = x + linear(silu(linear(x, weight["gate"])) * linear(x, weight["up"]), weight["down"])
            x = x * x.float().square().mean(-1, keepdim=True).rsqrt().to(x.dtype)
        return x


class Offloaded:
    """A stack whose layers store most keys and values on the host."""

    def __init__(self, stack: Stack, tokens: list[Tensor]) -> None:
        self.stack, shape = stack, stack.shape
        self.streams: list[Transfers] = [Bank() for _ in range(LAYERS)]
        self.states = []
        for number, transfers in enumerate(self.streams):
            state = empty(shape, offload=True, phase=phase_of(number))
            offload = state._offload
            assert offload is not None
            offload.transfers = transfers
            offload.open()
            for stored, whole in zip((state._key, state._value), tokens, strict=True):
                stored[:, :, :shape.tokens] = whole[:, list(state.head_clusters.representatives)]
            if number == 0:
                offload.store(tokens[0], tokens[1], 0, offload.members)
            mark_as_prompt(state, shape)
            transfers.submit(partial(offload.take, state._chosen, offload.always))
            self.states.append(state)

    def stride(self) -> Tensor:
        """A stride of steps, at the end of which no transfer is pending."""
        query = self.stack.rotated_query()
        for _ in range(STRIDE):
            output = self.stack.run(lambda layer, q, k, v: self.states[layer].step(q, k, v), query)
        for state in self.states:
            state.join()
        return output

    def with_transfers(self, transfers: Sequence[Transfers]) -> Callable[[], Tensor]:
        """`stride` with these transfers, one per layer."""
        def run() -> Tensor:
            for state, of_layer in zip(self.states, transfers, strict=True):
                assert state._offload is not None
                state._offload.transfers = of_layer
                # The warm-up behaves like the captured graph: it launches at every step and does not synchronize.
                state._expect_replays()
                state._settle = lambda: None  # type: ignore[method-assign]
            return self.stride()

        return run


def interleaved_times(gpu: Device, functions: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Median seconds by name. The graphs are replayed in turns, so that all run at the same clocks. The first graph
    runs untimed before each of them: after a graph without transfers, the next one would transfer two strides."""
    graphs = {name: gpu.capture(function) for name, function in functions.items()}
    first = next(iter(graphs.values()))
    spans: dict[str, list[tuple[Any, Any]]] = {name: [] for name in graphs}
    for _ in range(TURNS):
        for name, graph in graphs.items():
            first.run()
            gpu.cold()
            start = gpu.now()
            graph.run()
            spans[name].append((start, gpu.now()))
    return {name: median(end - start for start, end in of_one[2:]) for name, of_one in spans.items()}


def test_offloaded_stack(device_benchmark, draw, gpu, benchmark):
    """A stride of steps of a whole model in a graph with most keys and values on the host, against the same model with
    full attention. Graphs of the same stride with transfers in line, and without transfers, give the transfer time and
    the share of it that is hidden."""
    shape = OFFLOADED
    stack = Stack(shape, draw)
    tokens = [draw(shape.batch, shape.key_value_heads, shape.tokens, shape.head_dim) for _ in range(2)]
    offloaded, overlaps = Offloaded(stack, tokens), []
    overlapped = offloaded.with_transfers(offloaded.streams)

    def full(attention: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            for _ in range(STRIDE):
                output = stack.run(lambda layer, q, k, v: attention().reshape(shape.batch, -1), stack.axes[0])
            return output

        return run

    def verify(output: Tensor) -> None:
        assert bool(output.isfinite().all()), "the last hidden state is not finite"
        for state in (offloaded.states[0], offloaded.states[-1]):
            before = state.chosen
            overlapped()
            overlaps.append(float(synckv.overlap(before, state.chosen).mean()))
            assert 0.7 < overlaps[-1] < 0.9, f"{overlaps[-1]:.2f} of the chosen tokens stay, expected about 0.8"

    peers = decode_peers(stack.axes[0], *tokens)
    figures = device_benchmark(
        overlapped, moves=STRIDE * LAYERS * shape.step_bytes(2), verify=verify,
        peers={name: full(peer) for name, peer in peers.items() if name.startswith("cudnn")},
        peers_move=STRIDE * LAYERS * shape.full_bytes, gated=True,
    )
    if figures is not None:
        others = {"in line": InLine(), "skipped": Skipped()}
        others_run = {name: offloaded.with_transfers([one] * LAYERS) for name, one in others.items()}
        took = interleaved_times(gpu, {"behind": overlapped, **others_run})
        transfer_time = took["in line"] - took["skipped"]
        hidden = 1 - (took["behind"] - took["skipped"]) / transfer_time
        times = ", ".join(f"{name} {seconds / STRIDE * 1e3:.2f}" for name, seconds in took.items())
        benchmark.extra_info["offload"] = {"overlap": overlaps[-1], "hidden": hidden, "seconds_a_stride": took}
        print(f"overlap {overlaps[-1]:.2f}; ms a step: {times}; {hidden:.0%} of the transfers hidden")
        assert hidden >= 0.9, f"{hidden:.0%} of the transfer time is hidden, expected at least 90 %"


@pytest.mark.parametrize("programs", [8, 16, 24, 32, 64])
def test_transfer_programs(device_benchmark, draw, monkeypatch, programs):
    """The transfer of one layer's dynamic sets, all of whose tokens are new, by the number of programs. Not gated."""
    for name in ("PROGRAMS", "FEW"):
        monkeypatch.setattr(_offload, name, programs)
    shape = OFFLOADED
    state = empty(shape, offload=True)
    offload = state._offload
    assert offload is not None
    offload.transfers = Bank()
    offload.open()
    mark_as_prompt(state, shape)
    free = state._chosen.shape[-1] - state._static.shape[-1]
    sets = []
    for number in range(2):
        chosen = state._chosen.clone()
        # Tokens that are not static, and differ between the two sets.
        chosen[..., -free:] = state.static[..., :free] + 1 + number
        sets.append(chosen)
    turn = count()

    def exchange() -> Tensor:
        for _ in range(2):
            offload.take(sets[next(turn) % 2], offload.always)
        return offload.places

    def verify(places: Tensor) -> None:
        assert bool((places >= 0).all()), "a token has no place"
        assert bool((places.sort(-1).values.diff(dim=-1) > 0).all()), "two tokens share a place"

    row = 2 * shape.head_dim * ITEM
    heads = shape.key_value_heads - state.config.clusters
    device_benchmark(exchange, moves=2 * shape.batch * heads * free * row, verify=verify, gated=False)
