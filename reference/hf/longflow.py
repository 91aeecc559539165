"""LongFlow's cache for transformers, on the eager reference."""

from __future__ import annotations

from ..longflow import LongFlowConfig, LongFlowState
from .plug import StateCache


class LongFlowCache(StateCache):
    """A LongFlow cache for `generate`: each layer holds at most `budget` tokens per row, in float64 to bfloat16.

        model.set_attn_implementation("kvtwin")
        model.generate(ids, past_key_values=LongFlowCache(model.config, budget=1024))

    The options are LongFlowConfig's: per_head, protect_newest, sinks, window, kernel_size, check_finite. Slots are in
    `cache.layers[i].state`, a `LongFlowState`. Arguments, chunks, turns and errors: `StateCache`.
    """

    Config = LongFlowConfig
    State = LongFlowState
