"""EpiKV at the shapes of its targets: what scoring adds to a model's step, attention with it against eager H2O,
and the memory of a long prompt.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.judge import bounds
from kvtwin.conformance.judge.bounds import Interval
from kvtwin.conformance.judge.checkers import epikv_scores
from kvtwin.conformance.judge.checkers.epikv import assert_inside
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.optimized import epikv

from .peers import decode_peers

pytestmark = pytest.mark.benchmark(group="epikv")

DEVICE = "cuda"
DTYPE = torch.bfloat16
ITEM = DTYPE.itemsize


class Shape(NamedTuple):
    """B, layers, Hq, Hkv, D, C, the MLP's width, K."""

    batch: int
    layers: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    hidden_size: int
    width: int
    budget: int

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.batch * self.layers * self.key_value_heads * self.budget * self.head_dim * ITEM

    @property
    def layer_weights(self) -> int:
        heads = (self.query_heads + 2 * self.key_value_heads) * self.head_dim
        out = self.query_heads * self.head_dim
        return self.hidden_size * (heads + out + 3 * self.width) * ITEM

    @property
    def score_bytes(self) -> int:
        """Hidden states of two layers read, and the previous ones read and written; a rank per slot."""
        return self.batch * (3 * 2 * self.hidden_size * ITEM + 8 * self.budget)


QWEN = Shape(32, 28, 16, 8, 128, 2048, 6144, 4096)              # Qwen3-1.7B
LLAMA = Shape(1, 32, 32, 8, 128, 4096, 14336, 8192)             # Llama-3.1-8B


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    """Normal numbers of the benchmarks' type, the same in every run."""
    generator = torch.Generator(DEVICE).manual_seed(50)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=DTYPE, device=DEVICE, generator=generator)

    return normal


class Layers:
    """States of a model's layers that share a scorer, full: every step overwrites a slot."""

    def __init__(self, shape: Shape, draw: Callable[..., Tensor]) -> None:
        self.shape = shape
        self.config = epikv.EpiKVConfig(shape.budget, hidden_size=shape.hidden_size)
        sizes = {
            "batch": shape.batch, "key_value_heads": shape.key_value_heads, "head_dim": shape.head_dim, "dtype": DTYPE,
            "device": DEVICE,
        }
        self.scorer = epikv.EpiKVScorer(self.config, hidden_size=shape.hidden_size, **sizes)
        self.states = [
            epikv.EpiKVState(self.config, query_heads=shape.query_heads, scorer=self.scorer, **sizes)
            for _ in range(shape.layers)
        ]
        for state in self.states:
            state.key.copy_(draw(*state.key.shape))
            state.value.copy_(draw(*state.value.shape))
        self.hidden = draw(2, shape.batch, 1, shape.hidden_size)
        # Filled as if tokens of these scores had come: prompt and recent ones aside.
        prompt = shape.budget - self.config.newest - 512
        self.scorer.admit(torch.ones(shape.batch, prompt, dtype=torch.bool, device=DEVICE), None)
        for step in range(self.config.newest + 520):
            self.hidden.copy_(draw(*self.hidden.shape) * (1 + step % 7))
            self.score()
        assert bool(self.scorer.occupied.all())

    def score(self) -> Tensor:
        self.scorer.step((self.hidden[0], self.hidden[1]))
        return self.scorer.next_slot


def coming_score(scorer: epikv.EpiKVScorer, hidden: Sequence[Tensor]) -> Interval:
    """Where the score [B, 1] of the token that comes next may lie, by float64: hidden [B, 1, C] of each band."""
    window, number = scorer.config.window, scorer._tokens - 1                            # of the value that comes
    changes = []
    for band, states in enumerate(hidden):
        past, present = scorer._previous[:, band].double(), states[:, 0].double()        # [B, C]
        change = (present - past).square().sum(-1).sqrt()
        error = epikv_scores.change_error(present, past)
        place = number[:, None] - window + 1 + torch.arange(window, device=states.device)
        # The oldest first; the last one makes room.
        ring = scorer._values[:, band].double().gather(1, place % window)[:, :-1]
        values = torch.cat((ring, change[:, None]), 1)
        errors = torch.cat((torch.zeros_like(ring), error[:, None]), 1)
        found = epikv_scores.zscore_interval(values.masked_fill(place < 0, 0), errors, place >= 0, window)
        changes.append(Interval(*(end[:, None, None] for end in found)))
    return epikv_scores.difference_interval(*changes)


