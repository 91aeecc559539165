"""LagKV: the cache `LagKV` beside `LagKVState`, and beside the ranks of a chunk."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .....reference.baselines.lag_kv import LagKVConfig, LagKVState, log_score, rank_in_chunk
from ..checkout import Checkout, Project
from ..comparison import Comparison, Kept, at_positions, held
from ..inputs import ListCache, blocks, state, tokens

HEADS = 2


def by_share(key: Tensor, value: Tensor, end: int, *, sinks: int, lag: int, keeps: int) -> Tensor:
    """The tokens that stay of the first `end`, if each ranked chunk keeps its `keeps` best: [B, H, T] bool."""
    kept = (torch.arange(key.shape[2]) < end).expand(key.shape[:3]).clone()
    for first in range(sinks, end - 2 * lag + 1, lag):
        rank = rank_in_chunk(log_score(*(tensor[:, :, first:first + 2 * lag] for tensor in (key, value))))
        kept[..., first:first + lag] = rank >= lag - keeps
    return kept


def compare(checkout: Checkout) -> Iterator[Comparison]:
    cache = checkout.load("lag_kv", stand_ins={"transformers.cache_utils": {"DynamicCache": ListCache}}).LagKV
    prompts, plain, under = Kept(), Kept(), Kept()
    for seed, (prompt, lag, sinks, ratio) in enumerate(
        [(100, 16, 4, 0.5), (75, 8, 0, 0.25), (129, 32, 16, 0.5), (90, 10, 3, 0.7)]
    ):
        steps, keeps = 5 * lag, int(ratio * lag)
        total = prompt + steps
        query, key, value = tokens(seed, total, heads=HEADS)
        theirs = cache(ratio=ratio, lag_size=lag, sink_size=sinks)
        for first, end in blocks(prompt, steps):
            theirs.update(key[:, :, first:end].clone(), value[:, :, first:end].clone(), 0)
            kept = held(theirs.key_cache[0], key)
            if not first:
                config = LagKVConfig(int(kept[0, 0].sum()), lag=lag, sinks=sinks, block_size=prompt)
                ours = state(LagKVState, config, query, key)
                ours.prefill(*(tensor[:, :, :prompt] for tensor in (query, key, value)))
                prompts.add_held(kept, at_positions(ours.positions, total), first, end)
            else:
                ours.step(query[:, :, first], key[:, :, first], value[:, :, first])
            plain.add_held(kept, at_positions(ours.positions, total), first, end)
            share = by_share(key, value, end, sinks=sinks, lag=lag, keeps=keeps)
            under.add_held(kept, share, first, end)
    yield Comparison("tokens of a prompt kept, with the budget that a share gives", "decisions", prompts)
    yield Comparison(
        "tokens kept after a prompt and steps", "decisions", plain, ("lag_kv.budget",), under,
        "a share of each chunk, by the same ranks",
    )


PROJECT = Project(
    "https://github.com/AI-Lab-China-Merchants-Bank/LagKV", "2a9d19e7d17dbf49c5c596d2980ef0728ea121ec", ("lag_kv.py",),
    compare,
)
