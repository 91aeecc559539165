"""H2O: the attention layer with `H2OKVCache_LayerWise` (utils_real_drop) beside `H2OState`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from .....reference.baselines.h2o import H2OConfig, H2OState, attend
from .....reference.selection import top_k
from ..checkout import Checkout, Project
from ..comparison import Comparison, Kept, Outputs, at_positions, held
from ..inputs import Unrotated, blocks, causal, double, hidden, projections, rotate_half, state, tokens, unrotated

LLAMA = {"LlamaRotaryEmbedding": Unrotated, "rotate_half": rotate_half, "apply_rotary_pos_emb": unrotated}
MODEL = "transformers.models.llama.modeling_llama"
HEADS, HEAD_DIM, STEPS = 3, 16, 60


def compare(checkout: Checkout) -> Iterator[Comparison]:
    module = checkout.load("utils_real_drop.modify_llama", root="h2o_hf", stand_ins={"transformers": {}, MODEL: LLAMA})
    kept, outputs = Kept(), Outputs()
    for seed, (prompt, heavy, recent) in enumerate([(24, 10, 10), (16, 4, 8), (6, 8, 8), (30, 20, 4)]):
        query, key, value = tokens(seed, prompt + STEPS, heads=HEADS, head_dim=HEAD_DIM)
        config = SimpleNamespace(
            hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, num_key_value_heads=HEADS, rope_scaling=None,
            max_position_embeddings=4096, rope_theta=1e4, pretraining_tp=1, hh_size=heavy, recent_size=recent,
        )
        with double():
            layer = module.H2OLlamaAttention(config)
        for name, part in projections(HEADS, HEADS, HEAD_DIM).items():
            setattr(layer, name, part)
        ours = state(H2OState, H2OConfig(heavy + recent, recent=recent, block_size=prompt), query, key)
        past = None
        for first, end in blocks(prompt, STEPS):
            block = [tensor[:, :, first:end] for tensor in (query, key, value)]
            positions = torch.arange(first, end)[None]
            with double():
                output, _, past = layer(hidden(*block), position_ids=positions, past_key_value=past, use_cache=True)
            if first:
                outputs.add_step(ours, block, output)
            else:
                ours.prefill(*block)
            kept.add_held(held(past[0], key), at_positions(ours.positions, prompt + STEPS), first, end)
    yield Comparison(f"tokens kept after a prompt and {STEPS} steps", "decisions", kept)
    yield Comparison("outputs of steps", "numbers", outputs)
    yield by_mask(checkout)


def by_mask(checkout: Checkout) -> Comparison:
    """The code of the paper's accuracy experiments, which hides tokens with a mask instead of evicting them."""
    module = checkout.load("utils_hh.modify_llama", root="h2o_hf", stand_ins={"transformers": {}, MODEL: LLAMA})
    plain, under, total = Kept(), Kept(), 90
    for seed, (prompt, heavy, recent) in enumerate([(24, 10, 10), (13, 4, 8), (22, 16, 4)]):
        query, key, value = tokens(seed, total, heads=HEADS, head_dim=HEAD_DIM)
        config = SimpleNamespace(
            hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, max_position_embeddings=4096,
            heavy_ratio=(heavy + 0.5) / prompt, recent_ratio=(recent + 0.5) / prompt,
        )
        layer = module.LlamaAttention_heavy_hitter(config)
        for name, part in projections(HEADS, HEADS, HEAD_DIM).items():
            setattr(layer, name, part)
        ours = state(H2OState, H2OConfig(heavy + recent, recent=recent, block_size=prompt), query, key)
        hiding, past = held_by_mask(query, key, value, prompt=prompt, heavy=heavy, recent=recent), None
        for first, end in blocks(prompt, total - prompt):
            block = [tensor[:, :, first:end] for tensor in (query, key, value)]
            past = layer(hidden(*block), None if first else causal(prompt), past_key_value=past, use_cache=True)[2]
            theirs = torch.zeros(1, HEADS, total, dtype=torch.bool)
            theirs[0, :, :end] = layer.previous_scores != 0
            ours.append_block(*block)
            plain.add_held(theirs, at_positions(ours.positions, total), first, end)
            under.add_held(theirs, next(hiding), first, end)
    return Comparison(
        "tokens kept by the code that masks (utils_hh)", "decisions", plain, ("h2o.leaving-window",), under,
        "`attend` with a mask that hides, for one step, the token that leaves the window",
    )


def held_by_mask(
    query: Tensor, key: Tensor, value: Tensor, *, prompt: int, heavy: int, recent: int
) -> Iterator[Tensor]:
    """The tokens that compete after the prompt and after each step, [B, H, T] bool, by the sums of `attend`.

    The token that leaves the window of recent tokens is hidden from the next query, and competes from then on.
    query, key, value [B, H, T, D].
    """
    score, held = torch.zeros_like(key[..., 0]), torch.zeros_like(key[..., 0], dtype=torch.bool)
    for first, end in blocks(prompt, key.shape[2] - prompt):
        held[..., first:end] = True
        visible = held[..., :end].clone()
        if first > heavy + recent:
            visible[..., first - recent] = False
        received = attend(query[:, :, first:end], key[:, :, :end], value[:, :, :end], visible).received
        score[..., :end] += received
        if end > heavy + recent:
            rank = score[..., :end - recent].masked_fill(~held[..., :end - recent], -torch.inf)
            held[..., :end - recent] = torch.zeros_like(rank, dtype=torch.bool).scatter(-1, top_k(rank, heavy), True)
            score *= held
        yield held.clone()


PROJECT = Project(
    "https://github.com/FMInference/H2O", "ac75c2a8a9e76832b2a4139b9363373b56336bfb",
    ("h2o_hf/utils_real_drop/modify_llama.py", "h2o_hf/utils_hh/modify_llama.py"), compare,
)
