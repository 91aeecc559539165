"""`H2OCache` and `VATPCache` of LongFlow's repository beside `H2OState` and `VATPState`.

After the prompt, which both rank by the sum over its queries, they rank by the newest query alone: readings
`h2o.newest-query` and `vatp.attention-term`. VATPCache takes the values' L2 norm: `vatp.norm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ....reference.baselines import h2o, tova, vatp
from ....reference.selection import top_k
from .comparison import Comparison, Kept, at_positions, held
from .inputs import blocks, causal, repeated, state, tokens

HEADS, QUERY_HEADS, STEPS = 2, 4, 40


def compare(caches: dict[str, type]) -> Iterator[Comparison]:
    """caches: the authors' two classes."""
    for name, kind, config, extra in (
        ("H2OCache", h2o.H2OState, h2o.H2OConfig, ("h2o.newest-query", "h2o.heads")),
        ("VATPCache", vatp.VATPState, vatp.VATPConfig, ("vatp.attention-term", "vatp.norm", "vatp.heads")),
    ):
        plain, under = Kept(), Kept()
        for seed, (prompt, heavy, recent) in enumerate([(40, 10, 10), (20, 4, 8)]):
            drawn = tokens(seed, prompt + STEPS, heads=HEADS, query_heads=QUERY_HEADS)
            options = {"sinks": 0} if name == "VATPCache" else {}
            ours: Any = state(kind, config(heavy + recent, recent=recent, block_size=prompt, **options), *drawn[:2])
            theirs, key = caches[name](heavy, recent), drawn[1]
            newest = by_newest(*drawn, prompt=prompt, heavy=heavy, recent=recent, weigh=name == "VATPCache")
            for first, end in blocks(prompt, STEPS):
                block = [tensor[:, :, first:end] for tensor in drawn]
                append(theirs, *block)
                ours.append_block(*block)
                kept = held(theirs.key_cache[0], key)
                plain.add_held(kept, at_positions(ours.positions, prompt + STEPS), first, end)
                under.add_held(kept, next(newest), first, end)
        yield Comparison(
            f"tokens kept by the released {name} after a prompt and {STEPS} steps", "decisions", plain, extra, under,
            "`attend` of the newest query, all heads together",
        )


def append(cache: Any, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Give the authors' cache a block and its attention weights, as their layers do."""
    if cache.key_cache:
        key, value, _ = cache.update_stage1(key, value, 0)
    logit = query @ repeated(key, QUERY_HEADS // HEADS).mT / query.shape[-1] ** 0.5
    mask = causal(key.shape[2]) if query.shape[2] > 1 else torch.zeros(())
    weight = (logit + mask).softmax(-1)
    if cache.key_cache:
        cache.update_stage2(key, value, weight, 0)
    else:
        cache.initialize(key, value, weight, 0, mask)


def by_newest(
    query: Tensor, key: Tensor, value: Tensor, *, prompt: int, heavy: int, recent: int, weigh: bool
) -> Iterator[Tensor]:
    """The tokens that stay, the same for all heads, [B, Hkv, T] bool: after the prompt by sums, then by the newest
    query; weigh: times the mean L2 norm of the values."""
    stay = torch.zeros_like(key[..., 0], dtype=torch.bool)
    for first, end in blocks(prompt, key.shape[2] - prompt):
        stay[..., first:end] = True
        attend = tova.attend if first else h2o.attend
        received = attend(query[:, :, first:end], key[:, :, :end], value[:, :, :end], stay[..., :end]).received
        score = received.mean(1) * (value[:, :, :end].norm(dim=-1).mean(1) if weigh else 1)
        if int(stay[0, 0].sum()) > heavy + recent:
            rank = score[..., :end - recent].masked_fill(~stay[:, 0, :end - recent], -torch.inf)
            best = torch.zeros_like(rank, dtype=torch.bool).scatter(-1, top_k(rank, heavy), True)
            stay[..., :end - recent] = best[:, None]
        yield stay.clone()
