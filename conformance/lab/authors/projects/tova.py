"""TOVA: the attention of a Llama layer with `TOVACache` beside `TOVAState`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch

from .....reference.baselines.tova import TOVAConfig, TOVAState
from ..checkout import Checkout, Project, StandIns
from ..comparison import Comparison, Kept, Outputs, at_positions, held
from ..inputs import ListCache, blocks, causal, hidden, layer, repeated, state, tokens, unrotated

STAND_INS: StandIns = {
    "transformers.cache_utils": {"DynamicCache": ListCache},
    "transformers.models.llama.modeling_llama": {"apply_rotary_pos_emb": unrotated, "repeat_kv": repeated},
}


def compare(checkout: Checkout) -> Iterator[Comparison]:
    cache = checkout.load("src.tova_cache", stand_ins=STAND_INS).TOVACache
    forward = checkout.load("src.convert_models.llama_custom", stand_ins=STAND_INS).tova_llama_attention_forward
    plain, under, outputs = Kept(), Kept(), Outputs()
    heads, query_heads, head_dim, steps = 2, 8, 16, 40
    attention = layer(query_heads, heads, head_dim, config=SimpleNamespace(pretraining_tp=1))
    for seed, (prompt, budget) in enumerate([(50, 20), (24, 12), (9, 16), (80, 33)]):
        query, key, value = tokens(seed, prompt + steps, heads=heads, query_heads=query_heads, head_dim=head_dim)
        theirs = cache(budget)
        each = state(TOVAState, TOVAConfig(budget, block_size=prompt), query, key)
        shared = state(TOVAState, TOVAConfig(budget, block_size=prompt, per_head=False), query, key)
        for first, end in blocks(prompt, steps):
            block = [tensor[:, :, first:end] for tensor in (query, key, value)]
            mask = None if first else causal(prompt)
            output = forward(attention, hidden(*block), mask, torch.arange(first, end)[None], theirs)[0]
            if first:
                each.append_block(*block)
                outputs.add_step(shared, block, output)
            else:
                each.prefill(*block)
                shared.prefill(*block)
            kept = held(theirs.key_cache[0], key)
            plain.add_held(kept, at_positions(each.positions, prompt + steps), first, end)
            under.add_held(kept, at_positions(shared.positions, prompt + steps), first, end)
    yield Comparison(
        "tokens kept after a prompt and 40 steps", "decisions", plain, ("tova.heads",), under, "per_head=False"
    )
    yield Comparison("outputs of steps, with per_head=False", "numbers", outputs)


PROJECT = Project(
    "https://github.com/schwartz-lab-NLP/TOVA", "9c7d09bfff64cfc92cfb5f9d7e138cb04866e5a7",
    ("src/tova_cache.py", "src/convert_models/llama_custom.py"), compare,
)
