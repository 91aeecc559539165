"""CAKE's state and its cascade: what prompts and steps evict, several layers, short prompts, slots, order, errors:
what only our own sides promise.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import bounds, lockstep
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.conformance.suite.cake.test_cake_state import (
    BATCH,
    HEAD_DIM,
    HEADS,
    QUERY_HEADS,
    both_sides,
    held,
    new_states,
    token,
    tokens,
)

pytestmark = pytest.mark.kind("equivalence")


def pointed(device: torch.device, sizes: list[float]) -> list[Tensor]:
    """A prompt of one row whose queries weigh token t by exp(sizes[t]): all heads alike."""
    count = len(sizes)
    query, key = torch.zeros(1, QUERY_HEADS, count, HEAD_DIM), torch.zeros(1, HEADS, count, HEAD_DIM)
    query[..., 0], key[..., 0] = 1.0, torch.tensor(sizes)
    value = torch.arange(float(count)).view(1, 1, count, 1).expand(1, HEADS, count, HEAD_DIM)
    return [each.to(device).contiguous() for each in (query, key, value)]


@both_sides
def test_a_prompt_keeps_its_window_and_the_best_of_the_rest(side, twins, device):
    [state] = new_states(getattr(twins, side), device, batch=1, scale=1.0)
    state.prefill(*pointed(device, [0, 5, 1, 4, 0, 3, 2, 0, 0, 0]))
    assert [held(state, head=head) for head in range(HEADS)] == [[1, 3, 5, 6, 8, 9]] * HEADS
    assert (state.budgets.tolist(), state.tokens_seen, state.positions.shape[2]) == ([4], 10, 7)
    assert state.positions[0, 0].tolist() == [1, 3, 5, 6, 8, 9, -1]


@both_sides
def test_the_indicator_is_pooled(side, twins, device):
    """With a pool of three, the neighbours of the best token score as high as it does."""
    [state] = new_states(getattr(twins, side), device, batch=1, scale=1.0, kernel_size=3, budget=5)
    state.prefill(*pointed(device, [0, 0, 0, 0, 5, 0, 0, 0, 0, 0]))
    assert held(state) == [3, 4, 5, 8, 9]


@both_sides
def test_of_equal_tokens_the_oldest_are_evicted(side, twins, device):
    [state] = new_states(getattr(twins, side), device, batch=1, scale=1.0)
    state.prefill(*pointed(device, [0.0] * 12))
    assert held(state) == [6, 7, 8, 9, 10, 11]


@both_sides
@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_a_short_prompt_stays_whole_until_the_first_step(count, side, twins, device):
    """Up to budget + window = 8 tokens. The step attends to all of them, then evicts down to the budget."""
    [state] = new_states(getattr(twins, side), device)
    given = tokens(device, count)
    state.prefill(*given)
    short = count <= 8
    assert [len(held(state, row)) for row in range(BATCH)] == [count if short else 6] * BATCH
    assert state.budgets.tolist() == [4] * BATCH
    query, key, value = token(device, seed=5)
    kept = held(state)
    output = state.step(query, key, value)
    assert [len(held(state, row, head)) for row in range(BATCH) for head in range(HEADS)] == [min(count + 1, 6)] * 4
    if short:
        assert kept == list(range(count))
        whole = [torch.cat((one, new[:, :, None]), 2) for one, new in zip(given[1:], (key, value), strict=True)]
        case = DecodeCase.of(query, *whole)
        assert_within(output, case.attention.output[:, :, 0], bounds.decode_output(case), what="output")


@both_sides
def test_rows_of_different_lengths_have_their_own_budgets(side, twins, device):
    """Row 0 has 7 tokens and keeps them; row 1, with 12, evicts."""
    first, second = new_states(getattr(twins, side), device, 2)
    occupied = torch.ones(BATCH, 12, dtype=torch.bool, device=device)
    occupied[0, :5] = False
    for layer, state in enumerate((first, second)):
        state.prefill(*tokens(device, 12, seed=layer, size=1 - 0.9 * layer), occupied)
    budgets = first.cascade.budgets
    assert budgets[0].tolist() == [4, 4]
    assert int(budgets[1].sum()) == 8 and budgets[1, 0] > budgets[1, 1]
    for layer, state in enumerate((first, second)):
        assert held(state) == list(range(5, 12))
        assert [len(held(state, 1, head)) for head in range(HEADS)] == [int(budgets[1, layer]) + 2] * HEADS
        assert state.positions.shape[2] == max(7, int(budgets[1, layer]) + 2) + 1


@both_sides
def test_each_layer_takes_from_those_before_it(side, twins, device):
    states = new_states(getattr(twins, side), device, 3)
    cascade, seen = states[0].cascade, []
    sets: list[list[set[int]]] = []
    for layer, state in enumerate(states):
        assert bool(cascade.log_preferences[:, layer:].isinf().all())
        state.prefill(*tokens(device, 40, seed=layer, size=(0.5, 1.0, 0.05)[layer]))
        granted = cascade.budgets[:, :layer + 1]
        seen.append(granted.sum(1).tolist())
        assert [each.budgets.tolist() for each in states[:layer + 1]] == granted.T.tolist()
        sets.append([set(held(each, 1, 1)) for each in states[:layer + 1]])
        assert [len(one) for one in sets[-1]] == [int(count) + 2 for count in granted[1]]
    assert seen == [[12, 12]] * 3
    for earlier, later in pairwise(sets):
        assert all(new <= old for old, new in zip(earlier, later, strict=False))
    assert cascade.log_preferences.isfinite().all() and cascade.budgets[1, 2] < cascade.budgets[1, 1]


@both_sides
def test_budgets_are_capped_by_the_tokens_that_there_are(side, twins, device):
    """The first layer alone would get 3 * 4 tokens of 10. The sharp layer gets all of them, others the rest."""
    states = new_states(getattr(twins, side), device, 3, tau2=0.05)
    granted = []
    for layer, state in enumerate(states):
        state.prefill(*tokens(device, 12, seed=layer, size=(0.01, 1.5, 0.01)[layer]))
        granted.append(state.cascade.budgets[0, :layer + 1].tolist())
    assert granted[0] == [10] and granted[1] == [2, 10] and granted[2][1] == 10
    assert sum(granted[2]) == 12 and min(granted[2]) >= 1


@both_sides
def test_without_any_preference_layers_share_equally(side, twins, device):
    """A window of one query has no shift."""
    states = new_states(getattr(twins, side), device, 2, window=1)
    for layer, state in enumerate(states):
        state.prefill(*tokens(device, 20, seed=layer))
    assert states[0].cascade.budgets.tolist() == [[5, 5]] * BATCH
    assert bool((states[0].cascade.log_preferences == -torch.inf).all())


@both_sides
def test_a_batch_may_share_its_preferences(side, twins, device):
    """Alone, the rows have budgets of their own."""
    found = {}
    for whole_batch in (False, True):
        states = new_states(getattr(twins, side), device, 2, whole_batch=whole_batch)
        for layer, state in enumerate(states):
            given = tokens(device, 40, seed=layer)
            given[0][layer] *= 0.05
            state.prefill(*given)
        found[whole_batch] = states[0].cascade.budgets.tolist()
    assert found[False][0][0] < found[False][0][1] and found[False][1][0] > found[False][1][1]
    assert found[True][0] == found[True][1]


@both_sides
def test_reordered_rows_take_their_budgets_along(side, twins, device):
    states = new_states(getattr(twins, side), device, 2)
    for layer, state in enumerate(states):
        given = tokens(device, 40, seed=layer)
        given[0][layer] *= 0.05
        state.prefill(*given)
    cascade, index = states[0].cascade, torch.tensor([1, 0], device=device)
    before = [cascade.budgets.clone(), cascade.log_preferences.clone(), *(each.budgets.clone() for each in states)]
    assert before[0][0].tolist() != before[0][1].tolist()
    for each in (cascade, *states):
        each.reorder(index)
    after = [cascade.budgets, cascade.log_preferences, *(each.budgets for each in states)]
    for one, other in zip(before, after, strict=True):
        assert_same(other, one.flip(0), what="reordered")
    for number in range(2):
        for state in states:
            state.step(*token(device, seed=number))
    for layer, state in enumerate(states):
        expected = (cascade.budgets[:, layer] + 2).tolist()
        assert [len(held(state, row)) for row in range(BATCH)] == expected
    cascade.reset()
    assert bool((cascade.budgets == 4).all()) and bool((cascade.log_preferences == -torch.inf).all())


def weigh(device: torch.device, size: float, value: float = 0.0) -> list[Tensor]:
    """A token whose query weighs all tokens by their sizes; its own size is `size`."""
    query, key, new = torch.zeros(1, QUERY_HEADS, HEAD_DIM), torch.zeros(1, HEADS, HEAD_DIM), value
    query[..., 0], key[..., 0] = 1.0, size
    return [query.to(device), key.to(device), torch.full_like(key, new).to(device)]


@both_sides
def test_a_step_evicts_the_lowest_weight_outside_of_the_window(side, twins, device):
    """The newest two tokens stay, though they weigh least. The next token takes the slot that has become free."""
    [state] = new_states(getattr(twins, side), device, batch=1, scale=1.0)
    state.prefill(*pointed(device, [3.0, 1.0, 2.0, 4.0, -5.0, -6.0]))
    where = []
    for size, evicted, expected in (
        (0.0, 4, [0, 1, 2, 3, 5, 6]), (9.0, 5, [0, 1, 2, 3, 6, 7]), (0.0, 6, [0, 1, 2, 3, 7, 8]),
        (0.0, 1, [0, 2, 3, 7, 8, 9]),
    ):
        before, newest = state.positions[0, 0].tolist(), state.tokens_seen
        state.step(*weigh(device, size))
        now = state.positions[0, 0].tolist()
        assert held(state) == expected
        assert now[before.index(-1)] == newest and now[before.index(evicted)] == -1
        where.append(now.index(0))
    assert where == [0] * 4                                  # no token moves


@both_sides
def test_a_token_takes_the_lowest_free_slot(side, twins, device):
    """After a short prompt, the first step leaves several slots free."""
    [state] = new_states(getattr(twins, side), device, budget=10, window=4)
    state.prefill(*tokens(device, 14))
    for number in range(8):
        free = (state.positions < 0).to(torch.int8).argmax(-1)
        state.step(*token(device, seed=number))
        newest = (state.positions == 14 + number).to(torch.int8).argmax(-1)
        assert_same(newest, free, what="slot of the new token")


@both_sides
def test_equal_weights_evict_the_oldest_token_wherever_it_lies(side, twins, device):
    """After some steps, slots are no longer in the order of positions."""
    [state] = new_states(getattr(twins, side), device, batch=1, scale=1.0)
    state.prefill(*pointed(device, [0.0] * 9))
    for number in range(9):
        assert held(state) == list(range(3 + number, 9 + number))
        state.step(*weigh(device, 0.0))


@both_sides
def test_the_pool_runs_in_the_order_of_positions_and_ends_at_the_window(side, twins, device):
    """Beyond the first and the last token outside of the window are zeros, so that with equal weights these score less
    than others."""
    [state] = new_states(getattr(twins, side), device, batch=1, scale=1.0, kernel_size=3, budget=8)
    state.prefill(*pointed(device, [0.0] * 10))             # short: all stay
    state.step(*weigh(device, 0.0))                         # equal: the pools of tokens 0 and 8 have a zero each
    assert held(state) == [2, 3, 4, 5, 6, 7, 9, 10]         # these two, and of the others the oldest
    state.step(*weigh(device, 8.0))                         # token 9 has left the window, and is the last by position
    assert held(state) == [3, 4, 5, 6, 7, 9, 10, 11]


@both_sides
def test_a_step_attends_to_the_token_that_it_evicts(side, twins, device):
    [state] = new_states(getattr(twins, side), device, batch=1, scale=1.0)
    query, key, value = pointed(device, [0.0] * 7)
    state.prefill(query, key, value)
    output = state.step(*weigh(device, 0.0, 7.0))
    assert held(state) == [2, 3, 4, 5, 6, 7]
    # The mean of 0 to 7, with weights of exactly 1 / 8.
    assert_same(output, torch.full_like(output, 3.5), what="output")


@both_sides
def test_padding_in_the_window_leaves_room_for_later_tokens(side, twins, device):
    """The row has one token in its window of two. It evicts again when it has more than budget + window tokens."""
    [state] = new_states(getattr(twins, side), device)
    occupied = torch.ones(BATCH, 12, dtype=torch.bool, device=device)
    occupied[1, 10] = False
    state.prefill(*tokens(device, 12), occupied)
    assert [len(held(state, row)) for row in range(BATCH)] == [6, 5]
    for number in range(3):
        state.step(*token(device, seed=number))
        assert [len(held(state, row, 1)) for row in range(BATCH)] == [6, 6]


@pytest.mark.parametrize(("layers", "options", "trace"), [
    (3, {"budget": 8, "window": 3}, {"prompt": 40, "padding": "left_padding", "dtype": torch.float16}),
    (4, {"budget": 6, "window": 2, "tau2": 0.05}, {"prompt": 20, "dtype": torch.bfloat16}),
    (2, {"budget": 8, "window": 4, "kernel_size": 5}, {"prompt": 30, "content": "duplicates"}),
    (2, {"budget": 9, "window": 4, "whole_batch": True}, {"prompt": 25, "padding": "random"}),
    (2, {"budget": 7, "window": 4}, {"prompt": 14, "reorder_at": 1, "reset_at": 3}),
    (3, {"budget": 5, "window": 1, "gamma": 0.0}, {"prompt": 24, "content": "equal_keys"}),
    (2, {"budget": 6, "window": 5, "kernel_size": 1}, {"prompt": 5}),
], ids=str)
def test_layers_keep_step_with_float64(layers, options, trace, twins, device):
    """Other dtypes and layers than the traces that are drawn: a binding cap, equal tokens, no prefix."""
    made = StateTrace(
        method="cake", config=tuple(options.items()), layers=layers, device=str(device),
        **{"batch": 2, "key_value_heads": 1, "group": 2, "steps": 4, "seed": 7, **trace},
    )
    summary = lockstep.run(made, twins.optimized.baselines.cake)
    assert summary.steps == 4 * layers
    assert summary.decisive >= (layers if made.prompt > 11 else 0), "budgets and tokens must be decided"
