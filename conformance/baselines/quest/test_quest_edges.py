"""Quest at its edges: equal pages in several tiles, NaN in a key, and rows without tokens."""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.baselines.quest.test_quest_state import HEAD_DIM, new_state, token, tokens

pytestmark = pytest.mark.kind("equivalence")

both_sides = pytest.mark.parametrize("side", ["reference", "optimized"])


@both_sides
def test_of_equal_pages_in_three_tiles_the_first_are_selected(side, twins, device):
    """A tile has 16 pages in the interpreter and 8,192 on a GPU. The selection ends in the second one."""
    tile = 16 if device.type == "cpu" else 8192
    score, count = torch.ones(1, 1, 3 * tile, device=device), torch.tensor([3 * tile], device=device)
    k = tile + tile // 4
    found = getattr(twins, side).baselines.quest.select_pages(score, count, k=k, keep_last=False)
    assert found[0, 0].tolist() == list(range(k))


@both_sides
@pytest.mark.parametrize("keep_last", [True, False])
@pytest.mark.parametrize("values", [3, 2**20, None])
def test_the_best_of_any_number_of_pages_are_selected(side, values, keep_last, twins, device):
    """Among scores of few or many values, or each higher than the one before, as a stable sort does, with less than a
    tile and with more than two."""
    tile = 16 if device.type == "cpu" else 8192
    of_one, of_two, of_more = (1, 2, tile - 1, tile), (tile + 1, 3 * tile // 2, 2 * tile - 2), (2 * tile, 3 * tile + 3)
    for pages in of_one + of_two + of_more:
        if values is None:
            score = torch.arange(pages + 2.0)
        else:
            score = torch.randint(values, (pages + 2,), generator=torch.Generator().manual_seed(pages)) - values / 2
        score[-2:] = torch.inf                                          # there are no such pages
        if pages > 4:
            score[1], score[2] = torch.nan, -torch.inf                  # NaN ranks as -inf
        rank = torch.where(score.isnan(), -torch.inf, score)[:pages]
        order = [int(page) for page in torch.argsort(rank, descending=True, stable=True)]
        if keep_last:
            order.remove(pages - 1)
            order.insert(0, pages - 1)
        for k in sorted({1, 2, tile // 2, tile + 1, pages - 1, pages, pages + 1} - {0}):
            found = getattr(twins, side).baselines.quest.select_pages(
                score.float().to(device)[None, None], torch.tensor([pages], device=device), k=min(k, pages + 2),
                keep_last=keep_last,
            )
            expected = sorted(order[:k])
            assert found[0, 0].tolist() == expected + [-1] * (min(k, pages + 2) - len(expected)), (pages, k)


@both_sides
@pytest.mark.parametrize("first", ["prompt", "step"])
def test_nan_in_a_key_is_both_bounds_of_its_page(side, first, twins, device):
    """In its channel, whether it comes in a prompt or in a step. Other pages and channels have none."""
    state = new_state(getattr(twins, side), device, batch=1)
    query, key, value = tokens(device, 4, batch=1)
    key[0, 0, 1 if first == "step" else 0, 3] = torch.nan
    state.prefill(query[:, :, :1], key[:, :, :1], value[:, :, :1])
    for number in range(1, 4):
        state.step(*(tensor[:, :, number].contiguous() for tensor in (query, key, value)))
    expected = torch.zeros(1, 1, state.maximum.shape[2], HEAD_DIM, dtype=torch.bool)
    expected[0, 0, 0, 3] = True
    for bound in (state.maximum, state.minimum):
        assert torch.equal(bound.isnan().cpu(), expected)


@both_sides
def test_a_row_of_padding_begins_with_its_first_step(side, twins, device):
    """After a prompt of which row 1 has no token, a step's token is that row's first one."""
    state = new_state(getattr(twins, side), device)
    query, key, value = tokens(device, 3)
    occupied = torch.tensor([[True] * 3, [False] * 3], device=device)
    output = state.prefill(query, key, value, occupied)
    assert not output[1].any() and not state.occupied[1].any()
    step = token(device, seed=2)
    output = state.step(*step)
    assert state.positions[:, :4].tolist() == [[0, 1, 2, 3], [3, -1, -1, -1]]
    assert torch.equal(output[1], step[2][1].expand_as(output[1]))
    assert torch.equal(state.maximum[1, :, 0], step[1][1]) and torch.equal(state.minimum[1, :, 0], step[1][1])


@both_sides
@pytest.mark.parametrize("budget", [4, 24])
def test_selected_pages_move_with_their_rows(side, budget, twins, device):
    """With a budget of all tokens, too, where the rows have different numbers of pages."""
    state = new_state(getattr(twins, side), device, budget=budget)
    occupied = torch.ones(2, 7, dtype=torch.bool, device=device)
    occupied[1, :5] = False
    state.prefill(*tokens(device, 7), occupied)
    state.step(*token(device, seed=2))
    selected = state.selected.clone()
    assert not torch.equal(selected[0], selected[1])
    state.reorder(torch.tensor([1, 0], device=device))
    assert torch.equal(state.selected, selected.flip(0))
