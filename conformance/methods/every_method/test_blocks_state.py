"""Properties of the block cache for every method that uses it: chunks, decoding, capacity, padding, autograd modes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtwin.conformance import discovery
from kvtwin.conformance.cases import draws
from kvtwin.conformance.cases.oracle import attend
from kvtwin.conformance.cases.tiny import attributes
from kvtwin.conformance.judge import bounds, checkers, lockstep
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.reference.blocks import BlockState

BLOCKS = [pair for pair in discovery.methods() if issubclass(pair.state or object, BlockState)]
pytestmark = [pytest.mark.kind("laws"), pytest.mark.parametrize("pair", BLOCKS, ids=str)]

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
few = settings(max_examples=max(2, settings().max_examples // 8))
BATCH, QUERY_HEADS, HEADS, HEAD_DIM = 2, 2, 1, 16


@dataclass(frozen=True)
class Tokens:
    """T random tokens of two rows, of which the second has padding."""

    count: int
    seed: int
    padding: int = 0
    dtype: torch.dtype = torch.float32

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Keyword arguments of `append_block`."""
        generator = torch.Generator().manual_seed(self.seed)
        query, key, value = (
            torch.randn(BATCH, heads, self.count, HEAD_DIM, generator=generator)
            for heads in (QUERY_HEADS, HEADS, HEADS)
        )
        occupied = torch.ones(BATCH, self.count, dtype=torch.bool)
        occupied[1, torch.randperm(self.count, generator=generator)[:self.padding]] = False
        made = {name: x.to(device, self.dtype) for name, x in (("query", query), ("key", key), ("value", value))}
        return {**made, "occupied": occupied.to(device)}


@st.composite
def tokens(draw: st.DrawFn, least: int = 1, most: int = 8) -> Tokens:
    return Tokens(
        count=most if draws.plain_only() else draw(st.integers(least, most)), seed=draw(st.integers(0, 2**31 - 1)),
        padding=draw(st.integers(0, 4)), dtype=draw(st.sampled_from((torch.float32, torch.bfloat16))),
    )


def new(pair: discovery.Pair, twins: Any, side: str, device: torch.device, dtype: torch.dtype, **options: Any) -> Any:
    budget = options.pop("budget", 4)
    state = getattr(checkers.module(getattr(twins, side), pair), pair.state.__name__)
    return state(
        checkers.small_config(pair, budget, options), batch=BATCH, query_heads=QUERY_HEADS, key_value_heads=HEADS,
        head_dim=HEAD_DIM, dtype=dtype, device=device,
    )


