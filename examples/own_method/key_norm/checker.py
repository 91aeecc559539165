"""The checker: error bounds of the scores, the method's rules with plain lists, and configs to draw.

`kvtwin.conformance.judge.checkers` explains these names.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvtwin.conformance.judge import block_model
from kvtwin.conformance.judge.bounds import FLUSH, SLACK, UNIT, Interval, gamma
from kvtwin.conformance.judge.checkers import blocks

SMALL = blocks.SMALL
DEFAULTS = {"recent": 0, "block_size": 128, "softcap": None, "scale": None}
NUMBERS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("recent", blocks.NOT_INTEGERS, TypeError, "recent must be an int"),
    ("recent", (-1, 5), ValueError, "recent must be from 0 to budget = 4, got"),
]


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """A budget from 1 to `most`, and the other options but `scale`."""
    config = draw(blocks.block_configs(most))
    return {**config, "recent": draw(st.integers(0, min(3, config["budget"] - 1)))}


class Model(block_model.Head):
    """A KV head as a list of tokens. The token with the largest key is evicted; the newest are protected."""

    def finish(self, over_budget: bool, arrived: range) -> None:
        for token in self.tokens:
            token.score = -math.hypot(*token.key)

    def protected(self, positions: list[int]) -> set[int]:
        return set(sorted(positions, reverse=True)[:self.config.recent])


def norm_error(key: Tensor, occupied: Tensor) -> Tensor:
    """|computed - true| of ||k||, for key [B, Hkv, S, D] float64 and occupied [B, Hkv, S]; 0 for other slots.

    The sum of D squares passes through a rounding of the square and at most D - 1 additions: a relative error of
    gamma(D). Squares below FLUSH may flush to zero. The square root has a relative error of at most 4 u, also where it
    is approximate.
    """
    count = key.shape[-1]
    total = key.masked_fill(~occupied[..., None], 0).square().sum(-1)
    high = (total * (1 + gamma(count)) + count * FLUSH).sqrt() * (1 + 4 * UNIT)
    low = (total * (1 - gamma(count)) - count * FLUSH).clamp_min(0).sqrt() * (1 - 4 * UNIT)
    return (torch.maximum(high - total.sqrt(), total.sqrt() - low) * SLACK).masked_fill(~occupied, 0)


class Adapter(blocks.Adapter):
    """Scores are -||k||, and the ranks."""

    def score_error(self, chunk: blocks.Chunk) -> Tensor:
        """|computed - true|, [B, Hkv, S]."""
        return norm_error(chunk.before["key"], chunk.before["occupied"])

    def rank_interval(self, chunk: blocks.Chunk, error: Tensor) -> Interval:
        rank = chunk.before["rank"]
        return Interval(rank - error, rank + error)

    def ties(self, chunk: blocks.Chunk) -> Tensor:
        """Tokens with bitwise equal keys."""
        return blocks.equal_keys(chunk)
