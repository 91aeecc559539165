"""LongFlow's decode step in float32 with a sum of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from .eager import Eager


class OwnSum(Eager):
    """A subclass has `sum_of`, by which all products and weights are added."""

    def sum_of(self, terms: Tensor) -> Tensor:
        """The sum along the last axis."""
        raise NotImplementedError

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        grouped = query.float().unflatten(1, (key.shape[1], -1))
        return self.sum_of(grouped[:, :, :, None] * key[:, :, None])

    def attend(self, logit: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        top = logit.amax(-1, keepdim=True)
        weight = (logit - top.masked_fill(top == -torch.inf, 0)).exp()
        total = self.sum_of(weight)[..., None]
        weight = weight / total.masked_fill(total == 0, 1)
        return weight, self.sum_of(weight[..., None, :] * value.transpose(2, 3)[:, :, None])

    def scores(self, logit: Tensor, weight: Tensor, size: Tensor, heads: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        _, rank = super().scores(logit, weight, size, heads)
        terms = (weight * size).movedim(heads, tuple(range(-len(heads), 0))).flatten(-len(heads))
        return self.sum_of(terms) / terms.shape[-1], rank
