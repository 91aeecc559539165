"""VATP: the attention layer of utils_hh, with H2O's sums, beside `VATPState`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch

from .....reference.baselines.vatp import VATPConfig, VATPState
from ..checkout import Checkout, Project
from ..comparison import Comparison, Kept, Outputs, at_positions
from ..inputs import Unrotated, blocks, causal, hidden, projections, state, tokens, unrotated

HEADS, HEAD_DIM, STEPS = 3, 16, 60
MODEL = {"LlamaRotaryEmbedding": Unrotated, "apply_rotary_pos_emb": unrotated}


def compare(checkout: Checkout) -> Iterator[Comparison]:
    module = checkout.load(
        "utils_hh.modify_llama", bare=("utils_hh",), stand_ins={"transformers": {}, "utils_hh.modeling_llama": MODEL}
    )
    kept, outputs = Kept(), Outputs()
    for seed, (prompt, heavy, recent, sinks) in enumerate([(24, 10, 10, 4), (13, 4, 8, 1), (22, 16, 4, 8)]):
        query, key, value = tokens(seed, prompt + STEPS, heads=HEADS, head_dim=HEAD_DIM)
        config = SimpleNamespace(
            hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, max_position_embeddings=4096, rope_scaling=None,
            heavy_ratio=(heavy + 0.5) / prompt, recent_ratio=(recent + 0.5) / prompt, applyval=True, h2o=True,
            sink_len=sinks,
        )
        layer = module.LlamaAttention_heavy_hitter(0, config)
        for name, part in projections(HEADS, HEADS, HEAD_DIM).items():
            setattr(layer, name, part)
        options = VATPConfig(heavy + recent, recent=recent, sinks=sinks, block_size=prompt)
        ours, past = state(VATPState, options, query, key), None
        for first, end in blocks(prompt, STEPS):
            block = [tensor[:, :, first:end] for tensor in (query, key, value)]
            mask = None if first else causal(prompt)
            output, _, past = layer(hidden(*block), mask, past_key_value=past, use_cache=True)
            if first:
                outputs.add_step(ours, block, output)
            else:
                ours.prefill(*block)
            theirs = torch.zeros(1, HEADS, prompt + STEPS, dtype=torch.bool)
            theirs[0, :, :end] = layer.previous_scores != 0
            kept.add_held(theirs, at_positions(ours.positions, prompt + STEPS), first, end)
    yield Comparison(f"tokens kept after a prompt and {STEPS} steps, with H2O's sums", "decisions", kept)
    yield Comparison("outputs of steps", "numbers", outputs)


PROJECT = Project(
    "https://github.com/guozhiyu/vatp", "39ea686c9e5d038d9ffbea883218bfdbc9c28807", ("utils_hh/modify_llama.py",),
    compare,
)
