"""KIVI's cache for transformers, on the eager reference."""

from __future__ import annotations

from ..baselines.kivi import KIVIConfig, KIVIState
from .cache_adapter_quantized import QuantizedCache


class KIVICache(QuantizedCache):
    """A KIVI cache for `generate`, in float64 to bfloat16: all tokens stay, most of them in 2 or 4 bits.

        model.set_attn_implementation("kvtwin")
        cache = KIVICache(model.config, key_bits=2, value_bits=2, max_tokens=4096)
        model.generate(ids, **cache.argument)

    Options, as in KIVIConfig: key_bits, value_bits, group, residual, max_tokens. A budget has no effect (UserWarning).
    The slots are in `cache.layers[i].state`, a `KIVIState`. The first forward pass is the prompt, which attends to
    unquantized keys and values. All later tokens are decode steps, also those of a second chunk of the prompt.
    ValueError beyond max_tokens tokens, and for a model whose head_dim is not a multiple of the group. Other arguments,
    padding and errors: `StateCache`.
    """

    Config = KIVIConfig
    State = KIVIState
