"""ThinKV's headline: decoding up to 32,768 tokens with a Llama-3.1-8B shape, budget 1024, largest batch.

The paper (GH200 96 GB): 938 rows and 10,578 tokens per second; R-KV with sequential gather 350 rows and 2426 tokens per
second, with overlapped gather 4311; full KV 19 rows and 454. At batch 256, without quantization: 8080, 2490 and 5319.

A ThinKV state with a few rows runs for half of the length, with the thoughts of `bench_thinkv`, so that its blocks are
fragmented as in the steady state. All rows and layers are copies of these rows. Times are means over a window of tau
steps, in which every row quantizes eight times and shrinks past segments once. The peers that gather at every step get
their victims for free and are timed for moving tokens. R-KV evicts every 128 steps, and its scores are timed, too.
KIVI and PM-KVQ keep all tokens, in few bits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvtwin.optimized import thinkv
from kvtwin.reference.contract.thinkv.config import ThinKVConfig

from .. import bench_thinkv
from . import keeping, systems
from .base import Run
from .decoder import LLAMA_8B, Decoder, Model, small
from .longflow import Plan

ROWS = 8
ISO = 256


def run(run: Run) -> None:
    model = small(LLAMA_8B) if run.tiny else LLAMA_8B
    total, budget, iso, interval = (64, 16, 2, 4) if run.tiny else (32_768, 1024, ISO, 128)
    decoder = Decoder(model, run, total)
    config = config_of(run, budget, total)
    seed, steps = aged(run, model, config)
    run.record("state", {
        "steps": steps, "live": float((seed.cache.groups >= 0).sum(1).float().mean()),
        "bits": seed.cache.bits_per_element(), "blocks": float((seed.cache.block_thoughts >= 0).sum(1).float().mean()),
    })
    plan = Thoughts(run, model, decoder, total, budget, seed=seed)
    with run.part("full KV"):
        plan.full()
    with run.part("thinkv"):
        plan.thinkv("thinkv")
    for overlap in (False, True):
        name = f"gather, {'overlapped' if overlap else 'sequential'}"
        with run.part(name):
            plan.gathering(name, overlap)
    with run.part("r-kv fused"):
        plan.ours("r-kv fused", partial(systems.r_kv_state, interval=interval), interval=interval)
    slots = total + keeping.STEPS
    for name, config in (("kivi", keeping.kivi_config(model, slots)), ("pm-kvq", keeping.pm_kvq_config(slots))):
        if run.late(name):
            break
        with run.part(name):
            plan.growing(name, config)
    plan.ratios("thinkv")
    plan.batch = iso
    if run.tiny:                                                # the rest runs the same code
        return
    for name in ("thinkv", "gather, sequential", "gather, overlapped"):
        at = f"{name} at batch {iso}"
        if run.late(at):
            break
        with run.part(at):
            if name == "thinkv":
                plan.thinkv(at)
            else:
                plan.gathering(at, name.endswith("overlapped"))


def config_of(run: Run, budget: int, total: int) -> ThinKVConfig:
    if run.tiny:
        return ThinKVConfig(budget=budget, tau=8, group=4, block=4, max_tokens=total, retention=(4,))
    return ThinKVConfig(budget=budget, max_tokens=total)


def aged(run: Run, model: Model, config: ThinKVConfig) -> tuple[thinkv.ThinKVState, int]:
    """A state of a few rows after half of its tokens, and the number of these tokens."""
    rows, steps = (1, 10) if run.tiny else (ROWS, config.max_tokens // 2)
    state = thinkv.ThinKVState(config, **systems.sizes_of(model, rows, run))
    heads = (model.query_heads, model.key_value_heads, model.key_value_heads)
    given = [run.draw(rows, count, model.head_dim) for count in heads]

    def step() -> Tensor:
        for tensor in given:
            tensor.normal_()                                   # graphs support the default generator
        return state.step(*given)

    program = run.gpu.capture(step)
    state.reset()
    for number in range(steps):
        if number % config.tau == 0:
            letter = bench_thinkv.WINDOWS[number // config.tau % len(bench_thinkv.WINDOWS)]
            state.thought.fill_(int(bench_thinkv.LETTERS[letter]))
        program.run()
    if bool(state.cache.overflow.any()):
        run.complain("thinkv: a cache overflowed while it was filled")
    state._counted = steps
    return state, steps


def copied(run: Run, model: Model, seed: thinkv.ThinKVState, batch: int) -> thinkv.ThinKVState:
    """A state of `batch` rows, which are copies of the seed's rows."""
    state = thinkv.ThinKVState(seed.config, **systems.sizes_of(model, batch, run))
    index = torch.arange(batch, device=run.device) % seed.sizes.batch

    def tensors(one: thinkv.ThinKVState) -> list[Tensor]:
        own = [value for value in vars(one).values() if isinstance(value, Tensor)]
        return [*own, *one.cache._tables, *one.cache._storage]

    for target, source in zip(tensors(state), tensors(seed), strict=True):
        torch.index_select(source, 0, index, out=target)
    state._counted = seed._counted
    return state


