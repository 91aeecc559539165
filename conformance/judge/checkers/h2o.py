"""Checker of H2O: bounds of its accumulated attention weights, and configs to draw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference.baselines import h2o
from ...cases import block_cases, draws
from ...cases.case import Case
from .. import block_model
from ..bounds import SLACK, UNIT, Arithmetic, Interval
from ..variants import BLOCKS, CLASSES, INTERVALS, ONE, variant
from . import blocks
from .blocks import SMALL as SMALL
from .blocks import Chunk, received_error
from .blocks import max_kept as max_kept

CASES = blocks.ATTEND_CASES
DEFAULTS = {"recent": None, "sinks": 0, "interval": 1, "block_size": 128, "softcap": None, "scale": None}
#: Also evicts after every third token: with blocks of five, some rows within the prompt and others later.
LAWS = ({"recent": 0, "sinks": 2}, {"interval": 3, "block_size": 5})
VARIANTS = (
    *BLOCKS, *INTERVALS,
    variant("equal-scores-at-intervals", {"interval": 4, "block_size": 9}, **CLASSES, budget=16, steps=9),
    variant("no-recent-tokens", {"recent": 0, "sinks": 2}, turns=((3, 2),)),
    *(variant(f"first-tokens-weigh-least-at-an-interval-of-{interval}", {"recent": 1, "sinks": 3, "interval": interval},
              content="first_unseen", budget=7, prompt=3, steps=15, turns=((8, 2),)) for interval in (1, 2)),
    *(variant(f"newest-token-leaves-a-budget-of-{budget}", {"recent": 0}, **ONE | {"batch": 2, "key_value_heads": 3},
              budget=budget, prompt=budget + 1, steps=9) for budget in (32, 33)),
    variant("all-but-one-protected", {"recent": 3, "sinks": 2, "interval": 2}, steps=9),
)
GROUPINGS = ({"interval": 3},)
COMPILED = ({"softcap": 2.0, "sink_logits": True},)
#: See the package.
CACHES: dict[str, dict[str, Any]] = {
    "half of it recent": {"budget": 6, "block_size": 4},
    "none recent": {"budget": 5, "block_size": 3, "recent": 0},
    "budget 1": {"budget": 1, "block_size": 4},
    "first tokens": {"budget": 6, "block_size": 4, "recent": 2, "sinks": 3},
    "once in four tokens": {"budget": 4, "block_size": 3, "recent": 1, "interval": 4},
}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"budget": 4, "recent": 5}, ValueError, "recent must be at most budget = 4"),
    ({"budget": 4, "recent": 1.0}, TypeError, "recent must be an int"),
    ({"budget": 4, "recent": 4, "sinks": 1}, ValueError, "recent must be less than budget = 4"),
    ({"budget": 4, "recent": 2, "sinks": 3}, ValueError, "must be at most budget = 4, got 2 [+] 3"),
]
NUMBERS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("recent", blocks.NOT_INTEGERS[:3], TypeError, "recent must be an int"),
    ("recent", (-1,), ValueError, "recent must be at least 0"),
    ("recent", (5,), ValueError, "recent must be at most budget = 4, got 5"),
    ("sinks", blocks.NOT_INTEGERS, TypeError, "sinks must be an int"),
    ("sinks", (-1,), ValueError, "sinks must be at least 0"),
    ("sinks", (3, 5), ValueError, r"recent \+ sinks must be at most budget = 4, got 2 \+ "),
    *blocks.INTERVAL_NUMBERS,
]


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package."""
    return {**draw(protecting(blocks.block_configs(most))), "interval": draw(blocks.INTERVALS)}


@st.composite
def protecting(draw: st.DrawFn, configs: st.SearchStrategy[dict[str, int]]) -> dict[str, Any]:
    """Add `recent` and `sinks` to configs: often with sinks, and seldom so many that nothing else has room."""
    config = draw(configs)
    budget = config["budget"]
    recent = draw(st.none() | draws.protected(budget, least=0))
    room = budget - (budget // 2 if recent is None else recent) - (1 if draws.plain_only() else 0)
    return {**config, "recent": recent, "sinks": draw(st.integers(0, max(0, min(3, room))))}


def arguments(device: torch.device) -> dict[str, Any]:
    """See the package."""
    return blocks.attend_arguments(device)


variants = blocks.attend_variants


def sum_error(chunk: Chunk) -> Tensor:
    """|computed - true| of the accumulated weights after a chunk, [B, Hkv, S].

    The error of the token's sum before the chunk (`previous_error`), the error of the chunk's column sum
    (`received_error`), and one rounding of their sum: u (|score| + both).
    """
    error = chunk.previous_error + chunk.wide(received_error(chunk.attention, chunk.allowed))
    score = chunk.before["score"].masked_fill(~chunk.before["occupied"], 0)
    error = error + UNIT * (score.abs() + error) * SLACK
    return error.masked_fill(~chunk.before["occupied"], 0)


def attend_error(case: block_cases.AttendCase, allowed: Arithmetic) -> Tensor:
    """Bound of `attend(...).received`, [B, Hkv, S]."""
    return received_error(case.attention, allowed)


SUBJECTS = blocks.attend_subjects("h2o", h2o.attend, attend_error)


class Model(block_model.Head):
    """A token's score is the sum of the weights that it has received."""

    def observe(self, number: int, group: list[block_model.Vector]) -> None:
        weights = self.weights(group, number)
        for token in self.tokens:
            token.score += weights.get(token.position, 0.0)

    def protected(self, positions: list[int]) -> set[int]:
        return super().protected(positions) | set(sorted(positions)[:self.config.sinks])


class Adapter(blocks.Adapter):
    """Ranks are the scores. No two tokens tie: equal tokens arrive at different times and receive other queries."""

    def score_error(self, chunk: Chunk) -> Tensor:
        return sum_error(chunk)

    def rank_interval(self, chunk: Chunk, error: Tensor) -> Interval:
        return Interval(chunk.before["rank"] - error, chunk.before["rank"] + error)

    def ties(self, chunk: Chunk) -> Tensor:
        return blocks.no_ties(chunk)


def replay(case: Case, module: Any) -> Iterator[str]:
    """See the package."""
    yield from blocks.replay_attend(case, module, "h2o", h2o.attend, attend_error)
