"""KeyDiff's functions under test against float64: the scores of all keys and the kept tokens, for all kinds of content.

test_lockstep.py and test_keydiff_state.py test its state.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.key_cases import ANCHORS, KeyCase, fill, key_cases
from kvtwin.conformance.judge.checkers import keydiff as judge
from kvtwin.conformance.judge.compare import assert_same

# Squares of huge numbers overflow and are then recomputed. numpy, which the interpreter uses, warns about the overflow.
pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.filterwarnings("ignore:overflow encountered")]

few = settings(max_examples=max(at_least(3), settings().max_examples // 6))


def and_one_to_decide(case: KeyCase) -> list[KeyCase]:
    """The case, and a case of the same sizes with decisive choices. Large caches in low precision have few decisive
    choices, so a test of the drawn case alone could be vacuous."""
    if case.content == "ordinary" and case.dtype == torch.float32:
        return [case]
    return [case, dataclasses.replace(case, content="ordinary", dtype=torch.float32, layout="contiguous")]


# Invariance ----------------------------------------------------------------------------------------------------------


def rebuilt(case: KeyCase, change) -> KeyCase:
    """The case with `change(tensor, is_mask)` applied to each of its tensors."""
    masks = {
        name: None if mask is None else change(mask, True)
        for name, mask in (("occupied", case.occupied), ("protected", case.protected))
    }
    return KeyCase.of(
        change(case.key, False), change(case.value, False), budget=case.budget, recent=case.recent, anchor=case.anchor,
        similarity=case.similarity, **masks,
    )


def stays(kept: torch.Tensor, slots: int) -> torch.Tensor:
    """kept [B, Hkv, N] as a mask [B, Hkv, S]."""
    mask = torch.zeros(*kept.shape[:2], slots + 1, dtype=torch.bool, device=kept.device)
    return mask.scatter(-1, kept.where(kept >= 0, slots), True)[..., :slots]


UNTIED = ("ordinary", "collinear", "outliers", "sizes")


@pytest.mark.property("independence")
@given(
    case=key_cases(content=UNTIED, occupancy=("none",), slots=(2, 48)).filter(lambda it: it.layout != "repeat_slots"),
    seed=st.integers(0, 2**32 - 1),
)
@few
def test_keydiff_does_not_depend_on_slot_order(case, seed, twins, device):
    """With permuted slots, the result is right by the same truth. Where only one answer is right, the same tokens are
    kept."""
    generator = torch.Generator(device).manual_seed(seed)
    # The recent tokens must remain the last ones.
    old = case.slots - min(case.recent, case.slots)
    order = torch.cat([
        torch.randperm(old, generator=generator, device=device), torch.arange(old, case.slots, device=device)
    ])
    permuted = rebuilt(case, lambda tensor, mask: tensor[..., order] if mask else tensor[:, :, order])
    plain = twins.optimized.keydiff.evict(**case.inputs)
    moved = twins.optimized.keydiff.evict(**permuted.inputs)
    verdict = judge.assert_evict_right(moved, permuted)
    expected = stays(plain.kept, case.slots)[..., order]
    sealed = verdict.decisive | ~verdict.scored
    assert_same(stays(moved.kept, case.slots), expected, where=sealed[..., None], what="kept tokens")


@pytest.mark.property("independence")
@given(case=key_cases(content=UNTIED), shift=st.integers(1, 3))
@few
def test_keydiff_does_not_depend_on_head_order(case, shift, twins):
    heads = torch.arange(case.key_value_heads, device=case.key.device).roll(shift)
    for one in and_one_to_decide(case):
        permuted = rebuilt(one, lambda tensor, mask: tensor if mask and tensor.dim() == 2 else tensor[:, heads])
        plain = twins.optimized.keydiff.evict(**one.inputs)
        moved = twins.optimized.keydiff.evict(**permuted.inputs)
        verdict = judge.assert_evict_right(moved, permuted)
        sealed = verdict.decisive | ~verdict.scored
        assert_same(moved.kept, plain.kept[:, heads], where=sealed[..., None], what="kept")


@pytest.mark.property("independence")
@given(case=key_cases(content=UNTIED), extra=st.integers(1, 20))
@few
def test_keydiff_ignores_extra_padding_slots(case, extra, twins):
    """With free slots appended that contain NaN, the same tokens are kept."""
    def pad(tensor, mask):
        if mask:
            return torch.cat((tensor, tensor.new_zeros((*tensor.shape[:-1], extra))), -1)
        return torch.cat((tensor, tensor.new_full((*tensor.shape[:2], extra, tensor.shape[3]), torch.nan)), 2)

    for one in and_one_to_decide(case):
        if one.occupied is None:
            batch, _, slots, _ = one.key.shape
            everything = torch.ones(batch, slots, dtype=torch.bool, device=one.key.device)
            one._adopt({**one.tensors, "occupied": everything})
        padded = rebuilt(one, pad)
        judge.assert_score_right(twins.optimized.keydiff.score(**padded.score_inputs), padded)
        judge.assert_evict_right(twins.optimized.keydiff.evict(**padded.inputs), padded)


@pytest.mark.property("independence")
@given(case=key_cases(content=UNTIED), row=st.integers(0, 2))
@few
def test_keydiff_evicts_the_same_from_a_row_alone_and_in_a_batch(case, row, twins):
    """Another batch size may split the work differently. The result is within the same bounds, and equal where the
    choice is decisive."""
    row %= case.batch
    for one in and_one_to_decide(case):
        alone = rebuilt(one, lambda tensor, mask: tensor[row:row + 1])
        single, batched = twins.optimized.keydiff.evict(**alone.inputs), twins.optimized.keydiff.evict(**one.inputs)
        verdict = judge.assert_evict_right(single, alone)
        sealed = verdict.decisive | ~verdict.scored
        assert_same(single.kept, batched.kept[row:row + 1], where=sealed[..., None], what="kept of the row alone")


# Precision -----------------------------------------------------------------------------------------------------------


def collinear(device, slots: int, head_dim: int) -> torch.Tensor:
    """bfloat16 keys [1, 1, S, D] with cosines around 0.99, as the paper reports for models."""
    generator = torch.Generator(device).manual_seed(7)
    return fill("collinear", generator, (1, 1, slots, head_dim), torch.bfloat16)


@pytest.mark.property("extreme_numbers")
def test_keydiff_finds_the_direction_of_a_median_that_is_far_smaller_than_the_largest_key(twins, device):
    """One key of 2^100 and others of about 2^-60. The median, divided by the largest key, would underflow in
    float32."""
    key = torch.randn(1, 1, 21, 64, generator=torch.Generator().manual_seed(3)) * 2.0**-60
    key[:, :, 5] = torch.randn(64, generator=torch.Generator().manual_seed(4)) * 2.0**100
    case = KeyCase.of(key.to(device), budget=7, anchor="median")
    module = twins.optimized.keydiff
    judge.assert_score_right(module.score(**case.score_inputs), case)
    verdict = judge.assert_evict_right(module.evict(**case.inputs), case)
    assert bool(verdict.decisive.all())


@pytest.mark.property("extreme_numbers")
@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("exponent", (-60, -100, -130))
def test_keydiff_scores_against_an_anchor_that_nearly_vanishes(anchor, exponent, twins, device):
    """The largest channel cancels in the mean and is zero in the median. The others are 2^exponent times smaller."""
    key = torch.zeros(1, 1, 3, 16)
    key[0, 0, :, 0] = torch.tensor((1.0, 0.0, -1.0))
    key[..., 1] = 2.0**exponent
    case = KeyCase.of(key.to(device), anchor=anchor)
    score = twins.optimized.keydiff.score(**case.score_inputs)
    judge.assert_score_right(score, case)
    assert bool(score.isfinite().all())
