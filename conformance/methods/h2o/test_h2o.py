"""H2O under test: the sums of attention weights that tokens receive, and the evictions that they decide."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.oracle import attend
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.checkers import blocks
from kvtwin.conformance.judge.compare import assert_within

pytestmark = pytest.mark.kind("equivalence")

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
few = settings(max_examples=max(at_least(3), settings().max_examples // 6))


def new(module, device, budget, block, recent, heads=1):
    return module.H2OState(
        module.H2OConfig(budget, block, recent), batch=1, query_heads=heads, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )


@given(seed=st.integers(0, 2**31), block=st.integers(1, 9), count=st.integers(2, 9))
@few
def test_h2o_sums_are_column_sums_whatever_the_blocks(seed, block, count, twins, device):
    """If all tokens fit, each score is the sum of the token's column in the prompt's attention matrix."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, heads, count, 16, generator=generator).to(device) for heads in (2, 1, 1))
    both = lockstep.pair(
        "h2o", twins.optimized.baselines.h2o, config={"budget": count, "block_size": block}, batch=1, query_heads=2,
        key_value_heads=1, head_dim=16, dtype=torch.float32, device=device,
    )
    both.prefill(query, key, value)
    occupied = torch.ones(1, count, dtype=torch.bool, device=device)
    sums = blocks.received_attention(attend(query, key, value, occupied, causal=True))
    score, bound = both.tested.score[..., :count], both.adapter.previous_error[..., :count]
    assert_within(score, sums, bound, what="score against column sums")


@SIDES
def test_h2o_keeps_the_heavy_hitter(side, twins, device):
    """All queries attend to token 1, so it is kept without protection. The other tokens are evicted in the order of
    their sums."""
    module = getattr(twins, side).baselines.h2o
    state = new(module, device, budget=3, block=2, recent=1)
    key = torch.zeros(1, 1, 8, 16, device=device)
    key[0, 0, 1, 0] = 8
    query = torch.zeros(1, 1, 8, 16, device=device)
    query[..., 0] = 4
    state.prefill(query, key, key)
    # The older of two tokens with equal keys has received attention from more queries.
    assert state.positions[0, 0].tolist() == [0, 1, 7, -1, -1]
    assert float(state.score[0, 0, 1]) > 6 > 1.5 > float(state.score[0, 0, 0])


@SIDES
def test_h2o_starts_a_new_token_from_its_own_column(side, twins, device):
    """A new token does not inherit the sum of the previous token in its slot. It has only the weight from its own
    query. All keys are equal, so this is 1 divided by the number of tokens."""
    state = new(getattr(twins, side).baselines.h2o, device, budget=3, block=1, recent=2)
    token = torch.zeros(3, 1, 1, 16, device=device)
    for step in range(9):
        state.step(*token)
        newest = state.positions == step
        held = min(step + 1, 4)  # including the newest token, before the eviction
        assert abs(float(state.score[newest].double()) - 1 / held) <= 2.0**-20 / held


@SIDES
@pytest.mark.parametrize("recent", [0, 1, 2, 4, None])
def test_h2o_protects_the_newest(side, recent, twins, device):
    """Each new token receives the least attention, but the newest `recent` tokens are kept. With recent = 0 it is
    evicted at once."""
    state = new(getattr(twins, side).baselines.h2o, device, budget=4, block=1, recent=recent)
    for step in range(9):
        key = torch.full((1, 1, 16), -float(step), device=device)
        state.step(torch.ones(1, 1, 16, device=device), key, key)
    shielded = 2 if recent is None else recent
    held = sorted(state.positions[0, 0, :4].tolist())
    assert held == [*range(4 - shielded), *range(9 - shielded, 9)]


@SIDES
def test_h2o_averages_over_its_group(side, twins, device):
    """Two heads of one group attend to different tokens, so both tokens receive half."""
    state = new(getattr(twins, side).baselines.h2o, device, budget=2, block=2, recent=0, heads=2)
    key = torch.zeros(1, 1, 2, 16, device=device)
    key[0, 0, 0, 0] = key[0, 0, 1, 1] = 100
    query = torch.zeros(1, 2, 2, 16, device=device)
    query[0, 0, 1, 1] = query[0, 1, 1, 0] = -100              # the largest logit is 0: exp(0) is exactly 1
    state.prefill(query, key, key)
    # The first query attends only to itself.
    assert state.score[0, 0, :2].tolist() == [1.5, 0.5]


