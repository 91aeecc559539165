"""LongFlow's headline: decoding 16,000 tokens after a prompt of 512, a Qwen3-1.7B shape, budget 3200, largest batch.

The paper: 11.8 times the throughput of full KV, and 4.0 times that of methods that evict every 128 steps (A100 40 GB).
The attention module alone at a Qwen3-8B shape, batch 128, 3200 slots: 47 ms with H2O, 8 ms with LongFlow.

Times are of whole decode steps in CUDA graphs, including the next token. For LongFlow and the peers that evict, every
step is taken to cost as much as one with a full budget. Full KV is timed at five lengths and integrated over the 16,000
steps with linear interpolation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import bench_longflow
from ..bench_epikv import eager_h2o
from . import keeping, systems
from .base import ROUNDS, Run, rows_that_fit, trapezoid
from .decoder import ITEM, QWEN_1_7B, QWEN_8B, Decoder, Model, small


def run(run: Run) -> None:
    model = small(QWEN_1_7B) if run.tiny else QWEN_1_7B
    prompt, new, budget, interval = (4, 28, 16, 4) if run.tiny else (512, 16_000, 3200, 128)
    with run.part("attention module"):
        attention_module(run)
    decoder = Decoder(model, run, prompt + new)
    plan = Plan(run, model, decoder, prompt, new, budget)
    with run.part("full KV"):
        plan.full()
    with run.part("longflow"):
        plan.ours("longflow", systems.longflow_state, check=True)
    with run.part("h2o fused"):
        plan.ours("h2o fused", systems.h2o_state)
    for name, make in (
        ("snapkv fused", systems.snapkv_state), ("h2o fused, at intervals", systems.h2o_state),
        ("vatp fused, at intervals", systems.vatp_state), ("r-kv fused", systems.r_kv_state),
    ):
        with run.part(name):
            plan.ours(name, partial(make, interval=interval), interval=interval)
    for name, kind in (("snapkv", systems.SnapKV), ("h2o", systems.EagerH2O)):
        if run.late(name):
            break
        with run.part(name):
            plan.compacting(name, kind, interval)
    plan.ratios()


class Plan:
    """Measures the systems of one experiment, each at its largest batch or at a given one."""

    def __init__(
        self, run: Run, model: Model, decoder: Decoder, prompt: int, new: int, budget: int, batch: int | None = None
    ) -> None:
        self.run, self.model, self.decoder, self.batch = run, model, decoder, batch
        self.prompt, self.new, self.budget = prompt, new, budget

    def largest(self, each: float, measure: Callable[[int], dict[str, Any]], extra: int = 0) -> dict[str, Any]:
        """measure(batch) at the largest batch that fits. If memory runs out, the batch is reduced."""
        model, room = self.model, self.run.room() - extra
        batch = self.batch or 2
        if self.batch is None and not self.run.tiny:
            batch = rows_that_fit(room, each + model.activation_bytes(2), 4096)
        while True:
            try:
                found = measure(batch)
            except torch.cuda.OutOfMemoryError:
                if batch == 1 or self.batch is not None:
                    raise
            else:
                return {"batch": batch, "bytes_per_row": each, **found}
            self.run.free()
            batch = rows_that_fit(batch * 0.96, 1, batch - 1)

    def rate(self, name: str, found: dict[str, Any], seconds: float, moved: float) -> None:
        """Record a throughput. seconds, moved: time and bytes of all `new` steps."""
        tokens = found["batch"] * self.new
        peak = torch.cuda.max_memory_allocated() if self.run.cuda else 0
        self.run.record(name, {
            **found, "tokens_per_second": tokens / seconds, "milliseconds": seconds / self.new * 1e3,
            "bytes_per_token": moved / tokens, "share_of_bytes_bound": self.run.share(moved, seconds),
            "peak_bytes": peak,
        })

    def full(self) -> None:
        """Full KV, timed at several lengths and interpolated linearly."""
        run, model = self.run, self.model
        ends = self.prompt, self.prompt + self.new
        parts = 1 if run.tiny else 4
        lengths = [ends[0] + (ends[1] - ends[0]) * part // parts for part in range(parts + 1)]

        def measure(batch: int) -> dict[str, Any]:
            cache = systems.Cache(run, model, batch, ends[1])
            times, kernels = {}, set()
            for length in lengths:
                cache.at(length)
                kernels.add(cache.kernel)
                moves = model.weight_bytes + batch * length * model.token_bytes
                times[length] = systems.step_seconds(
                    run, f"full KV at {length}", self.decoder, cache.step, batch, length - 1, moves, rounds=3
                )
            return {"times": times, "kernels": sorted(kernels)}

        found = self.largest(model.token_bytes * ends[1], measure)
        times, batch = found.pop("times"), found["batch"]
        moved = {length: model.weight_bytes + batch * length * model.token_bytes for length in times}
        shares = {length: run.share(moved[length], times[length]) for length in times}
        found["milliseconds_at"] = {length: seconds * 1e3 for length, seconds in times.items()}
        found["share_at_the_end"] = shares[ends[1]]
        self.rate("full KV", found, trapezoid(times), trapezoid(moved))
        run.own_bound("full KV", run.figures["full KV"]["share_of_bytes_bound"])

    def ours(self, name: str, make: Callable[..., Any], check: bool = False, interval: int = 1) -> None:
        """kvtwin's states. They evict every `interval` steps, so that many steps are timed together."""
        run, model, budget = self.run, self.model, self.budget
        slots = budget + interval // 2

        def measure(batch: int) -> dict[str, Any]:
            states = [make(run, model, batch, budget) for _ in range(model.layers)]
            seconds = systems.step_seconds(
                run, name, self.decoder, lambda layer, *given: states[layer].step(*given), batch,
                self.prompt + self.new - 1, self.bytes(batch, slots), repeats=interval,
                rounds=ROUNDS if interval == 1 else 1,
            )
            if check:
                check_longflow(run, states[-1])
            return {"seconds": seconds}

        each = systems.bytes_per_row(run, lambda rows: make(run, model, rows, budget), model.layers)
        found = self.largest(each, measure)
        seconds = found.pop("seconds")
        self.rate(name, found, self.new * seconds, self.new * self.bytes(found["batch"], slots))

    def compacting(self, name: str, kind: type[systems.Compacting], interval: int) -> None:
        """A peer that compacts: a step at the average length, plus one cut of all layers per `interval` steps. The cut
        is timed for one layer."""
        run, model, budget = self.run, self.model, self.budget

        def measure(batch: int) -> dict[str, Any]:
            cache = kind(run, model, batch, budget, interval)
            step = systems.step_seconds(
                run, name, self.decoder, cache.step, batch, self.prompt + self.new - 1, self.bytes(batch, budget)
            )
            cut = model.layers * run.seconds(lambda: cache.cut(0), what=f"{name}'s cut", capture=False, rounds=3)
            return {"milliseconds_step": step * 1e3, "milliseconds_cut": cut * 1e3, "interval": interval,
                    "kernels": [cache.kernel]}

        # `extra` is for gathered rows, scores and cosines of a part of the batch.
        each, extra = kind.row_bytes(model, budget + interval), 0 if run.tiny else 5 * 2**29
        found = self.largest(each, measure, extra)
        seconds = (found["milliseconds_step"] + found["milliseconds_cut"] / interval) / 1e3
        self.rate(name, found, self.new * seconds, self.new * self.bytes(found["batch"], budget + interval / 2))

    def growing(self, name: str, config: keeping.Quantizing) -> None:
        """kvtwin's states that quantize all tokens and keep them, timed at several lengths and interpolated linearly.
        The quantization of a window of tokens, which happens every 128 steps, is left out."""
        run, model = self.run, self.model
        points = keeping.points(config, self.prompt, self.prompt + self.new)

        def moves(batch: int, length: int) -> float:
            return model.weight_bytes + batch * length * model.token_bytes * keeping.bits(config, length) / (8 * ITEM)

        def measure(batch: int) -> dict[str, Any]:
            states = [keeping.quantizing_state(run, model, config, batch) for _ in range(model.layers)]
            times = {}
            for length, start in points:
                for state in states:
                    keeping.start_from(state, start)
                times[length] = systems.step_seconds(
                    run, f"{name} at {length}", self.decoder, lambda layer, *given: states[layer].step(*given), batch,
                    length - 1, moves(batch, start), repeats=keeping.TIMED, rounds=1,
                )
            heads = (model.query_heads, model.key_value_heads, model.key_value_heads)
            try:
                keeping.check_quantizing(
                    states[-1], tuple(run.draw(batch, count, model.head_dim) for count in heads)
                )
            except AssertionError as error:
                run.complain(f"{name}: wrong after timing: {str(error).splitlines()[0]}")
            return {"times": times}

        found = self.largest(systems.bytes_per_row(
            run, lambda rows: keeping.quantizing_state(run, model, config, rows), model.layers
        ), measure)
        times, batch = found.pop("times"), found["batch"]
        found["milliseconds_at"] = {length: seconds * 1e3 for length, seconds in times.items()}
        moved = trapezoid({length: moves(batch, length) for length in times})
        self.rate(name, found, trapezoid(times), moved)

    def bytes(self, batch: int, slots: float) -> float:
        """The bytes that a step reads: the weights, and the keys and values of `slots` slots."""
        return self.model.weight_bytes + batch * slots * self.model.token_bytes

    def ratios(self, ours: str = "longflow") -> None:
        """The ratios of our tokens per second to the peers', measured and as predicted from the bytes."""
        figures = self.run.figures
        if ours not in figures:
            return
        rate, moved = figures[ours]["tokens_per_second"], figures[ours]["bytes_per_token"]
        self.run.record("ratios", {
            name: {"measured": rate / peer["tokens_per_second"], "by_bytes": peer["bytes_per_token"] / moved}
            for name, peer in figures.items() if name != ours and "tokens_per_second" in peer
        })


