"""KeyDiff where only one answer is right: ties, protection, NaN, and results that must be bitwise equal.

Both sides are tested. In other tests the judge orders ties, so only these tests check the reference's own order.
"""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.cases.key_cases import ANCHORS, SIMILARITIES, KeyCase
from kvtwin.conformance.cases.layouts import lay_out
from kvtwin.conformance.judge.checkers import keydiff as judge
from kvtwin.conformance.judge.compare import assert_same

pytestmark = [
    pytest.mark.kind("laws"), pytest.mark.parametrize("side", ("reference", "optimized")),
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # see test_keydiff.py
]


NAN, INF = float("nan"), float("inf")
SLOTS, HEAD_DIM = 40, 16
KINDS = [
    ("mean_normalized", "cosine", "contiguous"), ("mean_normalized", "cosine", "channels_first"),
    ("mean", "dot", "contiguous"), ("median", "euclidean", "channels_first"), ("mean", "cosine", "channels_first"),
]


def keys(device, seed: int = 0, heads: int = 1) -> torch.Tensor:
    """Keys [1, heads, S, D] in one half space, so that the anchor is far from zero."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(1, heads, SLOTS, HEAD_DIM, generator=generator) + 1).to(device)


def mask(device, *slots: int) -> torch.Tensor:
    """A bool mask [1, S], True at these slots."""
    return torch.isin(torch.arange(SLOTS, device=device), torch.tensor(slots, device=device))[None]


def kept(result) -> list[int]:
    return result.kept[0, 0].tolist()


# Ties ----------------------------------------------------------------------------------------------------------------


@pytest.mark.property("ties")
@pytest.mark.parametrize(("anchor", "similarity", "layout"), KINDS)
def test_evicts_the_oldest_of_equal_keys(anchor, similarity, layout, side, twins, device):
    """For any strides, which may change the order of sums."""
    evict = getattr(twins, side).keydiff.evict
    options = {"anchor": anchor, "similarity": similarity}
    for factor in (1, 0):
        key = lay_out(keys(device)[:, :, :1].expand(1, 1, SLOTS, HEAD_DIM) * factor, layout)
        assert kept(evict(key, key, 7, **options)) == list(range(SLOTS - 7, SLOTS))
    held = evict(key, key, 7, **options, protected=mask(device, 0, 3), recent=1)
    assert kept(held) == [0, 3, *range(SLOTS - 5, SLOTS)]
    # Equal keys among others, which rank lowest or highest.
    for sign in (1, -1):
        key, places = keys(device, seed=1), [2, 17, 20, 33, 39]
        key[:, :, places] = sign * key.mean(2, keepdim=True)
        key = lay_out(key, layout)
        for budget in (3, 37) if (sign < 0) != (similarity == "euclidean") or sign < 0 else (37,):
            result = evict(key, key, budget, **options)
            equal_kept = [place for place in places if place in kept(result)]
            assert equal_kept == places[len(places) - len(equal_kept):], "the oldest must be evicted first"


@pytest.mark.property("extreme_numbers")
def test_zero_keys_rank_like_keys_orthogonal_to_the_anchor(side, twins, device):
    """A zero key normalises to zero, so it ranks between keys that are similar to the anchor and keys opposite to
    it."""
    module = getattr(twins, side).keydiff
    key = keys(device)
    key[:, :, 5] = -key.mean(2)
    key[:, :, [9, 30]] = 0
    key[:, :, 30, ::2] = -0.0
    score = module.score(key)
    assert score[0, 0, [9, 30]].tolist() == [0, 0]
    assert kept(module.evict(key, key, 3)) == [5, 9, 30]
    assert kept(module.evict(key, key, 2)) == [5, 30]
    pairwise = module.pairwise_score(key)
    assert pairwise[0, 0, [9, 30]].tolist() == [0, 0]
    judge.assert_pairwise_right(pairwise, KeyCase.of(key))


# Anchors -------------------------------------------------------------------------------------------------------------


@pytest.mark.property("decisions")
@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("anchor", ANCHORS)
def test_the_few_keys_of_rows_with_free_slots(anchor, similarity, side, twins, device):
    """1 to 6 keys of very different lengths in each row, so that means, medians and numbers of keys that are taken
    otherwise give other scores and other orders."""
    module = getattr(twins, side).keydiff
    generator = torch.Generator().manual_seed(6)
    key = torch.randn(6, 1, 6, HEAD_DIM, generator=generator) + 0.5
    key = (key * torch.exp2(2.0 * torch.randn(6, 1, 6, 1, generator=generator))).to(device)
    occupied = torch.rand(6, 6, generator=generator).argsort(1).to(device) <= torch.arange(6, device=device)[:, None]
    key = key.masked_fill(~occupied[:, None, :, None], NAN)
    for budget in (1, 3):
        case = KeyCase.of(key, budget=budget, occupied=occupied, anchor=anchor, similarity=similarity)
        judge.assert_score_right(module.score(**case.score_inputs), case)
        judge.assert_evict_right(module.evict(**case.inputs), case)


# Counts and protection -----------------------------------------------------------------------------------------------


@pytest.mark.property("decisions")
def test_every_budget_is_kept(side, twins, device):
    module = getattr(twins, side).keydiff
    key = keys(device)
    value = keys(device, seed=2)
    order = module.evict(key, value, 1)
    assert order.key.shape == (1, 1, 1, HEAD_DIM) and order.occupied.all()
    for budget in (SLOTS, SLOTS + 1, 10**6):
        everything = module.evict(key, value, budget)
        assert kept(everything) == list(range(SLOTS)) and bool(everything.occupied.all())
        assert torch.equal(everything.key, key) and torch.equal(everything.value, value)
    occupied = mask(device, 4, 9, SLOTS - 1)
    few_tokens = module.evict(key, value, 5, occupied=occupied, recent=5)
    assert kept(few_tokens) == [4, 9, SLOTS - 1, -1, -1]
    assert few_tokens.occupied[0, 0].tolist() == [True] * 3 + [False] * 2
    for name, tensor in (("key", key), ("value", value)):
        got = getattr(few_tokens, name)[0, 0]
        assert torch.equal(got[:3], tensor[0, 0, [4, 9, SLOTS - 1]]) and bool((got[3:] == 0).all())
    nothing = module.evict(key, value, 5, occupied=torch.zeros_like(occupied))
    assert kept(nothing) == [-1] * 5 and bool((nothing.key == 0).all())
    assert bool((module.score(key, occupied=torch.zeros_like(occupied)) == -INF).all())


@pytest.mark.property("decisions")
def test_recent_and_protected_tokens_stay(side, twins, device):
    """Even with the lowest scores: their keys equal the anchor."""
    module = getattr(twins, side).keydiff
    key = keys(device)
    key[:, :, [1, 8, 38, 39]] = 5 * key.mean(2, keepdim=True)
    assert not {1, 8, 38, 39} & set(kept(module.evict(key, key, 30)))
    assert {38, 39} <= set(kept(module.evict(key, key, 30, recent=2)))
    assert {1, 8} <= set(kept(module.evict(key, key, 2, protected=mask(device, 1, 8))))
    assert kept(module.evict(key, key, 4, recent=2, protected=mask(device, 1, 8))) == [1, 8, 38, 39]
    # Recent tokens are the newest occupied ones, not the last slots. Protecting a free slot has no effect.
    occupied = ~mask(device, 36, 37, 38, 39)
    result = module.evict(key, key, 3, occupied=occupied, recent=2, protected=mask(device, 8, 38, 39))
    assert kept(result) == [8, 34, 35]
    # A token that is both protected and recent counts once.
    assert kept(module.evict(key, key, 2, recent=2, protected=mask(device, 39))) == [38, 39]
    per_head = torch.stack([mask(device, 1, 8), mask(device, 3)], 1)
    both = module.evict(torch.cat((key, key), 1), torch.cat((key, key), 1), 2, protected=per_head)
    assert both.kept[0, 0].tolist() == [1, 8] and 3 in both.kept[0, 1].tolist()


@pytest.mark.property("extreme_numbers")
def test_keys_of_any_size_have_directions(side, twins, device):
    """Squares overflow or underflow in float32, but cosines depend on directions only."""
    module = getattr(twins, side).keydiff
    key = keys(device).clamp(-3, 3)
    best = kept(module.evict(key, key, 9))
    for factor in (2.0**125, 2.0**-120):
        judge.assert_score_right(module.score(key * factor), KeyCase.of(key * factor))
        assert kept(module.evict(key * factor, key, 9)) == best


@pytest.mark.property("extreme_numbers")
def test_keys_of_very_different_sizes_have_directions(side, twins, device):
    """Tokens of 1e30 and of 2^-71 beside each other, and a head 1e60 times larger than the other."""
    module = getattr(twins, side).keydiff
    key = keys(device, heads=2).clamp(-3, 3)
    best = module.evict(key, key, 9).kept
    token = torch.ones(SLOTS, 1, device=device)
    token[::3], token[1::3] = 1e30, 2.0**-71
    head = torch.tensor([1e30, 1e-30], device=device)[:, None, None]
    for case in (key * token, key * head):
        judge.assert_score_right(module.score(case), KeyCase.of(case))
        assert_same(module.evict(case, key, 9).kept, best, what="kept")