def check_next_slot(scorer: epikv.EpiKVScorer, ranked: Tensor) -> None:
    """Of these scores [B, S] of a full cache the lowest goes, of equal ones the oldest."""
    # Of the newest ones, the token for which the slot is will be one.
    newest = scorer.positions > scorer.tokens_seen - scorer.config.newest
    ranked = ranked.masked_fill(newest, torch.inf)
    lowest = ranked.amin(1, keepdim=True)
    oldest = scorer.positions.masked_fill(ranked != lowest, 2**62).argmin(1)
    assert_same(scorer.next_slot, oldest, what="next slot")


def check_scores(layers: Layers) -> None:
    """What a token with new hidden states scores, and who goes then, against float64 and by sorting."""
    scorer = layers.scorer
    layers.hidden.mul_(1.25)
    slot, interval = scorer.next_slot.clone(), coming_score(scorer, tuple(layers.hidden))
    layers.score()
    assert_inside(scorer.score.gather(1, slot[:, None]), interval, what="score")
    check_next_slot(scorer, scorer.score)


def model_step(shape: Shape, layers: Layers, draw: Callable[..., Tensor]) -> Callable[[], Tensor]:
    """A decode step of a model of this shape over the caches of `layers`, without norms of heads and without rotation:
    weights and caches are read, which is what takes the time."""
    heads, group = shape.key_value_heads, shape.query_heads
    columns = (group + 2 * heads) * shape.head_dim

    def weights(rows: int, count: int) -> Tensor:
        return draw(rows, count) * rows**-0.5

    stack = [
        (weights(shape.hidden_size, columns), weights(group * shape.head_dim, shape.hidden_size),
         weights(shape.hidden_size, 2 * shape.width), weights(shape.width, shape.hidden_size))
        for _ in range(shape.layers)
    ]
    token = draw(shape.batch, shape.hidden_size)
    size = (shape.hidden_size,)

    def step() -> Tensor:
        x = token
        for state, (qkv, out, up, down) in zip(layers.states, stack, strict=True):
            parts = (functional.rms_norm(x, size) @ qkv).view(shape.batch, -1, shape.head_dim)
            query, key, value = parts.split((group, heads, heads), 1)
            x = x + state.step(query, key, value).flatten(1) @ out
            gate, wide = (functional.rms_norm(x, size) @ up).chunk(2, 1)
            x = x + (functional.silu(gate) * wide) @ down
        return x

    return step


def test_scoring(device_benchmark, draw):
    """One launch for all rows: changes, windows, scores, the next slot; beside a whole step of the model without it."""
    layers = Layers(QWEN, draw)
    device_benchmark(
        layers.score, moves=QWEN.score_bytes, verify=lambda _: check_scores(layers),
        peers={"model": model_step(QWEN, layers, draw)},
        peers_move=QWEN.cache_bytes + QWEN.layers * QWEN.layer_weights,
    )


def eager_h2o(query: Tensor, key: Tensor, value: Tensor, received: Tensor, *, repeated: bool) -> Tensor:
    """H2O on eager attention: all weights, summed up per KV head, and the lowest of them found.

    repeated: keys and values once for each query head, as transformers' eager attention has them; else the products of
    a group with its keys are one product of matrices, which transformers does not do.
    """
    batch, heads, _, head_dim = key.shape
    group = query.shape[1] // heads
    if repeated:
        keys, values = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
        rows = query[:, :, None]
    else:
        keys, values, rows = key, value, query.view(batch, heads, group, head_dim)
    weight = (rows @ keys.transpose(2, 3) * head_dim**-0.5).softmax(-1, dtype=torch.float32).to(value.dtype)
    received += weight.view(batch, heads, group, -1).float().mean(2)
    victim = received.argmin(-1)
    received.scatter_(2, victim[..., None], 0.0)
    return (weight @ values).view(query.shape)


