"""EpiKV's headline: the longest prompt that can be scored, and the time of a step against scoring by attention.

The paper: on an A100 with 80 GB, storing the attention weights of all layers fails at 8192 tokens, while hidden states
reach 65,536 tokens, 16 times as many. An AIME trace at a budget of 8192 takes 2.8 times less time than with RaaS and
1.6 times less than with ThinKV.

Context: a Llama-3.1-8B shape, batch 1. Only memory matters, so one layer is run, with the weights, keys and values of
all layers allocated. If the attention weights of all layers are kept (transformers' output_attentions), they are
allocated, too.
Steps: the whole model in a CUDA graph, also for the peers, which the paper launches kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvtwin.optimized import epikv

from .. import bench_epikv
from . import pointwise, systems
from .base import Run
from .decoder import ITEM, LLAMA_8B, Decoder, Loop, Model, by_token, small

#: The layers, of 32, whose hidden states are scored.
BANDS = (10, 21)


def run(run: Run) -> None:
    model = small(LLAMA_8B)._replace(layers=2) if run.tiny else LLAMA_8B
    with run.part("steps"):
        steps(run, model)
    with run.part("context"):
        context(run, model)


# Steps ---------------------------------------------------------------------------------------------------------------


class Layers:
    """The full states of all layers and their shared scorer. Every step overwrites a slot. The attributes have the
    names that the checks of `bench_epikv` use."""

    def __init__(self, run: Run, model: Model, budget: int) -> None:
        self.config = epikv.EpiKVConfig(budget, hidden_size=model.hidden, window=2 if run.tiny else 64)
        sizes = systems.sizes_of(model, 1, run)
        heads = sizes.pop("query_heads")
        self.scorer = epikv.EpiKVScorer(self.config, hidden_size=model.hidden, **sizes)
        self.states = [
            epikv.EpiKVState(self.config, query_heads=heads, scorer=self.scorer, **sizes) for _ in range(model.layers)
        ]
        for state in self.states:
            for tensor in (state.key, state.value):
                tensor.normal_(generator=run.generator)
        self.hidden = run.draw(2, 1, 1, model.hidden)
        scored = self.config.newest + (2 if run.tiny else 512)
        prompt = torch.ones(1, budget - scored, dtype=torch.bool, device=run.device)
        self.scorer.admit(prompt, None)
        for number in range(scored + 2):
            self.hidden.copy_(run.draw(*self.hidden.shape) * (1 + number % 7))
            self.score()
        if not bool(self.scorer.occupied.all()):
            run.complain("epikv: not every slot holds a token")

    def score(self) -> Tensor:
        self.scorer.step((self.hidden[0], self.hidden[1]))
        return self.scorer.next_slot


def steps(run: Run, model: Model) -> None:
    budget = 16 if run.tiny else 8192
    bands = (0, 1) if run.tiny else BANDS
    decoder = Decoder(model, run, 4 * budget)
    moves = model.weight_bytes + budget * model.token_bytes
    layers = Layers(run, model, budget)
    loop = Loop(decoder, 1, 2 * budget)

    def ours() -> Tensor:
        kept = loop.step(by_token(lambda layer, *given: layers.states[layer].step(*given)), bands)
        layers.scorer.step((kept[0], kept[1]))
        return layers.scorer.next_slot

    def record(name: str, function: Callable[[], Any]) -> None:
        seconds = run.seconds(function, what=name, moves=moves)
        first = run.figures.get("steps", {}).get("epikv", {"milliseconds": seconds * 1e3})["milliseconds"]
        run.record("steps", {name: {
            "milliseconds": seconds * 1e3, "over_ours": seconds * 1e3 / first,
            "share_of_bytes_bound": run.share(moves, seconds),
        }})

    record("epikv", ours)
    try:
        bench_epikv.check_scores(layers)                       # type: ignore[arg-type]
    except AssertionError as error:
        run.complain(f"epikv: wrong after timing: {str(error).splitlines()[0]}")
    caches = [(state.key, state.value) for state in layers.states]
    for name, scorer in scorers(run, model, budget, caches).items():
        with run.part(name):
            record(name, lambda scorer=scorer: loop.step(by_token(scorer)))


def scorers(run: Run, model: Model, budget: int, caches: list[tuple[Tensor, Tensor]]) -> dict[str, systems.Step]:
    """Peers: each writes the new token, attends over the same caches, and computes its scores."""
    place = torch.zeros(1, dtype=torch.int64, device=run.device)
    sums = torch.rand(model.layers, 1, model.key_value_heads, budget, device=run.device)
    sparsity = torch.zeros(1, device=run.device)
    kernel = systems.fastest(run, model, *caches[0])
    stamped = [systems.raas_state(run, model, 1, budget) for _ in range(model.layers)]
    with_sparsity = range(0, model.layers, max(1, model.layers // 4))       # ThinKV's four layers

    def written(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = caches[layer]
        pointwise.put(keys, values, place, key, value)
        return keys, values

    def plain(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return systems.attention(kernel, query, *written(layer, key, value))

    def h2o(layer: int, query: Tensor, key: Tensor, value: Tensor, repeated: bool) -> Tensor:
        return bench_epikv.eager_h2o(query, *written(layer, key, value), sums[layer], repeated=repeated)

    def weights(layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Attention with one product per group of queries: output [B, Hq, D], weights [B, Hkv, G, S] float32."""
        keys, values = written(layer, key, value)
        rows = query.unflatten(1, (key.shape[1], -1))
        weight = (rows @ keys.transpose(2, 3) * key.shape[-1] ** -0.5).softmax(-1, dtype=torch.float32)
        return (weight.to(values.dtype) @ values).flatten(1, 2), weight

    def thinkv(layer: int, query: Tensor, key: Tensor, value: Tensor, every: bool) -> Tensor:
        """The share of weights that are below 1 % of the largest weight of their head."""
        if not every and layer not in with_sparsity:
            return plain(layer, query, key, value)
        output, weight = weights(layer, query, key, value)
        sparsity.add_((weight < 0.01 * weight.amax(-1, keepdim=True)).float().mean())
        return output

    return {
        f"attention alone ({kernel})": plain,
        "h2o as transformers has it": lambda *given: h2o(*given, repeated=True),
        "h2o, a group's heads at once": lambda *given: h2o(*given, repeated=False),
        "raas (ours)": lambda layer, *given: stamped[layer].step(*given),
        "thinkv's sparsity, every layer": lambda *given: thinkv(*given, every=True),
        "thinkv's sparsity, four layers": lambda *given: thinkv(*given, every=False),
    }