@SIDES
@pytest.mark.parametrize("how", ("steps", "block"))
@pytest.mark.parametrize(("sinks", "kept"), [(0, {"steps": [0, 1, 3], "block": [3, 4, 5]}), (3, [0, 1, 2])])
def test_h2o_keeps_the_first_tokens_of_a_row(side, how, sinks, kept, twins, device):
    """The first three tokens of a row receive little attention. Padding, here of row 1, is no token: with sinks=3, row
    1 keeps the three tokens after it."""
    module, padding = getattr(twins, side).baselines.h2o, 2
    state = module.H2OState(
        module.H2OConfig(4, 24, recent=1, sinks=sinks), batch=2, query_heads=1, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )
    total = 5 if how == "steps" else 20
    key = torch.zeros(2, 1, total + padding, 16, device=device)
    key[0, 0, :3, 0], key[1, 0, :3 + padding, 0] = -32, -32   # the default scale is 1 / 4
    query = torch.ones_like(key)
    real = torch.ones(2, total + padding, dtype=torch.bool, device=device)
    real[1, :padding] = False
    if how == "steps":
        state.prefill(query[:, :, :padding], key[:, :, :padding], key[:, :, :padding], real[:, :padding])
        for token in range(padding, total + padding):
            state.step(*(tensor[:, :, token] for tensor in (query, key, key)))
    else:
        state.prefill(query, key, key, real)
    kept = kept[how] if isinstance(kept, dict) else kept
    for row, start in enumerate((0, padding)):
        held = sorted(state.positions[row, 0, :4].tolist())
        assert held == [*(start + token for token in kept), total + padding - 1]


@SIDES
@pytest.mark.parametrize("how", ("steps", "block"))
def test_h2o_sums_go_on_between_evictions(side, how, twins, device):
    """All keys are equal, so query i gives each token 1 / (i + 1). The cache holds 3 to 7 tokens. The eighth token
    evicts, by the sums of all eight queries: the two oldest tokens and the newest stay."""
    module = getattr(twins, side).baselines.h2o
    state = module.H2OState(
        module.H2OConfig(3, 5, recent=1, interval=5), batch=1, query_heads=1, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )
    token = torch.zeros(3, 1, 1, 8, 16, device=device)
    sums = [sum(1 / (query + 1) for query in range(first, 8)) for first in range(8)]
    if how == "steps":
        for step in range(7):
            state.step(*token[:, :, :, step])
    else:
        state.append_block(*token[:, :, :, :3])
        state.append_block(*token[:, :, :, 3:7])
    assert state.positions[0, 0, :7].tolist() == [*range(7)]
    for score, final in zip(state.score[0, 0, :7].tolist(), sums, strict=False):
        assert abs(score - (final - 1 / 8)) <= 2.0**-20
    state.step(*token[:, :, :, 7])
    assert state.positions[0, 0].tolist() == [0, 1, 7] + [-1] * 9
    for score, first in zip(state.score[0, 0, :3].tolist(), (0, 1, 7), strict=True):
        assert abs(score - sums[first]) <= 2.0**-20


@SIDES
@pytest.mark.parametrize("how", ("steps", "block"))
def test_h2o_keeps_the_first_tokens_at_intervals(side, how, twins, device):
    """The first three tokens receive little attention. The sixth token evicts two tokens, neither of them a sink."""
    module = getattr(twins, side).baselines.h2o
    state = module.H2OState(
        module.H2OConfig(4, 6, recent=1, sinks=3, interval=2), batch=1, query_heads=1, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )
    key = torch.zeros(1, 1, 6, 16, device=device)
    key[0, 0, :3, 0] = -32                                    # the default scale is 1 / 4
    query = torch.ones_like(key)
    if how == "steps":
        for token in range(6):
            state.step(*(tensor[:, :, token] for tensor in (query, key, key)))
    else:
        state.prefill(query, key, key)
    assert sorted(state.positions[0, 0, :4].tolist()) == [0, 1, 2, 5]


@SIDES
def test_h2o_rows_evict_by_their_own_sums_at_intervals(side, twins, device):
    """All queries attend to token 1 of row 0 and to token 2 of row 1. The block has fewer tokens than it may have."""
    module = getattr(twins, side).baselines.h2o
    state = module.H2OState(
        module.H2OConfig(1, 8, recent=0, interval=2), batch=2, query_heads=1, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )
    key, query = torch.zeros(2, 2, 1, 4, 16, device=device)
    key[0, 0, 1, 0] = key[1, 0, 2, 0] = 8
    query[..., 0] = 4
    state.prefill(query, key, key)
    assert state.positions[:, 0, :2].tolist() == [[1, -1], [2, -1]]


@SIDES
def test_h2o_protects_the_newest_tokens_in_any_slots(side, twins, device):
    """Token 3 takes the slot of token 0, the first. It receives nothing, but is one of the two newest at the next step,
    which evicts token 2."""
    state = new(getattr(twins, side).baselines.h2o, device, budget=3, block=1, recent=2)
    for logit in (-8, 0, 0, -8, 0):
        key = torch.full((1, 1, 16), float(logit) / 4, device=device)  # the default scale is 1 / 4
        state.step(torch.ones_like(key), key, key)
    assert state.positions[0, 0, :3].tolist() == [3, 1, 4]
