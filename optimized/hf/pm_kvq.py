"""PM-KVQ's cache for transformers, on the Triton kernels."""

from __future__ import annotations

from ...reference.baselines.pm_kvq import PMKVQConfig
from ...reference.hf.cache_adapter_quantized import QuantizedCache
from ..baselines.pm_kvq import PMKVQState


class PMKVQCache(QuantizedCache):
    """A PM-KVQ cache for `generate`, in float32 to bfloat16: all tokens stay, in codes that shrink as the cache fills.

        model.set_attn_implementation("kvtwin")
        cache = PMKVQCache(model.config, bits=4, max_tokens=4096)
        model.generate(ids, **cache.argument)

    Options, as in PMKVQConfig: bits, also a list with the budget of each layer, window, sinks, group, least_scale,
    max_tokens, for which memory is allocated. The slots are in `cache.layers[i].state`, a `PMKVQState`. Forward passes
    and errors: `PMKVQCache` of the reference. A model on the CPU needs Triton's interpreter: TRITON_INTERPRET=1 before
    anything imports triton, which importing a transformers model does.
    """

    Config = PMKVQConfig
    State = PMKVQState
    by_layer = ("bits",)
