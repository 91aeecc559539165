"""Quest's state: what a step selects and attends to, bounds of pages, padding, full states, and options:
what only our own sides promise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import bounds, checkers, lockstep
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.conformance.suite.quest.test_quest_state import (
    BATCH,
    HEAD_DIM,
    HEADS,
    QUERY_HEADS,
    SMALL,
    both_sides,
    new_state,
    token,
    tokens,
)

pytestmark = pytest.mark.kind("equivalence")


def pointed(device: torch.device, sizes: list[float], wanted: list[list[float]]) -> tuple[list[Tensor], list[Tensor]]:
    """A prompt whose token t has the key sizes[t] in channel t of 16, and a token whose query heads weigh the channels
    as `wanted` says; its own key and its value are 0. Value t is t + 1 in channel t."""
    count = len(sizes)
    key, value = torch.zeros(1, 1, count, HEAD_DIM), torch.zeros(1, 1, count, HEAD_DIM)
    for number, size in enumerate(sizes):
        key[0, 0, number, number], value[0, 0, number, number] = size, number + 1
    query = torch.tensor([line + [0.0] * (HEAD_DIM - len(line)) for line in wanted])[None]
    prompt = [torch.zeros(1, len(wanted), count, HEAD_DIM), key, value]
    step = [query, torch.zeros(1, 1, HEAD_DIM), torch.zeros(1, 1, HEAD_DIM)]
    return [x.to(device) for x in prompt], [x.to(device) for x in step]


@both_sides
def test_each_query_head_attends_to_its_own_pages_and_the_last(side, twins, device):
    """Head 0 asks for token 5, head 1 for token 0 in a page with token 1. No other token has a weight."""
    state = new_state(getattr(twins, side), device, batch=1, scale=1.0)
    prompt, step = pointed(device, [1.0] * 7, [[0, 0, 0, 0, 0, 40], [40]])
    state.prefill(*prompt)
    assert state.selected.tolist() == [[[-1, -1], [-1, -1]]]
    output = state.step(*step)
    assert state.selected.tolist() == [[[2, 3], [0, 3]]]
    assert output[0].argmax(-1).tolist() == [5, 0]
    assert output[0].amax(-1).tolist() == [6.0, 1.0]


@both_sides
def test_tokens_of_other_pages_have_no_weight(side, twins, device):
    """With equal logits, the weight is the share among the selected tokens: those of pages 0 and 3, one of which is
    half full."""
    state = new_state(getattr(twins, side), device, batch=1)
    prompt, step = pointed(device, [0.0] * 6, [[0.0], [0.0]])
    state.prefill(*prompt)
    output = state.step(*step)
    assert state.selected.tolist() == [[[0, 3], [0, 3]]]
    expected = torch.tensor([1.0, 2.0, *[0.0] * 14], device=device) / 3
    assert_within(output[0], expected.double().expand(2, -1), torch.full_like(output[0], 1e-6).double(), what="output")


@both_sides
def test_without_keep_last_a_step_may_ignore_its_own_token(side, twins, device):
    state = new_state(getattr(twins, side), device, batch=1, keep_last=False)
    prompt, step = pointed(device, [1.0] * 6, [[1, 1, 1, 1], [0, 0, 1, 0, 0, 1]])
    state.prefill(*prompt)
    state.step(*step)
    assert state.selected.tolist() == [[[0, 1], [1, 2]]]


@both_sides
@pytest.mark.parametrize(("options", "pages"), [
    ({}, 2), ({"budget": 5}, 3), ({"budget": 1}, 1), ({"budget": 1, "least_pages": 3}, 3), ({"budget": 100}, 12),
    ({"page_size": 16, "budget": 17}, 2), ({"least_pages": 40}, 12),
], ids=str)
def test_the_number_of_pages_covers_the_budget(options, pages, side, twins, device):
    state = new_state(getattr(twins, side), device, **options)
    assert state.config.pages_selected == pages == state.selected.shape[2]


@both_sides
def test_rounded_scores_make_ties(side, twins, device):
    """In bfloat16, 256 and 257 are equal, so that the first page is selected; the exact scores select the second."""
    given = pointed(device, [256.0, 0, 1, 0, 0, 0], [[1.0], [1.0]])
    prompt, step = [[x.bfloat16() for x in part] for part in given]
    prompt[1][0, 0, 2, 1] = 256.0                                    # token 2: 256 and 1, in channels 1 and 2
    step[0][..., :3] = 1.0
    for rounded, first in ((True, 0), (False, 1)):
        state = new_state(
            getattr(twins, side), device, batch=1, dtype=torch.bfloat16, round_scores=rounded, scale=2.0**-20
        )
        state.prefill(*prompt)
        state.step(*step)
        assert state.selected.tolist() == [[[first, 3]] * 2]


@both_sides
def test_one_token_at_a_time_bounds_pages_as_a_prompt_does(side, twins, device):
    whole, stepped = (new_state(getattr(twins, side), device) for _ in range(2))
    given = tokens(device, 7)
    whole.prefill(*given)
    for number in range(7):
        stepped.step(*(tensor[:, :, number] for tensor in given))
    for name in ("maximum", "minimum", "positions"):
        assert_same(getattr(stepped, name), getattr(whole, name), what=name)
    assert bool((whole.maximum[:, :, 4:] == 0).all()) and bool((whole.maximum[:, :, :4] != 0).any())


@both_sides
def test_a_page_larger_than_the_state_has_all_tokens(side, twins, device):
    found = []
    for page_size in (2**40, 12):
        state = new_state(getattr(twins, side), device, page_size=page_size, budget=4, max_tokens=12)
        outputs = [state.prefill(*tokens(device, 6)), state.step(*token(device, seed=2))]
        found.append([*outputs, state.maximum, state.minimum])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@both_sides
def test_padding_takes_no_slot(side, twins, device):
    """A padded row has the pages of the same tokens without padding."""
    given = tokens(device, 9)
    occupied = torch.ones(BATCH, 9, dtype=torch.bool, device=device)
    occupied[1, [0, 1, 4]] = False
    padded, alone = new_state(getattr(twins, side), device), new_state(getattr(twins, side), device, batch=1)
    padded.prefill(*given, occupied)
    alone.prefill(*(tensor[1:, :, occupied[1]] for tensor in given))
    for number in range(2):
        step = token(device, seed=10 + number)
        assert_same(padded.step(*step)[1:], alone.step(*(tensor[1:] for tensor in step)), what="output")
        for name in ("maximum", "minimum", "selected"):
            assert_same(getattr(padded, name)[1:], getattr(alone, name), what=name)
    assert padded.positions[1, :9].tolist() == [2, 3, 5, 6, 7, 8, 9, 10, -1]
    assert (padded.tokens_seen, padded.occupied.sum(1).tolist()) == (11, [11, 8])


def full_attention(state: Any, query: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Attention to the first `count` tokens, and its bound."""
    occupied = torch.ones(BATCH, count, dtype=torch.bool, device=query.device)
    case = DecodeCase.of(query, state.key[:, :, :count], state.value[:, :, :count], occupied)
    return case.attention.output[:, :, 0], bounds.decode_output(case)


