"""Quest: the attention of evaluation/quest_attention.py, and the pages that it selects, beside `QuestState`."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .....reference.attention import per_query_head
from .....reference.baselines.quest import QuestConfig, QuestState, page_bounds, page_scores, select_pages
from ..checkout import Checkout, Project, StandIns
from ..comparison import Comparison, Count, Outputs, at_positions
from ..inputs import ListCache, hidden, layer, repeated, state, tokens, unrotated

HEADS, QUERY_HEADS, HEAD_DIM = 2, 8, 16
STAND_INS: StandIns = {
    "transformers.models.llama.modeling_llama": {"apply_rotary_pos_emb": unrotated, "repeat_kv": repeated},
    "transformers.cache_utils": {"DynamicCache": ListCache},
    "transformers.models.mistral.modeling_mistral": {},
}


def compare(checkout: Checkout) -> Iterator[Comparison]:
    module = checkout.load("quest_attention", root="evaluation", stand_ins=STAND_INS)
    plain, under, outputs = Count(), Count(), Outputs()
    for seed, (prompt, page, budget) in enumerate([(100, 16, 64), (63, 8, 32), (64, 4, 8), (40, 16, 16)]):
        run(module, seed, prompt, 25, page, budget, [(plain, {}, None), (under, THEIRS, outputs)])
    yield Comparison(
        "pages selected in steps, a budget of whole pages", "decisions", plain,
        ("quest.last-page", "quest.least-pages"), under, "keep_last=False, least_pages=3",
    )
    yield Comparison("outputs of steps, under the same options", "numbers", outputs)
    plain, under = Count(), Count()
    for seed, (prompt, page, budget) in enumerate([(13, 4, 20), (60, 16, 72), (30, 8, 30)]):
        run(module, seed, prompt, 30, page, budget, [(plain, THEIRS, None)], under)
    yield Comparison(
        "pages selected in steps, other budgets and fewer tokens than the budget", "decisions", plain,
        ("quest.budget",), under, "the smaller of budget and tokens, rounded down to pages",
    )


#: The authors' evaluation as options of ours.
THEIRS = {"keep_last": False, "least_pages": 3}


def run(
    module: ModuleType, seed: int, prompt: int, steps: int, page: int, budget: int,
    sides: list[tuple[Count, dict[str, Any], Outputs | None]],
    rounded_down: Count | None = None,
) -> None:
    """Steps after a prompt, for each (count, options of ours, outputs). rounded_down: counts the functions of ours for
    the smaller of budget and tokens, in whole pages."""
    given = tokens(
        seed, prompt + steps, heads=HEADS, query_heads=QUERY_HEADS, head_dim=HEAD_DIM, dtype=torch.float32
    )  # the authors' code takes no float64
    exact = [tensor.double() for tensor in given]
    attention = layer(QUERY_HEADS, HEADS, HEAD_DIM, layer_id=2, chunk_size=page, token_budget=budget)
    states = [
        state(QuestState, QuestConfig(budget, page, max_tokens=prompt + steps, **options), *exact[:2])
        for _, options, _ in sides
    ]
    for each in states:
        each.prefill(*(tensor[:, :, :prompt] for tensor in exact))
    past = tuple(tensor[:, :, :prompt] for tensor in given[1:])
    for at in range(prompt, prompt + steps):
        block, truth = ([tensor[:, :, at:at + 1] for tensor in side] for side in (given, exact))
        output, past, mask = step(module, attention, block, past, at)
        if rounded_down is not None:
            score = page_scores(truth[0][:, :, 0], *page_bounds(exact[1][:, :, :at + 1], page_size=page))
            most = min(max(3, min(at + 1, budget) // page), score.shape[-1])
            chosen = select_pages(score, torch.tensor([score.shape[-1]]), k=most, keep_last=False)
            rounded_down.add(mask, at_positions(chosen, score.shape[-1]))
        for (count, _, outputs), each in zip(sides, states, strict=True):
            ours = each.step(*(tensor[:, :, 0] for tensor in truth))[:, :, None]
            count.add(mask, at_positions(each.selected, mask.shape[-1]))
            if outputs is not None:
                keys, values = (per_query_head(tensor, QUERY_HEADS) for tensor in (each.key, each.value))
                outputs.add_attention(output.view(ours.shape), ours, truth[0], keys, values, each._visible())


def step(
    module: ModuleType, attention: Any, block: list[Tensor], past: Any, at: int
) -> tuple[Tensor, Any, Tensor]:
    """The authors' output and cache, and the pages that they select, [B, Hq, pages] bool."""
    select, masks = module.local_heavy_hitter_mask, []

    def record(*arguments: Any) -> Tensor:
        masks.append(select(*arguments))
        return masks[-1]

    with mock.patch.object(module, "local_heavy_hitter_mask", record):
        output, _, past = module.forward(attention, hidden(*block), None, torch.tensor([[at]]), past, use_cache=True)
    return output, past, masks[0][:, :, 0, ::attention.chunk_size]


PROJECT = Project(
    "https://github.com/mit-han-lab/Quest", "01c1623bf9395009520874e989e29f683203b357",
    ("evaluation/quest_attention.py",), compare,
)
