"""SyncKV's functions in plain PyTorch, right ones, and subclasses that are wrong in one step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


def best_of(rank: Tensor, candidates: Tensor, count: int) -> Tensor:
    """The candidates [..., S] with the highest ranks, best first, of equals the first: [..., count], -1 at the end."""
    slots = rank.shape[-1]
    rank = rank.clamp(-1e30, 1e30).masked_fill(~candidates, -math.inf)
    order = rank.sort(dim=-1, descending=True, stable=True).indices
    order = order.where(candidates.gather(-1, order), -1)[..., :count]
    return pad(order, (0, max(0, count - slots)), value=-1)


def ascending(index: Tensor) -> Tensor:
    return index.where(index >= 0, 2**62).sort(-1).values.where((index >= 0).sort(-1, descending=True).values, -1)


class Sets:
    """`initial_sets`, right."""

    def __call__(
        self, query: Tensor, key: Tensor, occupied: Tensor, k_static: int, k_dynamic: int, *, scale: float | None = None
    ) -> Any:
        held = occupied[:, None].expand(-1, key.shape[1], -1)
        best = best_of(self.weights(query, key, held, scale), held, k_static + k_dynamic)
        return self.shown(best[..., :k_static]), self.shown(best[..., k_static:])

    def weights(self, query: Tensor, key: Tensor, held: Tensor, scale: float | None) -> Tensor:
        """The largest logarithm of a weight in each group, float32, so that equal keys tie."""
        key = key.double().masked_fill(~held[..., None], 0)
        # Not a matrix product: the order in which BLAS adds may depend on the slot.
        logit = (query.double().unflatten(1, (key.shape[1], -1))[..., None, :] * key[:, :, None]).sum(-1)
        logit = (logit * (scale or query.shape[-1] ** -0.5)).float().double()
        logit = logit.masked_fill(~held[:, :, None], -math.inf)
        return (logit - logit.logsumexp(-1, keepdim=True)).nan_to_num(-math.inf).amax(2).float()

    def shown(self, best: Tensor) -> Tensor:
        return ascending(best)


class Anticipate(Sets):
    """`anticipate`, right."""

    def __call__(  # type: ignore[override]
        self, query: Tensor, key: Tensor, occupied: Tensor, static: Tensor, k_dynamic: int, *,
        exclude_static: bool = True, scale: float | None = None,
    ) -> Tensor:
        held = occupied[:, None].expand(-1, key.shape[1], -1)
        slot = torch.arange(key.shape[2], device=key.device)
        taken = (static[..., None] == slot).any(2) & exclude_static
        return self.shown(best_of(self.weights(query, key, held, scale), held & ~self.excluded(taken), k_dynamic))

    def excluded(self, taken: Tensor) -> Tensor:
        return taken


class Similarity:
    """`head_similarity`, right."""

    def __call__(self, attention: Tensor, k: int, *, occupied: Tensor | None = None) -> Tensor:
        held = torch.ones_like(attention, dtype=torch.bool) if occupied is None else occupied[:, None]
        held = held.expand(attention.shape)
        best = best_of(attention.double().nan_to_num(-math.inf, math.inf, -math.inf), held, k)
        slot = torch.arange(attention.shape[-1], device=attention.device)
        chosen = (best[..., None] == slot).any(2).double()
        common = (chosen[:, :, None] * chosen[:, None]).sum(-1)
        return (common / self.denominator(chosen, k)).sum(0) / common.new_tensor(float(len(attention)))

    def denominator(self, chosen: Tensor, k: int) -> Tensor:
        return chosen.sum(-1)[:, :1, None]


class Cluster:
    """`cluster_heads`, right."""

    start = 0

    def __call__(self, similarity: Tensor, clusters: int) -> Any:
        row = similarity.double().cpu()
        row = row.max() - row
        chosen = [self.start % len(row)]
        while len(chosen) < clusters:
            chosen.append(self.first(self.distances(row, row[chosen]).amin(1)))
        center = row[chosen]
        for _ in range(20):
            far = self.distances(row, center)
            label = torch.tensor([self.first(-one) for one in far])
            for cluster in range(clusters):
                if not bool((label == cluster).any()):
                    own = far.gather(1, label[:, None])[:, 0]
                    alone = (label[:, None] == label).sum(1) == 1
                    label[self.first(own.masked_fill(alone, -math.inf))] = cluster
            center = torch.stack([row[label == cluster].mean(0) for cluster in range(clusters)])
        nearest = []
        for cluster, far in enumerate(self.distances(row, center).T):
            members = (label == cluster).nonzero()[:, 0]
            nearest.append(int(members[self.representative(far[members])]))
        return {"labels": self.shown(label, clusters), "representatives": nearest}

    def distances(self, row: Tensor, center: Tensor) -> Tensor:
        return (row[:, None] - center).square().sum(-1)

    def first(self, score: Tensor) -> int:
        return int((score == score.max()).nonzero()[0, 0])

    def representative(self, far: Tensor) -> int:
        return 0 if len(far) < 3 else self.first(-far)

    def shown(self, label: Tensor, clusters: int) -> Tensor:
        return label


# Wrong ones -----------------------------------------------------------------------------------------------------------


class BestFirst(Sets):
    """The tokens are in the order of their weights."""

    def shown(self, best: Tensor) -> Tensor:
        return best


class StaticAgain(Anticipate):
    def excluded(self, taken: Tensor) -> Tensor:
        return taken & False


class ShareOfK(Similarity):
    """The overlap is divided by k where there are fewer tokens."""

    def denominator(self, chosen: Tensor, k: int) -> Tensor:
        return torch.full_like(chosen.sum(-1)[:, :1, None], k)


class LabelsFromOne(Cluster):
    """The last label becomes 0."""

    def shown(self, label: Tensor, clusters: int) -> Tensor:
        return (label + 1) % clusters


class LastOfTwo(Cluster):
    """Of two heads, which are equally near to their mean, the last represents them."""

    def representative(self, far: Tensor) -> int:
        return len(far) - 1 if len(far) < 3 else self.first(-far)


class BeginsWithTheLast(Cluster):
    """The first center is the last head."""

    start = -1


class LastOfEquals(Cluster):
    def first(self, score: Tensor) -> int:
        return int((score == score.max()).nonzero()[-1, 0])
