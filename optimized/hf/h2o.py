"""H2O's cache for transformers, on the Triton kernels."""

from __future__ import annotations

from ...reference.hf.plug import StateCache
from ..baselines.h2o import H2OConfig, H2OState


class H2OCache(StateCache):
    """An H2O cache for `generate`: at most `budget` tokens per layer, row and KV head, in float32 to bfloat16.

        model.set_attn_implementation("kvtwin")
        model.generate(ids, past_key_values=H2OCache(model.config, budget=1024), prefill_chunk_size=128)

    The options are H2OConfig's: block_size, recent. A prompt comes in blocks of block_size tokens, which the layer
    holds beside its budget while they are processed; prefill_chunk_size bounds the model's activations likewise. Slots
    are in `cache.layers[i].state`, a `H2OState`. Arguments, padding, turns and errors: `StateCache` of the reference.
    A model on the CPU needs Triton's interpreter: TRITON_INTERPRET=1 before anything imports triton, which importing a
    transformers model does.
    """

    Config = H2OConfig
    State = H2OState
