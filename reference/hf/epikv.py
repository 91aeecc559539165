"""EpiKV's cache for transformers, on the eager reference."""

from __future__ import annotations

from ..epikv.scorer import EpiKVScorer
from ..epikv.state import EpiKVState
from .cache_adapter_epikv import HiddenStateCache


class EpiKVCache(HiddenStateCache):
    """An EpiKV cache for `generate`: at most `budget` tokens per row, the same in all layers, in float64 to bfloat16.

        model.set_attn_implementation("kvtwin")
        with EpiKVCache(model, budget=1024) as cache:
            model.generate(ids, **cache.argument)

    The constructor takes the model and registers forward hooks that read the outputs of the layers of both bands. The
    hooks are removed at the end of the `with` block or when the cache is deleted. RuntimeError for tokens of another
    model object, or after the hooks were removed. The cache cannot be copied or pickled.
    policy: "epikv", "hs_variance" or "band_adaptive"; "attn_x_hs" or "segment_hs", which also average the attention of
    all layers that evict; or "kv_key", "kv_val" or "lag_kv", which need no hooks and let each layer evict for itself.
    layers: the layers of the two bands, by default the paper's, scaled to the depth of the model.
    Other options, as in EpiKVConfig except bands and hidden_size: recent, window, chunk, spread, keep_prompt (must be
    True for policies with hooks), count_prompt, max_prompt; for "segment_hs" tau, sparsity_threshold, segments_by and
    edges, which is required: `kvtwin.reference.thinkv.calibrate` computes it from the averaged sparsity or relative
    entropy.

    The whole prompt is kept. If prompt + recent do not fit the budget, the prompt gets slots of its own, as with
    count_prompt=False, and a UserWarning says so; with count_prompt=True this is a ValueError. With hooks, the first
    forward pass is the prompt, and every later pass must have one token: a second chunk of prefill_chunk_size or a
    second turn raises NotImplementedError. All layers must be on one device. The slots are in `cache.layers[i].state`,
    an `EpiKVState`. Other arguments, padding and errors: `StateCache`.
    """

    State = EpiKVState
    Scorer = EpiKVScorer
