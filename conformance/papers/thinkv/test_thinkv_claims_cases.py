"""The cases of ThinKV's definition 3, and what a segment is (claims TK-18).

The states run with assigned thought types. Counts are exact. A test named ..._rejects_... shows that a slightly changed
statement fails, so the claim's own test is not empty.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.kind("claims")

T, E, R = 0, 1, 2
TAU, RETENTION = 4, (2, 1)


@pytest.fixture(scope="module", params=["reference", "optimized"])
def thinkv(request, twins):
    return getattr(twins, request.param).thinkv


def sizes_after(thinkv: Any, device: Any, kinds: list[int], *, budget: int = 100) -> list[list[int]]:
    """The number of live tokens of each segment at the end of each segment, with these thought types."""
    config = thinkv.ThinKVConfig(
        budget=budget, tau=TAU, group=2, block=2, retention=RETENTION, max_tokens=TAU * len(kinds)
    )
    state = thinkv.ThinKVState(
        config, batch=1, query_heads=1, key_value_heads=1, head_dim=16, dtype=torch.float32, device=device
    )
    generator, found = torch.Generator().manual_seed(0), []
    for number, kind in enumerate(kinds):
        for token in range(TAU):
            state.step(*torch.randn(3, 1, 1, 16, generator=generator).to(device))
            if not token:
                state.thought = torch.tensor([kind], device=device)
        live = Counter(state.segments[0][state.occupied[0]].tolist())
        found.append([live[segment] for segment in range(number + 1)])
    return found


@pytest.mark.claim("TK-18a")
def test_each_transition_reduces_every_earlier_segment_by_one_level(thinkv, device):
    """Including earlier transitions, and down to the minimum."""
    assert sizes_after(thinkv, device, [R, T, E, T, T]) == [
        [4], [2, 4], [2, 4, 4], [1, 2, 2, 4], [1, 1, 1, 2, 4],
    ]


@pytest.mark.claim("TK-18a")
def test_transitions_reject_other_thoughts_and_levels_that_are_skipped(thinkv, device):
    assert sizes_after(thinkv, device, [R, E, R]) == [[4], [4, 4], [4, 4, 4]]
    assert sizes_after(thinkv, device, [R, T])[-1][0] != RETENTION[1]


def annealed(thinkv: Any, device: Any, size: list[int], thought: list[int], budget: int) -> tuple[list[int], bool]:
    """The sizes that `anneal` leaves of earlier segments without a transition, and whether the budget is exceeded."""
    sizes, thoughts = torch.tensor([size, thought], device=device)[:, None]
    row = torch.tensor([len(size) - 1], device=device)
    found = thinkv.anneal(
        sizes, torch.zeros_like(sizes), thoughts, row, row < 0, live=sizes.sum(1), budget=budget, retention=(64, 32, 4),
    )
    return found.size[0].tolist(), bool(found.over_budget)


@pytest.mark.claim("TK-18b")
def test_least_important_and_oldest_segments_differ(thinkv, device):
    """An older reasoning and a newer execution segment. We reduce the less important one, and of two of one type the
    older one."""
    assert annealed(thinkv, device, [128, 128, 10], [R, E, R], 202)[0] == [128, 64, 10]
    assert annealed(thinkv, device, [128, 128, 10], [E, R, R], 202)[0] == [64, 128, 10]
    assert annealed(thinkv, device, [128, 128, 10], [E, E, R], 202)[0] == [64, 128, 10]
    assert annealed(thinkv, device, [128, 128, 10], [R, E, R], 266)[0] == [128, 128, 10]     # within the budget


@pytest.mark.claim("TK-18c")
def test_segments_at_their_minimum_have_no_lower_level(thinkv, device):
    """All earlier segments have 4 tokens, and the budget is exceeded by one: nothing is evicted. With one token more in
    a segment, that segment is reduced. The current segment is never."""
    assert annealed(thinkv, device, [4, 4, 10], [R, T, R], 17) == ([4, 4, 10], True)
    assert annealed(thinkv, device, [5, 4, 10], [R, T, R], 18) == ([4, 4, 10], False)


@pytest.mark.claim("TK-18d")
def test_two_windows_of_one_type_are_two_segments(thinkv, device):
    """By footnote 3 they are one segment, of 8 tokens here. As two, each keeps 2 at the next transition."""
    assert sizes_after(thinkv, device, [R, R, T])[-1] == [2, 2, 4]
    as_one = min(2 * TAU, RETENTION[0])
    assert sum(sizes_after(thinkv, device, [R, R, T])[-1][:2]) != as_one
