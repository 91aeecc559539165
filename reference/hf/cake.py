"""CAKE's cache for transformers, on the eager reference."""

from __future__ import annotations

from ..baselines.cake import CAKECascade, CAKEConfig, CAKEState
from .cache_adapter_cascading import CascadingCache


class CAKECache(CascadingCache):
    """A CAKE cache for `generate`, in float64 to bfloat16: its layers hold `budget` tokens on average, as many each as
    their attention calls for.

        model.set_attn_implementation("kvtwin")
        cache = CAKECache(model.config, budget=1024)
        model.generate(ids, **cache.argument)

    Options, as in CAKEConfig: window, kernel_size, gamma, tau1, tau2, whole_batch. The first forward pass is the
    prompt, after which `cache.cascade` has the preferences and budgets of the layers. All later tokens are decode
    steps, also those of a second chunk of the prompt: pass it in one piece. The slots are in `cache.layers[i].state`, a
    `CAKEState`. All layers must be on one device. Other arguments, padding and errors: `StateCache`.
    """

    Config = CAKEConfig
    State = CAKEState
    Cascade = CAKECascade
