"""TOVA under test: the newest query decides, by log-weights; the lowest slot of a tie is evicted; nothing is
protected: what only our own sides promise.
"""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.suite.tova.test_tova import SIDES, check_padding, new

pytestmark = pytest.mark.kind("equivalence")


@SIDES
def test_tova_of_equal_keys_evicts_the_lowest_slots(side, twins, device):
    state = new(getattr(twins, side).baselines.tova, device, budget=3, block=1)
    token = torch.ones(3, 2, 1, 16, device=device)
    held = []
    for _ in range(6):
        state.step(*token)
        held.append(state.positions[0, 0, :3].tolist())
    assert held == [[0, -1, -1], [0, 1, -1], [0, 1, 2], [3, 1, 2], [4, 1, 2], [5, 1, 2]]


@SIDES
def test_tova_of_equal_keys_evicts_the_lowest_slots_of_a_block(side, twins, device):
    """At first all tokens are in the block, and its lowest slots are evicted. Then those of the cache are evicted, and
    the block takes their slots."""
    state = new(getattr(twins, side).baselines.tova, device, budget=3, block=6)
    state.append_block(*torch.ones(3, 2, 1, 6, 16, device=device))
    assert state.positions[0, 0, :3].tolist() == [3, 4, 5]
    state.append_block(*torch.ones(3, 2, 1, 2, 16, device=device))
    assert state.positions[0, 0, :3].tolist() == [6, 7, 5]


@SIDES
def test_tova_protects_no_token(side, twins, device):
    """The newest token is evicted at once if its own query attends to other tokens."""
    state = new(getattr(twins, side).baselines.tova, device, budget=2, block=1)
    for step in range(5):
        key = torch.full((2, 1, 16), -float(step), device=device)
        state.step(torch.ones(2, 1, 16, device=device), key, key)
    assert state.positions[0, 0].tolist() == [0, 1, -1]


@SIDES
def test_tova_uses_the_last_query_that_is_not_padding(side, twins, device):
    """The block of row 0 ends with padding, whose query attends to token 1. Its last valid query attends to token 0. In
    row 1, the last query attends to token 1 and is valid."""
    state = new(getattr(twins, side).baselines.tova, device, budget=2, block=4)
    key = torch.zeros(2, 1, 4, 16, device=device)
    for token in range(4):
        key[:, :, token, token] = 8
    query = torch.zeros_like(key)
    query[0, 0, 2, 0] = query[0, 0, 3, 1] = query[1, 0, 3, 1] = 8
    query[:, :, :, 2] += 4                                                               # all attend to token 2 as well
    occupied = torch.tensor([[True] * 3 + [False], [True] * 4], device=device)
    state.prefill(query, key, key, occupied)
    assert sorted(state.positions[0, 0, :2].tolist()) == [0, 2]
    assert sorted(state.positions[1, 0, :2].tolist()) == [1, 2]


@SIDES
def test_tova_keeps_its_scores_through_padding(side, twins, device):
    """A block that is all padding in one row has no query there, so the row keeps its scores and its tokens."""
    check_padding(new(getattr(twins, side).baselines.tova, device, budget=3, block=2), device)


@SIDES
@pytest.mark.parametrize("how", ("steps", "block"))
@pytest.mark.parametrize("per_head", (True, False))
@pytest.mark.parametrize(("weights", "evicted", "otherwise"), [
    (((0.7, 0.01, 0.29), (0.0005, 0.3, 0.6995)), 1, lambda weight: weight.log().mean(0)),
    (((0.45, 0.25, 0.3), (0.01, 0.4, 0.59)), 0, lambda weight: weight.amax(0)),
], ids=["not-the-average-logarithm", "not-the-largest"])
def test_tova_chooses_per_head_or_by_the_average_over_all_heads(
    side, how, per_head, weights, evicted, otherwise, twins, device
):
    """Head 0 alone evicts token 1, and head 1 token 0. The average evicts one of them, and another rule the other."""
    weight = torch.tensor(weights, device=device)
    assert weight.argmin(1).tolist() == [1, 0]
    assert weight.mean(0).argmin() == evicted
    assert otherwise(weight).argmin() == 1 - evicted
    held = [[0, 2], [1, 2]] if per_head else [[1 - evicted, 2]] * 2
    module = getattr(twins, side).baselines.tova
    state = module.TOVAState(
        module.TOVAConfig(2, 3, per_head=per_head), batch=1, query_heads=2, key_value_heads=2, head_dim=16,
        dtype=torch.float32, device=device,
    )
    key = torch.zeros(1, 2, 3, 16, device=device)
    key[0, ..., 0] = weight.log()
    query = torch.zeros_like(key)
    query[..., 0] = 4  # the default scale is 1 / 4
    if how == "steps":
        for token in range(3):
            state.step(*(tensor[:, :, token] for tensor in (query, key, key)))
    else:
        state.prefill(query, key, key)
    assert [sorted(head) for head in state.positions[0, :, :2].tolist()] == held
    score = state.score[0, 1, int((state.positions[0, 1] == 2).nonzero())]
    assert float(score) == pytest.approx(float(weight[1, 2] if per_head else weight[:, 2].mean()), rel=1e-5)
