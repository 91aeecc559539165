"""EpiKV's scores: one number per token from hidden states, or from keys and values, of this and earlier tokens only.

All sums run in a fixed order, term by term, so that a token's score is bitwise independent of the tokens after it
(scores are causal, section 3.3).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..attention import INF, accumulate_dtype, sum_in_order
from ..contract.arguments import check_choice, check_integer
from ..contract.epikv.arguments import check_hidden_pair, check_lag, check_selection, check_series, check_vectors
from ..contract.epikv.config import DIFFERENCES
from ..selection import kept_after, kept_tokens, order

UNIT = 2.0**-24                 # of float32, for every dtype: whether a series is constant must not depend on the dtype
LEAST_RANGE = 1e-6              # of a channel, relative to the largest magnitude in its chunk


def hidden_change(hidden: Tensor, previous: Tensor) -> Tensor:
    """The change of a hidden state, g = ||h(t) - h(t - 1)||_2 (eq. 1).

    hidden, previous [..., C] of one dtype. Returns [...] float32 (float64 for float64 inputs). TypeError or ValueError
    for invalid arguments.
    """
    check_hidden_pair(hidden, previous)
    dtype = accumulate_dtype(hidden)
    return (hidden.to(dtype) - previous.to(dtype)).square().sum(-1).sqrt()


def rolling_mean(g: Tensor, window: int = 64, *, occupied: Tensor | None = None) -> Tensor:
    """Mean of the last `window` values, t included (below eq. 2): g [B, T] or [B, L, T] -> the same shape.

    occupied [B, T] bool: False marks padding, which gives 0 and is not part of any window. Returns float32 (float64 for
    float64 inputs). TypeError or ValueError for invalid arguments.
    """
    values, there = _windows(check_series("g", g, occupied), check_integer("window", window, minimum=1), occupied)
    return _in_place(_mean(values, there), occupied)


def rolling_zscore(g: Tensor, window: int = 64, *, occupied: Tensor | None = None) -> Tensor:
    """(g(t) - mean) / deviation over the last `window` values, t included (eq. 3 without its epsilon), with ddof 0.

    0 if the deviation is at most the rounding error of equal values, 4 u window max |g| with u = 2^-24. So the first
    value gives 0, and no result exceeds sqrt(window - 1). Arguments, dtype and errors as in `rolling_mean`.
    """
    values, there = _windows(check_series("g", g, occupied), check_integer("window", window, minimum=1), occupied)
    return _in_place(_zscore(values, there, window), occupied)


def score(
    change_a: Tensor, change_b: Tensor, *, policy: str = "epikv", window: int = 64, occupied: Tensor | None = None
) -> Tensor:
    """z_A - z_B, or for "hs_variance" the difference of rolling means (eq. 2): [B, T], higher = keep.

    change_a, change_b: g of one layer per band [B, T], or of several [B, L, T], whose z-scores are averaged
    ("band_adaptive"). occupied as in `rolling_mean`. TypeError or ValueError for invalid arguments.
    """
    check_choice("policy", policy, DIFFERENCES)
    one, other = (
        _with_layers(check_series(name, change, occupied))
        for name, change in (("change_a", change_a), ("change_b", change_b))
    )
    return score_of(one, other, policy, window, occupied)


def score_of(one: Tensor, other: Tensor, policy: str, window: int, occupied: Tensor | None) -> Tensor:
    """`score` for any policy that reads hidden states: changes [B, L, T] of band A and B, where L may be 0 for B."""
    rolling = rolling_mean if policy == "hs_variance" else rolling_zscore
    return difference(*(
        rolling(change, window, occupied=occupied) if change.shape[1] else change for change in (one, other)
    ))


def difference(one: Tensor, other: Tensor) -> Tensor:
    """The mean over the layers of band A, [B, L, ...], minus that of band B unless B is empty: [B, ...]."""
    return _over_layers(one) - _over_layers(other) if other.shape[1] else _over_layers(one)


def kv_variance(key_or_value: Tensor) -> Tensor:
    """Variance over channels (ddof 0), averaged over the KV heads: [B, Hkv, T, D] -> [B, T].

    Its rolling mean is the score of "kv_key" and "kv_val" (section 3.3). Returns float32 (float64 for float64 inputs).
    TypeError or ValueError for invalid arguments.
    """
    x = check_vectors("key_or_value", key_or_value)
    x = x.to(accumulate_dtype(x))
    return sum_in_order((x - x.mean(-1, keepdim=True)).square().mean(-1), 1) / x.shape[1]


def lag_kv(
    key: Tensor, value: Tensor, *, chunk: int = 128, spread: str = "deviation", occupied: Tensor | None = None
) -> Tensor:
    """The spread of each token's key and value, normalized by the previous chunk (section 3.3): [B, T], higher = keep.

    key, value [B, Hkv, T, D] of one dtype; occupied [B, T] bool, False for padding, which is in no chunk and gives 0.
    The tokens of a row are divided into chunks of `chunk`. Channel d of a vector becomes (x - low) / (high - low), with
    the range of the channel in the previous chunk. The standard deviations over the channels of key and value are added
    and averaged over the heads; with spread="variance", their variances. Channels whose range is at most 1e-6 of the
    largest magnitude in the chunk (of that head) are left out; without any channel the spread is 0. Tokens of the first
    chunk have no previous chunk and score +inf. TypeError or ValueError for invalid arguments.
    """
    chunk = check_lag(key, value, chunk, spread, occupied)
    dtype = accumulate_dtype(key)
    result = torch.zeros(key.shape[0], key.shape[2], dtype=dtype, device=key.device)
    for row in range(key.shape[0]):
        tokens = torch.arange(key.shape[2], device=key.device) if occupied is None else occupied[row].nonzero()[:, 0]
        vectors = [tensor[row][:, tokens].to(dtype) for tensor in (key, value)]         # [Hkv, n, D]
        result[row, tokens[:chunk]] = INF
        for start in range(chunk, len(tokens), chunk):
            spreads = [
                lag_spread(x[:, start:start + chunk], x[:, start - chunk:start].amin(1),
                           x[:, start - chunk:start].amax(1), spread)
                for x in vectors
            ]
            result[row, tokens[start:start + chunk]] = sum_in_order(spreads[0] + spreads[1], 0) / key.shape[1]
    return result


def lag_spread(x: Tensor, low: Tensor, high: Tensor, spread: str) -> Tensor:
    """Standard deviation, or variance, over the channels of (x - low) / (high - low).

    x [..., Hkv, n, D]; low, high [..., Hkv, D]; spread: one of `SPREADS`. Returns [..., Hkv, n].
    """
    width = high - low
    largest = torch.maximum(low.abs(), high.abs()).amax(-1, keepdim=True)
    varies = width > LEAST_RANGE * largest                                                # [..., Hkv, D]
    count = varies.sum(-1)[..., None].clamp_min(1)
    width = width.where(varies, 1)[..., None, :]
    varies = varies[..., None, :]
    normalized = ((x - low[..., None, :]) / width).where(varies, 0)
    center = (normalized.sum(-1) / count)[..., None]
    variance = (normalized - center).where(varies, 0).square().sum(-1) / count
    return variance if spread == "variance" else variance.sqrt()


def select(
    score: Tensor, budget: int, *, prompt: int, recent: int, occupied: Tensor | None = None
) -> Tensor:
    """The tokens to keep (section 3.3): the first `prompt`, the newest `recent`, and those with the highest scores.

    score [B, T]. Ties evict the older token; NaN ranks lowest. occupied [B, T] bool: False marks padding, which is
    never kept but counts as one of the first or newest. Returns [B, min(T, budget)] int64, ascending, -1 at the end of
    rows with fewer tokens. ValueError if prompt + recent exceed the budget; TypeError or ValueError for other invalid
    arguments.
    """
    score = check_selection(score, budget, prompt, recent, occupied)
    total = score.shape[1]
    index = torch.arange(total, device=score.device).expand(score.shape)
    place = order(score)                                                                # the lowest goes first
    place = torch.where((index < prompt) | (index >= total - recent), place + total, place)
    if occupied is None:
        return kept_after(place, min(total, budget))
    return kept_tokens(torch.where(occupied, place, index - total), occupied, min(total, budget))


# Windows -------------------------------------------------------------------------------------------------------------


def compacted(occupied: Tensor) -> Tensor:
    """The indices that put a row's padding first and its tokens last, in their order: [B, T] int64."""
    return occupied.to(torch.int8).sort(dim=-1, stable=True).indices


