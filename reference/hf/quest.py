"""Quest's cache for transformers, on the eager reference."""

from __future__ import annotations

from ..baselines.quest import QuestConfig, QuestState
from .cache_adapter_selecting import SelectingCache


class QuestCache(SelectingCache):
    """A Quest cache for `generate`, in float64 to bfloat16: all tokens stay, and a step attends to selected pages.

        model.set_attn_implementation("kvtwin")
        cache = QuestCache(model.config, budget=2048, max_tokens=32768)
        model.generate(ids, **cache.argument)

    Options, as in QuestConfig: page_size, keep_last, least_pages, round_scores, max_tokens. The first skip_layers
    layers attend to all tokens, by default two, as in the authors' code. The slots are in `cache.layers[i].state`, a
    `QuestState`. The first forward pass is the prompt. All later tokens are decode steps, also those of a second chunk
    of the prompt. ValueError beyond max_tokens tokens. Other arguments, padding and errors: `StateCache`.
    """

    Config = QuestConfig
    State = QuestState
