"""The caches of all layers of a model, kvtwin's and the peers', in the steady state of a decode loop.

Buffers are filled with random numbers instead of by running a prompt and thousands of steps. A step then reads, writes
and decides the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import embedding, scaled_dot_product_attention

from kvtwin.conformance.capacity import bytes_held
from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.judge import bounds
from kvtwin.conformance.judge.compare import assert_within
from kvtwin.optimized import longflow
from kvtwin.optimized._common.prompts import compression
from kvtwin.optimized.baselines import h2o, r_kv, raas, snapkv, vatp

from ..peers import BACKENDS, decode_peers
from . import pointwise
from .base import Run
from .decoder import Attend, Decoder, Loop, Model, by_token

Step = Callable[[int, Tensor, Tensor, Tensor], Tensor]


# Full attention ------------------------------------------------------------------------------------------------------


def attention(name: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of one query per head with the variant `name` of `decode_peers`: query [B, Hq, D] -> [B, Hq, D]."""
    backend = BACKENDS.get(name.removesuffix("-rows"), SDPBackend.MATH)
    batch, query_heads, head_dim = query.shape
    rows = query.unflatten(1, (key.shape[1], -1)) if name.endswith("-rows") else query[:, :, None]
    with sdpa_kernel(backend):
        found = scaled_dot_product_attention(rows, key, value, enable_gqa=not name.endswith("-rows"))
    return found.reshape(batch, query_heads, head_dim)


def fastest(run: Run, model: Model, key: Tensor, value: Tensor) -> str:
    """The name of the fastest variant of `decode_peers` for this cache: keys and values [B, Hkv, S, D]."""
    query = run.draw(key.shape[0], model.query_heads, model.head_dim)
    peers = decode_peers(query, key, value)
    times = {}
    for name, peer in peers.items():
        times[name] = 0.0 if run.tiny else run.seconds(peer, what=name, rounds=5, cold=True)
    name = min(times, key=lambda name: times[name], default="math")
    check_peer(run, name, query, key, value)
    return name


