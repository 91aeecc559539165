"""Random eviction under test: scores are exactly the bits of a hash, and the best of all tokens so far are kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.judge.block_model import splitmix64

pytestmark = pytest.mark.kind("equivalence")

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
few = settings(max_examples=max(at_least(3), settings().max_examples // 6))
LARGEST = 2**32 - 1


@pytest.mark.parametrize(("seed", "first"), [
    # Outputs of the generator for two seeds, as published with it.
    (0, 0xE220A8397B1DCDAF), (1234567, 6457827717110365317),
])
def test_random_hash_is_splitmix64(seed, first):
    assert splitmix64(seed) == first


@SIDES
@given(
    positions=st.lists(st.integers(-1, 2000) | st.integers(-1, LARGEST), min_size=1, max_size=8),
    seed=st.integers(0, 9) | st.integers(0, LARGEST),
)
def test_random_scores_are_the_hash_of_the_position(side, positions, seed, twins, device):
    given_ = torch.tensor([positions], device=device)
    score = getattr(twins, side).baselines.random.score(given_, seed=seed)
    assert score.dtype == torch.float32 and score.shape == given_.shape
    expected = [
        float(splitmix64((seed << 32) + position) >> 40) if position >= 0 else -torch.inf for position in positions
    ]
    assert score[0].tolist() == expected


@SIDES
@given(
    budget=st.integers(1, 6), block=st.integers(1, 5), count=st.integers(1, 12), seed=st.integers(0, LARGEST),
    padding=st.lists(st.integers(0, 11), max_size=4),
)
@few
def test_random_keeps_the_best_of_all_that_came(side, budget, block, count, seed, padding, twins, device):
    """A token's score never changes, so blocks have no effect: the best `budget` of all valid tokens are kept."""
    module = getattr(twins, side).baselines.random
    state = module.RandomState(
        module.RandomConfig(budget, block, seed), batch=2, query_heads=1, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )
    tokens = torch.randn(3, 2, 1, count, 16, generator=torch.Generator().manual_seed(count)).to(device)
    occupied = torch.ones(2, count, dtype=torch.bool, device=device)
    occupied[1, [token for token in padding if token < count]] = False
    state.prefill(*tokens, occupied)
    for row in range(2):
        real = occupied[row].nonzero()[:, 0].tolist()
        best = sorted(real, key=lambda position: splitmix64((seed << 32) + position) >> 40)[-budget:]
        held = state.positions[row, 0]
        assert sorted(held[held >= 0].tolist()) == sorted(best)
        scores = [float(splitmix64((seed << 32) + p) >> 40) if p >= 0 else -torch.inf for p in held.tolist()]
        assert state.score[row, 0].tolist() == scores


@SIDES
def test_random_is_the_same_in_every_row_and_head(side, twins, device):
    module = getattr(twins, side).baselines.random
    state = module.RandomState(
        module.RandomConfig(4, 8, seed=5), batch=2, query_heads=2, key_value_heads=2, head_dim=16,
        dtype=torch.float16, device=device,
    )
    generator = torch.Generator().manual_seed(1)
    state.prefill(*torch.randn(3, 2, 2, 8, 16, generator=generator).to(device, torch.float16))
    assert state.positions.unique(dim=1).shape[1] == 1 and state.positions.unique(dim=0).shape[0] == 1
    assert state.positions[0, 0, :4].tolist() != [4, 5, 6, 7]
