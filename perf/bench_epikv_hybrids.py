"""Benchmarks of a decode step of EpiKV's hybrid policies, which store attention logits and read them again.

The peers are attention alone and a step of the policy "epikv", which needs no logits, at the same shape.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.judge import bounds
from kvtwin.conformance.judge.bounds import SLACK, UNIT
from kvtwin.conformance.judge.checkers import epikv_hybrids
from kvtwin.conformance.judge.checkers.epikv import assert_inside
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.optimized import epikv
from kvtwin.reference.thinkv import attention_sparsity, classify

from .bench_epikv import DTYPE, ITEM, LLAMA, Shape, check_next_slot, next_score_interval
from .peers import decode_peers

pytestmark = pytest.mark.benchmark(group="epikv")

DEVICE = "cuda"
SHAPE = LLAMA._replace(batch=64, layers=1, budget=4096)
#: A segment begins, and its thought is classified, in one of `tau` steps. With the default of 128 the median is a step
#: without classification; with tau=1 every step classifies.
SEGMENTS = {"policy": "segment_hs", "edges": (0.5, 0.95)}
POLICIES: dict[str, dict[str, Any]] = {
    "attn_x_hs": {"policy": "attn_x_hs"}, "segment_hs": SEGMENTS, "segment_hs_with_sparsity": {**SEGMENTS, "tau": 1},
}
#: Bytes per slot for the choice of the next slot. Both read a rank. "attn_x_hs" also reads and writes a sum, reads the
#: score that it is added to, and writes the total; "segment_hs" also reads a thought.
SLOT_BYTES = {"attn_x_hs": 8 + 4 + 4 + 4 + 4, "segment_hs": 8 + 8}


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(51)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=DTYPE, device=DEVICE, generator=generator)

    return normal


def step_bytes(shape: Shape, policy: str) -> int:
    """Bytes of one layer's step: keys, values, queries, output, current and previous hidden states, and slots."""
    heads = 2 * shape.batch * shape.query_heads * shape.head_dim
    bands = 1 if policy == "attn_x_hs" else 2
    hidden = 3 * bands * shape.batch * shape.hidden_size
    return shape.cache_bytes + (heads + hidden) * ITEM + SLOT_BYTES[policy] * shape.batch * shape.budget


