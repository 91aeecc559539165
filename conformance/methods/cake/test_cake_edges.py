"""CAKE at the edges of its rules: the longest short prompt, padding in the window, what happens between the prompts of
two layers, and lists of tokens that fill a tile exactly: what only our own sides promise.
"""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.suite.cake.test_cake_edges import (
    BATCH,
    BUDGET,
    HEAD_DIM,
    HEADS,
    WINDOW,
    both_sides,
    new_states,
    prompt,
)

pytestmark = pytest.mark.kind("equivalence")


@both_sides
@pytest.mark.parametrize("count", [BUDGET + WINDOW, BUDGET + WINDOW + 1])
def test_layers_share_equally_up_to_a_prompt_of_budget_and_window(count, side, twins, device):
    """A prompt of budget + window tokens is short: its layers have equal budgets, though their preferences differ. With
    one token more, the preferences decide."""
    states = new_states(getattr(twins, side), device, 2)
    for layer, state in enumerate(states):
        state.prefill(*prompt(device, count, layer))
    cascade = states[0].cascade
    assert bool((cascade.log_preferences[:, 0] > cascade.log_preferences[:, 1] + 1).all())
    if count == BUDGET + WINDOW:
        assert cascade.budgets.tolist() == [[BUDGET - WINDOW] * 2] * BATCH
    else:
        assert bool((cascade.budgets[:, 0] > cascade.budgets[:, 1]).all())
    assert [state.budgets.tolist() for state in states] == cascade.budgets.T.tolist()


@both_sides
def test_padding_in_the_window_does_not_lower_the_cap(side, twins, device):
    """Row 1 has one token in its window of two. Both rows have ten tokens before it, which the first of three layers
    keeps: alone, it would get twelve."""
    [state, *_] = new_states(getattr(twins, side), device, 3)
    occupied = torch.ones(BATCH, 12, dtype=torch.bool, device=device)
    occupied[1, 11] = False
    state.prefill(*prompt(device, 12, 0), occupied)
    assert state.budgets.tolist() == [10, 10]
    for head in range(HEADS):
        assert [int((state.positions[row, head] >= 0).sum()) for row in range(BATCH)] == [12, 11]


@both_sides
def test_rows_may_be_reordered_before_the_next_layer_has_the_prompt(side, twins, device):
    """Row 0 is short and keeps its seven tokens; row 1 evicts again when layer 1 joins."""
    index = torch.tensor([1, 0], device=device)
    occupied = torch.ones(BATCH, 20, dtype=torch.bool, device=device)
    occupied[0, :13] = False
    found = []
    for reordered in (False, True):
        first, second = new_states(getattr(twins, side), device, 2)
        first.prefill(*prompt(device, 20, 0), occupied)
        given = [*prompt(device, 20, 1), occupied]
        if reordered:
            for each in (first, first.cascade):
                each.reorder(index)
            given = [each[index] for each in given]
        second.prefill(*given)
        assert first.positions.shape[2] < 20, "layer 0 must have evicted"
        rows = index if reordered else slice(None)
        found.append([(each.positions[rows], each.budgets[rows]) for each in (first, second)])
    for before, after in zip(*found, strict=True):
        for one, other in zip(before, after, strict=True):
            assert_same(other, one, what="reordered")


@both_sides
def test_layer_0_forgets_the_last_prompt(side, twins, device):
    """Only the state of layer 0 is reset, not the cascade. When layer 0 has the new prompt, layer 1 has the preference
    and the budget of a cascade without a prompt."""
    states = new_states(getattr(twins, side), device, 2)
    for layer, state in enumerate(states):
        state.prefill(*prompt(device, 20, layer))
    cascade = states[0].cascade
    assert cascade.budgets[:, 1].tolist() != [BUDGET - WINDOW] * BATCH
    states[0].reset()
    states[0].prefill(*prompt(device, 20, 0))
    assert cascade.log_preferences[:, 1].tolist() == [-torch.inf] * BATCH
    assert cascade.budgets[:, 1].tolist() == [BUDGET - WINDOW] * BATCH


@both_sides
def test_a_list_moves_up_to_its_end_where_a_tile_ends_before_the_window(side, twins, device):
    """Tiles have 16 tokens in the interpreter. At the first step, the oldest of 16 tokens before the window goes: the
    two tokens of the window follow in the second tile. Later, the token that leaves the window always weighs least."""
    cake = getattr(twins, side).baselines.cake
    state = cake.CAKEState(
        cake.CAKEConfig(budget=17, window=WINDOW, kernel_size=1, scale=1.0), batch=1, query_heads=1, key_value_heads=1,
        head_dim=HEAD_DIM, dtype=torch.float32, device=device,
    )
    query, key = torch.zeros(2, 1, 1, 24, HEAD_DIM, device=device)
    query[..., 0] = 1.0
    key[..., 0] = -2.0
    key[:, :, 0, 0], key[:, :, 1:16, 0] = -3.0, 4.0
    state.prefill(query[:, :, :17], key[:, :, :17], key[:, :, :17])
    for newest in range(17, 24):
        state.step(query[:, :, newest], key[:, :, newest], key[:, :, newest])
        held = sorted(position for position in state.positions[0, 0].tolist() if position >= 0)
        assert held == [*range(1, 16), newest - 1, newest]


@both_sides
def test_a_short_prompt_and_its_window_span_tiles(side, twins, device):
    """Tiles have 16 tokens in the interpreter. Token 12 weighs least, but is in the window of 20 for two steps. The
    first step evicts seven of 31 tokens, behind which the list moves up in both tiles."""
    cake = getattr(twins, side).baselines.cake
    state = cake.CAKEState(
        cake.CAKEConfig(budget=24, window=20, kernel_size=1, scale=1.0), batch=1, query_heads=1, key_value_heads=1,
        head_dim=HEAD_DIM, dtype=torch.float32, device=device,
    )
    query, key = torch.zeros(2, 1, 1, 33, HEAD_DIM, device=device)
    query[..., 0], key[:, :, 12, 0] = 1.0, -5.0
    state.prefill(query[:, :, :30], key[:, :, :30], key[:, :, :30])
    for newest, expected in ((30, [*range(7, 31)]), (31, [*range(8, 32)]), (32, [*range(8, 12), *range(13, 33)])):
        state.step(query[:, :, newest], key[:, :, newest], key[:, :, newest])
        assert sorted(position for position in state.positions[0, 0].tolist() if position >= 0) == expected
