"""LongFlow's decode step in splits: each has its own softmax, and their outputs are merged by their log-sum-exp."""

from __future__ import annotations

import types

import torch
from torch import Tensor

from .... import Capabilities
from .eager import Eager

CAPABILITIES = Capabilities(validates_arguments=False)
CHUNK = 48


class SplitK(Eager):
    def attend(self, logit: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        parts = [self._part(*part) for part in zip(logit.split(CHUNK, -1), value.split(CHUNK, 2), strict=True)]
        outputs, sums = torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])
        top = sums.amax(0)
        top = top.masked_fill(top == -torch.inf, 0)
        share = (sums - top).exp()                                                                # [n, B, Hkv, G]
        total = share.sum(0)
        share = share / total.masked_fill(total == 0, 1)
        weight = (logit - (top + total.log())[..., None]).exp().nan_to_num(0)
        return weight, (outputs * share[..., None]).sum(0)

    def _part(self, logit: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The output of a split, and the log-sum-exp of its logits, -inf if it has no token."""
        return torch.einsum("bhgs,bhsd->bhgd", self.softmax(logit), value), logit.logsumexp(-1)


longflow = types.SimpleNamespace(decode_attention=SplitK())
