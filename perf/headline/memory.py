"""Memory peak and fragmentation by method at the same budget, from torch.cuda.memory_stats over a whole run.

LongFlow's figure 4 makes this comparison. Here: the caches of all 28 layers of a Qwen3-1.7B shape, batch 16, a prompt
of 896 tokens, 256 steps and budget 1024. Nothing is captured, so that every launch uses the allocator. Queries, keys
and values are random. The peers are two caches that grow with torch.cat as transformers' cache does: one keeps all
tokens, and one is H2O, which gathers its tokens into new tensors every 128 steps.

fragmentation: the largest share of reserved memory, over all steps, that is in no tensor. inactive: the peak of bytes
in split blocks that are not in use. Each EpiKV state has its own scorer and random hidden states here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from kvtwin.conformance import discovery
from kvtwin.conformance.judge import checkers

from . import systems
from .base import Run
from .decoder import QWEN_1_7B, Model, small


def run(run: Run) -> None:
    model = small(QWEN_1_7B) if run.tiny else QWEN_1_7B
    batch, prompt, steps, budget = (1, 6, 1, 16) if run.tiny else (16, 896, 256, 1024)
    ours: dict[str, Callable[[], Any]] = {
        name: lambda name=name: state_of(run, model, name, batch, prompt + steps, budget)
        for name in (["longflow"] if run.tiny else [found.name for found in discovery.built_in() if found.state])
    }
    grown: dict[str, Callable[[], Any]] = {
        "full KV, grown by cat": lambda: Grown(None), "h2o, grown by cat": lambda: Grown(budget),
    }
    for name, make in (grown | ours).items():
        if run.late(name):
            break
        with run.part(name):
            one(run, model, name, make, batch, prompt, steps)


def state_of(run: Run, model: Model, method: str, batch: int, tokens: int, budget: int) -> Any:
    pair = checkers.pair(method)
    assert pair.config is not None and pair.state is not None
    options: dict[str, Any] = checkers.with_budget(method, budget) | checkers.measured(method, budget)
    given = {"max_tokens": tokens, "hidden_size": model.hidden}
    options |= {field.name: given[field.name] for field in fields(pair.config) if field.name in given}
    return getattr(pair.optimized, pair.state.__name__)(
        pair.config(**options), **systems.sizes_of(model, batch, run)
    )


class Grown:
    """Keys and values that grow with every token. With a budget, they are cut by summed weights (H2O) once they exceed
    it by 128 tokens."""

    INTERVAL = 128

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self.key = self.value = self.sums = torch.empty(0)

    def prefill(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key.clone(), value.clone()
        self.sums = torch.zeros(key.shape[:3], device=key.device)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.key, self.value = (
            torch.cat((old, new[:, :, None]), 2) for old, new in ((self.key, key), (self.value, value))
        )
        if self.budget is None:
            return systems.attention("flash", query, self.key, self.value)
        rows = query.unflatten(1, (key.shape[1], -1))
        weight = (rows @ self.key.transpose(2, 3) * key.shape[-1] ** -0.5).softmax(-1, dtype=torch.float32)
        self.sums = torch.cat((self.sums, torch.zeros_like(self.sums[..., :1])), 2) + weight.mean(2)
        output = (weight.to(value.dtype) @ self.value).flatten(1, 2)
        if self.key.shape[2] >= self.budget + self.INTERVAL:
            kept = self.sums.topk(self.budget, -1).indices.sort(-1).values
            self.key, self.value = systems.gather(self.key, self.value, kept)
            self.sums = self.sums.gather(2, kept)
        return output


def one(
    run: Run, model: Model, name: str, make: Callable[[], Any], batch: int, prompt: int, steps: int
) -> None:
    """One run of a method, measured from its first allocation on."""
    run.free()
    if run.cuda:
        torch.cuda.reset_peak_memory_stats()
    before = _statistics(run)
    worst = 0.0
    heads = (model.query_heads, model.key_value_heads, model.key_value_heads)
    states = [make() for _ in range(model.layers)]
    for state in states:
        given = [run.draw(batch, count, prompt, model.head_dim) for count in heads]
        state.prefill(*given, **checkers.extras(state, *given))
        del given
    token = [run.draw(batch, count, model.head_dim) for count in heads]
    more = checkers.extras(states[0], *token)
    for _ in range(steps):
        for state in states:
            output = state.step(*token, **more)
        now = _statistics(run)
        allocated, reserved = (now[key] - before[key] for key in ("allocated", "reserved"))
        worst = max(worst, 1 - allocated / reserved if reserved else 0.0)
    if not bool(output.isfinite().all()):
        run.complain(f"{name}: outputs that are not finite")
    after = _statistics(run)
    run.record(name, {
        "held_bytes": after["allocated"] - before["allocated"],
        "peak_bytes": after["peak"] - before["allocated"],
        "reserved_bytes": after["reserved_peak"] - before["reserved"],
        "inactive_bytes": after["inactive"], "fragmentation": worst,
        "allocations_per_step": (after["count"] - before["count"]) / (model.layers * (steps + 1)),
        "nominal_bytes": model.token_bytes * batch * 1024,
    })


def _statistics(run: Run) -> dict[str, float]:
    if not run.cuda:
        return dict.fromkeys(("allocated", "peak", "reserved", "reserved_peak", "inactive", "count"), 0)
    found = torch.cuda.memory_stats(run.device)
    return {
        "allocated": found["allocated_bytes.all.current"], "peak": found["allocated_bytes.all.peak"],
        "reserved": found["reserved_bytes.all.current"], "reserved_peak": found["reserved_bytes.all.peak"],
        "inactive": found["inactive_split_bytes.all.peak"], "count": found["allocation.all.allocated"],
    }
