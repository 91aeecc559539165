"""Quest's functions: bounds of pages, their scores and the selection, against plain Python and float64; bad input:
what only our own sides promise.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.layouts import lay_out
from kvtwin.conformance.judge.checkers.quest import score_error
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.conformance.suite.quest.test_quest import both_sides, quest_of

pytestmark = pytest.mark.kind("equivalence")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("contiguous", "sliced", "spread", "channels_first", "transposed")
some = settings(max_examples=max(at_least(4), settings().max_examples // 4))


@st.composite
def keys(draw: st.DrawFn) -> tuple[Tensor, int]:
    """key [B, Hkv, T, D] with a page size."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    heads, tokens = draw(st.sampled_from(((1, 1), (2, 1), (1, 2)))), draw(st.integers(1, 25))
    x = torch.randn(*heads, tokens, draw(st.sampled_from((16, 24, 80))), generator=generator)
    dtype = draw(st.sampled_from(DTYPES))
    # Beyond the exponents of float16 as well, and numbers of one sign.
    x = x * 10.0 ** draw(st.sampled_from((0, 0, -30, 30) if dtype != torch.float16 else (0, 0, -6, 4)))
    x = draw(st.sampled_from((x, x.abs(), -x.abs()))).to(dtype)
    return lay_out(x, draw(st.sampled_from(LAYOUTS))), draw(st.sampled_from((1, 2, 3, 4, 16, 32)))


@both_sides
@given(data=st.data())
@some
def test_bounds_are_the_largest_and_smallest_of_each_page(side, data, twins, device):
    key, size = data.draw(keys())
    found = quest_of(twins, side).page_bounds(key.to(device), page_size=size)
    pages = [key[:, :, start:start + size] for start in range(0, key.shape[2], size)]
    for name, one, of_page in zip(found._fields, found, (Tensor.amax, Tensor.amin), strict=True):
        assert one.dtype == key.dtype
        assert_same(one.cpu(), torch.stack([of_page(page, 2) for page in pages], 2), what=name)


@both_sides
def test_pages_larger_than_the_sequence_take_no_longer(side, twins, device):
    key = torch.randn(1, 2, 6, 16, generator=torch.Generator().manual_seed(2)).to(device)
    found = quest_of(twins, side).page_bounds(key, page_size=2**40)
    for bound, expected in zip(found, quest_of(twins, side).page_bounds(key, page_size=6), strict=True):
        assert torch.equal(bound, expected)


@both_sides
def test_a_page_with_nan_has_nan_in_this_channel_alone(side, twins, device):
    key = torch.randn(1, 1, 6, 16, generator=torch.Generator().manual_seed(1)).to(device)
    key[0, 0, 3, 5] = torch.nan
    for bound in quest_of(twins, side).page_bounds(key, page_size=2):
        assert bound.isnan().nonzero().tolist() == [[0, 0, 1, 5]]


