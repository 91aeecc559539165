"""LongFlow inside transformers with less room: the tokens, and evictions, of a loop written by hand in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance import tiny_models
from kvtwin.conformance.tiny_models import FAMILIES, cache_class, generate, prompts
from kvtwin.reference.longflow import LongFlowConfig

pytestmark = pytest.mark.kind("equivalence")

F64 = torch.float64


@dataclass
class Loop:
    """One row in float64 without caches, slots or masks: all keys and values for ever, and the set of those alive.

    Weights and equations are read off the model and the papers; transformers computes nothing here.
    """

    model: Any
    config: LongFlowConfig
    keys: list[Tensor] = field(default_factory=list)                       # per layer [T, Hkv, D]
    values: list[Tensor] = field(default_factory=list)
    alive: list[list[set[int]]] = field(default_factory=list)              # per layer, per KV head
    victims: list[list[int]] = field(default_factory=list)                 # who goes when the next token needs room
    seen: int = 0

    @torch.no_grad()
    def read(self, ids: list[int]) -> Tensor:
        """The logits [V] after these tokens: at first as one prompt, later one after the other."""
        if self.seen == 0:
            return self.forward(ids)
        for token in ids:
            logits = self.forward([token])
        return logits

    def copy(self) -> Loop:
        alive = [[set(head) for head in layer] for layer in self.alive]
        victims = [list(layer) for layer in self.victims]
        return Loop(self.model, self.config, list(self.keys), list(self.values), alive, victims, self.seen)

    def forward(self, ids: list[int]) -> Tensor:
        model, config = self.model.model, self.model.config
        x = model.embed_tokens.weight.to("cpu", F64)[ids]                                  # [Q, C]
        places = torch.arange(self.seen, self.seen + len(ids))
        for number, layer in enumerate(model.layers):
            attention, normed = layer.self_attn, self.norm(x, layer.input_layernorm)
            query = self.rotate(self.heads(normed, attention, "q"), places)                # [Q, Hq, D]
            key = self.rotate(self.heads(normed, attention, "k"), places)                  # [Q, Hkv, D]
            value = self.heads(normed, attention, "v")
            if self.seen == 0:
                self.keys.append(key)
                self.values.append(value)
                output = self.prompt(number, query)
            else:
                self.keys[number] = torch.cat([self.keys[number], key])
                self.values[number] = torch.cat([self.values[number], value])
                output = self.step(number, query[0])[None]
            x = x + self.linear(output.flatten(1), attention.o_proj)
            normed = self.norm(x, layer.post_attention_layernorm)
            gate = torch.nn.functional.silu(self.linear(normed, layer.mlp.gate_proj))
            x = x + self.linear(gate * self.linear(normed, layer.mlp.up_proj), layer.mlp.down_proj)
        assert config.num_hidden_layers == len(self.keys)
        self.seen += len(ids)
        return self.linear(self.norm(x[-1], model.norm), self.model.lm_head)

    def linear(self, x: Tensor, module: Any) -> Tensor:
        y = x @ module.weight.to("cpu", F64).T
        return y if module.bias is None else y + module.bias.to("cpu", F64)

    def norm(self, x: Tensor, module: Any) -> Tensor:
        square = (x * x).mean(-1, keepdim=True) + self.model.config.rms_norm_eps
        return x / square.sqrt() * module.weight.to("cpu", F64)

    def heads(self, x: Tensor, attention: Any, which: str) -> Tensor:
        """[Q, C] -> [Q, H, D]"""
        y = self.linear(x, getattr(attention, f"{which}_proj")).unflatten(-1, (-1, attention.head_dim))
        norm = getattr(attention, f"{which}_norm", None)
        return y if norm is None else self.norm(y, norm)

    def rotate(self, x: Tensor, places: Tensor) -> Tensor:
        """Rotary embedding of [Q, H, D]: the pair (d, d + D/2) turns by place * theta ** (-2d / D)."""
        half = x.shape[-1] // 2
        theta = self.model.config.rope_parameters["rope_theta"]
        angle = places[:, None, None] * theta ** (-torch.arange(half, dtype=F64) / half)
        one, other = x[..., :half], x[..., half:]
        return torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)

    def prompt(self, number: int, query: Tensor) -> Tensor:
        """Full causal attention [T, Hq, D], then SnapKV down to budget - 1 tokens, one choice for all heads."""
        key, value = self.keys[number], self.values[number]
        total, count, head_dim = query.shape
        group = count // key.shape[1]
        weight = torch.zeros(count, total, total, dtype=F64)
        output = torch.zeros_like(query)
        for h in range(count):
            for t in range(total):
                weight[h, t, :t + 1] = (key[:t + 1, h // group] @ query[t, h] / head_dim**0.5).softmax(0)
                output[t, h] = weight[h, t] @ value[:, h // group]
        self.alive.append([self.snapkv(weight) for _ in range(key.shape[1])])
        self.victims.append([-1] * key.shape[1])
        return output

    def snapkv(self, weight: Tensor) -> set[int]:
        """weight [Hq, T, T]. Sinks first, then the window from its end, then the prefix by pooled attention."""
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
        """query [Hq, D] of the newest token -> [Hq, D]; then the victim for the token after it."""
        key, value, newest = self.keys[number], self.values[number], self.seen
        count, head_dim = query.shape
        group = count // key.shape[1]
        score = torch.zeros(key.shape[1], newest + 1, dtype=F64)
        output = torch.zeros_like(query)
        for head, alive in enumerate(self.alive[number]):
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
        for head, alive in enumerate(self.alive[number]):
            safe = set(range(self.config.sinks))
            if self.config.protect_newest and self.config.budget > 1:
                safe.add(newest)
            self.victims[number][head] = min(alive - safe, key=lambda t: float(score[head, t]))
        return output


def watch(model: Any, cache: Any) -> list[list[list[list[list[int]]]]]:
    """Fills up with what is alive after each forward pass: [pass][layer][row][head] -> ascending positions."""
    seen: list[list[list[list[list[int]]]]] = []

    def look(*_: Any) -> None:
        layers = []
        for layer in cache.layers:
            positions = layer.state.positions
            assert layer.state.key.shape[2] == positions.shape[-1] == cache.config.budget
            rows = positions.tolist() if positions.dim() == 3 else [[row] * 2 for row in positions.tolist()]
            layers.append([[sorted(p for p in head if p >= 0) for head in row] for row in rows])
        seen.append(layers)

    model.model.register_forward_hook(look)
    return seen


def check_against_loop(model: Any, cache: Any, inputs: dict[str, Tensor], new: int, **options: Any) -> None:
    """Same tokens, and after every forward pass the same tokens alive in every layer, row and KV head."""
    alive = watch(model, cache)
    generated = generate(model, inputs, new, past_key_values=cache, **options)
    total = inputs["input_ids"].shape[1]
    first = options.get("prefill_chunk_size", total)
    for row, mask in enumerate(inputs["attention_mask"].tolist()):
        padding = mask.count(0)
        ids = inputs["input_ids"][row, padding:].tolist()
        loop = Loop(model, cache.config)
        parts = [ids[:first - padding]]
        parts += [ids[start - padding:start - padding + first] for start in range(first, total, first)]
        tokens: list[int] = []
        for number in range(len(parts) + new - 1):
            logits = loop.read(parts[number] if number < len(parts) else tokens[-1:])
            expected = [[sorted(t + padding for t in head) for head in layer] for layer in loop.alive]
            assert [layer[row] for layer in alive[number]] == expected, (row, number)
            if number >= len(parts) - 1:
                tokens.append(int(logits.argmax()))
        assert generated[row].tolist() == tokens, row


OPTIONS: dict[str, dict[str, Any]] = {
    "shared": {"budget": 6, "window": 3},
    "per head": {"budget": 6, "window": 3, "per_head": True},
    "sinks": {"budget": 7, "window": 4, "kernel_size": 3, "sinks": 2},
    "newest not protected": {"budget": 5, "window": 2, "protect_newest": False},
    "budget 1": {"budget": 1},
    "room for the prompt": {"budget": 13},
    "per head, sinks": {"budget": 5, "window": 1, "kernel_size": 1, "sinks": 3, "per_head": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_small_budget_is_the_loop(twins, device, family, options):
    model = tiny_models.model(family, F64, device)
    model.set_attn_implementation("kvtwin")
    cache = cache_class(twins, "reference")(model.config, **OPTIONS[options])
    check_against_loop(model, cache, prompts(11, [0, 2, 7], device), 12)


@pytest.mark.parametrize(("family", "options"), [("llama", "shared"), ("qwen2", "per head"), ("qwen3", "sinks")])
def test_small_budget_on_the_optimized_side_is_the_loop(twins, device, family, options):
    model = tiny_models.model(family, torch.float32, device)
    model.set_attn_implementation("kvtwin")
    cache = cache_class(twins, "optimized")(model.config, **OPTIONS[options])
    check_against_loop(model, cache, prompts(9, [0, 2], device), 6 if device.type == "cpu" else 30)


@pytest.mark.parametrize("chunk", [4, 7, 10])
def test_small_budget_in_chunks_is_a_stream(twins, device, chunk):
    model = tiny_models.model("llama", F64, device)
    model.set_attn_implementation("kvtwin")
    cache = cache_class(twins, "reference")(model.config, budget=6, window=3)
    check_against_loop(model, cache, prompts(11, [0, 3], device), 6, prefill_chunk_size=chunk)


def test_small_budget_with_beams_is_beams_over_the_loop(twins, device):
    model, inputs, new = tiny_models.model("llama", F64, device), prompts(9, [0], device), 10
    model.set_attn_implementation("kvtwin")
    cache = cache_class(twins, "reference")(model.config, budget=5, window=2)
    generated = generate(model, inputs, new, num_beams=3, past_key_values=cache)

    start = Loop(model, cache.config)
    logits = start.read(inputs["input_ids"][0].tolist())
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
        beams = [(score, tokens, loop, loop.read(tokens[-1:])) for score, tokens, loop in grown]
    assert generated[0].tolist() == beams[0][1]
    assert any(rows != [0, 1, 2] for rows in parents[1:]), "no beam changed its row, so nothing was reordered"
