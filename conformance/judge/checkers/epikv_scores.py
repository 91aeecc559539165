"""Intervals of EpiKV's scores: bounds of changes, rolling windows, variances and lags.

Everything is computed in float64 from exact inputs. The allowed arithmetic is that of `bounds`, with square roots to
2^-22 relative (ROOT).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....reference.epikv import scores as exact
from ..bounds import DIVISION, FLUSH, SLACK, UNIT, Interval, gamma

ROOT = 2.0**-22


class Values(NamedTuple):
    """Exact values per token [B, L, T] float64, their error bounds, and the tokens [B, T] that have a value."""

    exact: Tensor
    error: Tensor
    there: Tensor


def root_of_squares(squares: Tensor, count: float) -> Tensor:
    """Relative error of the root of a sum of `count` squares of numbers that were rounded once: sqrt(1 + t) with
    |t| <= gamma(count + 4), and ROOT."""
    t = gamma(count + 4)
    return torch.full_like(squares, (t / 2 * (1 + t) + ROOT) * SLACK)


def change_error(hidden: Tensor, previous: Tensor) -> Tensor:
    """|computed - true| of ||h - p||_2, [...]: h, p [..., C] float64.

    Differences round once, squares once, sums at most C times: `root_of_squares`. Squares below FLUSH may flush to
    zero, which changes the root by at most sqrt(C FLUSH). Equal states give exactly 0.
    """
    size = hidden.shape[-1]
    norm = (hidden - previous).square().sum(-1).sqrt()
    error = norm * root_of_squares(norm, size) + (size * FLUSH) ** 0.5
    return error.masked_fill(norm == 0, 0)


def mean_error(x: Tensor, error: Tensor, there: Tensor) -> Tensor:
    """|computed - true| of the mean of the x that are `there`, [...]: x, error, there [..., n].

    The mean error of the terms, plus n roundings of the sum and DIVISION, relative to the mean magnitude.
    """
    count = there.sum(-1).clamp_min(1)
    spread = error.masked_fill(~there, 0).sum(-1) / count
    size = x.abs().masked_fill(~there, 0).sum(-1) / count + spread
    return (spread + (gamma(count.double()) + DIVISION) * size) * SLACK


class Deviation(NamedTuple):
    """d_i = x_i - mean [..., n], sigma = rms(d) [...], and their error bounds."""

    each: Tensor
    each_error: Tensor
    sigma: Tensor
    sigma_error: Tensor


def deviation(x: Tensor, error: Tensor, there: Tensor) -> Deviation:
    """Deviation of the x [..., n] that are `there`.

    A computed d_i is d_i + r_i + c: r_i is the error of the term and a rounding; c is the error of the mean, the same
    for all terms, |c| <= off. As the d_i sum to 0, c changes the mean square by 2 c mean(r) + c^2 only; rms(d + r) is
    within rms(r) of rms(d) (triangle inequality). Then follow n + 3 roundings of squares and sums, a division and a
    root, and sqrt(FLUSH) for squares that flush to zero.
    """
    count = there.sum(-1).clamp_min(1)
    centre = x.masked_fill(~there, 0).sum(-1) / count
    off = mean_error(x, error, there)
    each = (x - centre[..., None]).masked_fill(~there, 0)
    own = (error + UNIT * (each.abs() + error + off[..., None])).masked_fill(~there, 0) * SLACK
    each_error = (own + off[..., None]).masked_fill(~there, 0)
    sigma, moved = (((y.square().sum(-1)) / count).sqrt() for y in (each, own))
    cross = 2 * off * own.sum(-1) / count
    most = ((sigma + moved).square() + cross + off.square()).sqrt()
    least = ((sigma - moved).clamp_min(0).square() - cross).clamp_min(0).sqrt()
    exact_error = torch.maximum(most - sigma, sigma - least)
    relative = gamma(count.double() + 3) + DIVISION + ROOT
    sigma_error = (exact_error + relative * most + FLUSH**0.5 * (most > 0)) * SLACK
    return Deviation(each, each_error, sigma, sigma_error)


def zscore_interval(x: Tensor, error: Tensor, there: Tensor, window: int) -> Interval:
    """Interval of the computed z-score of the last x [..., n], [...].

    It contains d' / sigma' for all d' and sigma' within their errors. A z-score other than 0 requires sigma' above the
    threshold 4 u window max|x'|, so sigma' is at least that; and sigma'^2 >= d'^2 / n up to rounding, so
    |z'| <= sqrt(n) whatever the errors. Where sigma's interval overlaps the threshold's, 0 is right too; below the
    threshold only 0 is right.
    """
    found = deviation(x, error, there)
    count = there.sum(-1).clamp_min(1).double()
    largest, slip = ((y.masked_fill(~there, 0)).amax(-1) for y in (x.abs(), error))
    factor = 4 * UNIT * window
    least = factor * (largest - slip).clamp_min(0) * (1 - UNIT) / SLACK
    most = factor * (largest + slip) * (1 + UNIT) * SLACK
    low_sigma, high_sigma = (found.sigma - found.sigma_error).clamp_min(0), found.sigma + found.sigma_error
    constant = high_sigma <= least                                                      # surely
    moving = low_sigma > most
    divisor = torch.maximum(low_sigma, least).clamp_min(1e-300)
    each, each_error = found.each[..., -1], found.each_error[..., -1]
    cap = count.sqrt() * (1 + gamma(count + 8) + DIVISION + ROOT) * SLACK

    def ends(d: Tensor, pick: object) -> Tensor:
        two = torch.stack((d / divisor, d / high_sigma.clamp_min(1e-300)))
        return pick(two, 0)  # type: ignore[operator]

    low, high = ends(each - each_error, torch.amin), ends(each + each_error, torch.amax)
    last = DIVISION * SLACK
    low, high = low - low.abs() * last, high + high.abs() * last
    low, high = torch.maximum(low, -cap), torch.minimum(high, cap)
    low, high = torch.where(moving, low, low.clamp_max(0)), torch.where(moving, high, high.clamp_min(0))
    return Interval(low.masked_fill(constant, 0), high.masked_fill(constant, 0))


def windows(values: Values, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """The last `window` values, errors and masks up to each token, with padding moved to the front."""
    order = exact.compacted(values.there)[:, None].expand(values.exact.shape)
    there = values.there[:, None].expand(values.exact.shape).gather(-1, order)
    parts = (values.exact.gather(-1, order).masked_fill(~there, 0), values.error.gather(-1, order), there)
    pad = torch.nn.functional.pad
    x, error, mask = (pad(part, (window - 1, 0)).unfold(-1, window, 1) for part in parts)
    return x, error, mask


def rolled_interval(values: Values, window: int, *, zscore: bool) -> Interval:
    """Intervals of rolling z-scores or means, [B, L, T]; exactly 0 for tokens without a value."""
    x, error, mask = windows(values, window)
    if zscore:
        found = zscore_interval(x, error, mask, window)
    else:
        centre = x.sum(-1) / mask.sum(-1).clamp_min(1)
        off = mean_error(x, error, mask)
        found = Interval(centre - off, centre + off)
    order = exact.compacted(values.there)[:, None].expand(values.exact.shape)
    there = values.there[:, None]
    return Interval(*(torch.zeros_like(end).scatter(-1, order, end).masked_fill(~there, 0) for end in found))


def difference_interval(*bands: Interval) -> Interval:
    """Interval of the mean over one band's layers, minus that of the other band if there is one: [B, L, T] -> [B, T].

    Sums of L terms, two divisions, a difference.
    """
    ends = []
    for found in bands:
        layers = found.low.shape[1]
        size = torch.maximum(found.low.abs(), found.high.abs()).mean(1)
        off = (gamma(layers) + DIVISION) * size * SLACK if layers > 1 else 0 * size
        ends.append(Interval(found.low.mean(1) - off, found.high.mean(1) + off))
    if len(ends) == 1:
        return ends[0]
    low, high = ends[0].low - ends[1].high, ends[0].high - ends[1].low
    return Interval(low - UNIT * SLACK * low.abs(), high + UNIT * SLACK * high.abs())


def hidden_interval(hidden: tuple[Tensor, ...], occupied: Tensor, *, policy: str, window: int) -> Interval:
    """Intervals of the scores of a sequence's tokens, [B, T]. hidden: of one or both bands, [B, L, T, C] float64."""
    index = torch.arange(occupied.shape[1], device=occupied.device).where(occupied, -1)
    last = index.cummax(1).values
    before = torch.cat((torch.full_like(last[:, :1], -1), last[:, :-1]), 1)
    there = occupied & (before >= 0)
    bands = []
    for band in hidden:
        band = band.masked_fill(~occupied[:, None, :, None], 0)
        place = before.clamp_min(0)[:, None, :, None].expand(band.shape)
        previous = band.gather(2, place)
        norm = (band - previous).square().sum(-1).sqrt()
        values = Values(norm, change_error(band, previous), there)
        bands.append(rolled_interval(values, window, zscore=policy != "hs_variance"))
    return difference_interval(*bands)


