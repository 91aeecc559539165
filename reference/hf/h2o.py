"""H2O's cache for transformers, on the eager reference."""

from __future__ import annotations

from ..baselines.h2o import H2OConfig, H2OState
from .plug import StateCache


class H2OCache(StateCache):
    """An H2O cache for `generate`: at most `budget` tokens per layer, row and KV head, in float64 to bfloat16.

        model.set_attn_implementation("kvtwin")
        model.generate(ids, past_key_values=H2OCache(model.config, budget=1024), prefill_chunk_size=128)

    Options, as in H2OConfig: block_size, recent. A prompt arrives in blocks of block_size tokens, which the layer
    stores in addition to its budget while it processes them; prefill_chunk_size bounds the memory for activations in
    the same way. The slots are in `cache.layers[i].state`, an `H2OState`. Other arguments, padding, turns and errors:
    `StateCache`.
    """

    Config = H2OConfig
    State = H2OState
