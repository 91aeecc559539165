"""What Quest states: the bound of a logit, what a selection misses, bytes, and the abstract as it is listed.

A test named ..._rejects_... shows that a slightly changed statement fails, so that the test of the claim is not empty.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.judge.checkers.quest import attention_case, output_bound, score_error

pytestmark = pytest.mark.kind("claims")

DTYPES = (torch.float32, torch.bfloat16)
P = 4


@pytest.fixture(params=["reference", "optimized"])
def quest(request, twins) -> Any:
    return getattr(twins, request.param).baselines.quest


def tensors(
    device: torch.device, dtype: torch.dtype, *, integers: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """query [1, 2, D], key [1, 1, 6 P, D]. Integers are small enough for exact sums in float32."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(1, *size, 32, generator=generator) for size in ((2,), (1, 6 * P)))
    if integers:
        query, key = ((4 * tensor).round() for tensor in (query, key))
    key[:, :, :P] = key[:, :, :1]                                               # a page of equal keys
    return query.to(device, dtype), key.to(device, dtype)


def largest_logits(query: Tensor, key: Tensor) -> Tensor:
    """The largest q . k_j of each page, [1, 2, pages] float64."""
    return (query.double() @ key[:, 0].double().mT).unflatten(2, (-1, P)).amax(3)


def scores(quest: Any, query: Tensor, key: Tensor) -> Tensor:
    found: Tensor = quest.page_scores(query, *quest.page_bounds(key, page_size=P))
    return found.double()


@pytest.mark.claim("QU-1a")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_score_is_at_least_each_logit_of_its_page(dtype, quest, device):
    query, key = tensors(device, dtype, integers=True)
    score, largest = scores(quest, query, key), largest_logits(query, key)
    assert bool((score >= largest).all())
    assert bool((score[..., 0] == largest[..., 0]).all()) and bool((score[..., 1:] > largest[..., 1:]).all())


@pytest.mark.claim("QU-1a")
def test_the_bound_rejects_a_smaller_score_and_one_of_maxima_alone(quest, device):
    query, key = tensors(device, torch.float32, integers=True)
    largest, maximum = largest_logits(query, key), quest.page_bounds(key, page_size=P).maximum
    assert not bool((scores(quest, query, key) - 1 >= largest).all())
    assert not bool((quest.page_scores(query, maximum, maximum).double() >= largest).all())


@pytest.mark.claim("QU-1b")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_computed_score_is_a_bound_less_its_error(dtype, quest, device):
    for seed in range(3):
        query, key = tensors(device, dtype, seed=seed)
        error = score_error(query, *quest.page_bounds(key, page_size=P))
        assert bool((scores(quest, query, key) >= largest_logits(query, key) - error).all())


@pytest.mark.claim("QU-1b")
def test_the_error_rejects_that_a_computed_score_is_a_bound(quest, device):
    """The first page has equal keys, so that its exact score is its logit, and some float32 scores are below it."""
    low = []
    for seed in range(8):
        query, key = tensors(device, torch.float32, seed=seed)
        low += (scores(quest, query, key) < largest_logits(query, key))[..., 0].flatten().tolist()
    assert any(low)


