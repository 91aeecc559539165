"""Corner cases: each test reproduces a bug that a reviewer found."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.kind("equivalence")


@pytest.mark.property("extreme_numbers")
def test_longflow_ranks_an_infinite_value_alike_on_both_sides(twins, device):
    """||v||_1 is infinite, so the score is infinite and the token is kept."""
    query, key, value = torch.randn(3, 1, 1, 6, 16, generator=torch.Generator().manual_seed(2)).to(device)
    value[0, 0, 3, 5] = torch.inf
    occupied = torch.ones(1, 6, dtype=torch.bool, device=device)
    both = [
        side.longflow.decode_attention(query[:, :, 0], key, value, occupied)
        for side in (twins.reference, twins.optimized)
    ]
    assert both[0].score[0, 3] == both[1].score[0, 3] == torch.inf
    assert both[0].slot == both[1].slot != 3
