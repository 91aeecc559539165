"""States of KIVI, PM-KVQ and Quest, which keep all tokens, and of CAKE, filled with random numbers for the headline
experiments.

A step reads the same bytes whatever the numbers are. Quest's selection depends on them: its query heads have few pages
in common, as with independent queries.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvtwin.conformance.judge.checkers import kivi as kivi_judge
from kvtwin.conformance.judge.checkers import pm_kvq as pm_kvq_judge
from kvtwin.optimized.baselines import cake, kivi, pm_kvq, quest
from kvtwin.reference.baselines.cake import CAKEConfig
from kvtwin.reference.baselines.kivi import KIVIConfig
from kvtwin.reference.baselines.pm_kvq import PMKVQConfig
from kvtwin.reference.baselines.quest import QuestConfig

from .. import bench_cake, bench_quest, quantized
from . import systems
from .base import Run
from .decoder import ITEM, Model

#: Steps that are timed together at one length, and the most that run there, with warm-up and capture.
TIMED, STEPS = 16, 32

Quantizing = KIVIConfig | PMKVQConfig


def kivi_config(model: Model, slots: int) -> KIVIConfig:
    """2 bits, as in ThinKV's table 2."""
    return KIVIConfig(2, 2, group=min(32, model.head_dim), max_tokens=slots)


def pm_kvq_config(slots: int) -> PMKVQConfig:
    """The default budget, 4 bits per number."""
    return PMKVQConfig(window=min(128, slots // 16), max_tokens=slots)


def quantizing_state(run: Run, model: Model, config: Quantizing, batch: int) -> Any:
    """A state of random codes and scales."""
    sizes = systems.sizes_of(model, batch, run)
    state: Any = (
        kivi.KIVIState(config, **sizes) if isinstance(config, KIVIConfig) else pm_kvq.PMKVQState(config, **sizes)
    )
    for name, tensor in vars(state).items():
        if name.endswith(("_codes", "_words")):
            tensor.random_(generator=run.generator)
        elif name.endswith("_scale"):
            tensor.uniform_(0.25, 1, generator=run.generator)
        elif name.endswith("_minimum") or name in ("_keys", "_values"):
            tensor.normal_(generator=run.generator)
    return state


def start_from(state: Any, tokens: int) -> None:
    """Continue as if the state had received so many tokens."""
    state.positions.fill_(-1)
    state.positions[:, :tokens] = torch.arange(tokens, device=state.device)
    quantized.start_from(state, tokens)


def points(config: Quantizing, first: int, last: int) -> list[tuple[int, int]]:
    """The lengths at which steps are timed, each with the number of tokens from which they start. Between two lengths
    with codes of one width, the bytes of a step are linear. PM-KVQ's width changes after each of its `limits`."""
    limits = () if isinstance(config, KIVIConfig) else config.limits
    ends = [first, *(limit for limit in limits if first < limit < last), last]
    found = [(first, first)]
    for less, more in pairwise(ends):
        if less > first:
            found.append((less + 1, less + 1))
        found.append((more, max(more - STEPS, less + 1)))
    return found


def bits(config: Quantizing, tokens: int) -> float:
    """The bits of a quantized number of a cache with so many tokens, with its share of a scale and a minimum."""
    width = config.key_bits if isinstance(config, KIVIConfig) else config.width_after(tokens)
    return width + 2 * 8 * ITEM / config.group


def check_quantizing(state: Any, token: tuple[Tensor, ...]) -> None:
    """Take a step and check it. AssertionError if it is wrong."""
    judge = kivi_judge if isinstance(state.config, KIVIConfig) else pm_kvq_judge
    quantized.check_step(judge, state, token)


def quest_state(run: Run, model: Model, batch: int, tokens: int, slots: int) -> quest.QuestState:
    """A state of random tokens, with the budget of Quest's benchmark, or half of a shorter prompt."""
    budget = min(bench_quest.BUDGET, tokens // 2)
    config = QuestConfig(budget, bench_quest.PAGE if not run.tiny else 4, max_tokens=slots)
    state = quest.QuestState(config, **systems.sizes_of(model, batch, run))
    for tensor in (state.key, state.value):
        tensor.normal_(generator=run.generator)
    for row in range(batch):
        found = quest.page_bounds(state.key[row:row + 1, :, :tokens], page_size=config.page_size)
        for bound, of_row in zip((state._maximum, state._minimum), found, strict=True):
            bound[row, :, :of_row.shape[2]] = of_row[0]
    start_from(state, tokens)
    return state


def cake_state(run: Run, model: Model, batch: int, budget: int) -> cake.CAKEState:
    """A state of so many random tokens. Every step evicts one."""
    config = CAKEConfig(budget, window=min(bench_cake.WINDOW, budget // 2))
    state = cake.CAKEState(config, **systems.sizes_of(model, batch, run))
    for tensor in (state.key, state.value):
        tensor.normal_(generator=run.generator)
    return bench_cake.fill(state)