def test_against_h2o(device_benchmark, draw):
    """Attention of all layers and one scoring, against eager H2O's attention, sums and choices of all layers."""
    shape, layers = LLAMA, Layers(LLAMA, draw)
    query = draw(shape.batch, shape.query_heads, shape.head_dim)
    key, value = (draw(shape.batch, shape.key_value_heads, shape.head_dim) for _ in range(2))
    received = torch.zeros(shape.layers, shape.batch, shape.key_value_heads, shape.budget, device=DEVICE)
    last = layers.states[-1]

    def step() -> Tensor:
        for state in layers.states:
            output = state.step(query, key, value)
        layers.score()
        return output

    def h2o(repeated: bool) -> Tensor:
        for state, sums in zip(layers.states, received, strict=True):
            output = eager_h2o(query, state.key, state.value, sums, repeated=repeated)
        return output

    device_benchmark(
        step, moves=shape.cache_bytes, verify=lambda _: check_attention(last, layers, query, key, value),
        peers={"h2o": lambda: h2o(True), "h2o, grouped": lambda: h2o(False)}, peers_move=shape.cache_bytes,
    )


def check_attention(
    state: epikv.EpiKVState, layers: Layers, query: Tensor, key: Tensor, value: Tensor
) -> None:
    """One more step: the token is in the slot that was next, and what came out is attention over what is held."""
    slot = state.next_slot.clone()
    output = state.step(query, key, value)
    place = slot[:, None, None, None].expand(-1, *key.shape[1:2], 1, key.shape[2])
    assert_same(state.key.gather(2, place)[:, :, 0], key, what="the new key")
    rows = slice(0, 2)                                            # the whole would take longer than all timing
    case = DecodeCase.of(query[rows], state.key[rows], state.value[rows], state.occupied[rows])
    assert_within(output[rows], case.attention.output[:, :, 0], bounds.decode_output(case), what="output")
    layers.score()


@pytest.mark.parametrize("shape", [LLAMA._replace(batch=64, layers=1, budget=4096)], ids=["B64-S4096"])
def test_step(device_benchmark, draw, shape):
    """A state of one layer with its own scorer, against attention alone: for information."""
    layers = Layers(shape, draw)
    state = layers.states[0]
    query = draw(shape.batch, shape.query_heads, shape.head_dim)
    key, value = (draw(shape.batch, shape.key_value_heads, shape.head_dim) for _ in range(2))

    def step() -> Tensor:
        output = state.step(query, key, value)
        layers.score()
        return output

    device_benchmark(
        step, moves=shape.cache_bytes, verify=lambda _: check_attention(state, layers, query, key, value),
        peers=decode_peers(query, state.key, state.value), peers_move=shape.cache_bytes, gated=False,
    )


# ---- the memory of a prompt ------------------------------------------------------------------------------------------


def peak(run: Callable[[], object]) -> int:
    """The most memory that is allocated while it runs. What it returns goes afterwards."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def test_prompt_memory(gpu, record_property):
    """65,536 tokens of a model of Llama-8B's shape: with scoring within 1 % of the peak without it; and attention
    weights for the asking, which grow with the square of the length, or do not fit."""
    import transformers

    from kvtwin.optimized.hf import EpiKVCache

    config = transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131_072, attn_implementation="sdpa",
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device(DEVICE):
            model = transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)
    tokens = 65_536
    ids = torch.randint(128_256, (1, tokens), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    plain = peak(lambda: model(ids, past_key_values=transformers.DynamicCache(config=config), logits_to_keep=1))
    model.set_attn_implementation("kvtwin")

    def with_scoring() -> None:
        with EpiKVCache(model, budget=2048, count_prompt=False, max_prompt=tokens) as cache:
            model(ids, past_key_values=cache, logits_to_keep=1)
            assert cache.layers[0].state.tokens_seen == tokens

    scored = peak(with_scoring)
    model.set_attn_implementation("eager")
    eager: dict[int, int | None] = {}
    for length in (1024, 2048, 4096, 8192):
        try:
            eager[length] = peak(lambda: model(ids[:, :length], output_attentions=True, logits_to_keep=1))  # noqa: B023
        except torch.cuda.OutOfMemoryError:
            eager[length] = None
    weights = sum(parameter.nbytes for parameter in model.parameters())
    figures = {"plain": plain, "scored": scored, "weights": weights, "eager": eager}
    record_property("bytes", figures)
    print(figures)
    assert scored <= 1.01 * plain, figures
    grown = [None if peak_ is None else peak_ - weights for peak_ in eager.values()]
    for less, more in itertools.pairwise(grown[1:]):
        assert less is not None, figures
        assert more is None or more > 3 * less, f"not quadratic: {figures}"
