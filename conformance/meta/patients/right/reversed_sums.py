"""LongFlow's decode step with sums that add one number after the other, from the last to the first."""

from __future__ import annotations

import types

import torch
from torch import Tensor

from .... import Capabilities
from .sums import OwnSum

CAPABILITIES = Capabilities(validates_arguments=False)
#: A loop over more terms takes too long: of these many parts, each is added from its last term to its first.
PARTS = 512


class ReversedSums(OwnSum):
    def sum_of(self, terms: Tensor) -> Tensor:
        while terms.shape[-1] > 1:
            parts = terms.split(PARTS, -1)
            terms = torch.stack([self._one_by_one(part) for part in parts], -1)
        return terms[..., 0]

    def _one_by_one(self, terms: Tensor) -> Tensor:
        total = terms[..., -1]
        for index in range(terms.shape[-1] - 2, -1, -1):
            total = total + terms[..., index]
        return total


longflow = types.SimpleNamespace(decode_attention=ReversedSums())
