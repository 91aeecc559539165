"""Similarity of heads, and their clusters (sections 3.1 and 4.1, B.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import sum_in_order
from ..contract.synckv.arguments import check_heads_attention, check_sets, check_similarity
from ..contract.synckv.types import HeadClusters
from .sets import best_of

#: Iterations of k-means.
ITERATIONS = 20


def overlap(first: Tensor, second: Tensor) -> Tensor:
    """The overlap coefficient of index sets: the size of the intersection over that of the smaller set (eq. 1).

    first [..., N], second [..., M] int64: distinct tokens, -1 for none. Returns [...] float64, from 0 to 1. TypeError
    or ValueError for invalid arguments, including empty sets.
    """
    check_sets(first, second)
    common = ((first[..., :, None] == second[..., None, :]) & (first >= 0)[..., None]).sum((-1, -2))
    smaller = torch.minimum((first >= 0).sum(-1), (second >= 0).sum(-1))
    return common.double() / smaller


def head_similarity(attention: Tensor, k: int, *, occupied: Tensor | None = None) -> Tensor:
    """The overlap of the top-k tokens of each pair of heads, averaged over steps and data (eq. 2).

    attention [steps, Hkv, n] floating: the weights of each KV head, or any scores that rank tokens equally; ties go to
    the lowest index, NaN ranks lowest. occupied [steps, n] bool: the tokens that exist at a step, by default all. A
    step with fewer than k tokens contributes all of them. Returns [Hkv, Hkv] float64, symmetric, 1 on the diagonal.
    TypeError or ValueError for invalid arguments, including steps without tokens.
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
    # Divide by a tensor: on a GPU, division by a number multiplies by its rounded inverse, and the diagonal is not 1.
    return share.sum(-1) / share.new_tensor(share.shape[-1])


def cluster_heads(similarity: Tensor, clusters: int) -> HeadClusters:
    """Clusters of similar heads, each represented by the head nearest to its centroid (B.1, steps 3 and 4).

    similarity [Hkv, Hkv] floating, symmetric, with the diagonal; clusters from 1 to Hkv. k-means in float64 on the rows
    of max(S) - S: the first center is head 0, each further one is the head farthest from its nearest center. ITERATIONS
    times, each head joins the nearest center, and each center moves to the mean of its heads. A cluster without heads
    takes the head that is farthest from its own center, unless that head is alone in its cluster. Ties go to the lowest
    index, also in a cluster of two, whose heads are equally near to the centroid. Sums run in ascending order of heads.
    TypeError or ValueError for invalid arguments.
    """
    clusters = check_similarity(similarity, clusters)
    similarity = similarity.detach().cpu().double()
    row = similarity.max() - similarity                                                 # [Hkv, Hkv]
    chosen = [0]
    while len(chosen) < clusters:
        chosen.append(int(_first(_distances(row, row[chosen]).amin(1))))
    center = row[chosen]
    for _ in range(ITERATIONS):
        label = _assign(_distances(row, center), clusters)
        member = label == torch.arange(clusters)[:, None]                               # [clusters, Hkv]
        center = torch.stack([sum_in_order(row[heads], 0) / int(heads.sum()) for heads in member])
    distance = _distances(row, center).T.masked_fill(~member, torch.inf)
    # Two heads are equally near to their mean; rounding must not decide between them.
    distance = distance.masked_fill(member & (member.sum(1, keepdim=True) <= 2), 0)
    return HeadClusters(tuple(label.tolist()), tuple(int(_first(-row)) for row in distance))


def _assign(distance: Tensor, clusters: int) -> Tensor:
    """Assign each head to a cluster, leaving none empty: distance [Hkv, clusters] -> [Hkv] int64."""
    label = torch.stack([_first(-row) for row in distance])
    for cluster in range(clusters):
        if not bool((label == cluster).any()):
            own = distance.gather(1, label[:, None])[:, 0]
            alone = label.bincount(minlength=clusters)[label] == 1
            label[_first(own.masked_fill(alone, -torch.inf))] = cluster
    return label


def _distances(row: Tensor, center: Tensor) -> Tensor:
    """Squared Euclidean distances: row [Hkv, F], center [C, F] -> [Hkv, C]."""
    return sum_in_order((row.T[:, :, None] - center.T[:, None, :]).square(), 0)


def _first(score: Tensor) -> Tensor:
    """The index of the highest score, the lowest of equals: score [n] -> scalar int64."""
    return (score == score.max()).nonzero()[0, 0]
