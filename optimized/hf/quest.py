"""Quest's cache for transformers, on the Triton kernels."""

from __future__ import annotations

from ...reference.baselines.quest import QuestConfig
from ...reference.hf.cache_adapter_selecting import SelectingCache
from ..baselines.quest import QuestState


class QuestCache(SelectingCache):
    """A Quest cache for `generate`, in float32 to bfloat16: all tokens stay, and a step attends to selected pages.

        model.set_attn_implementation("kvtwin")
        cache = QuestCache(model.config, budget=2048, max_tokens=32768)
        model.generate(ids, **cache.argument)

    Options, as in QuestConfig: page_size, keep_last, least_pages, round_scores, max_tokens, for which memory is
    allocated; and skip_layers, the number of first layers that attend to all tokens. The slots are in
    `cache.layers[i].state`, a `QuestState`. Forward passes and errors: `QuestCache` of the reference. A model on the
    CPU needs Triton's interpreter: TRITON_INTERPRET=1 before anything imports triton, which importing a transformers
    model does.
    """

    Config = QuestConfig
    State = QuestState