class Layer:
    """A full state of one layer with its own scorer, and a token for it. Every step overwrites a slot.

    A kept prompt fills the cache except for the recent tokens and `contested` slots."""

    def __init__(self, shape: Shape, draw: Callable[..., Tensor], *, contested: int = 512, **options: Any) -> None:
        self.config = epikv.EpiKVConfig(shape.budget, hidden_size=shape.hidden_size, **options)
        self.state = epikv.EpiKVState(
            self.config, batch=shape.batch, query_heads=shape.query_heads, key_value_heads=shape.key_value_heads,
            head_dim=shape.head_dim, dtype=DTYPE, device=DEVICE,
        )
        for tensor in (self.state.key, self.state.value):
            tensor.copy_(draw(*tensor.shape))
        self.query = draw(shape.batch, shape.query_heads, shape.head_dim)
        self.key, self.value = (draw(shape.batch, shape.key_value_heads, shape.head_dim) for _ in range(2))
        self.bands = [draw(shape.batch, 1, shape.hidden_size) for count in self.config.layers if count]
        prompt = shape.budget - self.config.newest - contested
        self.state.scorer.admit(torch.ones(shape.batch, prompt, dtype=torch.bool, device=DEVICE), None)
        for number in range(self.config.newest + contested + 8):
            for tensor in (self.query, self.key, self.value, *self.bands):
                tensor.copy_(draw(*tensor.shape))
            # Vary the changes of hidden states, and the logits: larger logits give a higher sparsity.
            self.query.mul_(1 + number // 5 % 4)
            for tensor in self.bands:
                tensor.mul_(1 + number % 7)
            self.step()
        assert bool(self.state.occupied.all())

    def step(self) -> Tensor:
        return self.state.step(self.query, self.key, self.value, *self.bands)


# Checks after timing -------------------------------------------------------------------------------------------------


def check(layer: Layer, output: Tensor, rows: slice = slice(0, 2)) -> None:
    """Check the output and the choice of the last timed step. Then take one more step, with other hidden states, and
    check all of its results.

    rows: the rows whose attention is checked; all rows would take longer than the benchmark."""
    check_attention(layer, output, rows)
    check_choice(layer)
    state, attention = layer.state, layer.state.scorer.attention
    for tensor in layer.bands:
        tensor.mul_(1.25)
    slot, own = state.next_slot[:, None].clone(), next_score_interval(state.scorer, layer.bands)
    before = SimpleNamespace(**{
        name: getattr(attention, name).clone() for name in ("aggregate", "frozen", "thoughts", "thought", "decoded")
    })
    case = check_attention(layer, layer.step(), rows)
    if layer.config.policy == "attn_x_hs":
        assert_inside(attention.frozen.gather(1, slot), own, what="the new token's own score")
        others = torch.ones_like(state.occupied).scatter(1, slot, False)
        assert_same(attention.frozen, before.frozen, where=others, what="the others' own scores")
        check_sums(attention.aggregate[rows], before.aggregate.scatter(1, slot, 0)[rows], case)
    else:
        assert_inside(state.score.gather(1, slot), own, what="the new token's score")
        check_thoughts(layer, before, slot, case, rows)
    check_choice(layer)


def check_attention(layer: Layer, output: Tensor, rows: slice) -> DecodeCase:
    """Assert that the new token is in the cache and that the output is attention over the cache."""
    state = layer.state
    slot = (state.positions == state.tokens_seen - 1).long().argmax(1)
    place = slot[:, None, None, None].expand(-1, *layer.key.shape[1:2], 1, layer.key.shape[2])
    assert_same(state.key.gather(2, place)[:, :, 0], layer.key, what="the new key")
    assert not bool(output.isnan().any()), "part of the output was not written"
    case = DecodeCase.of(layer.query[rows], state.key[rows], state.value[rows], state.occupied[rows])
    assert_within(output[rows], case.attention.output[:, :, 0], bounds.decode_output(case), what="output")
    return case


def check_sums(after: Tensor, before: Tensor, case: DecodeCase) -> None:
    """Check the attention that tokens have received, [b, S]. The new token starts at 0."""
    more, error = epikv_hybrids.received_attention(case.attention)
    total = before.double() + more
    assert_within(after, total, error + UNIT * (total + error) * SLACK, what="attention received")


def check_thoughts(layer: Layer, before: SimpleNamespace, slot: Tensor, case: DecodeCase, rows: slice) -> None:
    """Assert that the new token has the thought of its segment, classified again at a segment's start, and that the
    other tokens keep theirs."""
    config, state = layer.config, layer.state
    assert config.edges is not None
    thought = before.thought
    if int(before.decoded[0]) % config.tau == 0:
        share = attention_sparsity(
            case.query.double(), case.key.double(), case.occupied, threshold=config.sparsity_threshold,
            scale=state.scale,
        )
        thought = state.scorer.attention.thought.clone()                                # for rows that are not checked
        thought[rows] = classify(share, config.edges)
    known = SimpleNamespace(
        _decoded=int(before.decoded[0]) + 1, thought=thought[rows],
        thoughts=before.thoughts.scatter(1, slot, thought[:, None])[rows],
    )
    exact = SimpleNamespace(
        config=config, scale=state.scale, positions=state.positions[rows], tokens_seen=state.tokens_seen,
        scorer=SimpleNamespace(attention=known),
    )
    tested = SimpleNamespace(thoughts=state.scorer.attention.thoughts[rows])
    epikv_hybrids.assert_thoughts_right(tested, exact, case, "after timing")


def check_choice(layer: Layer) -> None:
    """Check the next slot by sorting: the lowest score, for "segment_hs" in the least important thought."""
    state, attention = layer.state, layer.state.scorer.attention
    ranked = state.score
    if layer.config.policy == "attn_x_hs":
        total = attention.aggregate.double() + attention.frozen.double()
        assert_within(ranked, total, UNIT * total.abs(), what="score")
    else:
        newest = state.positions > state.tokens_seen - layer.config.newest
        thoughts = state.thoughts
        assert thoughts is not None
        thoughts = thoughts.masked_fill(newest | ranked.isinf(), 3)
        ranked = ranked.masked_fill(thoughts != thoughts.amin(1, keepdim=True), torch.inf)
    check_next_slot(state.scorer, ranked)


def check_peer(layer: Layer, plain: Layer, output: Tensor) -> None:
    """Check the first row of a peer's output: attention over the hybrid's cache ([B, Hq, 1, D] or [B, Hkv, G, D]), or a
    step of `plain` ([B, Hq, D])."""
    of = plain if output.dim() == 3 else layer
    case = DecodeCase.of(*(tensor[:1] for tensor in (of.query, of.state.key, of.state.value, of.state.occupied)))
    assert_within(
        output[:1].flatten(1), case.attention.output[:, :, 0].flatten(1), bounds.decode_output(case).flatten(1),
        what="peer's output",
    )


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
def test_hybrid_step(device_benchmark, draw, options):
    """A decode step of one layer with its own scorer."""
    layer, plain = Layer(SHAPE, draw, **options), Layer(SHAPE, draw)
    device_benchmark(
        layer.step, moves=step_bytes(SHAPE, layer.config.policy), verify=lambda output: check(layer, output),
        peers={**decode_peers(layer.query, layer.state.key, layer.state.value), "epikv": plain.step},
        peers_move=SHAPE.cache_bytes, verify_peer=lambda output: check_peer(layer, plain, output),
    )
