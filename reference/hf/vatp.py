"""VATP's cache for transformers, on the eager reference."""

from __future__ import annotations

from ..baselines.vatp import VATPConfig, VATPState
from .plug import StateCache


class VATPCache(StateCache):
    """A VATP cache for `generate`: at most `budget` tokens per layer, row and KV head, in float64 to bfloat16.

        model.set_attn_implementation("kvtwin")
        model.generate(ids, past_key_values=VATPCache(model.config, budget=1024), prefill_chunk_size=128)

    Options, as in VATPConfig: block_size, recent. A prompt arrives in blocks of block_size tokens, which the layer
    stores in addition to its budget while it processes them; prefill_chunk_size bounds the memory for activations in
    the same way. The slots are in `cache.layers[i].state`, a `VATPState`. Other arguments, padding, turns and errors:
    `StateCache`.
    """

    Config = VATPConfig
    State = VATPState
