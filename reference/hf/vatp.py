"""VATP's cache for transformers, on the eager reference."""

from __future__ import annotations

from ..baselines.vatp import VATPConfig, VATPState
from .plug import StateCache


class VATPCache(StateCache):
    """A VATP cache for `generate`: at most `budget` tokens per layer, row and KV head, in float64 to bfloat16.

        model.set_attn_implementation("kvtwin")
        model.generate(ids, past_key_values=VATPCache(model.config, budget=1024), prefill_chunk_size=128)

    The options are VATPConfig's: block_size, recent. A prompt comes in blocks of block_size tokens, which the layer
    holds beside its budget while they are processed; prefill_chunk_size bounds the model's activations likewise. Slots
    are in `cache.layers[i].state`, a `VATPState`. Arguments, padding, turns and errors: `StateCache`.
    """

    Config = VATPConfig
    State = VATPState
