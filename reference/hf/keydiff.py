"""KeyDiff's cache for transformers, on the eager reference."""

from __future__ import annotations

from ..keydiff import KeyDiffConfig, KeyDiffState
from .plug import StateCache


class KeyDiffCache(StateCache):
    """A KeyDiff cache for `generate`: at most `budget` tokens per layer, row and KV head, in float64 to bfloat16.

        model.set_attn_implementation("kvtwin")
        model.generate(ids, past_key_values=KeyDiffCache(model.config, budget=1024), prefill_chunk_size=128)

    Options, as in KeyDiffConfig: block_size, recent, anchor, similarity, refresh. A prompt arrives in blocks of
    block_size tokens, which the layer stores in addition to its budget while it processes them; prefill_chunk_size
    bounds the memory for activations in the same way. The slots are in `cache.layers[i].state`, a `KeyDiffState`. Other
    arguments, padding, turns and errors: `StateCache`.
    """

    Config = KeyDiffConfig
    State = KeyDiffState
