"""KeyDiff's functions under test against float64: the scores of all keys and the kept tokens, for all kinds of
content: what only our own sides promise.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.key_cases import ANCHORS, CONTENTS, SIMILARITIES, UNDECIDED, KeyCase, key_cases
from kvtwin.conformance.judge.checkers import keydiff as judge
from kvtwin.conformance.suite.keydiff.test_keydiff import and_one_to_decide, collinear, few

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.filterwarnings("ignore:overflow encountered")]

some = settings(max_examples=max(at_least(4), settings().max_examples // 3))
DECIDED = tuple(content for content in CONTENTS if content not in UNDECIDED)
# Contents with keys that must have equal ranks, so that the tie rule decides exactly.
OWN = {"anchor": ANCHORS[:1], "similarity": SIMILARITIES[:1]}
OTHERS = [(anchor, similarity) for anchor in ANCHORS for similarity in SIMILARITIES][1:]


@given(case=key_cases())
@some
def test_keydiff_scores_as_float64_would(case, twins):
    """For any shape, dtype, layout, mask and content, with poisoned free slots."""
    judge.assert_score_right(twins.optimized.keydiff.score(**case.score_inputs), case)


@given(case=key_cases(content=DECIDED))
@some
def test_keydiff_evicts_what_float64_would(case, twins):
    for one in and_one_to_decide(case):
        judge.assert_evict_right(twins.optimized.keydiff.evict(**one.inputs), one)


@given(data=st.data())
@some
def test_keydiff_supports_other_anchors_and_similarities(data, twins):
    """The anchors and similarities of tables 2 and 3."""
    anchor, similarity = data.draw(st.sampled_from(OTHERS))
    case = data.draw(key_cases(anchor=(anchor,), similarity=(similarity,), content=DECIDED))
    judge.assert_score_right(twins.optimized.keydiff.score(**case.score_inputs), case)
    judge.assert_evict_right(twins.optimized.keydiff.evict(**case.inputs), case)


@given(data=st.data())
@few
def test_keydiff_adjudicates_ranks_that_are_too_close(data, twins):
    """Near-ties, and a vanishing anchor, for which every cosine is a rounding error. Scores must still be finite and
    within their bounds, and protection and padding must be right."""
    case = data.draw(key_cases(content=UNDECIDED, **OWN))
    score = twins.optimized.keydiff.score(**case.score_inputs)
    assert bool(score[case.mask].isfinite().all())
    judge.assert_score_right(score, case)
    judge.assert_evict_right(twins.optimized.keydiff.evict(**case.inputs), case)
    # At least as many decisive choices, so that the test as a whole is not vacuous.
    plain = data.draw(key_cases(content=("collinear",), slots=(30, 48), occupancy=("none",), **OWN))
    judge.assert_evict_right(twins.optimized.keydiff.evict(**plain.inputs), plain)


@given(case=key_cases(content=("ordinary",), layout=("far",), slots=(3, 5), **OWN))
@few
def test_keydiff_reads_beyond_two_to_the_31_elements(case, twins):
    judge.assert_score_right(twins.optimized.keydiff.score(**case.score_inputs), case)
    judge.assert_evict_right(twins.optimized.keydiff.evict(**case.inputs), case)


def test_keydiff_orders_nearly_collinear_keys(twins, device):
    """2048 keys with nearly equal directions. For any budget, float32 orders nearly all of them as float64 does."""
    key = collinear(device, 2048, 64)
    module = twins.optimized.keydiff
    for budget in (512, 2000) if device.type == "cuda" else (512,):
        case = KeyCase.of(key, budget=budget)
        verdict = judge.assert_evict_right(module.evict(**case.inputs), case)
        assert int(verdict.scored.sum()) == 1
    score = module.score(key)
    judge.assert_score_right(score, case)
    assert len(score.unique()) > 1800
    low, high = judge.rank_interval(case)
    assert float((high - low).max()) < 0.01 * float(high.max() - low.min()), "the bounds must order the keys"


def test_bfloat16_scores_do_not_order_nearly_collinear_keys(device):
    """The reason why keys are not scored in their own type: 2048 scores have at most 8 distinct values, and less than
    half of the top quarter is right."""
    key = collinear(device, 2048, 64)
    case = KeyCase.of(key, budget=512)
    unit = torch.nn.functional.normalize(key, dim=-1)
    score = -torch.nn.functional.cosine_similarity(unit.mean(2, keepdim=True), key, dim=-1)
    assert score.dtype == torch.bfloat16
    assert len(score.unique()) <= 8
    best = score.float().topk(512).indices
    exact = judge.rank_interval(case).low.topk(512).indices
    shared = torch.isin(best, exact).double().mean()
    assert float(shared) < 0.5
