"""EpiKV's scores of whole sequences. Semantics: `kvtwin.reference.epikv.scores`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...reference.contract.arguments import check_choice, check_integer
from ...reference.contract.epikv.arguments import (
    check_hidden_pair,
    check_lag,
    check_selection,
    check_series,
    check_vectors,
)
from ...reference.contract.epikv.config import DIFFERENCES
from .._common.launch import check_launchable
from .._common.prompts import prompt_selection
from . import _score_kernels as kernels


def hidden_change(hidden: Tensor, previous: Tensor) -> Tensor:
    """The change of a hidden state, g = ||h(t) - h(t - 1)||_2 (eq. 1): hidden, previous [..., C] -> [...] float32."""
    check_hidden_pair(hidden, previous)
    check_launchable(hidden=hidden, previous=previous)
    one, other = (_as_sequences(tensor) for tensor in (hidden, previous))
    found: Tensor = kernels.change(one, other, None)
    return found.view(hidden.shape[:-1])


def rolling_mean(g: Tensor, window: int = 64, *, occupied: Tensor | None = None) -> Tensor:
    """Mean of the last `window` values, t included (below eq. 2): g [B, T] or [B, L, T] -> the same shape, float32.

    occupied [B, T] bool: False marks padding, which gives 0 and is not part of any window.
    """
    return _rolling(g, window, occupied, zscore=False)


def rolling_zscore(g: Tensor, window: int = 64, *, occupied: Tensor | None = None) -> Tensor:
    """(g(t) - mean) / deviation over the last `window` values, t included (eq. 3 without its epsilon), with ddof 0.

    0 if the deviation is at most 4 u window max |g|, u = 2^-24. Arguments as in `rolling_mean`.
    """
    return _rolling(g, window, occupied, zscore=True)


def score(
    change_a: Tensor, change_b: Tensor, *, policy: str = "epikv", window: int = 64, occupied: Tensor | None = None
) -> Tensor:
    """z_A - z_B, or for "hs_variance" the difference of rolling means (eq. 2): [B, T], higher = keep.

    change_a, change_b: g of one layer per band [B, T], or of several [B, L, T], whose z-scores are averaged.
    """
    check_choice("policy", policy, DIFFERENCES)
    one, other = (
        _rolling(
            _with_layers(check_series(name, change, occupied)), window, occupied, zscore=policy != "hs_variance",
            name=name,
        )
        for name, change in (("change_a", change_a), ("change_b", change_b))
    )
    return difference(one, other)


def kv_variance(key_or_value: Tensor) -> Tensor:
    """Variance over channels (ddof 0), averaged over the KV heads: [B, Hkv, T, D] -> [B, T] float32."""
    x = check_vectors("key_or_value", key_or_value)
    check_launchable(key_or_value=x)
    found: Tensor = kernels.variances(x)
    return found


def lag_kv(
    key: Tensor, value: Tensor, *, chunk: int = 128, spread: str = "deviation", occupied: Tensor | None = None
) -> Tensor:
    """The spread of each token's key and value, normalized by the previous chunk: [B, T] float32, higher = keep.

    key, value [B, Hkv, T, D] of one dtype; spread: "deviation" or "variance"; occupied [B, T]. +inf in a row's
    first chunk, 0 for padding.
    """
    chunk = check_lag(key, value, chunk, spread, occupied)
    check_launchable(key=key, value=value)
    batch, _, tokens, _ = key.shape
    if occupied is None:
        order = torch.arange(tokens, device=key.device).repeat(batch, 1)
        first = torch.zeros(batch, dtype=torch.int64, device=key.device)
    else:
        order, first = compacted(occupied), (~occupied).sum(1)
    found: Tensor = kernels.lag(key, value, order, first, chunk, spread == "variance")
    return found


def select(
    score: Tensor, budget: int, *, prompt: int, recent: int, occupied: Tensor | None = None
) -> Tensor:
    """The tokens to keep (section 3.3): the first `prompt`, the newest `recent`, and those with the highest scores.

    score [B, T]. Ties evict the older token; NaN ranks lowest. occupied [B, T] bool, False for padding. Returns
    [B, min(T, budget)] int64, ascending, -1 at the end of rows with fewer tokens.
    """
    score = check_selection(score, budget, prompt, recent, occupied)
    score = score.detach().float()
    check_launchable(score=score)
    count = min(score.shape[1], budget)
    if not count:
        return torch.empty(score.shape[0], 0, dtype=torch.int64, device=score.device)
    first_end = torch.full_like(score[:, 0], prompt, dtype=torch.int64) if prompt else None
    best = prompt_selection.choose(
        score[:, None], occupied, first_end, count, min(recent, score.shape[1]), 1, 1
    )
    return prompt_selection.indices(*best[:2])


# Also used by the state ----------------------------------------------------------------------------------------------


def compacted(occupied: Tensor) -> Tensor:
    """The indices that put a row's padding first and its tokens last, in their order: [B, T] int64."""
    return occupied.to(torch.int8).sort(dim=-1, stable=True).indices


