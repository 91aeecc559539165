"""SnapKV under test against float64 in cases that are rarely drawn on the CPU: several KV heads, far offsets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from kvtwin.conformance.cases.case import WindowCase
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.strategies import window_cases
from kvtwin.conformance.judge.checkers import snapkv as judge

pytestmark = pytest.mark.kind("equivalence")

few = settings(max_examples=max(at_least(5), settings().max_examples // 4))
sharing = pytest.mark.parametrize("shared_heads", [False, True], ids=["per_head", "shared"])


def assert_right(case: WindowCase, shared_heads: bool, snapkv) -> None:
    judge.assert_score_right(
        snapkv.window_score(**case.score_inputs, shared_heads=shared_heads), case, shared_heads=shared_heads
    )
    judge.assert_compress_right(
        snapkv.compress(**case.snapkv_inputs, shared_heads=shared_heads), case, shared_heads=shared_heads
    )


@sharing
@given(case=window_cases(tokens=(8, 40), content=("ordinary", "duplicates"), max_window=6).map(
    lambda case: replace(case, batch=1, key_value_heads=2, occupancy="none", protect="none")
))
@few
def test_snapkv_keeps_heads_apart(case, shared_heads, twins):
    """Two KV heads with a shared choice or separate ones."""
    case = replace(case, budget=case.observers + (case.tokens - case.observers) // 2)
    assert_right(case, shared_heads, twins.optimized.baselines.snapkv)


@sharing
@pytest.mark.parametrize(
    ("batch", "heads", "tokens"), [(3, 1, 7), (1, 3, 7), (1, 1, 9)], ids=["rows", "heads", "tokens"]
)
def test_snapkv_reaches_offsets_beyond_2_to_the_31(batch, heads, tokens, shared_heads, twins, device):
    """Offsets of the last row, head or token do not fit into 32 bits."""
    case = WindowCase(
        batch=batch, key_value_heads=heads, group=1, head_dim=128, dtype=torch.float16, layout="far", tokens=tokens,
        observers=3, budget=5, kernel_size=3, device=str(device),
    )
    assert max(case.key.stride()) * (max(batch, heads, tokens) - 1) > 2**31 - 1
    assert_right(case, shared_heads, twins.optimized.baselines.snapkv)
