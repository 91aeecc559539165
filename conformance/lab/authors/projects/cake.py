"""CAKE: `adjust_budgets`, and the attention of Llama layers with their caches, beside `cake`."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Union

import torch
from torch import Tensor

from .....reference.baselines import cake, cake_prompt
from ..checkout import Checkout, Project, StandIns
from ..comparison import Comparison, Count, Kept, at_positions, held
from ..inputs import Unrotated, blocks, double, hidden, layer, repeated, state, tokens, unrotated

LAYERS, HEADS, QUERY_HEADS, HEAD_DIM, STEPS = 4, 2, 4, 16, 30
MODEL = {
    "apply_rotary_pos_emb": unrotated, "repeat_kv": repeated, "List": list, "Union": Union,
    "BaseModelOutputWithPast": object, "Cache": object,
}
STAND_INS: StandIns = {
    "transformers.models.llama.modeling_llama": MODEL, "transformers.models.llama.configuration_llama": {},
    "transformers.modeling_flash_attention_utils": {"_flash_attention_forward": lambda query, *_, **__: query},
}
Tokens = tuple[Tensor, Tensor, Tensor]


def compare(checkout: Checkout) -> Iterator[Comparison]:
    yield budgets(checkout.load("cake.utils", bare=("cake",)))
    llama = checkout.load("cake.model.modify_llama", bare=("cake", "cake.model"), stand_ins=STAND_INS)
    caches = checkout.load("cake.cake_cache", bare=("cake",), stand_ins=STAND_INS)
    prompts, plain, under = Kept(), Kept(), Kept()
    for seed, (prompt, budget, window, tau1, tau2, gamma) in enumerate(
        [(100, 32, 8, 1.0, 1.0, 200.0), (80, 40, 8, 1.6, 0.4, 200.0), (120, 40, 4, 1.0, 1.0, 0.0)]
    ):  # no layer gets fewer than 4 tokens: pooled over a width of 5, 3 have equal scores, and topk keeps any of them
        drawn = [
            tokens(10 * seed + number, prompt + STEPS, heads=HEADS, query_heads=QUERY_HEADS, head_dim=HEAD_DIM)
            for number in range(LAYERS)
        ]
        drawn = [((0.8 + 0.1 * number) * query, key, value) for number, (query, key, value) in enumerate(drawn)]
        config = cake.CAKEConfig(budget, window=window, tau1=tau1, tau2=tau2, gamma=gamma)
        run(llama, caches, config, drawn, prompt, plain, prompts, in_order=False)
        run(llama, caches, config, drawn, prompt, under, Kept(), in_order=True)
    yield Comparison(f"tokens of a prompt kept in {LAYERS} layers", "decisions", prompts)
    yield Comparison(
        f"tokens kept in {LAYERS} layers after a prompt and {STEPS} steps", "decisions", plain, ("cake.pool",), under,
        "the authors' cache sorted by position after each step",
    )


def budgets(utils: ModuleType) -> Comparison:
    """The integer rules by which layers share a total."""
    plain, under, generator = Count(), Count(), torch.Generator().manual_seed(0)
    for _ in range(2000):
        layers, prefix = (int(torch.randint(1, most, (), generator=generator)) for most in (9, 60))
        total = int(torch.randint(1, layers * prefix + 20, (), generator=generator))
        share = torch.rand(layers, generator=generator, dtype=torch.float64).pow(4)
        wanted = (share / share.sum() * total).trunc().long()
        theirs = torch.tensor(utils.adjust_budgets(wanted.tolist(), total, prefix, layers))
        ours = cake_prompt.divide(wanted[None], torch.tensor([prefix]), total)[0]
        plain.add(theirs, ours)
        under.add(theirs.clamp_max(prefix), ours)
    return Comparison(
        "budgets of layers", "numbers", plain, ("cake.excess",), under, "the authors' budgets, at most the prefix"
    )


def run(
    llama: ModuleType, caches: ModuleType, config: cake.CAKEConfig, drawn: list[Tokens], prompt: int, kept: Kept,
    prompts: Kept, *, in_order: bool,
) -> None:
    """A prompt and steps of all layers. in_order: sort the authors' cache by position after each step."""
    cascade = cake.CAKECascade(config, layers=LAYERS, batch=1, device="cpu")
    ours = [
        state(cake.CAKEState, config, query, key, cascade=cascade, layer=number)
        for number, (query, key, _) in enumerate(drawn)
    ]
    evict = caches.CakeprefillKVCache(
        config.budget, config.window, num_heads=QUERY_HEADS, num_layers=LAYERS, use_cascading=True
    )
    settings = SimpleNamespace(
        window_size=[config.window] * LAYERS, key_size=[config.prefix_budget] * LAYERS, prefill=[True] * LAYERS,
        decoding_evict=[None] * LAYERS, prefill_cake_evict=[evict] * LAYERS, tau1=config.tau1, tau2=config.tau2,
        gamma=config.gamma,
    )
    layers = [
        layer(QUERY_HEADS, HEADS, HEAD_DIM, config=settings, is_causal=True, _flash_attn_uses_top_left_mask=False)
        for _ in drawn
    ]
    past = caches.CakeCache()
    for first, end in blocks(prompt, STEPS):
        for number, (attention, each, tensors) in enumerate(zip(layers, ours, drawn, strict=True)):
            block = [tensor[:, :, first:end] for tensor in tensors]
            attention.layer_idx = number
            with double():
                past = llama.llama_attn_forward_cake(
                    attention, hidden(*block), past_key_value=past, position_embeddings=Unrotated()()
                )[2]
            if first:
                each.step(*(tensor[:, :, 0] for tensor in block))
            else:
                each.prefill(*block)
        # All layers as heads, [1, L Hkv, T].
        theirs = torch.cat([held(past.key_cache[number], drawn[number][1]) for number in range(LAYERS)], 1)
        mine = torch.cat([at_positions(each.positions, prompt + STEPS) for each in ours], 1)
        kept.add_held(theirs, mine, first, end)
        if not first:
            prompts.add_held(theirs, mine, first, end)
        for number in range(LAYERS) if in_order else ():
            sort(past, number, drawn[number][1])




def sort(past: Any, number: int, key: Tensor) -> None:
    """Bring the tokens of a layer into the order of their positions."""
    place = (past.key_cache[number][:, :, :, None] == key[:, :, None]).all(-1).to(torch.int8).argmax(-1)
    order = place.argsort(-1)[..., None].expand(past.key_cache[number].shape)
    for tensors in (past.key_cache, past.value_cache):
        tensors[number] = tensors[number].gather(2, order)


PROJECT = Project(
    "https://github.com/antgroup/cakekv", "c4675ce21b1d6f62d262f9a8dc0ad1e1e8ee4edd",
    ("cake/utils.py", "cake/cake_cache.py", "cake/model/modify_llama.py"), compare,
)