def check_longflow(run: Run, state: Any) -> None:
    """Take one more step of a timed state and check two of its rows against float64."""
    batch, query_heads, heads, _, head_dim = state.sizes
    query, key, value = (run.draw(batch, count, head_dim) for count in (query_heads, heads, heads))
    rows = torch.tensor([0, batch - 1], device=run.device)
    try:
        bench_longflow.check_step(state, query, key, value, state.step(query, key, value), rows)
    except AssertionError as error:
        run.complain(f"longflow: wrong after timing: {str(error).splitlines()[0]}")


def attention_module(run: Run) -> None:
    """One layer's attention with eviction, multiplied by 36 for all layers."""
    model = small(QWEN_8B) if run.tiny else QWEN_8B
    batch, budget = (2, 16) if run.tiny else (128, 3200)
    query, key, value = (
        run.draw(batch, heads, model.head_dim)
        for heads in (model.query_heads, model.key_value_heads, model.key_value_heads)
    )
    moves = 2.0 * batch * model.key_value_heads * budget * model.head_dim * ITEM
    ours = systems.longflow_state(run, model, batch, budget)
    fused = systems.h2o_state(run, model, batch, budget)
    received = torch.zeros(batch, model.key_value_heads, budget, device=run.device)
    kernel = systems.fastest(run, model, ours.key, ours.value)

    def eager(repeated: bool) -> Tensor:
        return eager_h2o(query, ours.key, ours.value, received, repeated=repeated)

    timed: dict[str, Callable[[], Any]] = {
        "longflow": lambda: ours.step(query, key, value),
        "h2o fused": lambda: fused.step(query, key, value),
        "h2o, a group's heads at once": lambda: eager(False),
        "h2o as transformers has it": lambda: eager(True),
        f"attention alone ({kernel})": lambda: systems.attention(kernel, query, ours.key, ours.value),
    }
    for name, function in timed.items():
        seconds = run.seconds(function, what=name, moves=moves, cold=True, rounds=20)
        run.record("attention module", {name: {
            "milliseconds": seconds * 1e3, "milliseconds_all_layers": seconds * 1e3 * model.layers,
            "share_of_bytes_bound": run.share(moves, seconds),
        }})
    check_longflow(run, ours)
