"""LongFlow's decode step with sums by halving: the second half is added to the first until one number is left."""

from __future__ import annotations

import types

from torch import Tensor
from torch.nn.functional import pad

from .... import Capabilities
from .sums import OwnSum

CAPABILITIES = Capabilities(validates_arguments=False)


class TreeSums(OwnSum):
    def sum_of(self, terms: Tensor) -> Tensor:
        while terms.shape[-1] > 1:
            half = (terms.shape[-1] + 1) // 2
            terms = terms[..., :half] + pad(terms[..., half:], (0, 2 * half - terms.shape[-1]))
        return terms[..., 0]


longflow = types.SimpleNamespace(decode_attention=TreeSums())
