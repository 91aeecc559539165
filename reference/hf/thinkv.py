"""ThinKV's cache for transformers, on the eager reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..thinkv.state import ThinKVState
from ..thinkv.thoughts import classify
from .cache_adapter_thinkv import ThoughtCache


class ThinKVCache(ThoughtCache):
    """A ThinKV cache for `generate`: about `budget` quantized tokens per layer and row, in float64 to bfloat16.

        model.set_attn_implementation("kvtwin")
        cache = ThinKVCache(model.config, budget=1024, thresholds=Thresholds(layers=(3, 7), edges=(0.5, 0.8)))
        model.generate(ids, **cache.argument)

    thresholds: the result of `calibrate` for this model. At decode steps 0, tau, 2 tau, ... the sparsity averaged over
    thresholds.layers determines the thought type of the next tau tokens of each row, in all layers. None: all tokens
    are reasoning, unless the caller assigns `layer.state.thought[:]` after the first step of a segment.
    budget: the number of tokens that eviction aims at. Each segment keeps a minimum even beyond it
    (`state.over_budget`). Other options, as in ThinKVConfig except edges: tau and group (at least 2), block, retention,
    formats, sparsity_threshold, sparsity_of, max_tokens. The slots are in `cache.layers[i].state`, a `ThinKVState`.

    The first forward pass is the prompt, and every later pass must have one token: a second chunk of prefill_chunk_size
    or a second turn raises NotImplementedError. ValueError for layers that do not exist or do not evict, and beyond
    max_tokens tokens. The host counts the steps, so a forward pass captured in a CUDA graph may only replace steps
    within a segment. Other arguments, padding and errors: `StateCache`.
    """

    State = ThinKVState

    @staticmethod
    def classify(sparsity: Sequence[Tensor], edges: tuple[float, float]) -> Tensor:
        """The thought types [B] by the mean of the layers' sparsities [B] (section 3.1.3)."""
        return classify(torch.stack(list(sparsity)).mean(0), edges)
