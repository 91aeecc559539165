"""The tokens that stand for all others until the next anticipation (sections 4.2 and 4.3)."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional

from ..attention import INF, logits
from ..contract import resolve_scale
from ..selection import top_k
from .contract import SyncKVSetsResult, check_anticipation, check_budget, check_initial


def split_budget(k: int, rho: float) -> tuple[int, int]:
    """(k_static, k_dynamic), which sum to k: ceil(rho k), rho taken as the decimal number that it is written as.

    k at least 1, rho from 0 to 1. The paper rounds both parts down (after eq. 6), which may lose a token, and in
    floating point more: (1 - 0.9) * 10 is below 1. TypeError, ValueError for bad arguments.
    """
    check_budget(k, rho)
    static = ceil(Fraction(str(rho)) * k)
    return static, k - static


def initial_sets(
    query: Tensor, key: Tensor, occupied: Tensor, k_static: int, k_dynamic: int, *, scale: float | None = None
) -> SyncKVSetsResult:
    """The tokens that the prompt's last token attends to most, by each R-head, in two parts (eq. 3 and 4).

    query [B, N_r G, D], the last token's, of the query heads of the R-heads; key [B, N_r, S, D], theirs; occupied
    [B, S] bool. G query heads count by the largest weight that any of them gives (B.1), compared as logarithms; of
    equals the lowest index is chosen. static: the best k_static, dynamic: the next best k_dynamic (see `split_budget`);
    either may be 0. A row of fewer tokens has all of them, the best in the static part. scale defaults to D ** -0.5.
    TypeError, ValueError for bad arguments.
    """
    sizes = check_initial(query, key, occupied, k_static, k_dynamic)
    weight = log_weights(query, key, occupied, resolve_scale(scale, sizes.head_dim))
    best = best_of(weight, occupied[:, None].expand(weight.shape), k_static + k_dynamic)  # eq. 3
    return SyncKVSetsResult(ascending(best[..., :k_static]), ascending(best[..., k_static:]))  # eq. 4


def anticipate(
    query: Tensor, key: Tensor, occupied: Tensor, static: Tensor, k_dynamic: int, *, exclude_static: bool = True,
    scale: float | None = None,
) -> Tensor:
    """The k_dynamic tokens that a decode step attends to most, by each R-head (eq. 5 and 6): [B, N_r, k_dynamic] int64.

    Tokens, ascending, then -1 where there are fewer. query, key, occupied, weights and ties: as in `initial_sets`, the
    step's own token among the keys. static [B, N_r, k_static] int64, -1 for none, else below S: tokens that are not
    chosen again, unless exclude_static is False, which is eq. 6 to the letter. TypeError, ValueError for bad arguments.
    """
    sizes = check_anticipation(query, key, occupied, static, k_dynamic, exclude_static)
    weight = log_weights(query, key, occupied, resolve_scale(scale, sizes.head_dim))   # eq. 5
    candidates = occupied[:, None].expand(weight.shape)
    if exclude_static:
        taken = functional.pad(torch.zeros_like(candidates), (0, 1))                    # one place more, for none
        taken = taken.scatter(-1, static.where(static >= 0, sizes.slots), True)
        candidates = candidates & ~taken[..., :-1]
    return ascending(best_of(weight, candidates, k_dynamic))                             # eq. 6


def log_weights(query: Tensor, key: Tensor, occupied: Tensor, scale: float) -> Tensor:
    """log of the largest attention weight in each group: [B, N_r, S]. Weights themselves would vanish into ties."""
    logit = logits(query, key, occupied, scale=scale)                                   # [B, N_r G, S]
    weight = logit - logit.logsumexp(-1, keepdim=True)
    return weight.unflatten(1, (key.shape[1], -1)).amax(2)


def best_of(score: Tensor, candidates: Tensor, count: int) -> Tensor:
    """The `count` candidates of the highest scores, in the order of rank, then -1: [..., S] -> [..., count] int64."""
    # A candidate of whatever score comes before what is none.
    score = score.nan_to_num(nan=-INF, posinf=INF, neginf=-INF).clamp_min(torch.finfo(score.dtype).min)
    score = score.masked_fill(~candidates, -INF)
    best = top_k(score, min(count, score.shape[-1]))
    best = best.masked_fill(~candidates.gather(-1, best), -1)
    return functional.pad(best, (0, count - best.shape[-1]), value=-1)


def ascending(index: Tensor) -> Tensor:
    """Ascending, -1 at the end."""
    last = torch.iinfo(index.dtype).max
    ordered = index.masked_fill(index < 0, last).sort(-1).values
    return ordered.masked_fill(ordered == last, -1)