def part(inputs: dict[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    return {
        name: tensor[:, start:end] if name == "occupied" else tensor[:, :, start:end]
        for name, tensor in inputs.items()
    }


def assert_same_state(one: Any, other: Any, why: str) -> None:
    for name, value in attributes(other).items():
        if isinstance(value, Tensor):
            assert_same(attributes(one)[name], value, what=f"{name}, {why}")
    assert one.tokens_seen == other.tokens_seen


@SIDES
@given(
    drawn=tokens(2), block=st.integers(1, 3), cuts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    masked=st.booleans(),
)
@example(drawn=Tokens(8, 1), block=3, cuts=[1], masked=False)
@few
def test_prompts_in_parts_of_whole_blocks_give_the_same_bits(pair, side, drawn, block, cuts, masked, twins, device):
    """prefill equals append_block, and append_block of a prompt equals that of its parts, if they end where blocks end.
    Results are bitwise equal, with padding anywhere. Without a mask, a prompt of one block may have other kernels."""
    inputs = drawn.inputs(device)
    if not masked and drawn.count > block:
        del inputs["occupied"]
    whole, parts = (new(pair, twins, side, device, drawn.dtype, block_size=block) for _ in range(2))
    outputs, start = [], 0
    for cut in [*cuts, drawn.count]:
        end = min(drawn.count, start + cut * block)
        if start < end:
            outputs.append(parts.append_block(**part(inputs, start, end)))
        start = end
    assert_same(torch.cat(outputs, 2), whole.prefill(**inputs), what="output in pieces")
    assert_same_state(parts, whole, "in pieces")


@pytest.mark.slow_on_cpu
@given(drawn=tokens(1, 7))
@few
def test_blocks_of_one_are_decoding(pair, drawn, twins, device):
    """append_block of one token is a step, and with block_size 1 a prompt is a sequence of steps. In the reference,
    results are bitwise equal. Other code may have separate kernels: both are compared with float64, and must make the
    same choices where only one is right."""
    inputs = {name: tensor for name, tensor in drawn.inputs(device).items() if name != "occupied"}
    block, steps = (new(pair, twins, "reference", device, drawn.dtype, block_size=1) for _ in range(2))
    output = block.prefill(**inputs)
    for t in range(drawn.count):
        step = steps.step(*(tensor[:, :, t] for tensor in inputs.values()))
        assert_same(step, output[:, :, t], what=f"output of step {t}")
    assert_same_state(steps, block, "after steps")
    config = {"budget": 4, **checkers.ask(pair.name, "SMALL", {}), "block_size": 1}
    pairs = [
        lockstep.pair(
            pair.name, checkers.module(twins.optimized, pair), config=config, batch=BATCH, query_heads=QUERY_HEADS,
            key_value_heads=HEADS, head_dim=HEAD_DIM, dtype=drawn.dtype, device=device,
        ) for _ in range(2)
    ]
    pairs[0].prefill(**inputs)
    for t in range(drawn.count):
        pairs[1].step(**{name: tensor[:, :, t] for name, tensor in inputs.items()})
    if not any(both.summary.adjudicated for both in pairs):
        assert_same(pairs[1].tested.positions, pairs[0].tested.positions, what="positions after steps")


@given(drawn=tokens(5, 12), spare=st.integers(0, 2))
@few
def test_one_block_is_full_attention_before_anything_leaves(pair, drawn, spare, twins, device):
    """With block_size >= T, the prompt attends to all of its tokens, for any budget. The cache evicts afterwards."""
    inputs = drawn.inputs(device)
    state = new(pair, twins, "optimized", device, drawn.dtype, block_size=drawn.count + spare)
    truth = attend(**inputs, causal=True).output
    assert_within(state.prefill(**inputs), truth, bounds.causal_output(**inputs), what="output")
    held = inputs["occupied"].sum(-1).clamp_max(4)[:, None]
    assert_same(state.occupied.sum(-1), held.expand(BATCH, HEADS), what="tokens held")


@SIDES
@given(drawn=tokens(2, 9))
@few
def test_padding_has_no_effect(pair, side, drawn, twins, device):
    """Its outputs are zeros, it occupies no slot and changes no number. A row of only padding stays empty."""
    inputs = drawn.inputs(device)
    inputs["occupied"][0] = False
    state = new(pair, twins, side, device, drawn.dtype, block_size=3)
    output = state.append_block(**inputs)
    hidden = ~inputs["occupied"]
    assert bool((output.transpose(1, 2)[hidden] == 0).all())
    assert not bool(state.occupied[0].any()) and bool((state.positions[0] == -1).all())
    held = state.positions[1][state.occupied[1]]
    assert bool(inputs["occupied"][1][held].all()), "padding must not occupy a slot"
    assert state.tokens_seen == drawn.count


@SIDES
def test_capacity_is_budget_plus_block(pair, side, twins, device):
    state = new(pair, twins, side, device, torch.float16, budget=5, block_size=3)
    assert state.key.shape == state.value.shape == (BATCH, HEADS, 8, HEAD_DIM)
    assert state.occupied.shape == state.positions.shape == state.score.shape == (BATCH, HEADS, 8)
    state.append_block(**Tokens(9, 1, dtype=torch.float16).inputs(device))
    assert bool(state.occupied[..., :5].all()) and not bool(state.occupied[..., 5:].any())
    assert bool((state.score[..., 5:] == -torch.inf).all())


@SIDES
def test_kept_tokens_do_not_move(pair, side, twins, device):
    """A token keeps its slot below the budget until it is evicted."""
    state = new(pair, twins, side, device, torch.float32, budget=4, block_size=2)
    inputs = Tokens(14, 5).inputs(device)
    place: list[dict[int, int]] = [{}, {}]
    for start in range(0, 14, 2):
        state.append_block(**part(inputs, start, start + 2))
        for row, before in enumerate(place):
            now = {token: slot for slot, token in enumerate(state.positions[row, 0].tolist()) if token >= 0}
            assert all(before[token] == slot for token, slot in now.items() if token in before)
            place[row] = now


@SIDES
def test_a_prompt_needs_an_empty_state(pair, side, twins, device):
    inputs = Tokens(3, 2).inputs(device)
    state = new(pair, twins, side, device, torch.float32)
    state.append_block(**inputs)
    with pytest.raises(RuntimeError, match=r"prefill needs an empty state.*reset\(\)"):
        state.prefill(**inputs)
    assert state.tokens_seen == 3
    state.reset()
    state.prefill(**inputs)


@SIDES
def test_a_state_made_in_inference_mode_is_usable_outside(pair, side, twins, device):
    """And the reverse."""
    inputs, one = Tokens(9, 3).inputs(device), part(Tokens(9, 4).inputs(device), 0, 1)
    index = torch.tensor([1, 0], device=device)
    with torch.inference_mode():
        state = new(pair, twins, side, device, torch.float32)
        state.prefill(**inputs)
        state.reorder(index)
    with torch.no_grad():
        state.append_block(**one)
        state.reset()
        state.append_block(**inputs)
    with torch.inference_mode():
        state.append_block(**one)
    assert state.tokens_seen == 10


@SIDES
def test_autocast_changes_nothing(pair, side, twins, device):
    inputs = Tokens(9, 6).inputs(device)
    plain, cast = (new(pair, twins, side, device, torch.float32) for _ in range(2))
    output = plain.prefill(**inputs)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert_same(cast.prefill(**inputs), output, what="output under autocast")
    assert_same_state(cast, plain, "under autocast")