def _windows(g: Tensor, window: int, occupied: Tensor | None) -> tuple[Tensor, Tensor]:
    """The last min(window, T) values up to each value, oldest first, [..., T, min(window, T)], and which of them exist.

    With `occupied`, values are in the order of `compacted`.
    """
    g, window = g.to(accumulate_dtype(g)), min(window, g.shape[-1])
    there = torch.ones_like(g, dtype=torch.bool) if occupied is None else occupied
    if occupied is not None:
        places = compacted(occupied)
        there = there.gather(-1, places)
        places, there = (x if g.dim() == 2 else x[:, None].expand(g.shape) for x in (places, there))
        g = g.gather(-1, places).masked_fill(~there, 0)
    before = (window - 1, 0)
    return (functional.pad(x, before).unfold(-1, window, 1) for x in (g, there))  # type: ignore[return-value]


def _in_place(result: Tensor, occupied: Tensor | None) -> Tensor:
    """Put results in the order of `compacted` back into their places, with 0 for padding."""
    if occupied is None:
        return result
    places, there = compacted(occupied), occupied
    places, there = (x if result.dim() == 2 else x[:, None].expand(result.shape) for x in (places, there))
    return torch.zeros_like(result).scatter(-1, places, result).masked_fill(~there, 0)


def _sum(values: Tensor) -> Tensor:
    """Sum over the last dimension, term by term: bitwise the same for any number of windows."""
    total = torch.zeros_like(values[..., 0])
    for value in values.unbind(-1):
        total = total + value
    return total


def _mean(values: Tensor, there: Tensor) -> Tensor:
    """The mean of the values that exist: values, there [..., window] -> [...]."""
    return _sum(values.where(there, 0)) / there.sum(-1).clamp_min(1)


def _zscore(values: Tensor, there: Tensor, window: int) -> Tensor:
    """The z-score of the last value in windows of `window` values, of which values, there [..., n] may leave out the
    first: -> [...]. In two passes: E[g^2] - mu^2 cancels."""
    center = _mean(values, there)
    deviation = (values - center[..., None]).where(there, 0)
    sigma = (_sum(deviation.square()) / there.sum(-1).clamp_min(1)).sqrt()
    constant = sigma <= 4 * UNIT * window * values.where(there, 0).abs().amax(-1)
    return (deviation[..., -1] / sigma.where(~constant, 1)).masked_fill(constant, 0)


def _with_layers(change: Tensor) -> Tensor:
    """[B, T] -> [B, 1, T]."""
    return change if change.dim() == 3 else change[:, None]


def _over_layers(x: Tensor) -> Tensor:
    """The mean over layers: [B, L, ...] -> [B, ...]."""
    return _sum(x.movedim(1, -1)) / x.shape[1]
