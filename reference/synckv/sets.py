"""The tokens that R-heads select for the other heads of their cluster (sections 4.2 and 4.3)."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional

from ..attention import INF, logits
from ..contract.arguments import resolve_scale
from ..contract.synckv.arguments import check_anticipation, check_budget, check_initial
from ..contract.synckv.types import SyncKVSetsResult
from ..selection import top_k


def split_budget(k: int, rho: float) -> tuple[int, int]:
    """(k_static, k_dynamic): ceil(rho k) and the rest of k, with rho taken as the decimal number that it is written as.

    k: an int >= 1. rho: a number from 0 to 1. The paper rounds both parts down (after eq. 6), which may lose a token;
    so may floating point, in which (1 - 0.9) * 10 is below 1. TypeError or ValueError for invalid arguments.
    """
    check_budget(k, rho)
    static = ceil(Fraction(str(rho)) * k)
    return static, k - static


def initial_sets(
    query: Tensor, key: Tensor, occupied: Tensor, k_static: int, k_dynamic: int, *, scale: float | None = None
) -> SyncKVSetsResult:
    """The tokens with the largest weights from the last prompt token, for each R-head, in two parts (eq. 3 and 4).

    query [B, N_r G, D], the last token's, of the query heads of the R-heads; key [B, N_r, S, D], of the R-heads;
    occupied [B, S] bool; scale defaults to D ** -0.5. The weight of a token is the largest that any of the G query
    heads gives it (B.1), compared by logarithm; ties go to the lowest index. static: the best k_static tokens; dynamic:
    the next best k_dynamic (see `split_budget`); either may be 0. If a row has fewer tokens, all are selected, static
    ones first. TypeError or ValueError for invalid arguments.
    """
    sizes = check_initial(query, key, occupied, k_static, k_dynamic)
    weight = log_weights(query, key, occupied, resolve_scale(scale, sizes.head_dim))
    return initial_by(weight, occupied, k_static, k_dynamic)


def initial_by(weight: Tensor, occupied: Tensor, k_static: int, k_dynamic: int) -> SyncKVSetsResult:
    """`initial_sets` by given log-weights [B, N_r, S]."""
    best = best_of(weight, occupied[:, None].expand(weight.shape), k_static + k_dynamic)  # eq. 3
    return SyncKVSetsResult(ascending(best[..., :k_static]), ascending(best[..., k_static:]))  # eq. 4


def anticipate(
    query: Tensor, key: Tensor, occupied: Tensor, static: Tensor, k_dynamic: int, *, exclude_static: bool = True,
    scale: float | None = None,
) -> Tensor:
    """The k_dynamic tokens with the largest weights from a decode step, for each R-head (eq. 5 and 6).

    query, key, occupied, weights and ties as in `initial_sets`; the keys include the step's own. static [B, N_r,
    k_static] int64, below S, -1 for none: tokens that are not selected again, unless exclude_static is False, which
    follows eq. 6 literally. Returns [B, N_r, k_dynamic] int64, ascending, then -1 if there are fewer tokens. TypeError
    or ValueError for invalid arguments.
    """
    sizes = check_anticipation(query, key, occupied, static, k_dynamic, exclude_static)
    weight = log_weights(query, key, occupied, resolve_scale(scale, sizes.head_dim))   # eq. 5
    candidates = occupied[:, None].expand(weight.shape)
    if exclude_static:
        taken = functional.pad(torch.zeros_like(candidates), (0, 1))                    # the last place is for -1
        taken = taken.scatter(-1, static.where(static >= 0, sizes.slots), True)
        candidates = candidates & ~taken[..., :-1]
    return ascending(best_of(weight, candidates, k_dynamic))                             # eq. 6


def log_weights(query: Tensor, key: Tensor, occupied: Tensor, scale: float) -> Tensor:
    """The logarithm of the largest attention weight in each group: query [B, N_r G, D], key [B, N_r, S, D], occupied
    [B, S] -> [B, N_r, S]. The weights themselves underflow, which creates ties."""
    logit = logits(query, key, occupied, scale=scale)                                   # [B, N_r G, S]
    weight = logit - logit.logsumexp(-1, keepdim=True)
    return weight.unflatten(1, (key.shape[1], -1)).amax(2)


def best_of(score: Tensor, candidates: Tensor, count: int) -> Tensor:
    """The `count` candidates with the highest scores, best first, then -1: [..., S] -> [..., count] int64."""
    # Clamped, so that any candidate ranks above all slots that are not candidates.
    score = score.nan_to_num(nan=-INF, posinf=INF, neginf=-INF).clamp_min(torch.finfo(score.dtype).min)
    score = score.masked_fill(~candidates, -INF)
    best = top_k(score, min(count, score.shape[-1]))
    best = best.masked_fill(~candidates.gather(-1, best), -1)
    return functional.pad(best, (0, count - best.shape[-1]), value=-1)


def ascending(index: Tensor) -> Tensor:
    """Sort index [..., N] int64 in ascending order, with -1 at the end."""
    last = torch.iinfo(index.dtype).max
    ordered = index.masked_fill(index < 0, last).sort(-1).values
    return ordered.masked_fill(ordered == last, -1)
