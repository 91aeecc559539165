"""EpiKV's scores: numbers per token, made from hidden states or from keys and values, each from its own past alone.

Everything here adds up in a fixed order, term after term, so that a token's score does not depend, not by a bit, on how
many tokens come after it (scores are causal, section 3.3).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..attention import INF, accumulate_dtype
from .._validate import check_choice, check_integer
from ..selection import kept_after, victims
from ._validate import check_hidden_pair, check_selection, check_series, check_vectors
from .contract import DIFFERENCES

UNIT = 2.0**-24                 # of float32, in every dtype: what counts as constant must not depend on it
LEAST_RANGE = 1e-6              # of a channel, relative to the largest number of its chunk


def hidden_change(hidden: Tensor, previous: Tensor) -> Tensor:
    """g = ||h(t) - h(t - 1)||_2 (eq. 1): hidden and previous [..., C], of one dtype -> [...] float32 (float64)."""
    check_hidden_pair(hidden, previous)
    dtype = accumulate_dtype(hidden)
    return (hidden.to(dtype) - previous.to(dtype)).square().sum(-1).sqrt()


def rolling_mean(g: Tensor, window: int = 64, *, occupied: Tensor | None = None) -> Tensor:
    """The mean of the last `window` values, t included (below eq. 2): g [B, T] or [B, L, T] -> its shape.

    occupied [B, T] bool: what is False is no value, and gives 0; windows reach back over real values only.
    float32 (float64 for float64). TypeError, ValueError for arguments that do not fit.
    """
    values, there = _windows(check_series("g", g, occupied), check_integer("window", window, minimum=1), occupied)
    return _in_place(_mean(values, there), occupied)


def rolling_zscore(g: Tensor, window: int = 64, *, occupied: Tensor | None = None) -> Tensor:
    """(g(t) - mean) / deviation over the last `window` values, t included (eq. 3, without its epsilon); ddof 0.

    0 where the deviation is at or below what rounding makes of equal values: 4 u window max |g|, u = 2^-24. So it is 0
    for a first value, and never exceeds sqrt(window - 1). Arguments as for `rolling_mean`.
    """
    values, there = _windows(check_series("g", g, occupied), check_integer("window", window, minimum=1), occupied)
    return _in_place(_zscore(values, there), occupied)


def score(
    change_a: Tensor, change_b: Tensor, *, policy: str = "epikv", window: int = 64, occupied: Tensor | None = None
) -> Tensor:
    """z_A - z_B, or with policy "hs_variance" the difference of rolling means (eq. 2): [B, T], higher = keep.

    change_a, change_b: g of a layer of each band [B, T], or of several [B, L, T], whose z-scores are averaged
    ("band_adaptive"). occupied as for `rolling_mean`.
    """
    check_choice("policy", policy, DIFFERENCES)
    one, other = (
        _with_layers(check_series(name, change, occupied))
        for name, change in (("change_a", change_a), ("change_b", change_b))
    )
    return score_of(one, other, policy, window, occupied)


def score_of(one: Tensor, other: Tensor, policy: str, window: int, occupied: Tensor | None) -> Tensor:
    """`score` of any policy that reads hidden states, of changes [B, L, T]; L may be 0 in band B."""
    rolling = rolling_mean if policy == "hs_variance" else rolling_zscore
    return difference(*(
        rolling(change, window, occupied=occupied) if change.shape[1] else change for change in (one, other)
    ))


def difference(one: Tensor, other: Tensor) -> Tensor:
    """The mean over the layers of band A, [B, L, ...], minus that of band B, where there is one."""
    return _over_layers(one) - _over_layers(other) if other.shape[1] else _over_layers(one)


def kv_variance(key_or_value: Tensor) -> Tensor:
    """Variance over a vector's channels (ddof 0), averaged over the KV heads: [B, Hkv, T, D] -> [B, T] float32
    (float64). Its rolling mean is the score of "kv_key" and "kv_val" (section 3.3)."""
    x = check_vectors("key_or_value", key_or_value)
    x = x.to(accumulate_dtype(x))
    return (x - x.mean(-1, keepdim=True)).square().mean(-1).mean(1)


def lag_kv(key: Tensor, value: Tensor, *, chunk: int = 128, occupied: Tensor | None = None) -> Tensor:
    """Spread of each token's key and value, normalised by the previous chunk (section 3.3): [B, T], higher = keep.

    key, value [B, Hkv, T, D]. The row's tokens are counted in chunks of `chunk`. Channel d of a vector becomes (x -
    low) / (high - low), of what the channel held in the chunk before; their deviation over the channels, of key plus
    value, is averaged over the heads. Channels of a range of at most 1e-6 of the largest number of the chunk (of that
    head) say nothing and are left out; where all are, the spread is 0. A first chunk has no chunk before: +inf.
    occupied [B, T]: what is False is in no chunk and gives 0.
    """
    check_vectors("key", key, occupied)
    check_vectors("value", value)
    chunk = check_integer("chunk", chunk, minimum=1)
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"value must have key's B, Hkv and T {tuple(key.shape[:3])}, got {tuple(value.shape)}")
    dtype = accumulate_dtype(key)
    result = torch.zeros(key.shape[0], key.shape[2], dtype=dtype, device=key.device)
    for row in range(key.shape[0]):
        tokens = torch.arange(key.shape[2], device=key.device) if occupied is None else occupied[row].nonzero()[:, 0]
        vectors = [tensor[row][:, tokens].to(dtype) for tensor in (key, value)]         # [Hkv, n, D]
        result[row, tokens[:chunk]] = INF
        for start in range(chunk, len(tokens), chunk):
            spreads = [
                lag_spread(x[:, start:start + chunk], x[:, start - chunk:start].amin(1),
                           x[:, start - chunk:start].amax(1))
                for x in vectors
            ]
            result[row, tokens[start:start + chunk]] = (spreads[0] + spreads[1]).mean(0)
    return result


def lag_spread(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Deviation over the channels of (x - low) / (high - low): x [..., Hkv, n, D]; low, high [..., Hkv, D] ->
    [..., Hkv, n]."""
    width = high - low
    largest = torch.maximum(low.abs(), high.abs()).amax(-1, keepdim=True)
    says = width > LEAST_RANGE * largest                                                # [..., Hkv, D]
    count = says.sum(-1)[..., None].clamp_min(1)
    width = width.where(says, 1)[..., None, :]
    says = says[..., None, :]
    normal = ((x - low[..., None, :]) / width).where(says, 0)
    centre = (normal.sum(-1) / count)[..., None]
    return ((normal - centre).where(says, 0).square().sum(-1) / count).sqrt()


