"""SnapKV's prompt compression under test against float64, with shared and with separate choices of heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance import stats
from kvtwin.conformance.cases.case import WindowCase
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.layouts import MIXED
from kvtwin.conformance.cases.strategies import DECIDED, VANISHING, window_cases
from kvtwin.conformance.judge.checkers import snapkv as judge
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.optimized.baselines import snapkv

pytestmark = pytest.mark.kind("equivalence")

some = settings(max_examples=max(at_least(4), settings().max_examples // 2))


@given(case=window_cases(), shared_heads=st.booleans())
@some
def test_snapkv_scores_as_float64_would(case, shared_heads, twins):
    actual = twins.optimized.baselines.snapkv.window_score(**case.score_inputs, shared_heads=shared_heads)
    judge.assert_score_right(actual, case, shared_heads=shared_heads)


@pytest.mark.property("accuracy")
@pytest.mark.parametrize("occupancy", ("none", "random"))
@pytest.mark.parametrize("tokens", (20, 300))
def test_snapkv_scores_a_long_prompt_with_padding_in_its_window(tokens, occupancy, twins, device):
    """Several blocks of slots over which the softmax's maximum rises, and padding queries in the window."""
    case = WindowCase(
        batch=3, key_value_heads=2, group=2, head_dim=16, tokens=tokens, observers=8, budget=10, occupancy=occupancy,
        seed=3, device=str(device),
    )
    for shared_heads in (False, True):
        actual = twins.optimized.baselines.snapkv.window_score(**case.score_inputs, shared_heads=shared_heads)
        judge.assert_score_right(actual, case, shared_heads=shared_heads)


@pytest.mark.property("layouts")
@pytest.mark.parametrize("occupancy", ("none", "random"))
def test_snapkv_scores_by_a_window_of_three_tiles(occupancy, twins, device):
    """The window's queries are processed 16 at a time. No two tensors have a stride in common."""
    case = WindowCase(
        batch=2, key_value_heads=2, group=3, head_dim=16, tokens=60, observers=40, budget=50, occupancy=occupancy,
        layout=MIXED, seed=4, device=str(device),
    )
    for shared_heads in (False, True):
        actual = twins.optimized.baselines.snapkv.window_score(**case.score_inputs, shared_heads=shared_heads)
        judge.assert_score_right(actual, case, shared_heads=shared_heads)


@given(case=window_cases(content=DECIDED), shared_heads=st.booleans())
@some
def test_snapkv_keeps_what_float64_would(case, shared_heads, twins):
    actual = twins.optimized.baselines.snapkv.compress(**case.snapkv_inputs, shared_heads=shared_heads)
    judge.assert_compress_right(actual, case, shared_heads=shared_heads)


@given(case=window_cases(content=VANISHING), shared_heads=st.booleans())
@some
def test_snapkv_choices_are_legal_where_weights_vanish(case, shared_heads, twins):
    """Most scores are 0 within their bounds, so few decisions are decisive. These and the form of the result are
    judged, but decisions are not counted (for logits of 1e4, 39 of 1,431 were decisive)."""
    actual = twins.optimized.baselines.snapkv.compress(**case.snapkv_inputs, shared_heads=shared_heads)
    with stats.collect():
        judge.assert_compress_right(actual, case, shared_heads=shared_heads)


@given(case=window_cases(tokens=(12, 40), content=("ordinary",), max_window=6))
@some
def test_snapkv_choices_are_mostly_decisive(case, twins):
    """For ordinary prompts and a budget for part of the prefix, scores decide, and most decisions are decisive."""
    budget = case.observers + (case.tokens - case.observers) // 2
    case = replace(case, budget=budget, protect="none")
    actual = twins.optimized.baselines.snapkv.compress(**case.snapkv_inputs, shared_heads=True)
    judge.assert_compress_right(actual, case)


@pytest.mark.property("decisions")
def test_snapkv_keeps_tokens_that_the_window_attends_to(twins, device):
    """The prefix token that every window query attends to is kept. All other prefix keys are orthogonal to the
    queries."""
    tokens, window, head_dim, target = 30, 4, 16, 11
    key = torch.zeros(1, 1, tokens, head_dim, device=device)
    key[..., 0] = torch.arange(tokens, device=device) % 2
    key[0, 0, target, 1] = 8
    query = torch.zeros(1, 2, window, head_dim, device=device)
    query[..., 1] = 4
    for module in (twins.reference.baselines.snapkv, twins.optimized.baselines.snapkv):
        kept = module.compress(query, key, key, window + 1, kernel_size=1).kept
        assert kept[0, 0].tolist() == [target, *range(tokens - window, tokens)]


@pytest.mark.kind("laws")
@pytest.mark.parametrize("seed", range(3))
def test_snapkv_ties_tokens_whose_pools_hold_the_same_weights(seed, device):
    """The pool of each of three tokens covers all three, between zeros at its ends. kvtwin's own pool adds them in one
    order; one that adds them in another order is within the bounds, so other implementations are not asked."""
    case = WindowCase(
        batch=3, key_value_heads=4, group=2, head_dim=16, tokens=5, observers=2, budget=4, seed=seed, device=str(device)
    )
    for shared_heads in (False, True):
        score = snapkv.window_score(**case.score_inputs, shared_heads=shared_heads)[..., :3]
        assert_same(score, score[..., :1].expand_as(score), what="score")
