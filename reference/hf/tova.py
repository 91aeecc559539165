"""TOVA's cache for transformers, on the eager reference."""

from __future__ import annotations

from ..baselines.tova import TOVAConfig, TOVAState
from .plug import StateCache


class TOVACache(StateCache):
    """A TOVA cache for `generate`: at most `budget` tokens per layer, row and KV head, in float64 to bfloat16.

        model.set_attn_implementation("kvtwin")
        model.generate(ids, past_key_values=TOVACache(model.config, budget=1024), prefill_chunk_size=128)

    Option, as in TOVAConfig: block_size. A prompt arrives in blocks of block_size tokens, which the layer stores in
    addition to its budget while it processes them; prefill_chunk_size bounds the memory for activations in the same
    way. The slots are in `cache.layers[i].state`, a `TOVAState`. Other arguments, padding, turns and errors:
    `StateCache`.
    """

    Config = TOVAConfig
    State = TOVAState
