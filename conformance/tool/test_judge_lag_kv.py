"""The bounds of LagKV's scores: no correct float32 arithmetic exceeds them, and they are not loose.

The ranks that follow from them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from kvtwin.conformance.judge.checkers import lag_kv
from kvtwin.reference.baselines import lag_kv as reference


def summed(tensor, order):
    """The sum over the last axis in float32, one by one in an order."""
    total = torch.zeros(tensor.shape[:-1])
    for index in order:
        total = total + tensor[..., index]
    return total


def spread_of(tokens, following, order):
    """`spread` in float32."""
    low, high = following.amin(-2), following.amax(-2)
    width = high - low
    scaled = torch.where(width > 0, (tokens - low) / torch.where(width > 0, width, 1.0), 0.0)
    centred = scaled - (summed(scaled, order) / tokens.shape[-1])[..., None]
    return (summed(centred * centred, order) / (tokens.shape[-1] - 1)).sqrt()


def log_score_of(key, value, order, tokens):
    """`log_score` in float32, with sums over the chunk in the order `tokens`."""
    logs = []
    for tensor in (key, value):
        spread = spread_of(*tensor.chunk(2, -2), order)
        top = spread.amax(-1, keepdim=True)
        logs.append(spread - (top + summed((spread - top).exp(), tokens)[..., None].log()))
    more, less = torch.maximum(*logs), torch.minimum(*logs)
    return more + (1 + (less - more).exp()).log()


def contents(head_dim, lag):
    """Chunks [2 lag, D]: ordinary, far from the next chunk's range, and in a narrow range."""
    generator = torch.Generator().manual_seed(head_dim * lag)
    plain = torch.randn(2 * lag, head_dim, generator=generator)
    yield plain
    yield plain + torch.cat([torch.full((lag, 1), 50.0), torch.zeros(lag, 1)])
    yield torch.cat([plain[:lag], 1e-3 * plain[lag:] + 7])
    yield plain * 2.0 ** torch.randint(-20, 20, (head_dim,), generator=generator)


def orders(count):
    generator = torch.Generator().manual_seed(count)
    yield range(count)
    yield range(count - 1, -1, -1)
    for _ in range(6):
        yield torch.randperm(count, generator=generator).tolist()


SIZES = [(16, 4), (16, 16), (64, 8), (128, 24)]


@pytest.mark.parametrize(("head_dim", "lag"), SIZES)
def test_no_correct_arithmetic_exceeds_the_bound_of_a_spread(head_dim, lag):
    highest = 0.0
    for tensor in contents(head_dim, lag):
        tokens, following = tensor.split(lag)
        truth, bound = lag_kv.spread_error(tokens.double(), following.double())
        for order in orders(head_dim):
            error = (spread_of(tokens, following, order).double() - truth).abs()
            assert bool((error <= bound).all())
            highest = max(highest, float((error / bound).max()))
    assert highest > (0.05 if head_dim == 16 else 0.02)


def test_the_mean_of_far_channels_is_covered():
    """All channels are nearly the same number, whose sum rounds in the same direction again and again: the worst of
    200,000 random ones. So the spread is small, and the error of the mean is all there is."""
    tokens = torch.full((1, 256), 1.9846038818359375) + torch.arange(256) % 2 * 2.0**-23
    following = torch.stack([torch.zeros(256), torch.ones(256)])
    truth, bound = lag_kv.spread_error(tokens.double(), following.double())
    error = (spread_of(tokens, following, range(256)).double() - truth).abs()
    assert bool((error <= bound).all()) and float((error / bound).max()) > 0.1


@pytest.mark.parametrize(("head_dim", "lag"), SIZES)
def test_no_correct_arithmetic_exceeds_the_bound_of_a_score(head_dim, lag):
    highest = 0.0
    key, value = contents(head_dim, lag), reversed(list(contents(head_dim, lag)))
    for one, other in zip(key, value, strict=True):
        allowed = lag_kv.score_interval(one.double(), other.double())
        middle = (allowed.low + allowed.high) / 2
        for order, tokens in zip(orders(head_dim), orders(lag), strict=True):
            found = log_score_of(one, other, order, tokens).double()
            assert bool((found >= allowed.low).all()) and bool((found <= allowed.high).all())
            highest = max(highest, float(((found - middle).abs() / (allowed.high - middle)).max()))
    assert highest > 0.01


@pytest.mark.parametrize("lag", [1, 2, 5, 16, 37, 70])
def test_ranks_of_equal_tokens_are_known(lag):
    """The reference gives equal tokens equal bits, and the ranks of their order of arrival."""
    generator = torch.Generator().manual_seed(lag)
    key, value = torch.randn(2, 1, 2 * lag, 32, generator=generator).double()
    key[:, :lag], value[:, :lag] = key[:, :1], value[:, :1]
    score = reference.log_score(key, value)
    assert bool((score == score[:, :1]).all())
    assert reference.rank_in_chunk(score)[0].tolist() == list(range(lag))
    allowed = lag_kv.rank_interval(key, value)
    assert allowed.low[0].tolist() == allowed.high[0].tolist() == list(range(lag))


def test_ranks_of_scores_that_lie_apart_are_known_and_of_near_ones_are_not():
    key = torch.zeros(1, 8, 32, dtype=torch.float64)
    key[0, :4, ::2] = torch.tensor([2.0, 1.0, 3.0, 1.0 + 2.0**-24], dtype=torch.float64)[:, None]
    key[0, 7] = 1
    allowed = lag_kv.rank_interval(key, torch.zeros_like(key))
    assert allowed.low[0].tolist() == [2, 0, 3, 0] and allowed.high[0].tolist() == [2, 1, 3, 1]


def test_a_rank_that_is_open_by_one_moves_by_one():
    """Between ranks, positions below 2^31 decide nothing."""
    rank, error = torch.tensor([5.0]) * 2**31, torch.tensor([1.0])
    chunk = SimpleNamespace(before={"rank": rank})
    found = lag_kv.Adapter().rank_interval(chunk, error)
    assert math.isclose(float(found.low), 4 * 2**31) and math.isclose(float(found.high), 6 * 2**31)
