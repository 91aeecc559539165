"""PM-KVQ's cache for transformers, on the eager reference."""

from __future__ import annotations

from ..baselines.pm_kvq import PMKVQConfig, PMKVQState
from .cache_adapter_quantized import QuantizedCache


class PMKVQCache(QuantizedCache):
    """A PM-KVQ cache for `generate`, in float64 to bfloat16: all tokens stay, in codes that shrink as the cache fills.

        model.set_attn_implementation("kvtwin")
        cache = PMKVQCache(model.config, bits=4, max_tokens=4096)
        model.generate(ids, **cache.argument)

    Options, as in PMKVQConfig: bits, also a list with the budget of each layer, window, sinks, group, least_scale,
    max_tokens. A budget of tokens has no effect (UserWarning). The slots are in `cache.layers[i].state`, a
    `PMKVQState`. The first forward pass is the prompt, which attends to unquantized keys and values. All later tokens
    are decode steps, also those of a second chunk of the prompt. ValueError beyond max_tokens tokens, for a model whose
    head_dim is odd, or larger than the group and no multiple of it, and for a list of budgets without one for each
    layer. Other arguments, padding and errors: `StateCache`.
    """

    Config = PMKVQConfig
    State = PMKVQState
    by_layer = ("bits",)
