"""Bounds of CAKE's indicators, of the two parts of a layer's preference, and of a decode step's scores.

Every computation starts from attention weights a_ij, whose relative error is `bounds.log_weight_error`: e_ij below is
their absolute error, with FLUSH for weights that underflow. W is the number of queries that observe, P the tokens
before the window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ....reference.baselines import cake
from ....reference.baselines.cake_prompt import SMALLEST
from ...cases.oracle import Attention, attend, upcast
from ..bounds import DIVISION, FLUSH, LOG, SLACK, UNIT, Interval, arithmetic, log_weight_error
from ..bounds import gamma as roundings

#: Of a logarithm in float64 (2 u), a quotient and a sum (u each), where u = 2^-53: once on the side under test, and
#: once in the judge.
ROUNDING = 2.0**-50


@dataclass(frozen=True)
class Observed:
    """Intervals of what `observe` computes: score [B, Hkv, T], dispersion and shift [B]; and its exact result."""

    score: Interval
    dispersion: Interval
    shift: Interval
    exact: cake.ObserveResult

    def log_preference(self, *, tau1: float, tau2: float, whole_batch: bool) -> Interval:
        """Interval of the logarithm of the preference, [B]. The sums over a batch have B more additions in float64."""
        ends = []
        for place, sign in ((0, -1), (1, 1)):
            parts = [part[place] for part in (self.dispersion, self.shift)]
            if whole_batch:
                parts = [part.sum(0, keepdim=True).expand(part.shape) for part in parts]
            logs = [part.clamp_min(0).log() / tau for part, tau in zip(parts, (tau1, tau2), strict=True)]
            size = sum(log.abs().masked_fill(log.isinf(), 0) for log in logs) + 1 / tau1 + 1 / tau2
            total = torch.where((logs[0] == -torch.inf) | (logs[1] == -torch.inf), -torch.inf, logs[0] + logs[1])
            ends.append(total + sign * ROUNDING * (len(parts[0]) + 1) * size)
        return Interval(*ends)


def weight_errors(attention: Attention) -> Tensor:
    """e_ij, [B, Hq, Q, S]."""
    below, above = log_weight_error(attention, arithmetic(attention.dtype))
    relative = torch.maximum(torch.expm1(above.clamp_max(300)), -torch.expm1(below))
    return (attention.weight * relative + FLUSH).masked_fill(~attention.seen, 0)


def observation_intervals(
    query_window: Tensor, key: Tensor, occupied: Tensor, *, gamma: float, kernel_size: int, scale: float | None
) -> Observed:
    """The intervals for inputs in the dtype under test."""
    exact = cake.observe(
        upcast(query_window), upcast(key), occupied, gamma=gamma, kernel_size=kernel_size, scale=scale
    )
    attention = attend(query_window, key, torch.zeros_like(key), occupied, scale=scale, causal=True)
    prefix = key.shape[2] - query_window.shape[2]
    observing = occupied[:, None, prefix:, None]                                            # [B, 1, W, 1]
    weight, error = (
        each[..., :prefix].masked_fill(~observing, 0) for each in (attention.weight, weight_errors(attention))
    )
    dispersion = _dispersion(weight, error)
    mean_error, variance, variance_error = _variance(weight, error, observing)
    terms = roundings(weight.shape[1] * prefix)
    shift_error = variance_error.sum((1, 2)) + terms * (variance + variance_error).sum((1, 2))
    score_error = _score(weight, mean_error, variance, variance_error, exact.score, gamma, kernel_size)
    return Observed(
        Interval(exact.score - score_error, exact.score + score_error), dispersion,
        Interval((exact.shift - shift_error * SLACK).clamp_min(0), exact.shift + shift_error * SLACK), exact,
    )


def _dispersion(weight: Tensor, error: Tensor) -> Interval:
    """Interval of -sum a log(a + E), E = 1e-10, [B].

    f(a) = -a log(a + E) is concave, rises up to 1/e - E and falls from 1/e on. So its least value on an interval is at
    an end; the largest as well, unless the interval reaches from below 1/e to above 1/e - E, where it is at most 1/e.
    Rounded are a + E, its logarithm (LOG absolute or relative, and two products) and the product with a: an error of
    (LOG + 4 u) (a + |f|). The sum has as many terms as there are weights. Weights that exceed 1 make it negative.
    """
    def f(a: Tensor) -> Tensor:
        return -a * (a + SMALLEST).log()

    low, high = (weight - error).clamp_min(0), weight + error
    least, most = torch.minimum(f(low), f(high)), torch.maximum(f(low), f(high))
    top = 1 / math.e
    most = torch.where((low < top) & (high > top - SMALLEST), top, most)
    size = torch.maximum(least.abs(), most.abs())
    rounding = (LOG + 4 * UNIT) * (high + size) + 4 * FLUSH
    rounding = ((rounding + roundings(weight[0].numel()) * (size + rounding)) * SLACK).masked_fill(error == 0, 0)
    return Interval((least - rounding).flatten(1).sum(-1), (most + rounding).flatten(1).sum(-1))


def _variance(weight: Tensor, error: Tensor, observing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The errors of a column's mean, its variance, and the variance's error, all [B, Hq, P]. observing [B, 1, W, 1].

    The mean has W additions and a division. A deviation d_i = a_ij - m has the error D_i = e_ij + that of the mean +
    u |d_i|. The sum of the squares then has the error sum 2 |d_i| D_i + D_i^2, W + 1 roundings, and a division. An
    implementation may also update the mean and the sum of squares with each query. Then it rounds more means, and these
    roundings are covered by e_ij, which has several per weight. The variance of one weight is exactly 0.
    """
    count = observing.sum(2)                                                                # [B, 1, 1]
    number = count.clamp_min(1)
    mean = weight.sum(2) / number
    mean_error = error.sum(2) / number
    mean_error = mean_error + (roundings(weight.shape[2]) + DIVISION) * (mean + mean_error)
    deviation = (weight - mean[:, :, None]).abs()
    off = error + mean_error[:, :, None] + UNIT * deviation
    deviation, off = (each.masked_fill(~observing, 0) for each in (deviation, off))
    between = (count - 1).clamp_min(1)
    variance = (deviation * deviation).sum(2) / between
    found = (2 * deviation * off + off * off).sum(2) / between
    found = found + (roundings(weight.shape[2] + 1) + DIVISION) * (variance + found) + 4 * FLUSH
    # An unoccupied column is exactly 0.
    found = found.masked_fill((error == 0).all(2), 0)
    return mean_error, variance, torch.where(count > 1, found * SLACK, 0)


