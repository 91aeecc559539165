"""LongFlow inside transformers with a small budget: tokens and evictions against a plain loop in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance.methods.support import tiny_models
from kvtwin.conformance.methods.support.hf_cases import check_against_loop
from kvtwin.conformance.methods.support.hf_loops import Loop
from kvtwin.conformance.methods.support.tiny_models import FAMILIES, cache_class, generate, prompts
from kvtwin.reference.longflow import LongFlowConfig

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]

F64 = torch.float64


class LongFlowLoop(Loop):
    """A row without slots or masks. It stores all keys and values, and the set of tokens that are in the cache."""

    def __init__(self, model: Any, config: LongFlowConfig) -> None:
        super().__init__(model)
        self.config = config
        self.padding = 0                                                   # on the left
        self.keys: list[Tensor] = []                                       # per layer [T, Hkv, D]
        self.values: list[Tensor] = []
        self.living: list[list[set[int]]] = []                             # per layer, per KV head
        self.victims: list[list[int]] = []                                 # evicted when the next token needs a slot

    def feed(self, ids: list[int], real: list[bool]) -> Tensor | None:
        """Feed the first tokens as one prompt, and later ones one by one."""
        if self.seen == 0:
            self.padding = real.count(False)
            return super().feed(ids, real)
        assert all(real)
        for token in ids:
            logits = self.forward([token])
        return logits

    def alive(self) -> list[list[list[int]]]:
        return [[sorted(token + self.padding for token in head) for head in layer] for layer in self.living]

    def copy(self) -> LongFlowLoop:
        made = LongFlowLoop(self.model, self.config)
        made.seen, made.padding, made.keys, made.values = self.seen, self.padding, list(self.keys), list(self.values)
        made.living = [[set(head) for head in layer] for layer in self.living]
        made.victims = [list(layer) for layer in self.victims]
        return made

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.seen == 0:
            self.keys.append(key)
            self.values.append(value)
            return self.prompt(number, query)
        self.keys[number] = torch.cat([self.keys[number], key])
        self.values[number] = torch.cat([self.values[number], value])
        return self.step(number, query[0])[None]

    def prompt(self, number: int, query: Tensor) -> Tensor:
        """Full causal attention [T, Hq, D], then compression to budget - 1 tokens by SnapKV, the same for all heads."""
        key, value = self.keys[number], self.values[number]
        total, count, head_dim = query.shape
        group = count // key.shape[1]
        weight = torch.zeros(count, total, total, dtype=F64)
        output = torch.zeros_like(query)
        for h in range(count):
            for t in range(total):
                weight[h, t, :t + 1] = (key[:t + 1, h // group] @ query[t, h] / head_dim**0.5).softmax(0)
                output[t, h] = weight[h, t] @ value[:, h // group]
        self.living.append([self.snapkv(weight) for _ in range(key.shape[1])])
        self.victims.append([-1] * key.shape[1])
        return output

    def snapkv(self, weight: Tensor) -> set[int]:
        """Kept tokens, from weight [Hq, T, T]: sinks, then the window from its end, then the prefix by pooled
        attention."""
        total, room = weight.shape[-1], self.config.budget - 1
        prefix = total - min(self.config.window, total)
        received = weight[:, prefix:].mean((0, 1)).tolist()
        reach = self.config.kernel_size // 2
        pooled = [sum(received[max(0, j - reach):min(prefix, j + reach + 1)]) for j in range(prefix)]
        order = list(range(min(self.config.sinks, total)))
        order += [t for t in range(total - 1, prefix - 1, -1) if t not in order]
        order += sorted((t for t in range(prefix) if t not in order), key=lambda t: -pooled[t])
        return set(order[:room])

    def step(self, number: int, query: Tensor) -> Tensor:
        """The output [Hq, D] for the query [Hq, D] of the newest token. Also chooses the victim of the next step."""
        key, value, newest = self.keys[number], self.values[number], self.seen
        count, head_dim = query.shape
        group = count // key.shape[1]
        score = torch.zeros(key.shape[1], newest + 1, dtype=F64)
        output = torch.zeros_like(query)
        for head, alive in enumerate(self.living[number]):
            if len(alive) == self.config.budget:
                alive.remove(self.victims[number][head])
            alive.add(newest)
            assert len(alive) <= self.config.budget
            tokens = sorted(alive)
            for h in range(head * group, (head + 1) * group):
                weight = (key[tokens, head] @ query[h] / head_dim**0.5).softmax(0)
                output[h] = weight @ value[tokens, head]
                score[head, tokens] += weight * value[tokens, head].abs().sum(-1)          # eq. 6, times D and heads
        if not self.config.per_head:
            score = score.sum(0).expand_as(score)
        for head, alive in enumerate(self.living[number]):
            safe = set(range(self.config.sinks))
            if self.config.protect_newest and self.config.budget > 1:
                safe.add(newest)
            self.victims[number][head] = min(alive - safe, key=lambda t: float(score[head, t]))
        return output


OPTIONS: dict[str, dict[str, Any]] = {
    "shared": {"budget": 6, "window": 3},
    "per head": {"budget": 6, "window": 3, "per_head": True},
    "sinks": {"budget": 7, "window": 4, "kernel_size": 3, "sinks": 2},
    "newest not protected": {"budget": 5, "window": 2, "protect_newest": False},
    "budget 1": {"budget": 1},
    "room for the prompt": {"budget": 13},
    "per head, sinks": {"budget": 5, "window": 1, "kernel_size": 1, "sinks": 3, "per_head": True},
}


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_small_budget_matches_the_decode_loop(twins, device, family, options):
    model = tiny_models.model(family, F64, device)
    model.set_attn_implementation("kvtwin")
    cache = cache_class(twins, "reference")(model.config, **OPTIONS[options])
    check_against_loop(lambda: LongFlowLoop(model, cache.config), model, cache, prompts(11, [0, 2, 7], device), 12)


@pytest.mark.parametrize(("family", "options"), [("llama", "shared"), ("qwen2", "per head"), ("qwen3", "sinks")])
def test_small_budget_on_the_optimized_side_matches_the_decode_loop(twins, device, family, options):
    model = tiny_models.model(family, torch.float32, device)
    model.set_attn_implementation("kvtwin")
    cache = cache_class(twins, "optimized")(model.config, **OPTIONS[options])
    new = 6 if device.type == "cpu" else 30
    check_against_loop(lambda: LongFlowLoop(model, cache.config), model, cache, prompts(9, [0, 2], device), new)


@pytest.mark.parametrize("chunk", [4, 7, 10])
def test_small_budget_in_chunks_is_a_stream(twins, device, chunk):
    model = tiny_models.model("llama", F64, device)
    model.set_attn_implementation("kvtwin")
    cache = cache_class(twins, "reference")(model.config, budget=6, window=3)
    make = lambda: LongFlowLoop(model, cache.config)  # noqa: E731
    check_against_loop(make, model, cache, prompts(11, [0, 3], device), 6, chunk=chunk)


def test_small_budget_with_beams_is_beams_over_the_loop(twins, device):
    model, inputs, new = tiny_models.model("llama", F64, device), prompts(9, [0], device), 10
    model.set_attn_implementation("kvtwin")
    cache = cache_class(twins, "reference")(model.config, budget=5, window=2)
    generated = generate(model, inputs, new, num_beams=3, past_key_values=cache)

    start = LongFlowLoop(model, cache.config)
    logits = start.forward(inputs["input_ids"][0].tolist())
    beams = [(0.0, [], start, logits)]
    parents = []
    for _ in range(new):
        ways = [
            (score + float(log), [*tokens, token], parent)
            for parent, (score, tokens, _, logits) in enumerate(beams)
            for token, log in enumerate(logits.log_softmax(0))
        ]
        best = sorted(ways, key=lambda way: way[0], reverse=True)[:3]
        parents.append([parent for *_, parent in best])
        grown = [(score, tokens, beams[parent][2].copy()) for score, tokens, parent in best]
        beams = [(score, tokens, loop, loop.forward(tokens[-1:])) for score, tokens, loop in grown]
    assert generated[0].tolist() == beams[0][1]
    assert any(rows != [0, 1, 2] for rows in parents[1:]), "no beam changed its row, so nothing was reordered"
