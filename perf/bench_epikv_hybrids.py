"""A decode step of EpiKV's hybrids, which keep attention's logits and read them again: beside attention alone, and
beside a step of "epikv", which does neither, of the same shape in the same run.
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

from .bench_epikv import DTYPE, ITEM, LLAMA, Shape, check_next_slot, coming_score
from .peers import decode_peers

pytestmark = pytest.mark.benchmark(group="epikv")

DEVICE = "cuda"
SHAPE = LLAMA._replace(batch=64, layers=1, budget=4096)
#: A segment begins, and its thought is told, in one of `tau` steps: 128 by default, so that a median has none of them,
#: and in every step where it is 1.
SEGMENTS = {"policy": "segment_hs", "edges": (0.5, 0.95)}
POLICIES: dict[str, dict[str, Any]] = {
    "attn_x_hs": {"policy": "attn_x_hs"}, "segment_hs": SEGMENTS, "segment_hs_with_sparsity": {**SEGMENTS, "tau": 1},
}
#: Bytes of a slot's part in a decision: a rank is read; a sum is read and written, what it is added to is read, and
#: the score is written; or a thought is read.
SLOT_BYTES = {"attn_x_hs": 8 + 4 + 4 + 4 + 4, "segment_hs": 8 + 8}


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(51)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=DTYPE, device=DEVICE, generator=generator)

    return normal


def step_bytes(shape: Shape, policy: str) -> int:
    """Of one layer: keys and values, queries and output, hidden states of its bands with the previous ones, slots."""
    heads = 2 * shape.batch * shape.query_heads * shape.head_dim
    bands = 1 if policy == "attn_x_hs" else 2
    hidden = 3 * bands * shape.batch * shape.hidden_size
    return shape.cache_bytes + (heads + hidden) * ITEM + SLOT_BYTES[policy] * shape.batch * shape.budget


class Layer:
    """A state of one layer with a scorer of its own, full, and a token for it: every step overwrites a slot.

    A kept prompt fills it but for the recent tokens and for `contested` slots."""

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
            # Hidden states move more or less; and the larger the logits, the more tokens are looked past.
            self.query.mul_(1 + number // 5 % 4)
            for tensor in self.bands:
                tensor.mul_(1 + number % 7)
            self.step()
        assert bool(self.state.occupied.all())

    def step(self) -> Tensor:
        return self.state.step(self.query, self.key, self.value, *self.bands)


# What is checked after timing ----------------------------------------------------------------------------------------


def check(layer: Layer, output: Tensor, rows: slice = slice(0, 2)) -> None:
    """The step that was timed last: its output, and its choice. Then one more, with other hidden states, in full.

    rows: those whose attention is compared; all would take longer than all timing."""
    check_attention(layer, output, rows)
    check_choice(layer)
    state, attention = layer.state, layer.state.scorer.attention
    for tensor in layer.bands:
        tensor.mul_(1.25)
    slot, own = state.next_slot[:, None].clone(), coming_score(state.scorer, layer.bands)
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
    """The new token is in the cache, and what came out is attention over what is held."""
    state = layer.state
    slot = (state.positions == state.tokens_seen - 1).long().argmax(1)
    place = slot[:, None, None, None].expand(-1, *layer.key.shape[1:2], 1, layer.key.shape[2])
    assert_same(state.key.gather(2, place)[:, :, 0], layer.key, what="the new key")
    assert not bool(output.isnan().any()), "part of the output was not written"
    case = DecodeCase.of(layer.query[rows], state.key[rows], state.value[rows], state.occupied[rows])
    assert_within(output[rows], case.attention.output[:, :, 0], bounds.decode_output(case), what="output")
    return case


def check_sums(after: Tensor, before: Tensor, case: DecodeCase) -> None:
    """What tokens have received by now, [b, S], the new one nothing before."""
    more, error = epikv_hybrids.received(case.attention)
    total = before.double() + more
    assert_within(after, total, error + UNIT * (total + error) * SLACK, what="attention received")


def check_thoughts(layer: Layer, before: SimpleNamespace, slot: Tensor, case: DecodeCase, rows: slice) -> None:
    """The new token has the thought of its segment, told anew where one begins; all others have theirs."""
    config, state = layer.config, layer.state
    assert config.edges is not None
    thought = before.thought
    if int(before.decoded[0]) % config.tau == 0:
        share = attention_sparsity(
            case.query.double(), case.key.double(), case.occupied, threshold=config.sparsity_threshold,
            scale=state.scale,
        )
        thought = state.scorer.attention.thought.clone()                                # rows that are not checked
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
    """The lowest score goes next, with thoughts the lowest of the least important thought, by sorting."""
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
    """Of the first row: attention over the hybrid's cache, [B, Hq, 1, D] or [B, Hkv, G, D], or a step of `plain`."""
    of = plain if output.dim() == 3 else layer
    case = DecodeCase.of(*(tensor[:1] for tensor in (of.query, of.state.key, of.state.value, of.state.occupied)))
    assert_within(
        output[:1].flatten(1), case.attention.output[:, :, 0].flatten(1), bounds.decode_output(case).flatten(1),
        what="peer's output",
    )


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
def test_hybrid_step(device_benchmark, draw, options):
    """A state of one layer with its own scorer."""
    layer, plain = Layer(SHAPE, draw, **options), Layer(SHAPE, draw)
    device_benchmark(
        layer.step, moves=step_bytes(SHAPE, layer.config.policy), verify=lambda output: check(layer, output),
        peers={**decode_peers(layer.query, layer.state.key, layer.state.value), "epikv": plain.step},
        peers_move=SHAPE.cache_bytes, verify_peer=lambda output: check_peer(layer, plain, output),
    )
