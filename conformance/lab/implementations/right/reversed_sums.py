"""LongFlow's decode step with sums that add one number after the other, from the last to the first."""

from __future__ import annotations

import types

from torch import Tensor
from torch.nn.functional import pad

from .... import Capabilities
from .sums import OwnSum

CAPABILITIES = Capabilities(validates_arguments=False)
#: A longer sum adds parts of so many terms each, since a loop over all terms takes too long.
MOST = 512


class ReversedSums(OwnSum):
    def sum_of(self, terms: Tensor) -> Tensor:
        while terms.shape[-1] > MOST:
            terms = self._one_by_one(pad(terms, (0, -terms.shape[-1] % MOST)).unflatten(-1, (-1, MOST)))
        return self._one_by_one(terms)

    def _one_by_one(self, terms: Tensor) -> Tensor:
        total = terms[..., -1]
        for index in range(terms.shape[-1] - 2, -1, -1):
            total = total + terms[..., index]
        return total


longflow = types.SimpleNamespace(decode_attention=ReversedSums())
