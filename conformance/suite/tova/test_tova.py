"""TOVA under test: the newest query decides, by log-weights; the lowest slot of a tie is evicted; nothing is
protected."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.kind("equivalence")

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))


def new(module, device, budget, block, **options):
    return module.TOVAState(
        module.TOVAConfig(budget, block, **options), batch=2, query_heads=1, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )


@pytest.mark.property("state")
@SIDES
@pytest.mark.parametrize("how", ("steps", "block"))
@pytest.mark.parametrize("budget", [3, 4])
def test_tova_evicts_the_least_of_weights_that_vanish(side, how, budget, twins, device):
    """exp(-150) and exp(-600) are 0 in float32. The token with the latter is evicted, which is not in the lowest
    slot."""
    state = new(getattr(twins, side).baselines.tova, device, budget=budget, block=8)
    key = torch.zeros(2, 1, budget + 1, 16, device=device)
    key[:, 0, :3, 0] = torch.tensor([-150.0, -600.0, -300.0])
    query = torch.zeros_like(key)
    query[..., 0] = 4  # the default scale is 1 / 4
    if how == "steps":
        for token in range(budget + 1):
            state.step(*(tensor[:, :, token] for tensor in (query, key, key)))
    else:
        state.prefill(query, key, key)
    assert sorted(state.positions[0, 0, :budget].tolist()) == [0, *range(2, budget + 1)]


@pytest.mark.property("state")
@SIDES
def test_tova_of_all_heads_keeps_its_scores_through_padding(side, twins, device):
    check_padding(new(getattr(twins, side).baselines.tova, device, budget=3, block=2, per_head=False), device)


def check_padding(state, device):
    generator = torch.Generator().manual_seed(4)
    state.prefill(*torch.randn(3, 2, 1, 3, 16, generator=generator).to(device))
    before, positions = state.score.clone(), state.positions.clone()
    tokens = torch.randn(3, 2, 1, 2, 16, generator=generator).to(device)
    state.append_block(*tokens, torch.tensor([[False, False], [True, False]], device=device))
    assert torch.equal(state.score[0], before[0]) and torch.equal(state.positions[0], positions[0])
    assert not torch.equal(state.score[1], before[1])


@pytest.mark.property("state")
@SIDES
@pytest.mark.parametrize("how", ("steps", "block"))
def test_tova_evicts_at_intervals_by_weights_that_vanish(side, how, twins, device):
    """Four tokens stay until the fifth. Then the two with the least weights are evicted, which are 0 in float32."""
    module = getattr(twins, side).baselines.tova
    state = module.TOVAState(
        module.TOVAConfig(3, 8, interval=2), batch=2, query_heads=1, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )
    key = torch.zeros(2, 1, 5, 16, device=device)
    key[:, 0, :3, 0] = torch.tensor([-150.0, -600.0, -300.0])
    query = torch.zeros_like(key)
    query[..., 0] = 4  # the default scale is 1 / 4
    state.prefill(query[:, :, :2], key[:, :, :2], key[:, :, :2])
    if how == "steps":
        for token in range(2, 5):
            assert state.positions[0, 0, :token].tolist() == [*range(token)]
            state.step(*(tensor[:, :, token] for tensor in (query, key, key)))
    else:
        state.append_block(*(tensor[:, :, 2:] for tensor in (query, key, key)))
    assert sorted(state.positions[0, 0, :3].tolist()) == [0, 3, 4]
    assert state.occupied[0, 0].sum() == 3