def select(
    score: Tensor, budget: int, *, prompt: int, recent: int, occupied: Tensor | None = None
) -> Tensor:
    """Which tokens stay (section 3.3): the first `prompt`, the newest `recent`, and those of the highest scores.

    score [B, T]. Of equal scores the older token goes first; NaN ranks lowest. occupied [B, T] bool: what is False is
    padding and never stays; it counts as a place, though. Returns [B, min(T, budget)] int64, ascending, -1 at the end
    of rows that have fewer. ValueError where prompt + recent exceed the budget.
    """
    score = check_selection(score, budget, prompt, recent, occupied)
    total = score.shape[1]
    index = torch.arange(total, device=score.device).expand(score.shape)
    place = torch.empty_like(index).scatter(-1, victims(score, total), index)           # 0 goes first
    place = torch.where((index < prompt) | (index >= total - recent), place + total, place)
    if occupied is not None:
        place = torch.where(occupied, place, index - total)
    kept = kept_after(place, min(total, budget))
    if occupied is None:
        return kept
    kept = kept.where(occupied.gather(1, kept), total).sort(-1).values
    return kept.where(kept < total, -1)


# Windows -------------------------------------------------------------------------------------------------------------


def compacted(occupied: Tensor) -> Tensor:
    """The order of a row's places in which padding comes first and tokens, as they came, last: [B, T] int64."""
    return occupied.to(torch.int8).sort(dim=-1, stable=True).indices


def _windows(g: Tensor, window: int, occupied: Tensor | None) -> tuple[Tensor, Tensor]:
    """The last `window` values up to each, oldest first, [..., T, window], and which of them there are.

    With `occupied` padding comes first, as in `compacted`.
    """
    g = g.to(accumulate_dtype(g))
    there = torch.ones_like(g, dtype=torch.bool) if occupied is None else occupied
    if occupied is not None:
        order = compacted(occupied)
        there = there.gather(-1, order)
        order, there = (x if g.dim() == 2 else x[:, None].expand(g.shape) for x in (order, there))
        g = g.gather(-1, order).masked_fill(~there, 0)
    before = (window - 1, 0)
    return (functional.pad(x, before).unfold(-1, window, 1) for x in (g, there))  # type: ignore[return-value]


def _in_place(result: Tensor, occupied: Tensor | None) -> Tensor:
    """Undoes `compacted`; 0 for padding."""
    if occupied is None:
        return result
    order, there = compacted(occupied), occupied
    order, there = (x if result.dim() == 2 else x[:, None].expand(result.shape) for x in (order, there))
    return torch.zeros_like(result).scatter(-1, order, result).masked_fill(~there, 0)


def _sum(values: Tensor) -> Tensor:
    """Over the last dimension, one after the other: the same bits for any number of windows."""
    total = torch.zeros_like(values[..., 0])
    for value in values.unbind(-1):
        total = total + value
    return total


def _mean(values: Tensor, there: Tensor) -> Tensor:
    """Of the values that are there; values [..., window] -> [...]."""
    return _sum(values.where(there, 0)) / there.sum(-1).clamp_min(1)


def _zscore(values: Tensor, there: Tensor) -> Tensor:
    """Of the last of them: values [..., window] -> [...]. Two passes: E[g^2] - mu^2 would cancel."""
    centre, window = _mean(values, there), values.shape[-1]
    deviation = (values - centre[..., None]).where(there, 0)
    sigma = (_sum(deviation.square()) / there.sum(-1).clamp_min(1)).sqrt()
    constant = sigma <= 4 * UNIT * window * values.where(there, 0).abs().amax(-1)
    return (deviation[..., -1] / sigma.where(~constant, 1)).masked_fill(constant, 0)


def _with_layers(change: Tensor) -> Tensor:
    return change if change.dim() == 3 else change[:, None]


def _over_layers(x: Tensor) -> Tensor:
    """The mean over layers: [B, L, ...] -> [B, ...]."""
    return _sum(x.movedim(1, -1)) / x.shape[1]
