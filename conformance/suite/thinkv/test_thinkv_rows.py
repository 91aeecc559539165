"""ThinKV's state with rows whose segments have other thoughts and sizes, in another order, and after a reset."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.compare import assert_same

SIZES = {"batch": 2, "query_heads": 2, "key_value_heads": 1, "head_dim": 16}
#: Thoughts by segment and row.
THOUGHTS = ((2, 0), (1, 2), (1, 0), (2, 1), (0, 2))


def tokens(generator: torch.Generator, device: torch.device, *time: int) -> list[Tensor]:
    """query, key, value [B, heads, *time, D]."""
    return [torch.randn(2, heads, *time, 16, generator=generator).to(device) for heads in (2, 1, 1)]


@pytest.mark.slow_on_cpu
@pytest.mark.kind("equivalence")
@pytest.mark.property("state")
@pytest.mark.parametrize("budget", [9, 13])
def test_segments_go_with_their_rows_and_nothing_outlasts_a_reset(budget, twins, device):
    """Which segments shrink depends on the thoughts of all earlier ones. After the reset the prompt's segments, which
    are reasoning, take the places of segments that were not."""
    tau = 4
    config = {"budget": budget, "tau": tau, "group": 2, "block": 2, "retention": (3, 2, 1), "max_tokens": 60,
              "sparsity_threshold": 0.3}
    both = lockstep.pair("thinkv", twins.optimized.thinkv, config=config, **SIZES, dtype=torch.float32, device=device)
    generator = torch.Generator().manual_seed(tau)

    def run(segments: tuple[int, ...], reorder_in: int) -> None:
        for number in segments:
            thought = torch.tensor(THOUGHTS[number], device=device)
            for place in range(tau):
                for state in (both.tested, both.reference):
                    state.thought = thought
                if number == reorder_in and place == 1:
                    states = both.tested, both.reference
                    looked = [state.sparsity.flip(0) for state in states]
                    both.reorder(torch.tensor([1, 0], device=device))
                    assert_same(states[0].sparsity, looked[0], what="sparsity")
                    assert_same(states[1].sparsity, looked[1], what="the reference's sparsity")
                both.step(*tokens(generator, device))

    occupied = torch.ones(2, tau + 2, dtype=torch.bool, device=device)
    occupied[0, 1:5] = False
    both.prefill(*tokens(generator, device, tau + 2), occupied)
    run((0, 1, 2), 2)
    both.reset()
    both.prefill(*tokens(generator, device, 2 * tau + 1))
    run((4, 0, 1), 4)


@pytest.mark.kind("equivalence")
@pytest.mark.property("state")
@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_over_budget_goes_with_its_row(side, twins, device):
    """The segments of one row exceed the budget even at their smallest size. The other row is nearly all padding."""
    module = getattr(twins, side).thinkv
    config = module.ThinKVConfig(3, tau=4, group=2, block=2, retention=(2, 1), max_tokens=60)
    state = module.ThinKVState(config, **SIZES, dtype=torch.float32, device=device)
    occupied = torch.ones(2, 16, dtype=torch.bool, device=device)
    occupied[0, :15] = False
    state.prefill(*tokens(torch.Generator().manual_seed(1), device, 16), occupied)
    assert state.over_budget.tolist() == [False, True]
    state.reorder(torch.tensor([1, 0], device=device))
    assert state.over_budget.tolist() == [True, False]
