"""LongFlow's cache for transformers, on the eager reference."""

from __future__ import annotations

from ..longflow import LongFlowConfig, LongFlowState
from .cache_adapter import StateCache


class LongFlowCache(StateCache):
    """A LongFlow cache for `generate`: at most `budget` tokens per layer and row, in float64 to bfloat16.

        model.set_attn_implementation("kvtwin")
        cache = LongFlowCache(model.config, budget=1024)
        model.generate(ids, **cache.argument)

    Options, as in LongFlowConfig: per_head, protect_newest, sinks, window, kernel_size, prefix_alone, check_finite. The
    slots are in `cache.layers[i].state`, a `LongFlowState`. Other arguments, chunks, turns and errors: `StateCache`.
    """

    Config = LongFlowConfig
    State = LongFlowState