# Context -------------------------------------------------------------------------------------------------------------


def context(run: Run, model: Model) -> None:
    """The longest of the tested prompts whose forward pass fits."""
    k = 1024
    tried: dict[str, list[int]] = {
        "attention weights kept": [2 * k, 4 * k, 6 * k, 8 * k, 12 * k],
        "attention weights, a layer at a time": [4 * k, 8 * k, 12 * k, 16 * k, 20 * k, 24 * k, 32 * k],
        "hidden states": [64 * k, 256 * k, 512 * k, 640 * k, 768 * k, 896 * k],
    }
    for name, lengths in tried.items():
        found: dict[int, dict[str, float] | None] = {}
        for tokens in [32, 64] if run.tiny else lengths:
            if run.late(f"{name} at {tokens}"):
                break
            found[tokens] = peak(run, model, name, tokens)
            run.record("context", {name: {
                "longest": max((length for length, one in found.items() if one), default=0), "tried": found,
            }})
            if found[tokens] is None:
                break
    ours, in_turn, kept = (run.figures["context"].get(name, {}).get("longest", 0) for name in reversed(tried))
    if ours and in_turn and kept:
        run.record("context ratios", {
            "hidden states over weights, a layer at a time": ours / in_turn,
            "hidden states over weights kept": ours / kept,
        })


def peak(run: Run, model: Model, how: str, tokens: int) -> dict[str, float] | None:
    """Peak bytes and seconds of the forward pass; None if memory runs out."""
    run.free()
    if run.cuda:
        torch.cuda.reset_peak_memory_stats()
    began = run.gpu.now()
    try:
        _forward(run, model, how, tokens)
        out_of_memory = False
    except torch.cuda.OutOfMemoryError:
        out_of_memory = True
    seconds = run.gpu.now() - began
    most = torch.cuda.max_memory_allocated() if run.cuda else 0
    run.free()
    return None if out_of_memory else {"bytes": most, "seconds_of_a_layer": seconds}


def _forward(run: Run, model: Model, how: str, tokens: int) -> None:
    decoder = Decoder(model, run, tokens, layers=1)
    other = model.layers - 1
    matrix = model.query_heads * tokens * tokens * ITEM
    layer_weights = sum(tensor.nbytes for tensor in decoder.layers[0])
    ballast = [
        torch.empty(size, dtype=torch.uint8, device=run.device)
        for size in (other * layer_weights, other * tokens * model.token_bytes // model.layers,
                     other * matrix if how.endswith("kept") else 0)
    ]
    cache = [
        torch.empty(1, model.key_value_heads, tokens, model.head_dim, dtype=torch.bfloat16, device=run.device)
        for _ in range(2)
    ]
    hidden = how == "hidden states"
    received: list[Tensor] = []

    def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache[0].copy_(key)
        cache[1].copy_(value)
        if hidden:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):                  # a kernel without a weight matrix
                return scaled_dot_product_attention(query, *cache, is_causal=True, enable_gqa=True)
        output, sums = eager_prompt(query, *cache)
        received.append(sums)
        return output

    ids = torch.arange(tokens, device=run.device)[None] % model.vocabulary
    _, kept = decoder.forward(
        ids, torch.arange(tokens, device=run.device), attend, keep=(0,) if hidden else (), tile=16_384
    )
    if hidden:
        # This layer's hidden states serve as those of both bands.
        scorer = epikv.EpiKVScorer(
            epikv.EpiKVConfig(16 if run.tiny else 8192, hidden_size=model.hidden, keep_prompt=False), batch=1,
            hidden_size=model.hidden, key_value_heads=model.key_value_heads, head_dim=model.head_dim,
            dtype=torch.bfloat16, device=run.device,
        )
        occupied = torch.ones(1, tokens, dtype=torch.bool, device=run.device)
        scorer.prefill(occupied, (kept[0][:, None], kept[0][:, None]), *cache)
        if int(scorer.occupied.sum()) != min(tokens, scorer.config.budget):
            run.complain(
                f"hidden states: {int(scorer.occupied.sum())} of {tokens} tokens are kept, expected "
                f"{min(tokens, scorer.config.budget)}"
            )
    elif not bool(received[0].isfinite().all()):
        run.complain(f"{how}: sums that are not finite")
    del ballast


def eager_prompt(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attention as in transformers' eager code, in place where possible, and the attention that each key receives."""
    group, tokens = query.shape[1] // key.shape[1], key.shape[2]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    logit = (query @ key.transpose(2, 3)).mul_(key.shape[-1] ** -0.5)
    index = torch.arange(tokens, device=key.device)
    logit.masked_fill_(index > index[:, None], -torch.inf)
    weight = logit.softmax(-1, dtype=torch.float32).to(value.dtype)
    return weight @ value, weight.sum(2, dtype=torch.float32)
