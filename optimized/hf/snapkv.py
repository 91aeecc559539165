"""SnapKV's cache for transformers, on the Triton kernels."""

from __future__ import annotations

from ...reference.hf.plug import StateCache
from ..baselines.snapkv import SnapKVConfig, SnapKVState


class SnapKVCache(StateCache):
    """A SnapKV cache for `generate`: `budget` tokens per layer, row and KV head, in float32 to bfloat16.

        model.set_attn_implementation("kvtwin")
        model.generate(ids, past_key_values=SnapKVCache(model.config, budget=1024), prefill_chunk_size=128)

    The options are SnapKVConfig's: block_size, window, kernel_size, interval. A prompt comes in blocks of block_size
    tokens, which the layer holds beside its cache while they are processed; prefill_chunk_size bounds the model's
    activations likewise. With an interval the cache outgrows its budget by up to interval - 1 tokens before it is
    compressed: 128 of them make decoding several times as fast. Slots are in `cache.layers[i].state`, a
    `SnapKVState`. Arguments, padding, turns and errors: `StateCache` of the reference.
    A model on the CPU needs Triton's interpreter: TRITON_INTERPRET=1 before anything imports triton, which importing a
    transformers model does.
    """

    Config = SnapKVConfig
    State = SnapKVState
