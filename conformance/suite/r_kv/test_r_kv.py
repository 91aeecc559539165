"""R-KV under test: the window's attention to the tokens before it, the similarities of keys, and both in one score."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import settings

from kvtwin.conformance import stats
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.judge.checkers import r_kv as checker
from kvtwin.reference.baselines import r_kv

pytestmark = pytest.mark.kind("equivalence")

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
few = settings(max_examples=max(at_least(3), settings().max_examples // 6))


def new(module, device, budget, block=1, heads=1, dtype=torch.float32, **options):
    return module.RKVState(
        module.RKVConfig(budget, block, **options), batch=2, query_heads=heads, key_value_heads=1, head_dim=16,
        dtype=dtype, device=device,
    )


def rows(vectors, device, dtype=torch.float32):
    """The same tokens in both rows: [2, 1, T, 16]."""
    made = torch.zeros(2, 1, len(vectors), 16)
    for token, vector in enumerate(vectors):
        made[:, :, token, :len(vector)] = torch.tensor(vector)
    return made.to(device, dtype)


def held(state, row=0):
    positions = state.positions[row, 0]
    return sorted(positions[positions >= 0].tolist())


def scores(state, row=0):
    positions = state.positions[row, 0].tolist()
    return {p: float(s) for p, s in zip(positions, state.score[row, 0], strict=True) if p >= 0}


def axis(number, length=1.0):
    return [0.0] * number + [length]


#: The keys and queries of tests by hand are exact, and float64 rounds numbers of size 1 and below fewer than 256 times.
FLOAT64 = 256 * 2.0**-53


def assert_scores(state, query, key, expected):
    """Feed a block. The scores are within their derived bounds of float64's, which are `expected`, by token."""
    config = r_kv.RKVConfig(**dataclasses.asdict(state.config))
    truth = r_kv.RKVState(
        config, dtype=torch.float64, device=key.device, batch=2, query_heads=1, key_value_heads=1, head_dim=16
    )
    with stats.collect():
        checker.Adapter().prefill(state, truth, {"query": query, "key": key, "value": key, "occupied": None})
    found = scores(truth)
    for token, score in expected.items():
        assert abs(found[token] - score) <= FLOAT64, (token, found)


@pytest.mark.property("state")
@SIDES
def test_r_kv_a_long_window_observes(side, twins, device):
    """18 queries: the first two attend to token 1, the others to token 0."""
    state = new(getattr(twins, side).baselines.r_kv, device, 20, 21, window=18, kernel_size=1, mix_lambda=1.0)
    key = rows([axis(0, 8.0), axis(1, 8.0), axis(2, 8.0)] + [axis(9)] * 18, device)
    query = torch.zeros_like(key)
    query[:, :, 3:, 0] = 8
    query[:, :, 3:5, 0], query[:, :, 3:5, 1] = 0, 8
    most = 1 / (1 + 2 * math.exp(-16))
    least = math.exp(-16) * most
    assert_scores(state, query, key, {0: (16 * most + 2 * least) / 18, 1: (2 * most + 16 * least) / 18})
    assert held(state) == [0, 1, *range(3, 21)]
