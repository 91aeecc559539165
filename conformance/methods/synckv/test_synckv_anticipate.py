"""The lists of an anticipation, from logits of which every operation is exact, and its scratch memory afterwards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvtwin.conformance.judge.compare import assert_same
from kvtwin.optimized.synckv import _step

pytestmark = pytest.mark.kind("equivalence")
BATCH, HEADS = 2, 2


def anticipate(
    logits: Tensor, maxima: Tensor, occupied: Tensor, fixed: Tensor, capacity: int, count: int, exclude: bool, due: int
) -> tuple[Tensor, Tensor]:
    """Lists, which held -7, and the histograms. Each row has one part, whose weights sum to one."""
    lists = torch.full((BATCH, HEADS, capacity), -7, device=logits.device)
    histograms = torch.zeros(BATCH, HEADS, 4, 256, dtype=torch.int32, device=logits.device)
    _step.anticipate(
        torch.tensor([due], dtype=torch.int32, device=logits.device), logits, maxima, torch.ones_like(maxima), occupied,
        fixed, histograms, lists, 1, count, exclude,
    )
    return lists, histograms


def expected(
    logits: Tensor, maxima: Tensor, occupied: Tensor, fixed: Tensor, capacity: int, count: int, exclude: bool
) -> Tensor:
    lists = torch.full((BATCH, HEADS, capacity), -7)
    for number in range(BATCH * HEADS):
        row, head = divmod(number, HEADS)
        score = (logits[number] - maxima.view(BATCH * HEADS, -1)[number, :, None]).amax(0).tolist()
        held, static = occupied[row].tolist(), fixed[row, head].tolist()
        tokens = [slot for slot in range(len(held)) if held[slot]]
        tokens.sort(key=lambda slot: (-torch.inf if exclude and static[slot] else -score[slot], slot))
        kept = sorted(tokens[:count])
        kept = [-1 if static[slot] and not exclude else slot for slot in kept]
        lists[row, head, capacity - count:] = torch.tensor([*kept, *[-1] * (count - len(kept))])
    return lists.to(logits.device)


@given(
    values=st.sampled_from((1, 2, 30, 4000)), group=st.sampled_from((1, 3, 4)),
    share=st.sampled_from((0.0, 0.1, 0.7, 1.0)), exclude=st.booleans(), seed=st.integers(0, 2**32 - 1), data=st.data(),
)
def test_lists_are_the_best_tokens_in_order(values, group, share, exclude, seed, data, device):
    """Few values give many equal scores, of which the first tokens are chosen. A list may be longer than the
    row has tokens."""
    slots = data.draw(st.integers(1, 200) if device.type == "cpu" else st.integers(1, 200) | st.integers(3000, 9000))
    capacity = data.draw(st.integers(1, slots))
    count = capacity if exclude else data.draw(st.integers(1, capacity))
    generator = torch.Generator(device).manual_seed(seed)
    rows = BATCH * HEADS
    logits = torch.randint(-values, values, (rows, group, slots), generator=generator, device=device).float()
    maxima = torch.randint(0, 9, (rows * group,), generator=generator, device=device).float()
    occupied = torch.rand(BATCH, slots, generator=generator, device=device) < share
    fixed = torch.rand(BATCH, HEADS, slots, generator=generator, device=device) < 0.2
    given = (logits.masked_fill(~occupied.repeat_interleave(HEADS, 0)[:, None], -torch.inf), maxima, occupied,
             fixed & occupied[:, None], capacity, count, exclude)
    found, histograms = anticipate(*given, due=1)
    assert_same(found, expected(*given), what="the lists")
    assert not histograms.any()


def test_a_step_without_an_anticipation_changes_nothing(device):
    logits, occupied = torch.zeros(BATCH * HEADS, 1, 20, device=device), torch.ones(BATCH, 20, device=device).bool()
    fixed = torch.zeros(BATCH, HEADS, 20, dtype=torch.bool, device=device)
    found, histograms = anticipate(
        logits, torch.zeros(BATCH * HEADS, device=device), occupied, fixed, 5, 3, False, due=0
    )
    assert (found == -7).all()
    assert not histograms.any()
