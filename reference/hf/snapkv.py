"""SnapKV's cache for transformers, on the eager reference."""

from __future__ import annotations

from ..baselines.snapkv import SnapKVConfig, SnapKVState
from .plug import StateCache


class SnapKVCache(StateCache):
    """A SnapKV cache for `generate`: `budget` tokens per layer, row and KV head, in float64 to bfloat16.

        model.set_attn_implementation("kvtwin")
        model.generate(ids, past_key_values=SnapKVCache(model.config, budget=1024), prefill_chunk_size=128)

    Options, as in SnapKVConfig: block_size, window, kernel_size, interval. A prompt arrives in blocks of block_size
    tokens, which the layer stores in addition to its budget while it processes them; prefill_chunk_size bounds the
    memory for activations in the same way. With an interval, the cache exceeds its budget by up to interval - 1 tokens
    between evictions; an interval of 128 makes decoding several times as fast. The slots are in
    `cache.layers[i].state`, a `SnapKVState`. Other arguments, padding, turns and errors: `StateCache`.
    """

    Config = SnapKVConfig
    State = SnapKVState
