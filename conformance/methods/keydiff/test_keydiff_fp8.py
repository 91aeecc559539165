"""KeyDiff over FP8 keys: as over the numbers that they are, and as over these numbers times positive scales:
what only our own sides promise.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.fp8_cases import FORMATS, LARGEST
from kvtwin.conformance.cases.in_pages import with_pages
from kvtwin.conformance.cases.key_cases import ANCHORS, FP8_CONTENTS, UNDECIDED, key_cases
from kvtwin.conformance.judge.checkers import keydiff as judge
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.conformance.suite.keydiff.test_keydiff_fp8 import (
    assert_right,
    bits,
    each_format,
    each_side,
    keys,
    module_of,
    over_pages,
    paged_keys,
)
from kvtwin.reference import keydiff as eager

DECIDED = tuple(content for content in FP8_CONTENTS if content not in UNDECIDED)
few = settings(max_examples=max(2, settings().max_examples // 5))


@pytest.mark.kind("equivalence")
@each_side
@given(data=st.data())
@few
def test_keydiff_over_fp8_is_what_float64_says(side, data, twins, device):
    case = data.draw(key_cases(content=DECIDED, similarity=("cosine",), slots=(1, 24)))
    case = dataclasses.replace(case, dtype=FORMATS[data.draw(st.sampled_from(sorted(FORMATS)))])
    assert_right(module_of(twins, side, device), case)
    judge.assert_pairwise_right(module_of(twins, side, device).pairwise_score(**case.pairwise_inputs), case)


@pytest.mark.kind("laws")
@each_side
@each_format
@pytest.mark.parametrize("anchor", ANCHORS)
def test_a_positive_scale_of_each_head_changes_nothing(side, fp8, anchor, twins, device):
    """The result is right for keys times any positive scales, also if they differ among heads by orders of magnitude.
    With powers of two, it has the same bits."""
    case = keys(fp8, device, anchor=anchor)
    module = module_of(twins, side, device)
    score, kept = module.score(**case.score_inputs), module.evict(**case.inputs).kept
    error = judge.score_error(judge.keys_of(case), "cosine")
    for scale in ([0.3, 170.0], [2.0**-8, 4.0]):
        scaled = case.key.double() * torch.tensor(scale, dtype=torch.float64, device=device)[:, None, None]
        truth = eager.score(scaled, occupied=case.occupied, anchor=anchor)
        assert_within(score, truth, error, what=f"score against that of keys times {scale}")
    plain = {name: getattr(case, name).float() for name in ("key", "value")}
    plain["key"] = scaled.float().nan_to_num()
    if device.type == "cpu":
        assert_same(module.score(**case.score_inputs | {"key": plain["key"]}), score, what="score of scaled keys")
        assert_same(module.evict(**case.inputs | plain).kept, kept, what="kept of scaled keys")


@pytest.mark.slow_on_cpu
@pytest.mark.kind("laws")
@each_side
@each_format
@pytest.mark.parametrize("occupancy", ["random", "left_padding", "empty_row"])
def test_keydiff_reads_no_code_of_a_free_slot(side, fp8, occupancy, twins, device):
    """NaN with both signs, infinity, and all others."""
    case = keys(fp8, device, occupancy=occupancy, poison="zero")
    module = module_of(twins, side, device)
    free = ~case.mask[..., None]
    assert bool(free.any())
    plain = module.score(**case.score_inputs), module.evict(**case.inputs).kept
    for code in (0x7C, 0x7F, 0xFF, 0xFC, 0x80, LARGEST[fp8]):
        key = bits(case.key).masked_fill(free, code).view(FORMATS[fp8])
        assert_same(module.score(**case.score_inputs | {"key": key}), plain[0], what=f"score with {code:#x}")
        assert_same(module.evict(**case.inputs | {"key": key}).kept, plain[1], what=f"kept with {code:#x}")


@pytest.mark.slow_on_cpu
@pytest.mark.kind("laws")
@each_side
@each_format
@pytest.mark.parametrize("layout", ["transposed", "sliced", "spread", "channels_first"])
def test_keydiff_over_fp8_does_not_depend_on_strides(side, fp8, layout, twins, device):
    one, other = (keys(fp8, device, layout=name) for name in ("contiguous", layout))
    module = module_of(twins, side, device)
    assert_right(module, other)
    if device.type == "cpu":
        for name, mine, its in zip(
            eager.EvictResult._fields, module.evict(**one.inputs), module.evict(**other.inputs), strict=True
        ):
            assert_same(its, mine, what=name)


@pytest.mark.kind("laws")
@each_side
@pytest.mark.parametrize(("fp8", "code"), [("e4m3", 0xFF), ("e5m2", 0x7E)])
def test_nan_in_an_occupied_slot_reaches_the_scores(side, fp8, code, twins, device):
    """Of its head alone."""
    case = keys(fp8, device, occupancy="none")
    key = bits(case.key).clone()
    key[1, 0, 20, 3] = code
    score = module_of(twins, side, device).score(key.view(FORMATS[fp8]))
    assert bool(score[1, 0].isnan().all()) and not bool(score[0].isnan().any() or score[1, 1].isnan().any())


@pytest.mark.kind("laws")
@each_side
@each_format
@pytest.mark.parametrize("anchor", ANCHORS)
def test_keydiff_over_pages_of_fp8_has_the_bits_of_one_tensor(side, fp8, anchor, twins, device):
    """On a GPU, where other instructions load the keys, the results are right, and need not have the same bits."""
    for protect in ("none", "random"):
        case = paged_keys(fp8, device, anchor=anchor, recent=2, protect=protect)
        module = over_pages(twins, side, case)
        score = module.paged_score(**with_pages(case.paged_score_inputs))
        found = module.paged_evict(**with_pages(case.paged_inputs))
        judge.assert_score_right(score, case)
        judge.assert_paged_evict_right(found, case)
        if device.type == "cpu":
            assert_same(score, module.score(**case.score_inputs), what="score")
            assert_same(found.kept, module.evict(**case.inputs).kept, what="kept")
