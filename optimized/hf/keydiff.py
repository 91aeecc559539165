"""KeyDiff's cache for transformers, on the Triton kernels."""

from __future__ import annotations

from ...reference.hf.plug import StateCache
from ..keydiff import KeyDiffConfig, KeyDiffState


class KeyDiffCache(StateCache):
    """A KeyDiff cache for `generate`: at most `budget` tokens per layer, row and KV head, in float32 to bfloat16.

        model.set_attn_implementation("kvtwin")
        model.generate(ids, past_key_values=KeyDiffCache(model.config, budget=1024), prefill_chunk_size=128)

    The options are KeyDiffConfig's: block_size, recent, anchor, similarity, refresh. A prompt comes in blocks of
    block_size tokens, which the layer holds beside its budget while they are processed; prefill_chunk_size bounds the
    model's activations likewise. Slots are in `cache.layers[i].state`, a `KeyDiffState`. Arguments, padding, turns and
    errors: `StateCache` of the reference.
    A model on the CPU needs Triton's interpreter: TRITON_INTERPRET=1 before anything imports triton, which importing a
    transformers model does.
    """

    Config = KeyDiffConfig
    State = KeyDiffState
