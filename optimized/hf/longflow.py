"""LongFlow's cache for transformers, on the Triton kernels."""

from __future__ import annotations

from ...reference.hf.cache_adapter import StateCache
from ..longflow import LongFlowConfig, LongFlowState


class LongFlowCache(StateCache):
    """A LongFlow cache for `generate`: at most `budget` tokens per layer and row, in float32 to bfloat16.

        model.set_attn_implementation("kvtwin")
        cache = LongFlowCache(model.config, budget=1024)
        model.generate(ids, **cache.argument)

    Options, as in LongFlowConfig: per_head, protect_newest, sinks, window, kernel_size, prefix_alone, check_finite. The
    slots are in `cache.layers[i].state`, a `LongFlowState`. Other arguments, chunks, turns and errors: `StateCache` of
    the reference. A model on the CPU needs Triton's interpreter: TRITON_INTERPRET=1 before anything imports triton,
    which importing a transformers model does.
    """

    Config = LongFlowConfig
    State = LongFlowState