def stepped(quest: Any, device: torch.device, seed: int) -> tuple[Any, Tensor, Tensor]:
    """A state after a step with two of four pages, the step's query, and its output."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, heads, 12, 16, generator=generator).to(device) for heads in (2, 1, 1))
    state = quest.QuestState(
        quest.QuestConfig(2 * P, P, max_tokens=16), batch=1, query_heads=2, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )
    state.prefill(query, key, value)
    token = [tensor[:, :, 3] for tensor in (2 * query, key, value)]
    return state, token[0], state.step(*token)


@pytest.mark.claim("QU-2a")
def test_the_output_differs_by_the_weight_that_is_not_selected(quest, device):
    """Up to the error of float32."""
    for seed in range(2):
        state, query, output = stepped(quest, device, seed)
        page = torch.arange(4, device=device)
        chosen = (state.selected[..., None] == page).any(2).repeat_interleave(P, -1)
        seen = state.occupied[:, None].expand(-1, 2, -1)
        everything = attention_case(state, query, seen, None)
        share = (everything.attention.weight[:, :, 0] * chosen).sum(-1, keepdim=True)
        largest = state.value.double().abs().amax()
        allowed = 2 * (1 - share) * largest + output_bound(attention_case(state, query, chosen & seen, None), 2)
        assert bool(((output.double() - everything.attention.output[:, :, 0]).abs() <= allowed).all())
        assert bool((share < 1).all())


@pytest.mark.claim("QU-2a")
def test_the_difference_is_attained_and_rejects_half_of_it(quest, device):
    """All selected values are 1, and all others -1. All logits are 0."""
    state, query, _ = stepped(quest, device, 0)
    state.reset()
    key = torch.zeros(1, 1, 12, 16, device=device)
    value = torch.where(torch.arange(12, device=device) < P, 1.0, -1.0)[:, None].expand(1, 1, 12, 16).contiguous()
    state.prefill(torch.zeros(1, 2, 12, 16, device=device), key, value)
    output = state.step(query, key[:, :, 0], value[:, :, 0])                  # pages 0 and 3: five tokens with 1
    assert state.selected.tolist() == [[[0, 3]] * 2]
    assert output.unique().tolist() == [1.0]
    share = Fraction(5, 13)
    difference = 1 - (share - (1 - share))
    assert difference == 2 * (1 - share)
    assert not difference <= 1 - share


def one_query(device: torch.device, *keys: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """The query (1, 1) and keys in the first two of 16 channels."""
    query, key = torch.zeros(1, 1, 16, device=device), torch.zeros(1, 1, len(keys), 16, device=device)
    query[..., :2] = 1
    key[0, 0, :, :2] = torch.tensor(keys, device=device)
    return query, key


def selected(quest: Any, query: Tensor, key: Tensor, size: int) -> int:
    """The only page that is selected."""
    score = quest.page_scores(query, *quest.page_bounds(key, page_size=size))
    count = torch.tensor([score.shape[2]], device=key.device)
    return int(quest.select_pages(score, count, k=1, keep_last=False))


@pytest.mark.claim("QU-2b")
def test_the_page_of_the_largest_logit_may_be_missed(quest, device):
    """The keys (1, 0) and (0, 1) have a score of 2 and logits of 1; (0.75, 0.75) has a logit of 1.5."""
    query, key = one_query(device, (0.75, 0.75), (0.75, 0.75), (1.0, 0.0), (0.0, 1.0))
    assert int((query @ key[:, 0].mT).argmax()) == 0
    assert selected(quest, query, key, 2) == 1


@pytest.mark.claim("QU-2b")
def test_missing_it_rejects_pages_of_one_token(quest, device):
    query, key = one_query(device, (0.75, 0.75), (0.75, 0.75), (1.0, 0.0), (0.0, 1.0))
    assert selected(quest, query, key, 1) == 0


@pytest.mark.claim("QU-3a")
def test_bounds_have_the_bytes_of_one_token_per_page(quest, device):
    key = torch.zeros(2, 3, 4 * P, 16, device=device)
    assert P * sum(bound.nbytes for bound in quest.page_bounds(key, page_size=P)) == 2 * key.nbytes


@pytest.mark.claim("QU-3c")
def test_the_bytes_reject_that_query_heads_share_their_pages(quest, device):
    """Two query heads with opposite queries select different pages, so that their bytes add up."""
    query, key = one_query(device, (1.0, 1.0), (1.0, 1.0), (-1.0, -1.0), (-1.0, -1.0))
    pages = {selected(quest, sign * query, key, 2) for sign in (1, -1)}
    assert len(pages) == 2


def whole(part: Fraction, faster: Fraction) -> Fraction:
    """How much faster the whole becomes, if the share `part` of its time becomes `faster` times as fast."""
    return 1 / (1 - part + part / faster)


@pytest.mark.claim("QU-4")
def test_a_faster_part_speeds_up_the_whole_by_less():
    for faster in (Fraction("2.23"), Fraction("7.03")):
        assert all(1 <= whole(Fraction(part, 100), faster) <= faster for part in range(101))
        assert whole(Fraction(1), faster) == faster
    assert abs(whole(Fraction("0.643"), Fraction("7.03")) - Fraction("2.23")) < Fraction("0.01")


@pytest.mark.claim("QU-4")
def test_the_limit_rejects_the_numbers_of_the_abstract():
    assert not any(whole(Fraction(part, 100), Fraction("2.23")) >= Fraction("7.03") for part in range(101))