class Order(NamedTuple):
    """An order of a row's T tokens: first those without a value, then those with one."""

    places: Tensor | None                           # [B, T] int64: the token at each place; None: as they are
    first: Tensor                                   # [B] int64: the place of the first token with a value
    there: Tensor                                   # [B, T] bool: the tokens with a value

    def apply(self, x: Tensor) -> Tensor:
        """x [B, L, T] in this order."""
        return x if self.places is None else x.gather(2, self.places[:, None].expand(x.shape))


def order_of(there: Tensor) -> Order:
    """The order of there [B, T]: the tokens with a value."""
    return Order(compacted(there), (~there).sum(1), there)


def rolling_of(g: Tensor, order: Order, window: int, *, zscore: bool) -> Tensor:
    """Rolling means or z-scores of g [B, L, T], float32, 0 for tokens without a value."""
    ordered, first = order.apply(g), order.first.repeat_interleave(g.shape[1])
    found: Tensor = kernels.rolling(ordered.reshape(-1, g.shape[2]), first, window, zscore).view(g.shape)
    if order.places is not None:
        found = torch.zeros_like(found).scatter(2, order.places[:, None].expand(g.shape), found)
    return found.masked_fill(~order.there[:, None], 0)


def difference(one: Tensor, other: Tensor) -> Tensor:
    """The mean over the layers of band A, [B, La, T], minus that of band B, [B, Lb, T], unless B is empty: [B, T]."""
    return _over_layers(one) - _over_layers(other) if other.shape[1] else _over_layers(one)


def _over_layers(x: Tensor) -> Tensor:
    total = x[:, 0]
    for layer in range(1, x.shape[1]):
        total = total + x[:, layer]
    return total / x.shape[1]


def _rolling(g: Tensor, window: int, occupied: Tensor | None, *, zscore: bool, name: str = "g") -> Tensor:
    """Rolling means or z-scores of g, which error messages call `name`."""
    g = check_series(name, g, occupied)
    window = check_integer("window", window, minimum=1)
    check_launchable(**{name: g})
    shape, tokens = g.shape, g.shape[-1]
    if occupied is None:
        found: Tensor = kernels.rolling(g.reshape(-1, tokens), None, window, zscore)
        return found.view(shape)
    return rolling_of(_with_layers(g), order_of(occupied), window, zscore=zscore).view(shape)


def _with_layers(change: Tensor) -> Tensor:
    return change if change.dim() == 3 else change[:, None]


def _as_sequences(tensor: Tensor) -> Tensor:
    """[..., C] as [B, T, C]."""
    if tensor.dim() <= 3:
        return tensor.view(*[1] * (3 - tensor.dim()), *tensor.shape)
    return tensor.flatten(0, -3)
