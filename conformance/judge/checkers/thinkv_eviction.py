"""Checker of ThinKV's k-means, round by round, and of the tokens that it keeps.

Each assignment is compared with float64 centroids of the previous actual assignment, since an early legal tie changes
all later rounds. A cluster is right if its distance minus its bound is at most every other cluster's distance plus that
cluster's bound. Tokens with bitwise equal keys have equal distances in any arithmetic: they share a cluster, and the
lowest index comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import stats
from ...cases.thought_cases import LAYOUTS, SegmentCase, segment_cases
from ..bounds import FLUSH, SLACK, UNIT, gamma
from ..compare import fail
from ..fields import field
from ..subjects import Subject, properties
from ..ties import tie_classes

ROUNDS = 10


class Distances(NamedTuple):
    """||x_j - centroid_c||^2 [L, k] in float64 and its error bound up to a term that all clusters of a token share; inf
    for a cluster without tokens. own, own_error [L]: of the token's own cluster, including the shared term."""

    squared: Tensor
    error: Tensor
    own: Tensor
    own_error: Tensor


def distances(token: Tensor, member: Tensor) -> Distances:
    """Distances of float64 keys [L, F] to the means of the clusters in member [L, k] bool.

    Two ways of computing them are allowed, and the bound is the larger of the two. u = 2^-24, n tokens in a cluster.

    *Through the Gram matrix of centred keys.* The origin is the mean of all tokens, or of the two tokens at one and
    three quarters; y_jd is the larger magnitude of the two after centring. A computed origin has the error gamma(L + 2)
    of the mean |x_d|, which shifts all tokens alike and changes no distance; the subtraction rounds, 1 u of y.
    Then G_ji has the error gamma(2.1 F + 8) A_ji, with A = y y': F products are summed, and each addition loses 2 u in
    a tensor core; if keys are split into three parts of 8 bits, the smaller products are 2^-7 of the others, and those
    left out 2 u. A mean over a cluster's tokens adds gamma(2.1 n + 6), with three parts and a division again; the mean
    of these within the cluster adds gamma(n + 5). With a_jc and b_c the means of A over the cluster and over pairs in
    it, distance_jc without the norm has the error gamma(2.1 F + 3.1 n + 24) (2 a_jc + b_c); the norm has the error
    gamma(2.1 F + 8) A_jj and three roundings.

    *From centroids.* Centroids have the error h_cd = gamma(n + 2) mean |x_id| over the cluster, differences u, and sums
    of squares gamma(F + 4): gamma(F + 8) distance + sum_d (2 |x_jd - c_d| h_cd + h_cd^2).

    Products and parts of numbers below FLUSH flush to zero: FLUSH times F (1 + the largest y) each.
    """
    size, channels = token.shape
    count = member.sum(0).double()                                                        # [k]
    full = count.clamp_min(1)
    centroid = (member.double().T @ token) / full[:, None]                                # [k, F]
    apart = (token[:, None] - centroid).abs()                                             # [L, k, F]
    squared = apart.square().sum(-1)

    pair = token[[size // 4, 3 * size // 4]]
    sizes = torch.stack([
        (token - some.mean(0)).abs() * (1 + UNIT) + gamma(size + 2) * some.abs().mean(0) for some in (token, pair)
    ]).amax(0)                                                                            # y, [L, F]
    gram = sizes @ sizes.T                                                                # A, [L, L]
    average = (gram @ member.double()) / full                                             # a, [L, k]
    within = (average * member).sum(0) / full                                             # b, [k]
    vanished = 8 * FLUSH * channels * (1 + sizes.max())
    through_gram = gamma(2.1 * channels + 3.1 * full + 24) * (2 * average + within) + vanished
    norm = gamma(2.1 * channels + 16) * gram.diagonal()

    drift = gamma(full + 2)[:, None] * (member.double().T @ token.abs()) / full[:, None]  # h, [k, F]
    from_centroids = gamma(channels + 8) * squared + (2 * apart * drift + drift.square()).sum(-1) + vanished

    error = torch.maximum(through_gram, from_centroids) * SLACK
    own_error = torch.maximum(through_gram + norm[:, None], from_centroids) * SLACK
    empty = count == 0
    own, own_error = ((tensor.masked_fill(~member, 0)).sum(1) for tensor in (squared, own_error))
    return Distances(squared.masked_fill(empty, torch.inf), error.masked_fill(empty, 0), own, own_error)


class Counts(NamedTuple):
    """Decisions of a case, and how many of them had one right answer."""

    total: int
    decisive: int


def assert_representatives_right(actual: Any, case: Any) -> Counts:
    """actual: `select_representatives(**case.inputs)` of a SegmentCase (or of what has its vectors, tokens and keep).

    Decisions: each token's cluster, if there are several, in every round that differs from the previous one; the
    nearest token of each cluster of three or more; each token that may be kept in place of an empty cluster.
    """
    indices, assignments = actual
    size, keep = case.tokens, min(case.keep, case.tokens)
    for name, tensor, shape in (("indices", indices, (keep,)), ("assignments", assignments, (ROUNDS, size))):
        if tensor.dtype != torch.int64 or tuple(tensor.shape) != shape:
            fail(f"{name}: expected int64 of shape {shape}, got {tensor.dtype} of {tuple(tensor.shape)}")
    if bool((indices.diff() <= 0).any()) or int(indices[0]) < 0 or int(indices[-1]) >= size:
        fail(f"indices: expected {keep} distinct tokens of 0..{size - 1}, ascending, got {indices.tolist()}")
    if bool((assignments < 0).any()) or bool((assignments >= max(keep, 1)).any()):
        fail(f"assignments: expected clusters of 0..{keep - 1}, got {assignments.tolist()}")
    if case.keep >= size:
        every = torch.arange(size, device=indices.device).expand(ROUNDS, size)
        if not torch.equal(assignments, every):
            fail(f"assignments: expected each of {size} tokens in its own cluster, got {assignments.tolist()}")
        return Counts(0, 0)
    token = case.vectors.double().contiguous()
    vectors, occupied = case.vectors[None, None], torch.ones(1, size, dtype=torch.bool, device=token.device)
    kind = tie_classes(vectors, vectors, occupied)[0]
    cluster = torch.arange(keep, device=token.device)
    start = cluster * size // keep
    member = torch.arange(size, device=token.device)[:, None] == start
    counts, before = Counts(0, 0), None
    for number, assigned in enumerate(assignments):
        # Of clusters whose initial keys are equal, the first gets all tokens.
        behind = (kind[start][:, None] == kind[start]).tril(-1).any(1) if number == 0 else torch.zeros_like(start) > 0
        found = _check_round(distances(token, member), assigned, behind, kind, number)
        if before is None or not torch.equal(before, assigned):
            counts = Counts(counts.total + found.total, counts.decisive + found.decisive)
        before, member = assigned, assigned[:, None] == cluster
    found = _check_choice(distances(token, member), member, indices, kind)
    counts = Counts(counts.total + found.total, counts.decisive + found.decisive)
    stats.decisions(counts.total, counts.decisive)
    return counts


def _check_round(found: Distances, assigned: Tensor, behind: Tensor, kind: Tensor, number: int) -> Counts:
    """Check one round's assignment [L]. behind [k]: clusters that lose an exact tie with an earlier one."""
    low, high = found.squared - found.error, found.squared + found.error
    legal = (low <= high.amin(1, keepdim=True)) & found.squared.isfinite() & ~behind
    wrong = ~legal.gather(1, assigned[:, None])[:, 0]
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        best, taken = int(high[token].argmin()), int(assigned[token])
        fail(
            f"round {number}: token {token} is assigned to cluster {taken} at {found.squared[token, taken].item():.9g} "
            f"+- {found.error[token, taken].item():.3g}, but cluster {best} is at "
            f"{found.squared[token, best].item():.9g} +- {found.error[token, best].item():.3g}"
        )
    wrong = assigned != assigned[kind]
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        fail(f"round {number}: tokens {int(kind[token])} and {token} are equal, but are assigned to different clusters")
    contested = (found.squared.isfinite() & ~behind).sum(1) > 1
    return Counts(int(contested.sum()), int((contested & (legal.sum(1) == 1)).sum()))


def _check_choice(found: Distances, member: Tensor, indices: Tensor, kind: Tensor) -> Counts:
    """Check the kept tokens: a nearest token of each cluster, and the farthest tokens in place of empty clusters."""
    low, high = found.own - found.own_error, found.own + found.own_error
    keep_mask = torch.zeros_like(kind, dtype=torch.bool).index_fill(0, indices, True)
    total = decisive = 0
    nearest = torch.zeros_like(keep_mask)
    for number, tokens in enumerate(member.T):
        at = tokens.nonzero()[:, 0]
        if len(at) == 0:
            continue
        legal = at[:1]
        if len(at) > 2:
            legal = at[low[at] <= high[at].min()]
            legal = legal[kind[legal] == legal]                        # the first of equal ones
            classes = len(kind[at].unique())
            total, decisive = total + (classes > 1), decisive + (classes > 1 and len(legal) == 1)
        kept = legal[keep_mask[legal]]
        if len(kept) == 0:
            fail(
                f"cluster {number} of tokens {at.tolist()} must keep one of {legal.tolist()}, got "
                f"{at[keep_mask[at]].tolist()}\n  distances {found.own[at].tolist()}"
            )
        # Any of these may be the nearest. The others were kept for their distance; assume the most favourable case.
        nearest[kept[high[kept].argmin()]] = True
    filling, evicted = keep_mask & ~nearest, ~keep_mask
    if bool(filling.any()) and bool(evicted.any()):
        last, first = torch.where(filling, high, torch.inf), torch.where(evicted, low, -torch.inf)
        if bool(last.min() < first.max()):
            near, far = int(last.argmin()), int(first.argmax())
            fail(
                f"token {near}, at {found.own[near].item():.9g} from its centroid, is kept in place of an empty "
                f"cluster, but token {far}, at {found.own[far].item():.9g}, is evicted"
            )
    missing = int((~member.any(0)).sum())
    if int(filling.sum()) != missing:
        fail(f"{missing} clusters are empty: expected {missing} tokens beside the clusters' nearest, "
             f"got {int(filling.sum())}")
    _check_equals(member, keep_mask, kind)
    if missing:
        rest, index = ~nearest, torch.arange(len(kind), device=kind.device)
        equal = kind[:, None] == kind
        above = (((low > high[:, None]) | (equal & (index < index[:, None]))) & rest).sum(1)
        below = (((high < low[:, None]) | (equal & (index > index[:, None]))) & rest).sum(1)
        sure = (above >= missing) | (below >= int(rest.sum()) - missing)
        total, decisive = total + int(rest.sum()), decisive + int((rest & sure).sum())
    return Counts(total, decisive)


def _check_equals(member: Tensor, keep_mask: Tensor, kind: Tensor) -> None:
    """Check that the first tokens are kept among those with equal keys, which share a cluster."""
    for first in kind.unique().tolist():
        at = (kind == first).nonzero()[:, 0]
        kept = keep_mask[at]
        if bool((kept[1:] & ~kept[:-1]).any()):
            fail(f"of the equal tokens {at.tolist()} the first must be kept, got {at[kept].tolist()}")


def _judge_representatives(actual: Any, case: SegmentCase) -> None:
    with field("indices"):
        assert_representatives_right(actual, case)


#: `indices` is judged together with `assignments`, from which it follows.
REPRESENTATIVES = Subject(
    "select_representatives", lambda **arguments: segment_cases(shrinks=True, **arguments), _judge_representatives,
    choices=("indices",), sized=None, batched=False,
    properties=properties(
        ordinary=("ordinary", "clumps"), tied=("duplicates", "equal_keys"), extreme=("sizes", "offset"), layout=LAYOUTS,
    ),
)


def replay(case: SegmentCase, module: Any) -> Iterator[str]:
    """Judge a saved case again."""
    counts = assert_representatives_right(module.select_representatives(**case.inputs), case)
    yield f"representatives, {counts.decisive} of {counts.total} decisions decisive"
