"""KeyDiff on caches of several tiles and programs, with a key of extreme size in one of the tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.key_cases import KeyCase
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.checkers import keydiff as judge

pytestmark = [
    pytest.mark.kind("equivalence"),
    pytest.mark.property("accuracy"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # see test_keydiff.py
]

SLOTS, HEAD_DIM = 150, 16
#: The slot of the extreme key, by KV head.
PLACES = (5, 40, 70, 120, 140)


def keys(device: torch.device, *, seed: int, factor: float) -> Tensor:
    key = torch.randn(1, len(PLACES), SLOTS, HEAD_DIM, generator=torch.Generator().manual_seed(seed)).clamp(-3, 3)
    for head, place in enumerate(PLACES):
        key[0, head, place] *= factor
    return key.to(device)


@pytest.mark.parametrize("factor", [1e30, 2.0**-71])
def test_a_key_of_extreme_size_in_any_tile_has_a_direction(factor, twins, device):
    key = keys(device, seed=1, factor=factor)
    judge.assert_score_right(twins.optimized.keydiff.score(key), KeyCase.of(key))


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("factor", [1e30, 2.0**-71])
def test_a_step_evicts_a_key_of_extreme_size_in_any_tile(factor, twins, device):
    """It is the key most like the anchor. One more head has no such key. The sum of the keys is computed again at every
    second step."""
    key = 1 + 0.5 * torch.cat((keys(device, seed=2, factor=1.0), keys(device, seed=3, factor=1.0)[:, :1]), 1)
    for head, place in enumerate(PLACES):
        key[0, head, place] = factor
    heads, budget = key.shape[1], SLOTS - 5
    generator = torch.Generator().manual_seed(4)
    query, value = (torch.randn(1, heads, SLOTS, HEAD_DIM, generator=generator).to(device) for _ in range(2))
    both = lockstep.pair(
        "keydiff", twins.optimized.keydiff, config={"budget": budget, "block_size": budget, "refresh": 2}, batch=1,
        query_heads=heads, key_value_heads=heads, head_dim=HEAD_DIM, dtype=torch.float32, device=device,
    )
    both.prefill(*(tensor[:, :, :budget] for tensor in (query, key, value)))
    for step in range(budget, SLOTS):
        both.step(*(tensor[:, :, step] for tensor in (query, key, value)))
        assert not any(place in both.tested.positions[0, head].tolist() for head, place in enumerate(PLACES))
