"""CAKE's benchmarks: a decode step that evicts a token, against attention alone, and what a prompt's window observes.

A step reads every key and value once, as attention does. Besides, it writes and reads a logit per query head and token,
and keeps the list of the tokens in order of their positions. The large shape is a layer with 30 % of 128K tokens, as in
SyncKV's tables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.judge import bounds
from kvtwin.conformance.judge.checkers import cake_bounds
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.optimized.baselines.cake import CAKEState, ObserveResult, observe
from kvtwin.reference.baselines.cake import CAKEConfig
from kvtwin.reference.baselines.cake_prompt import step_score

from .peers import decode_peers

pytestmark = pytest.mark.benchmark(group="cake")

DEVICE, DTYPE = "cuda", torch.bfloat16
ITEM = DTYPE.itemsize
WINDOW = 32


class Shape(NamedTuple):
    """B, tokens, Hq, Hkv, D."""

    batch: int
    tokens: int
    query_heads: int = 32
    key_value_heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        return f"B{self.batch}-n{self.tokens}"

    @property
    def key_bytes(self) -> int:
        return self.batch * self.key_value_heads * self.tokens * self.head_dim * ITEM

    @property
    def attention_bytes(self) -> int:
        """Bytes of attention: keys, values, queries and outputs."""
        return 2 * self.key_bytes + 2 * self.batch * self.query_heads * self.head_dim * ITEM


STEPS = (Shape(128, 3200), Shape(8, 3200), Shape(1, 39322), Shape(8, 39322))
PROMPTS = (Shape(8, 2**15), Shape(1, 2**17))


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))


def fill(state: CAKEState) -> CAKEState:
    """Continue as if the state had received as many tokens as its budget. Keys and values are left as they are."""
    tokens = state.config.budget
    state.positions.fill_(-1)
    for buffer in (state.positions, state._order):
        buffer[..., :tokens] = torch.arange(tokens, device=state.device, dtype=buffer.dtype)
    for counter in (state._held, state._free, state._seen):
        counter.fill_(tokens)
    return state


def filled(shape: Shape, **options: Any) -> CAKEState:
    """A state of random tokens whose next step evicts one."""
    state = CAKEState(
        CAKEConfig(shape.tokens, window=WINDOW, **options), batch=shape.batch, query_heads=shape.query_heads,
        key_value_heads=shape.key_value_heads, head_dim=shape.head_dim, dtype=DTYPE, device=DEVICE,
    )
    for number, tensor in enumerate((state.key, state.value)):
        for row in range(shape.batch):
            tensor[row] = normal(2 * row + number, *tensor.shape[1:])
    return fill(state)


def check_step(state: CAKEState, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Take a step that evicts one token per KV head, and check the last row: the output, the token that left, and the
    order of the others, with float64."""
    before, position = state.positions[-1:].clone(), state.tokens_seen
    output, last = state.step(query, key, value)[-1:], slice(-1, None)
    assert not bool(output.isnan().any()), "part of the output was not written"
    after, window = state.positions[last], state.config.window
    newest = torch.argmax((before < 0).int(), -1, keepdim=True)           # the lowest free slot
    positions = before.scatter(-1, newest, position)
    for name, cache, given in (("key", state.key, key), ("value", state.value, value)):
        stored = cache[last].take_along_dim(newest[..., None], 2)[:, :, 0]
        assert_same(stored, given[last], what=f"{name} of the new token")
    case = DecodeCase.of(
        query[last], state.key[last], state.value[last], positions >= 0, scale=state.scale, per_head=True
    )
    assert_within(output, case.attention.output[:, :, 0], bounds.decode_output(case), what="output")
    left = (positions >= 0) & (after < 0)
    assert_same(left.sum(-1), torch.ones_like(left[..., 0], dtype=torch.int64), what="number of evicted tokens")
    assert_same(after, positions.masked_fill(left, -1), what="positions")
    stays = positions > position - window
    assert not bool((left & stays).any()), "a token of the window was evicted"
    size = state.config.kernel_size
    score = step_score(case.attention.weight[:, :, 0], positions, stays, kernel_size=size)
    place = positions.argsort(-1).argsort(-1)
    error = cake_bounds.step_error(case.attention, stays | (positions < 0), place, score, size)
    limit = (score + error).masked_fill(positions < 0, torch.inf).amin(-1)
    assert bool(((score - error)[left] <= limit.flatten()).all()), "a token with a higher score was evicted"
    held = int(state._held[-1, 0])
    listed = after.gather(-1, state._order[last, :, :held].long())
    assert_same(listed, after.sort(-1).values[..., -held:], what="tokens in order")


@pytest.mark.parametrize("shape", STEPS, ids=str)
def test_step(device_benchmark, shape):
    state = filled(shape)
    query = normal(100, shape.batch, shape.query_heads, shape.head_dim)
    key, value = (normal(seed, shape.batch, shape.key_value_heads, shape.head_dim) for seed in (101, 102))
    cache = state.key[:, :, :shape.tokens], state.value[:, :, :shape.tokens]
    device_benchmark(
        lambda: state.step(query, key, value), moves=shape.attention_bytes,
        verify=lambda _: check_step(state, query, key, value), peers=decode_peers(query, *cache), gated=False,
    )


@pytest.mark.parametrize("shape", PROMPTS, ids=str)
def test_observe(device_benchmark, shape):
    query = normal(1, shape.batch, shape.query_heads, WINDOW, shape.head_dim)
    key = normal(2, shape.batch, shape.key_value_heads, shape.tokens, shape.head_dim)

    def verify(found: ObserveResult) -> None:
        """The last row, one KV head at a time: float64 takes much memory."""
        occupied, group = torch.ones(1, shape.tokens, dtype=torch.bool, device=DEVICE), query.shape[1] // key.shape[1]
        parts = []
        for head in range(shape.key_value_heads):
            interval = cake_bounds.observation_intervals(
                query[-1:, head * group:(head + 1) * group], key[-1:, head:head + 1], occupied, gamma=200.0,
                kernel_size=5, scale=None,
            )
            score, exact = found.score[-1:, head:head + 1], interval.exact.score
            error = (interval.score.high - exact).masked_fill(exact.isinf(), 0)
            assert_within(score, exact, error, what=f"score of head {head}")
            parts.append(torch.stack([torch.cat(interval.dispersion), torch.cat(interval.shift)]))
        for name, (low, high) in zip(("dispersion", "shift"), torch.stack(parts).sum(0).tolist(), strict=True):
            value = float(getattr(found, name)[-1])
            assert low <= value <= high, f"{name}: got {value}, expected a number from {low} to {high}"

    device_benchmark(lambda: observe(query, key), moves=shape.key_bytes, verify=verify, gated=False)
