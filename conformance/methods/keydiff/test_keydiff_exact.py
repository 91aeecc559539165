"""KeyDiff where only one answer is right: ties, protection, NaN, and results that must be bitwise equal:
what only our own sides promise.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.key_cases import key_cases
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.suite.keydiff.test_keydiff_exact import HEAD_DIM, INF, NAN, SLOTS, kept, keys, mask

pytestmark = [
    pytest.mark.kind("laws"), pytest.mark.parametrize("side", ("reference", "optimized")),
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # see test_keydiff.py
]

few = settings(max_examples=max(at_least(3), settings().max_examples // 6))


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


def test_positions_and_queries_do_not_change_the_choice(side, twins, device):
    """The score depends on the set of keys only: their order and norms do not matter (KD-5)."""
    module = getattr(twins, side).keydiff
    key = keys(device)
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1)).to(device)
    best, moved = kept(module.evict(key, key, 9)), kept(module.evict(key[:, :, order], key, 9))
    assert sorted(order[moved].tolist()) == best
    powers = torch.exp2(torch.randint(-20, 20, (SLOTS, 1), generator=torch.Generator().manual_seed(2)).float())
    assert kept(module.evict(key * powers.to(device), key, 9)) == best


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
