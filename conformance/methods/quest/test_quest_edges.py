"""Quest at its edges: equal pages in several tiles, NaN in a key, and rows without tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.judge.checkers import quest as judge
from kvtwin.conformance.judge.compare import assert_within
from kvtwin.conformance.suite.quest.test_quest_state import HEAD_DIM, new_state, token, tokens

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


def scores_of(order: str, room: int) -> Tensor:
    """Scores of pages: of few neighbouring or of many values, each higher than the one before, or each lower."""
    if order in ("rising", "falling"):
        return torch.arange(float(room)) if order == "rising" else -torch.arange(float(room))
    generator = torch.Generator().manual_seed(room)
    if order == "few values":
        score = 1.0 + torch.randint(3, (room,), generator=generator) * 2.0**-23
    else:
        score = torch.randint(2**20, (room,), generator=generator) - 2.0**19
    if room > 4:
        score[1], score[2] = torch.nan, -torch.inf                      # NaN ranks as -inf
    return score


@both_sides
@pytest.mark.parametrize("keep_last", [True, False])
@pytest.mark.parametrize("more", [0, 2])
@pytest.mark.parametrize("order", ["few values", "many values", "rising", "falling"])
def test_the_best_of_any_number_of_pages_are_selected(side, order, more, keep_last, twins, device):
    """As a stable sort selects them, with less than a tile and with more than two, with and without room for more."""
    on_cpu = device.type == "cpu"
    tile = 16 if on_cpu else 8192
    # On a GPU fewer, since most have a kernel of their own.
    some = (1, tile - 1, tile, 3 * tile // 2) if on_cpu else ()
    for pages in (*some, 2, tile + 1, 2 * tile, 2 * tile + 1, 3 * tile + 1):
        score = scores_of(order, pages + more)
        score[pages:] = torch.inf                                       # there are no such pages
        rank = torch.where(score.isnan(), -torch.inf, score)[:pages]
        best = torch.argsort(rank, descending=True, stable=True).tolist()
        if keep_last:
            best.remove(pages - 1)
            best.insert(0, pages - 1)
        for k in sorted({1, tile // 2, tile + 1, pages - 1, pages, pages + 1} & set(range(1, pages + more + 1))):
            torch.full((k,), -7, dtype=torch.int32, device=device)      # so that memory of the result is wrong before
            found = getattr(twins, side).baselines.quest.select_pages(
                score.to(device)[None, None], torch.tensor([pages], device=device), k=k, keep_last=keep_last
            )
            expected = sorted(best[:k])
            assert found[0, 0].tolist() == expected + [-1] * (k - len(expected)), (pages, k)


@both_sides
def test_neighbouring_scores_are_told_apart(side, twins, device):
    """The highest score and its neighbour, above a lowest one at any distance."""
    for distance in range(2, 40):
        score = 1.0 - torch.tensor([0.0, 0.0, 0.0, 1.0, distance, 0.0]) * 2.0**-24
        found = getattr(twins, side).baselines.quest.select_pages(
            score.to(device)[None, None], torch.tensor([6], device=device), k=2
        )
        assert found.tolist() == [[[0, 5]]], distance


@both_sides
def test_many_places_without_a_page_and_a_count_beyond_the_pages(side, twins, device):
    """Places are filled 1,024 at a time. A count beyond the pages does not reach the scores of the next row."""
    quest = getattr(twins, side).baselines.quest
    score, count = torch.ones(1, 1, 2200, device=device), torch.tensor([3], device=device)
    assert quest.select_pages(score, count, k=2100).tolist() == [[[0, 1, 2] + [-1] * 2097]]
    score, count = torch.tensor([[[1.0, 2.0, 0.0], [5.0, 6.0, 7.0]]], device=device), torch.tensor([5], device=device)
    assert quest.select_pages(score, count, k=2, keep_last=False).tolist() == [[[0, 1], [1, 2]]]


@both_sides
@pytest.mark.parametrize(("budget", "page_size"), [(40, 2), (12, 2), (15, 5)])
def test_a_group_attends_to_every_token_once(side, budget, page_size, twins, device):
    """With more tokens than a tile has, whether all pages are selected or not, with pages that end in a tile, and after
    a step has counted the token of each of three rows."""
    state = new_state(
        getattr(twins, side), device, batch=3, max_tokens=40, budget=budget, page_size=page_size, query_heads=4
    )
    query, key, value = (
        torch.randn(3, heads, 40, HEAD_DIM, generator=torch.Generator().manual_seed(heads)).to(device)
        for heads in (4, 1, 2)
    )
    value = value[:, :1]
    state.prefill(query[:, :, :38], key[:, :, :38], value[:, :, :38])
    state.step(*(tensor[:, :, 38] for tensor in (query, key, value)))
    output = state.step(*(tensor[:, :, 39] for tensor in (query, key, value)))
    page = torch.arange(40, device=device) // page_size
    visible = (state.selected[..., None] == page).any(-2) if budget < 40 else torch.ones(3, 4, 40, dtype=torch.bool)
    exact = DecodeCase.of(query[:, :, 39], key, value, visible.to(device), per_head=True)
    assert_within(output, exact.attention.output[:, :, 0], judge.output_bound(exact, 4), what="output")


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