@both_sides
def test_a_budget_of_all_tokens_is_full_attention(side, twins, device):
    """Also if the pages are as many as max_tokens needs, and none is scored."""
    given = tokens(device, 9)
    for budget in (10, 24):
        state = new_state(getattr(twins, side), device, budget=budget)
        state.prefill(*given)
        query, key, value = token(device, seed=5)
        output = state.step(query, key, value)
        assert_within(output, *full_attention(state, query, 10), what="output")
        assert state.selected[..., :5].tolist() == [[[0, 1, 2, 3, 4]] * QUERY_HEADS] * BATCH
        assert bool((state.selected[..., 5:] == -1).all())
        state.reset()
        assert bool((state.selected == -1).all())


@both_sides
def test_a_full_state_refuses_a_token_and_stays_as_it_was(side, twins, device):
    state = new_state(getattr(twins, side), device, max_tokens=6)
    state.prefill(*tokens(device, 5))
    state.step(*token(device))
    names = ("positions", "key", "value", "maximum", "minimum", "selected")
    before = {name: getattr(state, name).clone() for name in names}
    with pytest.raises(ValueError, match="^max_tokens=6 is too small for 7 tokens"):
        state.step(*token(device))
    for name, one in before.items():
        assert_same(getattr(state, name), one, what=name)
    assert state.tokens_seen == 6


@pytest.mark.parametrize("budget", [4, 6])
def test_a_replayed_step_beyond_the_last_slot_drops_its_token(budget, twins, device):
    """The host does not count replays of a graph. The kernels do, and attend to the tokens that there are."""
    state = new_state(twins.optimized, device, max_tokens=6, budget=budget)
    if not hasattr(state, "_counted"):
        pytest.skip("counts tokens on the host in an attribute of kvtwin's own state, `_counted`")
    occupied = torch.ones(BATCH, 6, dtype=torch.bool, device=device)
    occupied[1, 0] = False
    state.prefill(*tokens(device, 6), occupied)
    names = ("positions", "key", "value", "maximum", "minimum")
    before = {name: getattr(state, name).clone() for name in names}
    state._counted = 0
    query, key, value = token(device, seed=5)
    output = state.step(query, key, value)
    assert state.tokens_seen == 6
    for name, one in before.items():
        assert_same(getattr(state, name), one, what=name)
    assert not bool(output.isnan().any())
    if budget == 6:
        case = DecodeCase.of(query[:1], state.key[:1], state.value[:1])
        assert_within(output[:1], case.attention.output[:, :, 0], bounds.decode_output(case), what="output")


def test_reordered_rows_take_their_pages_along(twins, device):
    """After a step, and before the next one widens the bounds of a page that is not full."""
    state = new_state(twins.optimized, device)
    state.prefill(*tokens(device, 5))
    state.step(*token(device))
    names = ("positions", "key", "value", "maximum", "minimum", "selected")
    before = {name: getattr(state, name).clone() for name in names}
    state.reorder(torch.tensor([1, 0], device=device))
    for name, one in before.items():
        assert_same(getattr(state, name), one.flip(0), what=name)


@pytest.mark.parametrize("options", [
    {"budget": 5, "page_size": 3, "keep_last": False, "least_pages": 2}, {"budget": 9, "page_size": 4},
], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_steps_keep_step_with_float64(dtype, options, twins, device):
    """Rows of different lengths, more pages than a chunk of the selection has, and three query heads per KV head."""
    trace = StateTrace(
        method="quest", config=tuple({**SMALL, "max_tokens": 80, **options}.items()), batch=2, group=3, head_dim=16,
        dtype=dtype, prompt=67, padding="left_padding", steps=5, seed=4, device=str(device),
    )
    summary = lockstep.run(trace, twins.optimized.baselines.quest)
    assert summary.steps == 5
    assert summary.decisive >= 15, "the three query heads of the long row select among 17 pages or more"


def test_the_memory_of_a_step_is_that_of_the_selected_tokens(twins, device):
    state = new_state(twins.optimized, device)
    state.prefill(*tokens(device, 8))
    state.step(*token(device))
    # A full page and a page of one token, of one KV head.
    assert checkers.checker_of("quest").bytes_of(state) == BATCH * HEADS * 3 * 2 * HEAD_DIM * 4
