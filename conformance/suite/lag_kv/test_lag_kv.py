"""LagKV under test: ranks within chunks, scaled by the chunk that follows."""

from __future__ import annotations

import math

import pytest
import torch

from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import lockstep

pytestmark = pytest.mark.kind("equivalence")

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))

DIM = 32
#: Every other channel is 1. Its standard deviation over the channels is SPREAD.
PATTERN = torch.arange(DIM) % 2
SPREAD = math.sqrt(DIM / 4 / (DIM - 1))


def new(twins, side, device, budget, block=64, dtype=torch.float32, **options):
    module = getattr(twins, side).baselines.lag_kv
    return module.LagKVState(
        module.LagKVConfig(budget, block, **options), batch=2, query_heads=1, key_value_heads=1, head_dim=DIM,
        dtype=dtype, device=device,
    )


def tokens(*spreads):
    """Tokens with these standard deviations, followed by a chunk whose channels range from 0 to 1: [2 C, D]."""
    following = torch.zeros(len(spreads), DIM)
    following[-1] = 1
    return torch.cat([torch.tensor(spreads)[:, None] * PATTERN / SPREAD, following])


def feed(state, how, key, value, occupied=None):
    """key, value [T, D], the same for both rows."""
    key, value = (x.expand(2, 1, *x.shape).to(state.dtype).to(state.key.device) for x in (key, value))
    if how == "block":
        state.append_block(torch.zeros_like(key), key, value, occupied)
        return
    for token in range(key.shape[2]):
        state.step(torch.zeros_like(key[:, :, token]), key[:, :, token], value[:, :, token])


def ranks(state, row=0):
    return {int(p): int(s) for p, s in zip(state.positions[row, 0], state.score[row, 0], strict=True) if p >= 0}


@pytest.mark.property("state")
@pytest.mark.slow_on_cpu
@SIDES
def test_lag_kv_ranks_count_more_than_positions(side, twins, device):
    """1100 positions are padding. Token 0, which has rank 1, stays longer than a token of rank 0 behind the padding."""
    state = new(twins, side, device, 7, 600, lag=2)
    generator = torch.Generator().manual_seed(1)
    first, last = tokens(2.0, 1.0), tokens(1.0, 2.0)
    feed(state, "block", first, first)
    nothing = torch.zeros(550, DIM)
    for _ in range(2):
        feed(state, "block", nothing, nothing, torch.zeros(2, 550, dtype=torch.bool, device=device))
    feed(state, "block", last, last)
    feed(state, "block", *torch.randn(2, 2, DIM, generator=generator))
    kept = ranks(state)
    assert kept.get(0) == 1 and 1104 not in kept


@pytest.mark.property("state")
@SIDES
def test_lag_kv_padding_belongs_to_no_chunk(side, twins, device):
    """Row 1 has the same tokens as row 0, with padding before, between and behind them."""
    key = torch.cat([torch.ones(1, DIM), tokens(2.0, 1.0, 3.0)])
    there = torch.zeros(12, dtype=torch.bool)
    there[[1, 3, 4, 6, 7, 9, 10]] = True
    padded = torch.full((12, DIM), 50.0)
    padded[there] = key
    state = new(twins, side, device, 8, lag=3, sinks=1)
    feed(state, "block", padded, torch.zeros_like(padded), there.expand(2, -1).to(device))
    assert ranks(state, 1) == {1: 3, 3: 1, 4: 0, 6: 2, 7: 3, 9: 3, 10: 3}


@pytest.mark.property("state")
@pytest.mark.slow_on_cpu
@pytest.mark.parametrize(("lag", "options"), [
    (40, {"budget": 139, "block_size": 50, "prompt": 340, "group": 3}),
    (21, {"budget": 70, "block_size": 100, "prompt": 230, "dtype": torch.bfloat16, "head_dim": 80}),
    (3, {"budget": 31, "block_size": 70, "prompt": 160, "dtype": torch.float16}),
])
def test_lag_kv_of_long_chunks_keeps_step(lag, options, twins, device):
    """Chunks of several tiles, several chunks in a block, and chunks that end within a block."""
    options = dict(options)
    config = {"budget": options.pop("budget"), "block_size": options.pop("block_size"), "lag": lag, "sinks": 5}
    trace = StateTrace(
        method="lag_kv", config=tuple(config.items()), seed=lag, padding="random", device=str(device), steps=2 * lag,
        batch=2, **options,
    )
    summary = lockstep.run(trace, twins.optimized.baselines.lag_kv)
    assert summary.decisive > trace.steps
