"""An anticipation in one launch chooses what the one in eight launches chooses, and leaves its scratch memory clean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvtwin.conformance.judge.compare import assert_same
from kvtwin.optimized.synckv import _step
from kvtwin.optimized.synckv._anticipate_fused import BINS

pytestmark = pytest.mark.kind("equivalence")

BATCH, HEADS, SPLITS = 2, 2, 2
ROWS = BATCH * HEADS


def logits_of(content: str, group: int, slots: int, generator: torch.Generator) -> Tensor:
    """[rows, group, slots]: with many equal numbers, with two different ones, or all close together."""
    logits = torch.randn(ROWS, group, slots, generator=generator, device=generator.device)
    if content == "ties":
        return logits.round()
    if content == "two numbers":
        return (logits > 0).float()
    return 1e-4 * logits + 5 if content == "close" else logits


def chosen(
    logits: Tensor, occupied: Tensor, fixed: Tensor, generator: torch.Generator, capacity: int, count: int,
    exclude: bool, due: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """The lists after an anticipation, which held -7, and its scratch memory."""
    device, parts = logits.device, (ROWS * logits.shape[1] * SPLITS,)
    maxima = torch.randn(parts, generator=generator, device=device)
    sums = torch.rand(parts, generator=generator, device=device) + 0.1
    lists = torch.full((BATCH, HEADS, capacity), -7, device=device)
    histograms = torch.zeros(ROWS, BINS.value, dtype=torch.int32, device=device)
    arrived = torch.zeros(ROWS, dtype=torch.int32, device=device)
    _step.anticipate(
        torch.tensor([due], dtype=torch.int32, device=device), logits, maxima, sums, occupied, fixed, histograms,
        arrived, lists, SPLITS, count, exclude,
    )
    return lists, histograms, arrived


@given(
    content=st.sampled_from(("ordinary", "ties", "two numbers", "close")), group=st.sampled_from((1, 3, 4)),
    share=st.sampled_from((0.0, 0.05, 0.7, 1.0)), exclude=st.booleans(), seed=st.integers(0, 2**32 - 1), data=st.data(),
)
def test_one_launch_chooses_what_eight_choose(content, group, share, exclude, seed, data, device):
    on_cpu = device.type == "cpu"
    slots = data.draw(st.integers(1, 100) if on_cpu else st.integers(1, 100) | st.integers(4000, 40000))
    capacity = data.draw(st.integers(1, slots))
    count = capacity if exclude else data.draw(st.integers(1, capacity))

    def choose(alone: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        logits = logits_of(content, group, slots, generator)
        occupied = torch.rand(BATCH, slots, generator=generator, device=device) < share
        logits = logits.masked_fill(~occupied.repeat_interleave(HEADS, 0)[:, None], -torch.inf)
        fixed = torch.rand(BATCH, HEADS, slots, generator=generator, device=device) < 0.2
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_step, "ALONE", alone)
            return chosen(logits, occupied, fixed & occupied[:, None], generator, capacity, count, exclude)

    found, histograms, arrived = choose(slots)
    assert_same(found, choose(0)[0], what="the lists")
    assert not histograms.any()
    assert not arrived.any()


def test_a_step_without_an_anticipation_changes_nothing(device, monkeypatch):
    monkeypatch.setattr(_step, "ALONE", 20)
    generator = torch.Generator(device).manual_seed(0)
    logits, occupied = torch.zeros(ROWS, 1, 20, device=device), torch.ones(BATCH, 20, dtype=torch.bool, device=device)
    fixed = torch.zeros(BATCH, HEADS, 20, dtype=torch.bool, device=device)
    found, histograms, arrived = chosen(logits, occupied, fixed, generator, 5, 3, False, due=0)
    assert (found == -7).all()
    assert not histograms.any()
    assert not arrived.any()
