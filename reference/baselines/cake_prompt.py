"""CAKE's rules for a prompt: indicators, preferences, cascading budgets and the tokens that layers keep.

Source: Qin et al., "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences" (2025), and the authors'
code, antgroup/cakekv at c4675ce. The last w queries of a prompt observe its prefix, the tokens before them. The
dispersion and the shift of this attention give each layer a preference. The layers share a total of tokens in
proportion to their preferences. Each new layer changes the budgets of the layers before it, which then evict again:
the cascade.

`cake.py` has the cache that follows these rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..attention import INF, causal_logits, per_kv_head, per_query_head, softmax, sum_in_order
from ..blocks import group_mean
from ..contract.arguments import resolve_scale
from ..contract.cake import check_budgets, check_cascade, check_kept, check_log_preference, check_observe
from ..selection import order

SMALLEST = 1e-10  # the authors add it to a weight before they take its logarithm


class ObserveResult(NamedTuple):
    """What the window's queries say about a layer.

    score [B, Hkv, T]: the indicator of each token, +inf for the window, -inf for unoccupied positions. dispersion,
    shift [B]: the two parts of the layer's preference. All float32, or float64 for float64 inputs.
    """

    score: Tensor
    dispersion: Tensor
    shift: Tensor


def observe(
    query_window: Tensor, key: Tensor, occupied: Tensor | None = None, *,
    gamma: float = 200.0, kernel_size: int = 5, scale: float | None = None,
) -> ObserveResult:
    """Indicators and the two parts of the preference, from the attention of the window's queries to the prefix.

    query_window [B, Hq, W, D], the queries of the last W of the T tokens; key [B, Hkv, T, D], post-RoPE; occupied
    [B, T] bool, by default all. Queries at unoccupied positions (padding) are ignored. The variance over one query is
    0. gamma: the weight of the variance in the indicator, a finite float >= 0. kernel_size: the width of the average
    pool along the prefix, odd, with zeros beyond both ends. TypeError or ValueError for invalid arguments.
    """
    occupied, sizes = check_observe(query_window, key, occupied, gamma, kernel_size)
    prefix = sizes.slots - query_window.shape[2]
    observing = occupied[:, prefix:, None]                                                # [B, W, 1]
    scale = resolve_scale(scale, sizes.head_dim)
    weight = softmax(causal_logits(query_window, key, occupied, scale=scale))             # [B, Hq, W, T]
    weight = weight[..., :prefix].masked_fill(~observing[:, None], 0)                     # [B, Hq, W, P]
    count = observing.sum(1)[:, None]                                                     # [B, 1, 1]
    mean = sum_in_order(weight, 2) / count.clamp_min(1)                                   # [B, Hq, P]
    deviation = (weight - mean[:, :, None]).masked_fill(~observing[:, None], 0)
    variance = sum_in_order(deviation * deviation, 2) / (count - 1).clamp_min(1)          # unbiased

    score = torch.full(key.shape[:3], INF, dtype=weight.dtype, device=key.device)
    dispersion = shift = torch.zeros(sizes.batch, dtype=weight.dtype, device=key.device)
    if prefix:
        dispersion = -(weight * (weight + SMALLEST).log()).flatten(1).sum(-1)             # over heads, rows and prefix
        shift = variance.flatten(1).sum(-1)
        indicator = functional.avg_pool1d(
            mean + gamma * variance, kernel_size, stride=1, padding=kernel_size // 2, count_include_pad=True
        )
        score[..., :prefix] = group_mean(indicator, sizes.key_value_heads)
    return ObserveResult(score.masked_fill(~per_kv_head(occupied), -INF), dispersion, shift)


def log_preference(
    dispersion: Tensor, shift: Tensor, *, tau1: float = 1.0, tau2: float = 1.0, whole_batch: bool = False
) -> Tensor:
    """The logarithm of a layer's preference, dispersion^(1/tau1) shift^(1/tau2): [B] -> [B] float64.

    The logarithm, because a small tau takes the power out of the range of floats. dispersion, shift: see `observe`.
    tau1, tau2: finite, at least 1e-6. whole_batch: all rows get the preference of the sums over the batch, as in the
    authors' code; then the rows of a batch depend on each other. TypeError or ValueError for invalid arguments.
    """
    check_log_preference(dispersion, shift, tau1, tau2, whole_batch)
    dispersion, shift = dispersion.double(), shift.double()
    if whole_batch:
        dispersion = sum_in_order(dispersion, 0).expand(dispersion.shape)
        shift = sum_in_order(shift, 0).expand(shift.shape)
    return dispersion.clamp_min(0).log() / tau1 + shift.log() / tau2  # weights of 1 give a dispersion just below 0


def budgets(log_preferences: Tensor, prefix: Tensor, total: int) -> Tensor:
    """The number of prefix tokens that each of the layers so far keeps: [B, layers] int64, on the device.

    log_preferences [B, layers], of the layers 0 to l; prefix [B] int64, the number of tokens before the window, 0 or
    more; total: the tokens that all layers share, an int >= 1. A layer gets trunc(share * total), at most the prefix.
    The excess is spread over the layers below the prefix, one pass; then the difference to the total likewise. The sum
    may still be less than the total. NaN is no preference; layers without any share equally. TypeError or ValueError
    for invalid arguments.
    """
    check_budgets(log_preferences, prefix, total)
    log_preferences = log_preferences.double().masked_fill(log_preferences.isnan(), -INF)
    none = (log_preferences == -INF).all(-1, keepdim=True)
    share = log_preferences.masked_fill(none, 0).softmax(-1)                              # p_i / sum of p
    return divide((share * total).trunc().to(torch.int64), prefix, total)


def divide(wanted: Tensor, prefix: Tensor, total: int) -> Tensor:
    """Budgets that layers get if they want so many tokens, wanted [B, layers] int64: the integer rules of `budgets`."""
    most = prefix[:, None]
    granted = wanted.minimum(most)
    granted = _spread(granted, (wanted - granted).sum(-1, keepdim=True), granted < most)
    missing = total - granted.sum(-1, keepdim=True)
    granted = _spread(granted, missing, torch.where(missing > 0, granted < most, granted > 1))
    return granted.clamp_min(0).minimum(most)  # a pass may exceed the prefix: a layer has no more tokens than that


def _spread(granted: Tensor, amount: Tensor, takes: Tensor) -> Tensor:
    """Add `amount` [B, 1] evenly over the layers that take some; the first ones get one more. granted [B, layers]."""
    count = takes.sum(-1, keepdim=True).clamp_min(1)
    quotient = amount.abs() // count
    more = takes.cumsum(-1) <= amount.abs() % count
    return granted + (quotient + more.to(torch.int64)) * takes * amount.sign()


def kept(score: Tensor, budget: Tensor) -> Tensor:
    """The tokens that a layer keeps: all with a score of +inf, and the best `budget` of the others.

    score [B, Hkv, T], +inf for the window, -inf for tokens that the layer does not have; budget [B] int64. Returns
    [B, Hkv, T] bool. Among equal scores the lowest index is evicted first. TypeError or ValueError for invalid
    arguments.
    """
    check_kept(score, budget)
    window = score == INF
    count = window.sum(-1) + budget[:, None]                                              # [B, Hkv]
    return (order(score) >= score.shape[-1] - count[..., None]) & (score != -INF)


def step_score(weight: Tensor, positions: Tensor, window: Tensor, *, kernel_size: int = 5) -> Tensor:
    """What a decode step ranks tokens by: the weight of its query, pooled along the tokens in order of position.

    weight [B, Hq, S] of the slots' tokens; positions [B, Hkv, S] int64, -1 for free slots; window [B, Hkv, S] bool, the
    tokens that stay. kernel_size: see `observe`; beyond the first and the last token outside of the window are zeros.
    Returns the mean over the query heads of a KV head, [B, Hkv, S]: +inf for the window, -inf for free slots.
    """
    heads = positions.shape[1]
    rest, place = window | (positions < 0), order(positions)                              # free slots come first
    rest_of_head, place_of_head = (per_query_head(each, weight.shape[1]) for each in (rest, place))
    in_order = torch.zeros_like(weight).scatter(-1, place_of_head, weight.masked_fill(rest_of_head, 0))
    pooled = functional.avg_pool1d(
        in_order, kernel_size, stride=1, padding=kernel_size // 2, count_include_pad=True
    ).gather(-1, place_of_head)
    score = group_mean(pooled, heads)
    return score.masked_fill(window, INF).masked_fill(positions < 0, -INF)


def cascade(scores: Sequence[Tensor], log_preferences: Tensor, prefix: Tensor, total: int) -> list[Tensor]:
    """What each layer holds after the last one, when every layer makes the layers before it evict again.

    scores: one [B, Hkv, T] per layer, see `kept`; log_preferences [B, layers]; prefix, total: see `budgets`. Returns
    one [B, Hkv, T] bool per layer. A layer that once gave up a token does not get it back when its budget grows.
    TypeError or ValueError for invalid arguments.
    """
    check_cascade(scores, log_preferences)
    holds = [score != -INF for score in scores]
    for layer in range(len(scores)):
        granted = budgets(log_preferences[:, : layer + 1], prefix, total)
        for earlier in range(layer + 1):
            left = scores[earlier].masked_fill(~holds[earlier], -INF)
            holds[earlier] = kept(left, granted[:, earlier])
    return holds
