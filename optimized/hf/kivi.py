"""KIVI's cache for transformers, on the Triton kernels."""

from __future__ import annotations

from ...reference.baselines.kivi import KIVIConfig
from ...reference.hf.cache_adapter_quantized import QuantizedCache
from ..baselines.kivi import KIVIState


class KIVICache(QuantizedCache):
    """A KIVI cache for `generate`, in float32 to bfloat16: all tokens stay, most of them in 2 or 4 bits.

        model.set_attn_implementation("kvtwin")
        cache = KIVICache(model.config, key_bits=2, value_bits=2, max_tokens=4096)
        model.generate(ids, **cache.argument)

    Options, as in KIVIConfig: key_bits, value_bits, group, residual, max_tokens, for which memory is allocated. The
    slots are in `cache.layers[i].state`, a `KIVIState`. Forward passes and errors: `KIVICache` of the reference. A
    model on the CPU needs Triton's interpreter: TRITON_INTERPRET=1 before anything imports triton, which importing a
    transformers model does.
    """

    Config = KIVIConfig
    State = KIVIState