def variance_of(x: Tensor) -> Values:
    """Variances of x [B, Hkv, T, D] float64, averaged over heads, as `Values` [B, 1, T] of all tokens.

    With sigma = rms(d) and its error e before the last roundings, |sigma'^2 - sigma^2| <= 2 sigma e + e^2.
    """
    found = deviation(x, torch.zeros_like(x), torch.ones_like(x, dtype=torch.bool))
    error = 2 * found.sigma * found.sigma_error + found.sigma_error.square()
    variance, heads = found.sigma.square(), x.shape[1]
    off = error.mean(1) + (gamma(heads) + DIVISION) * (variance + error).mean(1)
    there = torch.ones(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device)
    return Values(variance.mean(1)[:, None], off[:, None] * SLACK, there)


def spread_interval(x: Tensor, low: Tensor, high: Tensor, spread: str) -> Interval:
    """Interval of `lag_spread`, [..., Hkv, n]: x [..., Hkv, n, D]; low, high [..., Hkv, D], exact. A variance is within
    the squares of a deviation's ends, see `variance_of`.

    (x - low) and (high - low) round once each, then DIVISION; the rest is as for any deviation. Where rounding decides
    whether a channel's range exceeds the threshold (1e-6 itself is rounded), any spread is right.
    """
    width = high - low
    limit = exact.LEAST_RANGE * torch.maximum(low.abs(), high.abs()).amax(-1, keepdim=True)
    says, open_ = width > limit, ((width - limit).abs() <= 8 * UNIT * (width + limit)) & (width > 0)
    mask = says[..., None, :].expand(x.shape)
    normal = ((x - low[..., None, :]) / width.where(says, 1)[..., None, :]).masked_fill(~mask, 0)
    error = normal.abs() * (2 * UNIT + DIVISION) * SLACK + 2 * FLUSH * mask
    found = deviation(normal, error, mask)
    off = found.sigma_error + 2 * DIVISION * found.sigma                                # terms are divided, not the sum
    open_ = open_.any(-1)[..., None]
    power = 2 if spread == "variance" else 1
    least, most = (found.sigma - off).clamp_min(0) ** power, (found.sigma + off) ** power
    return Interval(least.masked_fill(open_, 0), most.masked_fill(open_, torch.inf))


