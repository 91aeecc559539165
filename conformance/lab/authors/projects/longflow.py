"""LongFlow: `OursCache` and its kernel (triton_kernel/attention.py), in the interpreter, beside `LongFlowState`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .....reference.longflow import LongFlowConfig, LongFlowState
from .. import released_baselines
from ..checkout import Checkout, Project, StandIns
from ..comparison import Comparison, Kept, Outputs, at_positions, held
from ..inputs import blocks, repeated, state, tokens

HEADS, QUERY_HEADS, HEAD_DIM, STEPS = 2, 4, 16, 40
STAND_INS: StandIns = {
    "transformers.utils": {"logging": SimpleNamespace(get_logger=logging.getLogger)},
    "transformers.models.qwen3.modeling_qwen3": {"repeat_kv": repeated},
}


def compare(checkout: Checkout) -> Iterator[Comparison]:
    module = checkout.load("models.ours", bare=("models", "triton_kernel"), stand_ins=STAND_INS)
    yield prompts(module)
    plain, under, outputs = Kept(), Kept(), Outputs()
    for seed, (prompt, budget) in enumerate([(50, 40), (20, 24), (12, 48)]):
        run(module, seed, prompt, budget, plain, None, protect_newest=True)
        run(module, seed, prompt, budget, under, outputs, protect_newest=False)
    yield Comparison(
        f"tokens kept after a prompt and {STEPS} steps, with prefix_alone=True", "decisions", plain,
        ("longflow.newest-token",), under, "protect_newest=False",
    )
    yield Comparison("outputs of steps, under the same options", "numbers", outputs)
    caches = {
        name: getattr(checkout.load(f"models.{file}", bare=("models",), stand_ins=STAND_INS), name)
        for name, file in (("H2OCache", "h2o"), ("VATPCache", "vatp"))
    }
    yield from released_baselines.compare(caches)


def prompts(module: ModuleType) -> Comparison:
    plain, under = Kept(), Kept()
    for seed in range(60):
        prompt, budget = 60 + seed, 41 + seed % 16
        query, key, value = tokens(seed, prompt, heads=HEADS, query_heads=QUERY_HEADS, head_dim=HEAD_DIM)
        cache = module.OursCache(budget)
        kept = held(cache.initialize(query, key, value, None, 0)[0], key)[:, 0]      # all heads keep the same tokens
        for count, alone in ((plain, False), (under, True)):
            ours = state(LongFlowState, LongFlowConfig(budget, prefix_alone=alone), query, key)
            ours.prefill(query, key, value)
            count.add_held(kept, at_positions(ours.positions, prompt), 0, prompt)
    return Comparison(
        "tokens of 60 prompts kept", "decisions", plain, ("longflow.prompt-window",), under, "prefix_alone=True"
    )


def run(
    module: ModuleType, seed: int, prompt: int, budget: int, kept: Kept, outputs: Outputs | None, **options: Any
) -> None:
    given = tokens(
        seed, prompt + STEPS, heads=HEADS, query_heads=QUERY_HEADS, head_dim=HEAD_DIM, dtype=torch.float32
    )
    exact = [tensor.double() for tensor in given]
    cache = module.OursCache(budget)
    ours = state(LongFlowState, LongFlowConfig(budget, prefix_alone=True, **options), *exact[:2])
    for first, end in blocks(prompt, STEPS):
        block, truth = ([tensor[:, :, first:end] for tensor in side] for side in (given, exact))
        if first:
            key, value, mask = cache.update(*block[1:], 0)
            cached = key.double(), value.double(), mask.clone()
            with mock.patch.object(torch.Tensor, "is_cuda", True):              # the kernel runs in the interpreter
                output, slot = module.triton_evict_attention_forward(
                    block[0], key, value, mask, QUERY_HEADS // HEADS, HEAD_DIM**-0.5
                )
            cache.update_evict_idx(slot, 0)
            mine = ours.step(*(tensor[:, :, 0] for tensor in truth))[:, :, None]
            if outputs is not None:
                outputs.add_attention(output.transpose(1, 2), mine, truth[0], *cached)
        else:
            cache.initialize(*block, None, 0)
            ours.prefill(*truth)
        kept.add_held(
            waits(held(cache.key_cache[0], given[1])[:, 0], cache.key_cache[0][:, 0], cache.update_idx[0], given[1]),
            waits(at_positions(ours.positions, prompt + STEPS), ours.key[:, 0], ours.next_slot, exact[1]), first, end,
        )


def waits(kept: Tensor, cached: Tensor, slot: Tensor, key: Tensor) -> Tensor:
    """The tokens that stay after the next step: `kept` [B, T] without the one in `slot` [B] of head 0's `cached` keys
    [B, S, D]. key [B, Hkv, T, D]: of all tokens."""
    goes = cached[torch.arange(len(slot)), slot]                                 # [B, D]
    return kept & ~(key[:, 0] == goes[:, None]).all(-1)


PROJECT = Project(
    "https://github.com/yisunlp/LongFLow", "89a68d30ea28857fc8e1b229544a2cc23f52a43e",
    ("models/ours.py", "models/h2o.py", "models/vatp.py", "triton_kernel/attention.py"), compare,
)
