"""CAKE's cache for transformers, on the Triton kernels."""

from __future__ import annotations

from ...reference.baselines.cake import CAKEConfig
from ...reference.hf.cache_adapter_cascading import CascadingCache
from ..baselines.cake import CAKECascade, CAKEState


class CAKECache(CascadingCache):
    """A CAKE cache for `generate`, in float32 to bfloat16: its layers hold `budget` tokens on average, as many each as
    their attention calls for.

        model.set_attn_implementation("kvtwin")
        cache = CAKECache(model.config, budget=1024)
        model.generate(ids, **cache.argument)

    Options, as in CAKEConfig: window, kernel_size, gamma, tau1, tau2, whole_batch. The slots are in
    `cache.layers[i].state`, a `CAKEState`; what the layers share is in `cache.cascade`. Forward passes and errors:
    `CAKECache` of the reference. A model on the CPU needs Triton's interpreter: TRITON_INTERPRET=1 before anything
    imports triton, which importing a transformers model does.
    """

    Config = CAKEConfig
    State = CAKEState
    Cascade = CAKECascade
