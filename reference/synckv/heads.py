"""How alike heads are, and which of them stand for which (sections 3.1 and 4.1, B.1)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .contract import HeadClusters, check_heads_attention, check_sets, check_similarity
from .sets import best_of

#: Rounds of k-means.
ITERATIONS = 20


def overlap(first: Tensor, second: Tensor) -> Tensor:
    """The overlap coefficient of index sets: the share of the smaller one that the other holds too (eq. 1).

    first [..., N], second [..., M] int64: distinct tokens, -1 for none. Returns [...] float64, from 0 to 1.
    TypeError, ValueError for bad arguments, an empty set among them.
    """
    check_sets(first, second)
    common = ((first[..., :, None] == second[..., None, :]) & (first >= 0)[..., None]).sum((-1, -2))
    smaller = torch.minimum((first >= 0).sum(-1), (second >= 0).sum(-1))
    return common.double() / smaller


def head_similarity(attention: Tensor, k: int, *, occupied: Tensor | None = None) -> Tensor:
    """How much the k tokens that two heads attend to most are the same, on average over steps and data (eq. 2).

    attention [steps, Hkv, n] floating, weights of each KV head or anything that ranks tokens alike; of equals the
    lowest index comes first, NaN last. occupied [steps, n] bool: the tokens that there are at a step, default all; of a
    step with fewer than k all are taken. Returns [Hkv, Hkv] float64, symmetric, 1 on the diagonal.
    TypeError, ValueError for bad arguments, a step without tokens among them.
    """
    check_heads_attention(attention, k, occupied)
    candidates = torch.ones_like(attention, dtype=torch.bool)
    if occupied is not None:
        candidates = occupied[:, None].expand(attention.shape)
    best = best_of(attention, candidates, min(k, attention.shape[-1]))                    # [steps, Hkv, k]
    heads = attention.shape[1]
    share = torch.stack([
        torch.stack([overlap(best[:, i], best[:, j]) for j in range(heads)]) for i in range(heads)
    ])                                                                                  # [Hkv, Hkv, steps]
    # Divided by a tensor: a number would be multiplied by its rounded inverse on a GPU, and the diagonal miss 1.
    return share.sum(-1) / share.new_tensor(share.shape[-1])


def cluster_heads(similarity: Tensor, clusters: int) -> HeadClusters:
    """Heads that look at the same tokens, and of each cluster the one nearest to its centroid (B.1, steps 3 and 4).

    similarity [Hkv, Hkv] floating, symmetric, the diagonal included; clusters from 1 to Hkv. k-means on the rows of
    max(S) - S in float64: the first centre is head 0, each further one the head farthest from its nearest centre; then
    ITERATIONS times every head goes to the nearest centre, and centres become means. A cluster that no head goes to
    takes the head that is farthest from its own centre, of those that do not stand alone. All ties go to the lowest
    index, that of a cluster of two, both equally near to its centroid, too. All sums run in ascending order.
    TypeError, ValueError for bad arguments.
    """
    clusters = check_similarity(similarity, clusters)
    similarity = similarity.detach().cpu().double()
    row = similarity.max() - similarity                                                 # [Hkv, Hkv]
    chosen = [0]
    while len(chosen) < clusters:
        chosen.append(int(_first(_distances(row, row[chosen]).amin(1))))
    centre = row[chosen]
    for _ in range(ITERATIONS):
        label = _assign(_distances(row, centre), clusters)
        member = label == torch.arange(clusters)[:, None]                               # [clusters, Hkv]
        centre = torch.stack([_in_order(row[heads]) / int(heads.sum()) for heads in member])
    distance = _distances(row, centre).T.masked_fill(~member, torch.inf)
    # Two heads are equally near to their mean, whatever it is rounded to.
    distance = distance.masked_fill(member & (member.sum(1, keepdim=True) <= 2), 0)
    return HeadClusters(tuple(label.tolist()), tuple(int(_first(-row)) for row in distance))


def _assign(distance: Tensor, clusters: int) -> Tensor:
    """The cluster of each head, none of them empty: distance [Hkv, clusters] -> [Hkv]."""
    label = torch.stack([_first(-row) for row in distance])
    for cluster in range(clusters):
        if not bool((label == cluster).any()):
            own = distance.gather(1, label[:, None])[:, 0]
            alone = label.bincount(minlength=clusters)[label] == 1
            label[_first(own.masked_fill(alone, -torch.inf))] = cluster
    return label


def _distances(row: Tensor, centre: Tensor) -> Tensor:
    """Squared Euclidean distances: row [Hkv, F], centre [C, F] -> [Hkv, C]."""
    return _in_order((row.T[:, :, None] - centre.T[:, None, :]).square())


def _in_order(terms: Iterable[Tensor]) -> Tensor:
    """Their sum, the first two first: torch's own sum promises no order."""
    total, *rest = terms
    for term in rest:
        total = total + term
    return total


def _first(score: Tensor) -> Tensor:
    """The lowest index of the highest of the scores [n]."""
    return (score == score.max()).nonzero()[0, 0]
