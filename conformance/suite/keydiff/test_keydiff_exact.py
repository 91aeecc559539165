"""KeyDiff where only one answer is right: ties, protection, NaN, and results that must be bitwise equal.

Both sides are tested. In other tests the judge orders ties, so only these tests check the reference's own order.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.key_cases import ANCHORS, SIMILARITIES, KeyCase, key_cases
from kvtwin.conformance.cases.layouts import lay_out
from kvtwin.conformance.judge.checkers import keydiff as judge
from kvtwin.conformance.judge.compare import assert_same

pytestmark = [
    pytest.mark.kind("laws"), pytest.mark.parametrize("side", ("reference", "optimized")),
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # see test_keydiff.py
]

few = settings(max_examples=max(at_least(3), settings().max_examples // 6))

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


def test_a_vanishing_anchor_makes_all_keys_equal_or_nearly(side, twins, device):
    """For keys +-e1, the sum of the normalised keys is 0. Cosines with it are 0 or rounding errors, but ranks are
    defined."""
    module = getattr(twins, side).keydiff
    key = torch.zeros(1, 1, 8, HEAD_DIM, device=device)
    key[..., ::2, 0], key[..., 1::2, 0] = 1, -1
    score = module.score(key)
    assert bool((score.abs() <= 1 + 1e-5).all())
    stay = kept(module.evict(key, key, 3))
    assert len(set(stay)) == 3 and stay == sorted(stay) and set(stay) <= set(range(8))


# Anchors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("anchor", "center"), [("mean_normalized", 1), ("mean", 5), ("median", 2)])
def test_anchors_are_of_the_occupied_keys(anchor, center, side, twins, device):
    """Four keys on one axis, so all scores are exact. The median of an even number of keys is the lower one, 2 and not
    6. Among six slots, two of them free, the means would be smaller and the median larger."""
    module = getattr(twins, side).keydiff
    length = {0: 6, 2: 1, 3: 11, 5: 2}
    key = torch.zeros(1, 1, 6, HEAD_DIM, device=device)
    key[:, :, [1, 4]] = NAN
    key[0, 0, list(length), 0] = torch.tensor([*length.values()], dtype=torch.float32, device=device)
    occupied = torch.tensor([[slot in length for slot in range(6)]], device=device)
    for similarity, expected in (
        ("euclidean", {slot: abs(number - center) for slot, number in length.items()}),
        ("dot", {slot: -center * number for slot, number in length.items()}),
    ):
        options = {"occupied": occupied, "anchor": anchor, "similarity": similarity}
        assert module.score(key, **options)[0, 0].tolist() == [expected.get(slot, -INF) for slot in range(6)]
        for budget in (1, 2, 3):
            best = sorted(expected, key=expected.__getitem__)[-budget:]
            assert kept(module.evict(key, key, budget, **options)) == sorted(best)


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


# NaN and infinity ----------------------------------------------------------------------------------------------------


def test_a_key_that_is_no_number_leaves_no_order(side, twins, device):
    """The anchor of its head is NaN, and so are all ranks, so the lowest slots are evicted. Other heads are
    unaffected."""
    module = getattr(twins, side).keydiff
    clean = module.evict(keys(device, heads=2), keys(device, heads=2), 7)
    for number in (NAN, INF):
        key = keys(device, heads=2)
        key[0, 0, 20, 3] = number
        assert bool(module.score(key)[0, 0].isnan().all())
        result = module.evict(key, key, 7)
        assert result.kept[0, 0].tolist() == list(range(SLOTS - 7, SLOTS))
        assert_same(result.kept[0, 1], clean.kept[0, 1], what="kept of the other head")
    held = module.evict(key, key, 7, protected=mask(device, 2))
    assert held.kept[0, 0].tolist() == [2, *range(SLOTS - 6, SLOTS)]


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


def test_positions_and_queries_do_not_change_the_choice(side, twins, device):
    """The score depends on the set of keys only: their order and norms do not matter (KD-5)."""
    module = getattr(twins, side).keydiff
    key = keys(device)
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1)).to(device)
    best, moved = kept(module.evict(key, key, 9)), kept(module.evict(key[:, :, order], key, 9))
    assert sorted(order[moved].tolist()) == best
    powers = torch.exp2(torch.randint(-20, 20, (SLOTS, 1), generator=torch.Generator().manual_seed(2)).float())
    assert kept(module.evict(key * powers.to(device), key, 9)) == best


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


def test_evicts_equal_keys_of_several_tiles_by_slot(side, twins, device):
    """60 of 700 keys are equal and most like the anchor. Of them, the lowest 20, 40 and 59 are evicted."""
    module = getattr(twins, side).keydiff
    generator = torch.Generator().manual_seed(5)
    key = (0.5 * torch.randn(1, 1, 700, HEAD_DIM, generator=generator) + 1).to(device)
    equal = torch.randperm(700, generator=generator)[:60].sort().values.to(device)
    key[:, :, equal] = 1
    for count in (20, 40, 59):
        gone = torch.ones(700, dtype=torch.bool, device=device)
        gone[module.evict(key, key, 700 - count).kept[0, 0]] = False
        assert gone.nonzero()[:, 0].tolist() == equal[:count].tolist()


# Bitwise equality ----------------------------------------------------------------------------------------------------


def assert_same_bits(one, other, what: str) -> None:
    for name, first, second in zip(("key", "value", "kept", "occupied"), one, other, strict=True):
        assert_same(second, first, what=f"{name}, {what}")


@given(case=key_cases(content=("ordinary", "collinear", "zero_keys")))
@few
def test_masks_per_head_that_are_equal_are_one_mask(case, side, twins):
    """[B, S] and its expansion to [B, Hkv, S] give the same result."""
    if case.per_head or case.occupied is None:
        return
    module = getattr(twins, side).keydiff
    wide = {
        name: None if mask is None else mask[:, None].expand(case.mask.shape)
        for name, mask in (("occupied", case.occupied), ("protected", case.protected))
    }
    assert_same_bits(module.evict(**{**case.inputs, **wide}), module.evict(**case.inputs), "with masks per head")
