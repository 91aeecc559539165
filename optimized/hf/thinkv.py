"""ThinKV's cache for transformers, on the Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...reference.hf.cache_adapter_thinkv import ThoughtCache
from ..thinkv.state import ThinKVState
from ..thinkv.thoughts import classify


class ThinKVCache(ThoughtCache):
    """A ThinKV cache for `generate`: about `budget` quantized tokens per layer and row, in float32 to bfloat16.

        model.set_attn_implementation("kvtwin")
        cache = ThinKVCache(model.config, budget=1024, thresholds=Thresholds(layers=(3, 7), edges=(0.5, 0.8)))
        model.generate(ids, **cache.argument)

    thresholds: the result of `calibrate` for this model. Other options, as in ThinKVConfig except edges; forward passes
    and errors: `ThinKVCache` of the reference. Memory is allocated for max_tokens. A model on the CPU needs Triton's
    interpreter: TRITON_INTERPRET=1 before anything imports triton, which importing a transformers model does.
    """

    State = ThinKVState

    @staticmethod
    def classify(sparsity: Sequence[Tensor], edges: tuple[float, float]) -> Tensor:
        """The thought types [B] by the mean of the layers' sparsities [B]."""
        return classify(torch.stack(list(sparsity)).mean(0), edges)
