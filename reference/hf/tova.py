"""TOVA's cache for transformers, on the eager reference."""

from __future__ import annotations

from ..baselines.tova import TOVAConfig, TOVAState
from .plug import StateCache


class TOVACache(StateCache):
    """A TOVA cache for `generate`: at most `budget` tokens per layer, row and KV head, in float64 to bfloat16.

        model.set_attn_implementation("kvtwin")
        model.generate(ids, past_key_values=TOVACache(model.config, budget=1024), prefill_chunk_size=128)

    The option is TOVAConfig's: block_size. A prompt comes in blocks of block_size tokens, which the layer holds beside
    its budget while they are processed; prefill_chunk_size bounds the model's activations likewise. Slots are in
    `cache.layers[i].state`, a `TOVAState`. Arguments, padding, turns and errors: `StateCache`.
    """

    Config = TOVAConfig
    State = TOVAState