def _score(
    weight: Tensor, mean_error: Tensor, variance: Tensor, variance_error: Tensor, exact: Tensor, factor: float,
    kernel_size: int,
) -> Tensor:
    """The error of the indicators [B, Hkv, T], 0 for the window: that of m + factor v, pooled and averaged. Sums of
    nonnegative numbers: a product, an addition, the pool, the group, and two divisions."""
    heads, prefix = exact.shape[1], weight.shape[-1]
    result = torch.zeros_like(exact)
    if not prefix:
        return result
    group = weight.shape[1] // heads
    error = (mean_error + factor * variance_error).unflatten(1, (heads, -1)).mean(2)
    pooled = functional.avg_pool1d(error, kernel_size, stride=1, padding=kernel_size // 2)
    size = exact[..., :prefix].masked_fill(exact[..., :prefix].isinf(), 0) + pooled
    pooled = pooled + roundings(kernel_size + group + 4 + 2 * DIVISION / UNIT) * size + 8 * FLUSH * (1 + factor)
    result[..., :prefix] = pooled * SLACK
    return result.masked_fill(exact == -torch.inf, 0)


def step_error(attention: Attention, rest: Tensor, place: Tensor, score: Tensor, kernel_size: int) -> Tensor:
    """The error of a decode step's scores [B, Hkv, S], 0 for free slots and the window, as in `_score`.

    attention: of the one query; rest [B, Hkv, S]: the slots that are free or in the window; place [B, Hkv, S]: the
    order of the slots by position; score: the exact ones.
    """
    heads = score.shape[1]
    error = weight_errors(attention)[:, :, 0].unflatten(1, (heads, -1)).mean(2).masked_fill(rest, 0)
    in_order = torch.zeros_like(error).scatter(-1, place, error)
    pooled = functional.avg_pool1d(in_order, kernel_size, stride=1, padding=kernel_size // 2).gather(-1, place)
    size = score.masked_fill(rest, 0) + pooled
    group = attention.query_heads // heads
    pooled = pooled + roundings(kernel_size + group + 2 + 2 * DIVISION / UNIT) * size + 8 * FLUSH
    return (pooled * SLACK).masked_fill(rest, 0)
