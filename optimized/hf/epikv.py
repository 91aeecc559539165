"""EpiKV's cache for transformers, on the Triton kernels."""

from __future__ import annotations

from ...reference.hf.cache_adapter_epikv import HiddenStateCache
from ..epikv.scorer import EpiKVScorer
from ..epikv.state import EpiKVState


class EpiKVCache(HiddenStateCache):
    """An EpiKV cache for `generate`: at most `budget` tokens per row, the same in all layers, in float32 to bfloat16.

        model.set_attn_implementation("kvtwin")
        with EpiKVCache(model, budget=1024) as cache:
            model.generate(ids, **cache.argument)

    A forward pass takes one launch per layer, for attention, and one for all decisions; with a hybrid policy two per
    layer and two for decisions. Options, hooks and errors: `EpiKVCache` of the reference. A model on the CPU needs
    Triton's interpreter: TRITON_INTERPRET=1 before anything imports triton, which importing a transformers model does.
    """

    State = EpiKVState
    Scorer = EpiKVScorer