class Thoughts(Plan):
    """A plan without a prompt: all tokens are decoded."""

    def __init__(
        self, run: Run, model: Model, decoder: Decoder, total: int, budget: int, *, seed: thinkv.ThinKVState
    ) -> None:
        first = 1                                              # attention needs at least one token
        super().__init__(run, model, decoder, first, total - first, budget)
        self.seed = seed

    def thinkv(self, name: str) -> None:
        run, model, seed = self.run, self.model, self.seed
        per_row = bench_thinkv.payload(seed.cache, bench_thinkv.Shape(
            seed.sizes.batch, model.query_heads, model.key_value_heads, self.budget, model.head_dim
        )) / seed.sizes.batch

        def moves(batch: int) -> float:
            return model.weight_bytes + model.layers * batch * per_row

        def measure(batch: int) -> dict[str, Any]:
            states = [copied(run, model, seed, batch) for _ in range(model.layers)]
            tau = seed.config.tau
            seconds = systems.step_seconds(
                run, name, self.decoder, lambda layer, *given: states[layer].step(*given), batch, seed._counted,
                moves(batch), repeats=tau, rounds=1,
            )
            check(run, name, states[-1])
            return {"seconds": seconds, "payload_per_row": model.layers * per_row}

        def make(rows: int) -> thinkv.ThinKVState:
            return thinkv.ThinKVState(seed.config, **systems.sizes_of(model, rows, run))

        # `scratch` is for shrinking the segments of a layer.
        scratch = 0 if run.tiny else 2**30
        found = self.largest(systems.bytes_per_row(run, make, model.layers), measure, scratch)
        seconds = found.pop("seconds")
        self.rate(name, found, self.new * seconds, self.new * moves(found["batch"]))

    def gathering(self, name: str, overlap: bool) -> None:
        """A peer that gathers at every step. `moves` counts the reads of attention, not those of the gather."""
        run, model, budget = self.run, self.model, self.budget

        def measure(batch: int) -> dict[str, Any]:
            cache = systems.Gathering(run, model, batch, budget, overlap=overlap)
            moves = self.bytes(batch, budget)
            step = systems.step_seconds(run, name, self.decoder, cache.step, batch, budget, moves)
            alone = systems.step_seconds(
                run, f"{name}, without gather", self.decoder, super(systems.Gathering, cache).step, batch, budget, moves
            )
            return {"seconds": step, "milliseconds_without_gather": alone * 1e3, "kernels": [cache.kernel]}

        # Includes the spare buffer and the indices.
        each = model.token_bytes * budget * (1 + 1 / model.layers) + 16 * model.key_value_heads * budget
        found = self.largest(each, measure)
        seconds = found.pop("seconds")
        self.rate(name, found, self.new * seconds, self.new * self.bytes(found["batch"], budget))


def check(run: Run, name: str, state: thinkv.ThinKVState) -> None:
    """Check that a timed cache is within its bounds, and the attention of one row against float64."""
    cache, config = state.cache, state.config
    if bool(cache.overflow.any()):
        run.complain(f"{name}: a cache overflowed")
    live = int((cache.groups >= 0).sum(1).max())
    if live > config.peak:
        run.complain(f"{name}: {live} tokens are live, expected at most {config.peak}")
    query = run.draw(state.sizes.batch, state.sizes.query_heads, state.sizes.head_dim)
    row = _first_row(state)
    try:
        bench_thinkv.check_row(row.cache, query[:1], thinkv.decode_attention(query[:1], row.cache), 0)
    except AssertionError as error:
        run.complain(f"{name}: wrong after timing: {str(error).splitlines()[0]}")


def _first_row(state: thinkv.ThinKVState) -> thinkv.ThinKVState:
    """A state with a copy of the first row: dequantizing all rows of a large state would not fit into memory."""
    sizes = state.sizes
    one = thinkv.ThinKVState(
        state.config, batch=1, query_heads=sizes.query_heads, key_value_heads=sizes.key_value_heads,
        head_dim=sizes.head_dim, dtype=state.dtype, device=state.device,
    )
    parts = zip((*one.cache._tables, *one.cache._storage), (*state.cache._tables, *state.cache._storage), strict=True)
    for target, source in parts:
        target.copy_(source[:1])
    return one
