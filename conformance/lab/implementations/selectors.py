"""Quest's functions in plain PyTorch, right ones, and subclasses that are wrong in one step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

INF = math.inf


class Bounds:
    """`page_bounds`, right."""

    filling = (-INF, INF)

    def __call__(self, key: Tensor, *, page_size: int) -> Any:
        size = min(page_size, key.shape[2])
        high, low = (
            pad(self.read(key), (0, 0, 0, -key.shape[2] % size), value=filling).unflatten(2, (-1, size))
            for filling in self.filling
        )
        return {"maximum": self.largest(high), "minimum": low.amin(3)}

    def read(self, key: Tensor) -> Tensor:
        return key

    def largest(self, pages: Tensor) -> Tensor:
        return pages.amax(3)


class Scores:
    """`page_scores`, right: products with the maxima for positive numbers of the query, with the minima for others."""

    def __call__(self, query: Tensor, maximum: Tensor, minimum: Tensor) -> Tensor:
        query = query.float().unflatten(1, (maximum.shape[1], -1))
        positive, negative = self.parts(query)
        return torch.cat((positive @ maximum.float().mT, negative @ minimum.float().mT), 1).unflatten(
            1, (2, -1)
        ).sum(1).flatten(1, 2)

    def parts(self, query: Tensor) -> tuple[Tensor, Tensor]:
        return query.clamp_min(0), query.clamp_max(0)


class Select:
    """`select_pages`, right."""

    def __call__(self, score: Tensor, count: Tensor, *, k: int, keep_last: bool = True) -> Tensor:
        pages = score.shape[-1]
        page, held = torch.arange(pages, device=score.device), count[:, None, None]
        rank = score.double().nan_to_num(-INF, INF, -INF).clamp(-1e300, 1e300)
        rank = self.forced(rank, page == held - 1) if keep_last else rank
        order = self.order(rank.masked_fill(self.absent(page, held), -INF))[..., :k]
        chosen = order.where(order < held, pages)
        chosen = pad(self.sorted(chosen), (0, k - chosen.shape[-1]), value=pages)
        return chosen.where(chosen < pages, -1)

    def absent(self, page: Tensor, count: Tensor) -> Tensor:
        return page >= count

    def forced(self, rank: Tensor, last: Tensor) -> Tensor:
        return rank.masked_fill(last, INF)

    def order(self, rank: Tensor) -> Tensor:
        return rank.sort(dim=-1, descending=True, stable=True).indices

    def sorted(self, chosen: Tensor) -> Tensor:
        return chosen.sort(-1).values


# Wrong ones -----------------------------------------------------------------------------------------------------------


class ZerosAreKeys(Bounds):
    """The rest of the last page counts as zeros."""

    filling = (0.0, 0.0)


class FreeSlotsAreKeys(Bounds):
    """The last page is read to its end, whatever is there."""

    def __call__(self, key: Tensor, *, page_size: int) -> Any:
        more = -key.shape[2] % page_size
        last = sum((size - 1) * stride for size, stride in zip(key.shape, key.stride(), strict=True))
        room = key.untyped_storage().nbytes() // key.element_size() - key.storage_offset()
        if more and last + more * key.stride(2) < room:
            key = key.as_strided((*key.shape[:2], key.shape[2] + more, key.shape[3]), key.stride())
        return super().__call__(key, page_size=page_size)


class LastPageIsIgnored(Bounds):
    """A last page that is not full has the bounds of no tokens."""

    def __call__(self, key: Tensor, *, page_size: int) -> Any:
        found = super().__call__(key, page_size=page_size)
        if key.shape[2] % page_size:
            found["maximum"][:, :, -1], found["minimum"][:, :, -1] = -INF, INF
        return found


class LargestMagnitude(Bounds):
    def largest(self, pages: Tensor) -> Tensor:
        return pages.abs().amax(3)


class OneBound(Scores):
    """Maxima alone."""

    def parts(self, query: Tensor) -> tuple[Tensor, Tensor]:
        return query, query * 0


class BestFirst(Select):
    """The pages are in the order of their scores."""

    def sorted(self, chosen: Tensor) -> Tensor:
        return chosen


class LastOfEquals(Select):
    def order(self, rank: Tensor) -> Tensor:
        return rank.shape[-1] - 1 - rank.flip(-1).sort(dim=-1, descending=True, stable=True).indices


class LastPageCompetes(Select):
    def forced(self, rank: Tensor, last: Tensor) -> Tensor:
        return rank


class AllPagesCompete(Select):
    """Pages that a row does not have take places of others."""

    def absent(self, page: Tensor, count: Tensor) -> Tensor:
        return torch.zeros_like(page >= count)
