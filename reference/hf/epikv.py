"""EpiKV's cache for transformers, on the eager reference."""

from __future__ import annotations

from ..epikv.scorer import EpiKVScorer
from ..epikv.state import EpiKVState
from .plug_epikv import HiddenStateCache


class EpiKVCache(HiddenStateCache):
    """An EpiKV cache for `generate`: at most `budget` tokens per row, the same in all layers, in float64 to bfloat16.

        model.set_attn_implementation("kvtwin")
        with EpiKVCache(model, budget=1024) as cache:
            model.generate(ids, past_key_values=cache)

    It takes the model, for hooks that hear what the layers of the two bands put out; they are gone when the block, or
    the cache, is. policy: "epikv", "hs_variance", "band_adaptive"; "attn_x_hs" and "segment_hs", which weigh in the
    attention of all layers that evict, on average; or "kv_key", "kv_val", "lag_kv", which need no hooks and let every
    layer decide for itself. layers: the numbers of the bands' layers, default the paper's, scaled to the
    model's depth. The other options are EpiKVConfig's, but for bands and hidden_size: recent, window, chunk,
    keep_prompt (True, but for policies without hooks), count_prompt, max_prompt; and of "segment_hs" tau,
    sparsity_threshold, and edges, which must be given: `kvtwin.reference.thinkv.calibrate` finds them, of that average.

    The prompt stays whole, so prompt + recent must fit the budget (ValueError), unless count_prompt=False gives it room
    of its own. With hooks, the first forward pass is the prompt, and every later one brings one token; one that brings
    more raises NotImplementedError (a later chunk of prefill_chunk_size, a second turn). All layers must be on one
    device. Slots are in `cache.layers[i].state`, an `EpiKVState`. Other arguments, padding and errors: `StateCache`.
    """

    State = EpiKVState
    Scorer = EpiKVScorer
