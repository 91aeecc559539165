"""Tests of KeyDiff's checker: its bounds are sound and tight, and its comparators can fail.

emulate_keys.py has the arithmetic: float32 in many orders, fused, flushing, and with roots and divisions that have the
largest allowed error. test_judge_keydiff_state.py tests a sum that a state carries.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.key_cases import ANCHORS, CONTENTS, COSINE_ONLY, FP8_CONTENTS, SIMILARITIES, KeyCase
from kvtwin.conformance.cases.oracle import oracle, upcast_all
from kvtwin.conformance.judge.checkers import keydiff as judge
from kvtwin.conformance.judge.compare import Mismatch, assert_within
from kvtwin.conformance.tool.emulate_keys import KeyMachine
from kvtwin.reference import keydiff
from kvtwin.reference.contract.scales import FP8


@pytest.fixture(autouse=True)
def keep_failures_out_of_the_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTWIN_FAILURES", str(tmp_path))


MACHINES = (
    KeyMachine("sequential", lean=1), KeyMachine("reversed", fused=True, lean=-1, late=True),
    KeyMachine("pairwise", lean=-1, flushes=True, powers=True), KeyMachine("strided", powers=True, late=True),
)


def utilisation(machine: KeyMachine, case: KeyCase) -> dict[str, float]:
    """The largest error of `machine` for `case`, relative to its bound. Raises Mismatch if an error exceeds its
    bound."""
    keys, exact = judge.keys_of(case), upcast_all(case.score_inputs)
    used = {case.similarity: judge.assert_score_right(machine.score(case), case)}
    if case.similarity != "cosine":
        return used
    direction = machine.direction(case)
    # Ranks of a head may have a common error: the effect of the anchor's error on the mean of the keys.
    center = keys.unit.sum(2, keepdim=True) / keys.count
    shared = -(center * (direction.double() - keys.direction)).sum(-1)
    rank = machine.rank(case, direction).double() - shared
    truth = keydiff.rank(exact["key"], case.mask, case.anchor, case.similarity)
    error = judge.rank_error(keys, "cosine")
    held = case.mask
    used["rank"] = assert_within(rank[held], truth[held], error[held], what="rank")
    if case.anchor == "mean_normalized" and case.slots < 300:
        used["pairwise"] = judge.assert_pairwise_right(machine.pairwise(case), case)
    return used


def variants(case: KeyCase) -> list[KeyCase]:
    return [
        dataclasses.replace(case, anchor=anchor, similarity=similarity)
        for anchor in ANCHORS for similarity in SIMILARITIES
        if similarity == "cosine" or (case.content not in COSINE_ONLY and case.dtype not in FP8)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_no_correct_arithmetic_exceeds_the_bounds(machine, content):
    for dtype, shape in (
        (torch.float32, {"slots": 16}), (torch.bfloat16, {"slots": 37, "occupancy": "random", "per_head": True}),
        (torch.float16, {"slots": 24, "head_dim": 40}), (torch.float32, {"slots": 1, "occupancy": "empty_row"}),
    ):
        case = KeyCase(**{"batch": 2, "key_value_heads": 2, "dtype": dtype, "content": content, "seed": 3, **shape})
        for variant in variants(case):
            utilisation(machine, variant)


@pytest.mark.parametrize("content", [
    content if content in ("ordinary", "subnormal") else pytest.param(content, marks=pytest.mark.slow)
    for content in FP8_CONTENTS
])
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_no_correct_arithmetic_exceeds_the_bounds_over_fp8_keys(dtype, content):
    for machine in MACHINES[:3]:
        for shape in ({"slots": 16}, {"slots": 21, "occupancy": "random", "per_head": True, "head_dim": 24}):
            case = KeyCase(**{"batch": 2, "key_value_heads": 2, "dtype": dtype, "content": content, "seed": 3, **shape})
            for variant in variants(case):
                utilisation(machine, variant)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_keys_keep_the_meaning_of_their_contents(dtype):
    def made(content: str, **more: str) -> tuple[KeyCase, Tensor]:
        case = KeyCase(slots=24, dtype=dtype, content=content, **more)
        return case, case.key.double()

    for content in FP8_CONTENTS:
        case, key = made(content, poison="nan", occupancy="random")
        assert case.key.dtype == case.value.dtype == dtype
        assert bool(key[case.mask].isfinite().all()) and bool(key[~case.mask].isnan().all()), content
        assert len(key[case.mask].unique()) >= 3, content
    least = torch.finfo(dtype).smallest_normal
    for content, low, high in (("ordinary", 0.9, 1), ("subnormal", 0.01, 0.2)):
        normal = (made(content)[1].abs() >= least).double().mean()
        assert low <= float(normal) <= high, content
    for content, different in (("duplicates", 24 - 7), ("zero_keys", 24 - 6), ("equal_keys", 1)):
        case, _ = made(content)
        assert len(judge.equal_keys(case.key, case.mask).unique()) == different, content
    length = made("sizes")[1].norm(dim=-1)
    assert float(length.max() / length.min()) > 256


@pytest.mark.parametrize("dtype", [
    torch.float32, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in FP8),
], ids=str)
@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_ordinary_data_reaches_one_percent_of_each_bound(machine, dtype):
    """For D = 16, S <= 16 and float32, the worst of a few thousand elements of ordinary data uses at least 1 %. So it
    does over FP8 keys, with which the arithmetic is float32."""
    worst: dict[str, float] = {}
    for slots in (2, 8, 16):
        for case in variants(KeyCase(batch=128, slots=slots, seed=1, dtype=dtype)):
            for name, used in utilisation(machine, case).items():
                name = f"{case.anchor} {name}"
                worst[name] = max(used, worst.get(name, 0))
    assert all(0.01 <= used <= 1 for used in worst.values()), worst


#: Just below half an ulp of 1.
LOST = 2.0**-24 * (1 - 2.0**-8)


def erring_keys(slots: int, head_dim: int) -> Tensor:
    """Keys whose sequential sum has the largest error in channel 0: first 1, and then terms just too small to change 1.
    The other keys are along the other channels, equally many for each."""
    key = torch.zeros(slots, head_dim)
    key[0, 0] = 1
    index = torch.arange(1, slots)
    key[1:, 0] = LOST
    key[index, 1 + index % (head_dim - 1)] = 1
    return key[None, None]


@pytest.mark.parametrize(("anchor", "similarity"), [
    ("mean_normalized", "cosine"), ("mean", "cosine"), ("mean", "dot"), ("mean_normalized", "dot"),
])
def test_sums_made_to_err_reach_ten_percent_at_larger_shapes(anchor, similarity):
    for slots, head_dim in ((256, 128), (512, 256)):
        case = KeyCase.of(erring_keys(slots, head_dim), anchor=anchor, similarity=similarity)
        found = utilisation(KeyMachine("sequential"), case)
        assert all(0.1 <= used <= 1 for used in found.values()), (slots, found)


def test_distances_made_to_err_reach_ten_percent():
    key = torch.full((1, 1, 512, 64), LOST)
    key[:, :, 0] = 1
    found = utilisation(KeyMachine("sequential"), KeyCase.of(key, anchor="mean", similarity="euclidean"))
    assert 0.1 <= found["euclidean"] <= 1, found


def test_a_root_beyond_its_allowance_is_caught():
    class Sloppy(KeyMachine):
        def root(self, squares):
            return super().root(squares) * (1 + 2.0**-14)

    case = KeyCase(batch=8, slots=4)
    with pytest.raises(Mismatch, match="score"):
        utilisation(Sloppy(late=True), case)


def test_bounds_are_zero_where_nothing_can_err_and_finite_everywhere():
    for content in CONTENTS:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            case = KeyCase(
                batch=3, key_value_heads=2, head_dim=80, slots=9, occupancy="empty_row", content=content, dtype=dtype,
            )
            for variant in variants(case):
                keys = judge.keys_of(variant)
                error = judge.score_error(keys, variant.similarity)
                assert bool(error.isfinite().all()) and bool((error[~case.mask] == 0).all())
                if variant.similarity == "cosine":
                    zero = (keys.key == 0).all(-1)
                    assert bool((error[zero] == 0).all()) and bool((error[~zero] > 0).all())
                    assert float(error.max()) < 3, "cosines must be within [-1, 1]"
                assert bool(judge.rank_error(keys, variant.similarity).isfinite().all())


def test_what_lies_in_unoccupied_slots_does_not_reach_a_bound():
    plain = KeyCase(slots=9, occupancy="random", poison="zero", seed=7)
    for kind in ("nan", "inf", "largest"):
        poisoned = dataclasses.replace(plain, poison=kind)
        for one, other in zip(judge.rank_interval(plain), judge.rank_interval(poisoned), strict=True):
            assert torch.equal(one[plain.mask], other[plain.mask])


# The comparators detect wrong results --------------------------------------------------------------------------------


def evicted(case: KeyCase) -> dict[str, Tensor]:
    return oracle(keydiff.evict, case)._asdict()


CASE = KeyCase(batch=2, key_value_heads=2, slots=12, budget=5, recent=2, protect="newest", dtype=torch.bfloat16)


def given_back(case: KeyCase, kept: Tensor, **changes: Tensor) -> keydiff.EvictResult:
    key, value = (judge.gathered(tensor, kept.long().clamp_max(case.slots - 1)) for tensor in (case.key, case.value))
    return keydiff.EvictResult(**{"key": key, "value": value, "kept": kept, "occupied": kept >= 0, **changes})


def test_the_truth_itself_is_right():
    judge.assert_evict_right(given_back(CASE, evicted(CASE)["kept"]), CASE)


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda kept: kept.flip(-1), "ascend"),
    (lambda kept: kept.clone().index_fill_(-1, torch.tensor([1]), 99), "expected 5 tokens"),
    (lambda kept: kept[..., :-1], "expected int64"),
    (lambda kept: kept.int(), "expected int64"),
    (lambda kept: torch.arange(5).expand_as(kept), "protected tokens"),
])
def test_a_wrong_kept_is_caught(spoil, says):
    with pytest.raises(Mismatch, match=says):
        judge.assert_evict_right(given_back(CASE, spoil(evicted(CASE)["kept"])), CASE)


@pytest.mark.parametrize(("name", "says"), [("key", "kept key"), ("value", "kept value"), ("occupied", "occupied")])
def test_what_does_not_fit_kept_is_caught(name, says):
    kept = evicted(CASE)["kept"]
    right = given_back(CASE, kept)._asdict()[name]
    wrong = ~right if name == "occupied" else right.clone().index_fill_(-1, torch.tensor([3]), 7)
    with pytest.raises(Mismatch, match=says):
        judge.assert_evict_right(given_back(CASE, kept, **{name: wrong}), CASE)
    with pytest.raises(Mismatch, match=f"{says}: expected dtype"):
        judge.assert_evict_right(given_back(CASE, kept, **{name: right.float()}), CASE)


def test_a_victim_that_is_not_the_worst_is_caught():
    case = KeyCase(slots=12, budget=5)
    kept = evicted(case)["kept"]
    best = set(kept[0, 0].tolist())
    swapped = sorted([*sorted(best)[1:], min(set(range(12)) - best)])
    with pytest.raises(Mismatch, match="is evicted with a score in"):
        judge.assert_evict_right(given_back(case, torch.tensor([[swapped]])), case)


@pytest.mark.parametrize("factor", [1, 0], ids=["equal", "zero"])
def test_the_wrong_one_of_equal_keys_is_caught(factor):
    key = torch.randn(1, 1, 12, 16, generator=torch.Generator().manual_seed(0)).abs()
    key[:, :, 3:7] = -key[:, :, :1] * factor  # far from the others, or zero with rank 0: they are kept
    key[:, :, 5, 2] *= -1 if factor == 0 else 1  # -0 is 0
    case = KeyCase.of(key, budget=3)
    assert evicted(case)["kept"].tolist() == [[[4, 5, 6]]]
    with pytest.raises(Mismatch, match="the lower index must be evicted first"):
        judge.assert_evict_right(given_back(case, torch.tensor([[[3, 5, 6]]])), case)


@pytest.mark.parametrize("case", [KeyCase(slots=30), KeyCase(slots=30, content="collinear", dtype=torch.bfloat16)])
def test_scores_that_are_a_little_wrong_are_caught(case):
    score = keydiff.score(case.key)
    judge.assert_score_right(score, case)
    for wrong in (score.double(), score.bfloat16()):
        with pytest.raises(Mismatch, match="score: expected dtype float32"):
            judge.assert_score_right(wrong, case)
        with pytest.raises(Mismatch, match="score: expected dtype float32"):
            judge.assert_pairwise_right(wrong, case)
    without = score.masked_fill(score == score.max(), torch.nan)
    for wrong in (-score, score.bfloat16().float(), score * (1 + 1e-4), without):
        with pytest.raises(Mismatch):
            judge.assert_score_right(wrong, case)
    with pytest.raises(Mismatch):
        judge.assert_pairwise_right(keydiff.pairwise_score(case.key) / 30, case)
    # The anchor of figure 3, the mean of the unnormalised keys, is another one.
    uneven = KeyCase.of(case.key * torch.arange(1, 31)[:, None].to(case.dtype))
    with pytest.raises(Mismatch):
        judge.assert_score_right(keydiff.score(uneven.key, anchor="mean"), uneven)