def check_peer(run: Run, name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check the first KV head of the first row against float64."""
    group, one = query.shape[1] // key.shape[1], (slice(0, 1), slice(0, 1))
    occupied = torch.ones(1, key.shape[2], dtype=torch.bool, device=run.device)
    case = DecodeCase.of(query[:1, :group], key[one], value[one], occupied)
    output = attention(name, query, key, value)[:1, :group]
    try:
        assert_within(output, case.attention.output[:, :, 0], bounds.decode_output(case), what="output")
    except AssertionError as error:
        run.complain(f"wrong after timing, peer {name}: {str(error).splitlines()[0]}")


class Cache:
    """Keys and values of all layers, [B, Hkv, S, D], in static buffers. The first `length` slots contain tokens. A step
    writes its token to the last of these and attends with PyTorch's fastest kernel."""

    def __init__(self, run: Run, model: Model, batch: int, slots: int) -> None:
        shape = (batch, model.key_value_heads, slots, model.head_dim)
        self.run, self.model = run, model
        self.pairs = [(run.draw(*shape), run.draw(*shape)) for _ in range(model.layers)]
        self.place = torch.zeros(1, dtype=torch.int64, device=run.device)
        self.length, self.kernel = slots, "math"
        self.at(slots)

    def at(self, length: int) -> None:
        self.length = length
        self.place.fill_(length - 1)
        key, value = self.pairs[0]
        self.kernel = fastest(self.run, self.model, key[:, :, :length], value[:, :, :length])

    def step(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.pairs[layer]
        pointwise.put(keys, values, self.place, key, value)
        return attention(self.kernel, query, keys[:, :, :self.length], values[:, :, :self.length])


# Ours ----------------------------------------------------------------------------------------------------------------


def sizes_of(model: Model, batch: int, run: Run) -> dict[str, Any]:
    return {
        "batch": batch, "query_heads": model.query_heads, "key_value_heads": model.key_value_heads,
        "head_dim": model.head_dim, "dtype": torch.bfloat16, "device": run.device,
    }


def longflow_state(run: Run, model: Model, batch: int, budget: int) -> longflow.LongFlowState:
    """A full state: every step overwrites a slot."""
    state = longflow.LongFlowState(longflow.LongFlowConfig(budget), **sizes_of(model, batch, run))
    for tensor in (state.key, state.value):
        tensor.normal_(generator=run.generator)
    state.occupied.fill_(True)
    state.positions.copy_(torch.arange(budget, device=run.device))
    state.score.zero_()
    state._seen.fill_(budget)
    return state


def h2o_state(
    run: Run, model: Model, batch: int, budget: int, block: int = 16, interval: int = 1
) -> h2o.H2OState:
    """One of ours with `budget` tokens: fused with attention; with an interval of 1, nothing is moved."""
    return _scored(run, h2o.H2OState(h2o.H2OConfig(budget, block, interval=interval), **sizes_of(model, batch, run)))


def vatp_state(
    run: Run, model: Model, batch: int, budget: int, block: int = 16, interval: int = 1
) -> vatp.VATPState:
    """The same for VATP, which also holds the L1 norms of the values."""
    config = vatp.VATPConfig(budget, block, interval=interval)
    state = _scored(run, vatp.VATPState(config, **sizes_of(model, batch, run)))
    for value, norm in zip(state.value, state._carried, strict=True):  # by rows, since memory is nearly full
        torch.sum(value.abs(), -1, dtype=torch.float32, out=norm)
    return state


def raas_state(run: Run, model: Model, batch: int, budget: int, block: int = 16) -> raas.RaaSState:
    """The same for RaaS. A query renews the tokens with at least half of the mean weight."""
    config = raas.RaaSConfig(budget, block, alpha=0.5 / budget)
    state = raas.RaaSState(config, **sizes_of(model, batch, run))
    _fill(run, state, budget)
    state.score[..., :budget] = state.positions[..., :budget].float()
    return state


def _scored(run: Run, state: Any) -> Any:
    """Fill a state that adds up attention, as it is after an eviction."""
    budget = state.config.budget
    _fill(run, state, budget)
    if state._counts is not None:
        state._counts.fill_(budget)
    state.score[..., :budget] = torch.rand(
        state.score[..., :budget].shape, generator=run.generator, device=run.device
    )
    return state


def snapkv_state(
    run: Run, model: Model, batch: int, budget: int, interval: int = 128, block: int = 16
) -> snapkv.SnapKVState:
    """A SnapKV state of kvtwin right after a compression to its budget, which happens every `interval` steps."""
    config = snapkv.SnapKVConfig(budget, block, interval=interval)
    return _observed(run, snapkv.SnapKVState(config, **sizes_of(model, batch, run)))


def r_kv_state(
    run: Run, model: Model, batch: int, budget: int, interval: int = 128, block: int = 16
) -> r_kv.RKVState:
    """The same for R-KV."""
    config = r_kv.RKVConfig(budget, block, interval=interval)
    return _observed(run, r_kv.RKVState(config, **sizes_of(model, batch, run)))


def _observed(run: Run, state: Any) -> Any:
    """Fill a state that scores its tokens by a window of queries, as it is after an eviction."""
    budget, observers = state.config.budget, state.config.observers
    _fill(run, state, budget)
    state._counts.fill_(budget)
    state._window_query.normal_(generator=run.generator)
    newest = torch.arange(budget - observers, budget, device=run.device)
    state._window_positions[:, newest % observers] = newest
    return state


def _fill(run: Run, state: Any, budget: int) -> None:
    """Fill the first slots with tokens 0 to budget - 1."""
    filled = slice(0, budget)
    for tensor in (state.key, state.value):
        tensor[:, :, filled].normal_(generator=run.generator)
    state.occupied[..., filled] = True
    for tensor in (state.positions, state._token_index):
        tensor[..., filled] = torch.arange(budget, device=run.device, dtype=tensor.dtype)
    state._valid_seen.fill_(budget)
    state._seen.fill_(budget)


def bytes_per_row(run: Run, make: Callable[[int], Any], layers: int) -> float:
    """Bytes per row of all buffers of a state, times the number of layers. Measured with many rows, because attention
    splits few rows into more parts, which need more scratch memory."""
    rows = 128 if run.cuda and not run.tiny else 2
    return layers * bytes_held(make(rows)) / rows


# Peers that evict at intervals and compact their cache ---------------------------------------------------------------


class Compacting(Cache):
    """A cache that exceeds its budget by up to `interval` tokens and is then cut. Attention is timed at the mean
    length.

    `kept_slots` chooses the tokens. Their keys and values are gathered into a buffer that all layers share; a cache
    that rotates through buffers would move as many bytes.
    """

    WINDOW = 32

    def __init__(self, run: Run, model: Model, batch: int, budget: int, interval: int) -> None:
        super().__init__(run, model, batch, budget + interval)
        self.budget, self.interval = budget, interval
        self.at(budget + interval // 2)
        window = min(self.WINDOW, budget // 2)
        self.window = [run.draw(batch, model.query_heads, window, model.head_dim) for _ in range(model.layers)]
        self.newest = torch.zeros(1, dtype=torch.int64, device=run.device)
        rows = max(1, 2**29 // (model.key_value_heads * (budget + interval) * model.head_dim * 2))
        self.rows = min(batch, rows)

    @classmethod
    def row_bytes(cls, model: Model, slots: int) -> float:
        window = 2 * model.layers * model.query_heads * cls.WINDOW * model.head_dim
        return model.token_bytes * slots + window

    def step(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.window[layer].index_copy_(2, self.newest, query[:, :, None])
        return super().step(layer, query, key, value)

    def kept_slots(self, window: Tensor, key: Tensor) -> Tensor:
        """The slots to keep, [B, Hkv, budget] int64, for some rows: window [B, Hq, W, D], key [B, Hkv, S, D]."""
        raise NotImplementedError

    def cut(self, layer: int) -> None:
        """Cut one layer to its budget, as happens every `interval` steps."""
        key, value = self.pairs[layer]
        for first in range(0, key.shape[0], self.rows):
            part = slice(first, first + self.rows)
            gather(key[part], value[part], self.kept_slots(self.window[layer][part], key[part]))


def gather(key: Tensor, value: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """key, value [B, Hkv, S, D] at slots kept [B, Hkv, N]. Copies whole rows, which is faster than torch.gather."""
    batch, heads, slots, head_dim = key.shape
    row = torch.arange(batch * heads, device=key.device).view(batch, heads, 1) * slots + kept
    found = [embedding(row, tensor.reshape(-1, head_dim)) for tensor in (key, value)]
    return found[0], found[1]


class SnapKV(Compacting):
    """SnapKV with kvtwin's kernels: pooled attention of the last 32 queries."""

    def kept_slots(self, window: Tensor, key: Tensor) -> Tensor:
        return compression.choose(
            window, key, key, self.budget, kernel_size=5, occupied=None, protected=None, shared_heads=False, scale=None
        )


class EagerH2O(Compacting):
    """H2O as in the authors' code, which computes all weights and adds them up, but with one product per group."""

    def __init__(self, run: Run, model: Model, batch: int, budget: int, interval: int) -> None:
        super().__init__(run, model, batch, budget, interval)
        self.sums = torch.rand(model.layers, batch, model.key_value_heads, self.length, device=run.device)
        self.kernel = "eager"

    @classmethod
    def row_bytes(cls, model: Model, slots: int) -> float:
        return super().row_bytes(model, slots) + 4 * model.layers * model.key_value_heads * slots

    def step(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.pairs[layer]
        pointwise.put(keys, values, self.place, key, value)
        keys, values = keys[:, :, :self.length], values[:, :, :self.length]
        rows = query.unflatten(1, (key.shape[1], -1))
        weight = (rows @ keys.transpose(2, 3) * key.shape[-1] ** -0.5).softmax(-1, dtype=torch.float32)
        self.sums[layer] += weight.mean(2)
        return (weight.to(values.dtype) @ values).flatten(1, 2)

    def kept_slots(self, window: Tensor, key: Tensor) -> Tensor:
        sums = self.sums[0, :key.shape[0]]
        sums = torch.nn.functional.pad(sums, (0, key.shape[2] - sums.shape[2]))
        sums[..., -self.budget // 2:] = torch.inf
        return sums.topk(self.budget, -1).indices.sort(-1).values


class Gathering(Cache):
    """Eviction with gather compaction at every step: attention, then moving the remaining tokens. The evicted tokens
    are given, so choosing them costs nothing.

    overlap: gather on a second stream while the next layers run.
    """

    def __init__(self, run: Run, model: Model, batch: int, budget: int, *, overlap: bool) -> None:
        super().__init__(run, model, batch, budget)
        self.spare = [torch.empty_like(part) for part in self.pairs[0]]
        self.side = torch.cuda.Stream(run.device) if overlap and run.cuda else None
        # Really all held tokens but one, and the new one. Gathering all held tokens moves as many bytes.
        self.row = torch.arange(batch * model.key_value_heads * budget, device=run.device)

    def move(self, layer: int) -> None:
        for tensor, spare in zip(self.pairs[layer], self.spare, strict=True):
            table = tensor.view(-1, tensor.shape[-1])
            torch.index_select(table, 0, self.row, out=spare.view(table.shape))

    def step(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = super().step(layer, query, key, value)
        if self.side is None:
            self.move(layer)
            return output
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.move(layer)
        if layer == len(self.pairs) - 1:
            torch.cuda.current_stream().wait_stream(self.side)
        return output


def step_seconds(
    run: Run, what: str, decoder: Decoder, step: Step | Attend, batch: int, position: int, moves: float, **options: Any
) -> float:
    """Seconds of a whole decode step of the model over these caches. `step` is the step of a state."""
    loop = Loop(decoder, batch, position)
    seconds = run.seconds(lambda: loop.step(by_token(step)), what=what, moves=moves, **options)
    if not 0 <= int(loop.ids.min()) <= int(loop.ids.max()) < decoder.model.vocabulary:
        run.complain(f"{what}: the next tokens are not in the vocabulary")
    return seconds
