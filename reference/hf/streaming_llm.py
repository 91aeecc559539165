"""StreamingLLM's cache for transformers, on the eager reference."""

from __future__ import annotations

from ..baselines.streaming_llm import StreamingLLMConfig, StreamingLLMState
from .plug import StateCache


class StreamingLLMCache(StateCache):
    """A StreamingLLM cache for `generate`: at most `budget` tokens per layer, row and KV head, in float64 to bfloat16.

        model.set_attn_implementation("kvtwin")
        model.generate(ids, past_key_values=StreamingLLMCache(model.config, budget=1024), prefill_chunk_size=128)

    The options are StreamingLLMConfig's: block_size, sinks. A prompt comes in blocks of block_size tokens, which the
    layer holds beside its budget while they are processed; prefill_chunk_size bounds the model's activations likewise.
    Slots are in `cache.layers[i].state`, a `StreamingLLMState`. Arguments, padding, turns and errors: `StateCache`.
    """

    Config = StreamingLLMConfig
    State = StreamingLLMState
