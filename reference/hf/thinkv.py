"""ThinKV's cache for transformers, on the eager reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..thinkv.state import ThinKVState
from ..thinkv.thoughts import classify
from .plug_thinkv import ThoughtCache


class ThinKVCache(ThoughtCache):
    """A ThinKV cache for `generate`, with quantized tokens of which `budget` per layer and row are to stay, in float64
    to bfloat16.

        model.set_attn_implementation("kvtwin")
        cache = ThinKVCache(model.config, budget=1024, thresholds=Thresholds(layers=(3, 7), edges=(0.5, 0.8)))
        model.generate(ids, past_key_values=cache)

    thresholds: what `calibrate` finds for this model. At decode steps 0, tau, 2 tau, ... the sparsity averaged over
    thresholds.layers, by their numbers in the model, says for every row what kind of thought the tau tokens from this
    one on belong to, in all layers. None: they are reasoning, unless the user writes `layer.state.thought[:]` after a
    window's first step. budget: what eviction aims at; the floor of each segment wins over it (`state.over_budget`).
    The other options are ThinKVConfig's, but for edges: tau and group of at least 2, block, retention, formats,
    sparsity_threshold, max_tokens. Slots are in `cache.layers[i].state`, a `ThinKVState`.

    The first forward pass is the prompt, and every later one brings one token; one that brings more raises
    NotImplementedError (a later chunk of prefill_chunk_size, a second turn). ValueError for layers that do not exist or
    do not evict, and beyond max_tokens. Where windows begin is counted on the host: a forward pass captured as a CUDA
    graph stands for steps within a window only. Other arguments, padding and errors: `StateCache`.
    """

    State = ThinKVState

    @staticmethod
    def classify(sparsity: Sequence[Tensor], edges: tuple[float, float]) -> Tensor:
        """Section 3.1.3: the thought types [B] by the mean of the layers' sparsities [B]."""
        return classify(torch.stack(list(sparsity)).mean(0), edges)