@st.composite
def scored(draw: st.DrawFn) -> dict[str, Tensor]:
    """Arguments of `page_scores`."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    (batch, heads), group = draw(st.sampled_from(((1, 1), (2, 1), (1, 2)))), draw(st.sampled_from((1, 2, 3, 8)))
    pages, head_dim = draw(st.integers(1, 40)), draw(st.sampled_from((16, 24, 80)))
    dtype = draw(st.sampled_from(DTYPES))
    one, other = (torch.randn(batch, heads, pages, head_dim, generator=generator) for _ in range(2))
    query = torch.randn(batch, heads * group, head_dim, generator=generator)
    tensors = {"query": query, "maximum": torch.maximum(one, other), "minimum": torch.minimum(one, other)}
    size = draw(st.sampled_from((1.0, 1.0, 100.0)))
    layouts = {name: draw(st.sampled_from(LAYOUTS)) for name in ("maximum", "minimum")}
    return {name: lay_out((size * x).to(dtype), layouts.get(name, "contiguous")) for name, x in tensors.items()}


@both_sides
@given(data=st.data())
@some
def test_scores_are_sums_of_the_larger_products(side, data, twins, device):
    given_ = {name: tensor.to(device) for name, tensor in data.draw(scored()).items()}
    score = quest_of(twins, side).page_scores(**given_)
    assert score.dtype == torch.float32
    query, heads = given_["query"].double(), given_["query"].shape[1]
    products = [
        query[:, :, None] * bound.double().repeat_interleave(heads // bound.shape[1], 1)
        for bound in (given_["maximum"], given_["minimum"])
    ]
    assert_within(score, torch.maximum(*products).sum(-1), score_error(**given_), what="score")


@both_sides
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_queries_of_one_sign_read_one_of_the_bounds(sign, side, twins, device):
    generator = torch.Generator().manual_seed(3)
    one, other = (torch.randn(1, 1, 5, 16, generator=generator).to(device) for _ in range(2))
    query = sign * torch.rand(1, 2, 16, generator=generator).to(device)
    maximum, minimum = torch.maximum(one, other), torch.minimum(one, other)
    wider = (maximum, minimum - 1) if sign > 0 else (maximum + 1, minimum)
    narrower = (maximum - 0.5, minimum) if sign > 0 else (maximum, minimum + 0.5)
    quest = quest_of(twins, side)
    score = quest.page_scores(query, maximum, minimum)
    assert_same(quest.page_scores(query, *wider), score, what="score")
    assert bool((quest.page_scores(query, *narrower) < score).all())


def plain_selection(score: list[float], count: int, k: int, keep_last: bool) -> list[int]:
    """`select_pages` of one query head."""
    forced = [count - 1] if keep_last and count else []
    ranked = {page: (-score[page] if score[page] == score[page] else math.inf, page) for page in range(count)}
    order = sorted(ranked.keys() - set(forced), key=ranked.__getitem__)
    best = sorted(forced + order[:k - len(forced)])
    return best + [-1] * (k - len(best))


@both_sides
@given(data=st.data())
@some
def test_the_best_pages_are_selected_and_of_equal_ones_the_first(side, data, twins, device):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31 - 1)))
    batch, heads, pages = (*data.draw(st.sampled_from(((1, 1), (2, 3), (1, 2)))), data.draw(st.integers(1, 45)))
    kind = data.draw(st.sampled_from(("ordinary", "few", "equal", "special")))
    score = torch.randn(batch, heads, pages, generator=generator)
    if kind in ("few", "special"):
        score = (2 * score).round() / 2 * data.draw(st.sampled_from((1.0, -0.0)))
    if kind == "equal":
        score = torch.full_like(score, data.draw(st.sampled_from((1.0, -torch.inf, torch.inf, torch.nan, 0.0))))
    if kind == "special":
        other = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
        chosen = other[torch.randint(5, score.shape, generator=generator)]
        score = chosen.where(torch.rand(score.shape, generator=generator) < 0.6, score)
    score = score.to(data.draw(st.sampled_from(DTYPES)))
    count = torch.randint(0, pages + 1, (batch,), generator=generator)
    k, keep_last = data.draw(st.integers(1, pages + 2)), data.draw(st.booleans())
    laid = lay_out(score, data.draw(st.sampled_from(("contiguous", "sliced", "spread"))))
    found = quest_of(twins, side).select_pages(laid.to(device), count.to(device), k=k, keep_last=keep_last)
    assert found.dtype == torch.int64
    assert found.tolist() == [
        [plain_selection(line, number, k, keep_last) for line in row]
        for row, number in zip(score.tolist(), count.tolist(), strict=True)
    ]


@both_sides
def test_the_last_page_is_kept_though_it_scores_least(side, twins, device):
    score = torch.tensor([5.0, 4.0, torch.inf, 2.0, -torch.inf, 9.0], device=device)[None, None]
    count = torch.tensor([5], device=device)
    quest = quest_of(twins, side)
    assert quest.select_pages(score, count, k=2).tolist() == [[[2, 4]]]
    assert quest.select_pages(score, count, k=1).tolist() == [[[4]]]
    assert quest.select_pages(score, count, k=2, keep_last=False).tolist() == [[[0, 2]]]
    assert quest.select_pages(score, count, k=7).tolist() == [[[0, 1, 2, 3, 4, -1, -1]]]


@both_sides
def test_nan_ranks_lowest_and_many_pages_are_searched(side, twins, device):
    quest = quest_of(twins, side)
    score = torch.tensor([torch.nan, 1.0, -torch.inf, 2.0], device=device)[None, None]
    count = torch.tensor([4], device=device)
    for k, expected in ((1, [3]), (2, [1, 3]), (3, [0, 1, 3])):
        assert quest.select_pages(score, count, k=k, keep_last=False).tolist() == [[expected]]
    # More pages than a chunk has: 16 in the interpreter.
    score, count = -torch.arange(40.0, device=device)[None, None], torch.tensor([40], device=device)
    assert quest.select_pages(score, count, k=6, keep_last=False).tolist() == [[[0, 1, 2, 3, 4, 5]]]
    assert quest.select_pages(score.flip(-1), count, k=4).tolist() == [[[36, 37, 38, 39]]]


@pytest.mark.kind("bad_input")
@pytest.mark.limits
def test_kernels_take_up_to_16_query_heads_per_kv_head(twins, device):
    bound = torch.zeros(1, 1, 2, 16, device=device)
    with pytest.raises(ValueError, match="^query heads per KV head must be at most 16, got Hq = 17, Hkv = 1"):
        twins.optimized.baselines.quest.page_scores(torch.zeros(1, 17, 16, device=device), bound, bound)