def lag_interval(
    key: Tensor, value: Tensor, occupied: Tensor, chunk: int, spread: str = "deviation"
) -> Interval:
    """Interval of `lag_kv`, [B, T]: key, value [B, Hkv, T, D] float64."""
    low, high = torch.zeros(2, *occupied.shape, dtype=torch.float64, device=key.device)
    for row, mask in enumerate(occupied):
        tokens = mask.nonzero()[:, 0]
        low[row, tokens[:chunk]] = high[row, tokens[:chunk]] = torch.inf
        for start in range(chunk, len(tokens), chunk):
            here, before = tokens[start:start + chunk], tokens[start - chunk:start]
            parts = [
                spread_interval(x[row][:, here], x[row][:, before].amin(1), x[row][:, before].amax(1), spread)
                for x in (key, value)
            ]
            total = [(parts[0][end] + parts[1][end]).mean(0) for end in (0, 1)]
            relative = (gamma(2 * key.shape[1]) + DIVISION) * SLACK
            low[row, here], high[row, here] = total[0] * (1 - relative), total[1] * (1 + relative)
    return Interval(low, high)


def vector_interval(
    key: Tensor, value: Tensor, occupied: Tensor, *, policy: str, window: int, chunk: int, spread: str
) -> Interval:
    """Intervals of the scores of a sequence's tokens, [B, T], for the policies that read keys and values."""
    key, value = (x.double().masked_fill(~occupied[:, None, :, None], 0) for x in (key, value))
    if policy == "lag_kv":
        return lag_interval(key, value, occupied, chunk, spread)
    values = variance_of(key if policy == "kv_key" else value)._replace(there=occupied)
    found = rolled_interval(values, window, zscore=False)
    return Interval(found.low[:, 0], found.high[:, 0])
