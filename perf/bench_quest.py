"""Quest's benchmarks: a decode step, and its attention over the selected pages, against attention over all tokens.

Query heads share the bounds of the pages, but each selects its own pages. "independent" heads have few pages in common;
the pages of "alike" heads, whose queries are equal, are read once per KV head if the L2 cache keeps them. A model is
between the two. With G = 4, 16 tokens per page and 1 / 64 of the tokens selected, a step of independent heads reads an
eighth of the bytes of full attention: 1 / 16 for the bounds, and 4 / 64 for keys and values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.judge import bounds
from kvtwin.conformance.judge.checkers import quest as judge
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.optimized.baselines.quest import QuestState, _attend
from kvtwin.reference.baselines.quest import QuestConfig, page_bounds, page_scores, select_pages

from .peers import decode_peers

pytestmark = pytest.mark.benchmark(group="quest")

DEVICE, DTYPE = "cuda", torch.bfloat16
ITEM = DTYPE.itemsize
BUDGET, PAGE = 2048, 16
#: Room for the tokens that warm-up, rounds and verification append.
SPARE = 2048


class Shape(NamedTuple):
    """B, tokens, Hq, Hkv, D."""

    batch: int
    tokens: int
    query_heads: int = 32
    key_value_heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        return f"B{self.batch}-n{self.tokens // 1024}K"

    def attention_bytes(self, tokens: float) -> int:
        """Bytes of attention over so many tokens per row and KV head: keys, values, queries and outputs."""
        cache = 2 * self.batch * self.key_value_heads * tokens * self.head_dim
        return int((cache + 2 * self.batch * self.query_heads * self.head_dim) * ITEM)


LARGE = Shape(8, 2**17)
OTHERS = (Shape(1, 2**17), Shape(8, 2**15))


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))


def filled(shape: Shape, **options: Any) -> QuestState:
    """A state of random tokens, with the bounds of their pages."""
    config = QuestConfig(BUDGET, PAGE, max_tokens=shape.tokens + SPARE, **options)
    state = QuestState(
        config, batch=shape.batch, query_heads=shape.query_heads, key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim, dtype=DTYPE, device=DEVICE,
    )
    # A prompt would also compute its attention, which takes most of the time of a benchmark.
    for number, tensor in enumerate((state.key, state.value)):
        for row in range(shape.batch):
            tensor[row, :, :shape.tokens] = normal(2 * row + number, *state.key.shape[1:])[:, :shape.tokens]
    for row in range(shape.batch):
        found = page_bounds(state.key[row:row + 1, :, :shape.tokens], page_size=PAGE)
        for bound, of_row in zip((state._maximum, state._minimum), found, strict=True):
            bound[row, :, :of_row.shape[2]] = of_row[0]
    state.positions[:, :shape.tokens] = torch.arange(shape.tokens, device=DEVICE)
    state._count.fill_(shape.tokens)
    state._counters.fill_(shape.tokens)
    state._counted = shape.tokens
    return state


def queries(shape: Shape, heads: str) -> Tensor:
    """[B, Hq, D], independent or equal within a group."""
    if heads == "independent":
        return normal(100, shape.batch, shape.query_heads, shape.head_dim)
    group = shape.query_heads // shape.key_value_heads
    return normal(100, shape.batch, shape.key_value_heads, shape.head_dim).repeat_interleave(group, 1)


def tokens_read(state: QuestState) -> float:
    """The different tokens that a step reads per row and KV head, on average."""
    batch, heads, group = state.sizes.batch, state.sizes.key_value_heads, state.sizes.group
    pages = torch.zeros(batch, heads, state.config.pages_stored, dtype=torch.bool, device=DEVICE)
    pages = pages.scatter(-1, state.selected.unflatten(1, (heads, group)).flatten(2), True)
    return int(pages.sum()) * state.config.page_size / (batch * heads)


def check_step(state: QuestState, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Take a step, and check the last row: bounds, selected pages, and the output over them, with float64."""
    output, last = state.step(query, key, value)[-1:], slice(-1, None)
    assert not bool(output.isnan().any()), "part of the output was not written"
    config, total = state.config, state.tokens_seen
    pages = -(-total // config.page_size)
    found = page_bounds(state.key[last, :, :total], page_size=config.page_size)
    maximum, minimum = (bound[last, :, :pages] for bound in (state.maximum, state.minimum))
    for name, one, other in zip(found._fields, (maximum, minimum), found, strict=True):
        assert_same(one, other, what=name)
    selected, count = state.selected[last], torch.tensor([pages], device=DEVICE)
    truth = select_pages(
        page_scores(query[last].double(), maximum.double(), minimum.double()), count, k=config.pages_selected
    )
    judge.assert_pages_right(
        selected, truth, query[last], maximum, minimum, count, keep_last=True, rounded=config.round_scores
    )
    check_output(state, query, output, total)


def check_output(state: QuestState, query: Tensor, output: Tensor, total: int) -> None:
    """Check the output of the last row of `total` tokens over the selected pages, with float64."""
    output, last, config = output[-1:], slice(-1, None), state.config
    place = torch.arange(config.page_size, device=DEVICE)
    token = (state.selected[-1, :, :, None] * config.page_size + place).flatten(1)         # [Hq, N]
    row = torch.arange(len(token), device=DEVICE)[:, None] // state.sizes.group
    visible = (token < total) & (token >= 0)
    keys, values = (tensor[-1][row, token.clamp(0, total - 1)][None] for tensor in (state.key, state.value))
    case = DecodeCase.of(query[last], keys, values, visible[None], per_head=True)
    assert_within(
        output, case.attention.output[:, :, 0], judge.output_bound(case, state.sizes.group), what="output"
    )


def verify_peer(exact: DecodeCase, output: Tensor) -> None:
    """Check a peer's output of the last row."""
    assert_within(
        output[-1:].flatten(1), exact.attention.output[:, :, 0].flatten(1), bounds.decode_output(exact).flatten(1),
        what="peer's output",
    )


def step_benchmark(device_benchmark, shape: Shape, heads: str) -> None:
    state, query = filled(shape), queries(shape, heads)
    key, value = (normal(seed, shape.batch, shape.key_value_heads, shape.head_dim) for seed in (101, 102))
    keys, values = (tensor[:, :, :shape.tokens] for tensor in (state.key, state.value))
    exact = DecodeCase.of(query[-1:], keys[-1:], values[-1:])
    state.step(query, key, value)
    bounds_bytes = 2 * shape.batch * shape.key_value_heads * (shape.tokens // PAGE) * shape.head_dim * ITEM
    device_benchmark(
        lambda: state.step(query, key, value), moves=bounds_bytes + shape.attention_bytes(tokens_read(state)),
        verify=lambda _: check_step(state, query, key, value), peers=decode_peers(query, keys, values),
        peers_move=shape.attention_bytes(shape.tokens), verify_peer=lambda output: verify_peer(exact, output),
        gated=shape == LARGE,
    )


@pytest.mark.parametrize("heads", ["independent", "alike"])
def test_step(device_benchmark, heads):
    step_benchmark(device_benchmark, LARGE, heads)


@pytest.mark.parametrize("heads", ["independent", "alike"])
def test_attention_over_selected_pages(device_benchmark, heads):
    """The decoding alone, without scores and selection."""
    state, query = filled(LARGE), queries(LARGE, heads)
    given = [normal(seed, LARGE.batch, LARGE.key_value_heads, LARGE.head_dim) for seed in (101, 102)]
    for _ in range(PAGE):                       # to the end of a page: calls count tokens, but do not store any
        state.step(query, *given)
    total = state.tokens_seen
    keys, values = (tensor[:, :, :total] for tensor in (state.key, state.value))
    exact = DecodeCase.of(query[-1:], keys[-1:], values[-1:])
    device_benchmark(
        lambda: _attend(
            query, state.key, state.value, state._selected, state._count, state._counters, state._pages_now,
            state._partial, state._row_maxima, state._weight_sums, state.scale, PAGE, state._splits, True,
        ),
        moves=LARGE.attention_bytes(tokens_read(state)),
        verify=lambda output: check_output(state, query, output, total),
        peers=decode_peers(query, keys, values), peers_move=LARGE.attention_bytes(total),
        verify_peer=lambda output: verify_peer(exact, output), gated=True,
    )


@pytest.mark.parametrize("shape", OTHERS, ids=str)
def test_other_steps(device_benchmark, shape):
    step_benchmark(device_benchmark, shape, "independent")
