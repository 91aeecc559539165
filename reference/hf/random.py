"""Random eviction's cache for transformers, on the eager reference."""

from __future__ import annotations

from ..baselines.random import RandomConfig, RandomState
from .plug import StateCache


class RandomCache(StateCache):
    """A random cache for `generate`: at most `budget` tokens per layer, row and KV head, in float64 to bfloat16.

        model.set_attn_implementation("kvtwin")
        model.generate(ids, past_key_values=RandomCache(model.config, budget=1024), prefill_chunk_size=128)

    Options, as in RandomConfig: block_size, seed. A prompt arrives in blocks of block_size tokens, which the layer
    stores in addition to its budget while it processes them; prefill_chunk_size bounds the memory for activations in
    the same way. The slots are in `cache.layers[i].state`, a `RandomState`. Other arguments, padding, turns and errors:
    `StateCache`.
    """

    Config = RandomConfig
    State = RandomState
