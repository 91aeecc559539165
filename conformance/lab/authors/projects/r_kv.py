"""R-KV: `R1KV.update_kv` beside `RKVState`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .....reference.baselines.r_kv import RKVConfig, RKVState
from ..checkout import Checkout, Project
from ..comparison import Comparison, Kept, at_positions, held
from ..inputs import state, tokens

HEADS, QUERY_HEADS, WINDOW, INTERVAL, EVICTIONS = 2, 4, 8, 16, 5
ORDER = ("r_kv.pool-order", "r_kv.first-slot", "r_kv.most-recent")


def similar_tokens(seed: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens whose keys lie around 12 directions, so that some are similar."""
    query, key, value = tokens(seed, count, heads=HEADS, query_heads=QUERY_HEADS)
    centre = tokens(seed + 1000, 12, heads=HEADS)[1]
    nearest = torch.arange(count) * 7 % 12
    return query, centre[:, :, nearest] + 0.7 * key, value


def compare(checkout: Checkout) -> Iterator[Comparison]:
    utils = checkout.load("rkv.utils", bare=("rkv",))
    names = {name: getattr(utils, name) for name in ("cal_similarity", "compute_attention_scores")}
    # The package's own __init__ imports a module that this commit does not have.
    method = checkout.load("rkv.compression.r1_kv", bare={"rkv": {}, "rkv.compression": names}).R1KV
    first, later, ordered = Kept(), Kept(), Kept()
    for seed, (budget, prompt, width) in enumerate(
        (budget, prompt, width) for budget in (32, 48) for prompt in (70, 96) for width in (1, 7)
    ):
        query, key, value = similar_tokens(seed, prompt + EVICTIONS * INTERVAL)
        theirs = method(budget=budget, window_size=WINDOW, kernel_size=width, mix_lambda=0.1)
        config: dict[str, Any] = {"window": WINDOW, "kernel_size": width, "interval": INTERVAL, "block_size": prompt}
        ours, by_score = (
            state(RKVState, RKVConfig(budget, order=order, **config), query, key) for order in ("position", "score")
        )
        cached, start, total = (key[:, :, :0], value[:, :, :0]), 0, key.shape[2]
        for end in range(prompt, total + 1, INTERVAL):
            keys, values = (
                torch.cat([old, new[:, :, start:end]], 2) for old, new in zip(cached, (key, value), strict=True)
            )
            cached = theirs.update_kv(keys, query[:, :, end - WINDOW:end], values)
            for one in (ours, by_score):
                if start:
                    for at in range(start, end):
                        one.step(query[:, :, at], key[:, :, at], value[:, :, at])
                else:
                    one.prefill(*(tensor[:, :, :prompt] for tensor in (query, key, value)))
            kept = held(cached[0], key)
            found, found_by_score = (at_positions(one.positions, total) for one in (ours, by_score))
            if not start:
                first.add_held(kept, found, start, end)
            later.add_held(kept, found, start, end)
            ordered.add_held(kept, found_by_score, start, end)
            start = end
    yield Comparison("tokens kept after a prompt", "decisions", first)
    yield Comparison(
        f"tokens kept, a prompt and {EVICTIONS} more evictions", "decisions", later, ORDER, ordered, 'order="score"'
    )
    yield defaults(method)


def defaults(method: type) -> Comparison:
    """The authors' class as it is without arguments."""
    plain, under = Kept(), Kept()
    for seed in range(4):
        query, key, value = similar_tokens(50 + seed, 300)
        kept = held(method().update_kv(key, query[:, :, -WINDOW:], value)[0], key)
        for count, config in (
            (plain, RKVConfig(128, block_size=300)), (under, RKVConfig(128, block_size=300, mix_lambda=0.07))
        ):
            ours = state(RKVState, config, query, key)
            ours.prefill(query, key, value)
            count.add_held(kept, at_positions(ours.positions, 300), 0, 300)
    return Comparison(
        "tokens kept after a prompt, the class's own defaults", "decisions", plain, ("r_kv.lambda",), under,
        "mix_lambda=0.07",
    )


PROJECT = Project(
    "https://github.com/Zefan-Cai/R-KV", "d15c9767e67c2bd9807128fecc35223fa2484a69",
    ("rkv/compression/r1_kv.py", "rkv/utils.py"), compare,
)
