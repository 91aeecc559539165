"""Checker of RaaS: which timestamps a weight near alpha leaves open, and configs to draw."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...cases import draws
from .. import block_model
from ..bounds import DIVISION, FLUSH, SLACK, UNIT, Interval, gamma, log_weight_error
from . import blocks, h2o
from .blocks import Chunk
from .blocks import max_kept as max_kept

REQUIRED = {"alpha": 0.02}
SMALL = {**blocks.SMALL, "alpha": 0.1}
DEFAULTS = {"recent": 0, "sinks": 0, "interval": 1, "block_size": 128, "scale": None}
TRACE = {"alpha": 0.05}
LAWS = ({"interval": 3, "block_size": 5, "recent": 2, "sinks": 1},)
GROUPINGS = ({"interval": 3},)
#: See the package.
CACHES: dict[str, dict[str, Any]] = {
    "small": {"budget": 6, "block_size": 4, "alpha": 0.1},
    "the prompt protected": {"budget": 6, "block_size": 4, "alpha": 0.2, "sinks": 3, "recent": 1},
    "the oldest leaves": {"budget": 4, "block_size": 3, "alpha": 0.0},
    "once in four tokens": {"budget": 4, "block_size": 3, "alpha": 0.05, "interval": 4},
}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"budget": 4, "alpha": None}, TypeError, "alpha must be a float"),
    ({"budget": 4, "alpha": -0.1}, ValueError, "alpha must be from 0 to 1"),
    ({"budget": 4, "alpha": 0.1, "recent": 3, "sinks": 2}, ValueError, "must be at most budget = 4, got 3 [+] 2"),
]
NUMBERS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("alpha", (True, "0.1", None, torch.tensor(0.1)), TypeError, "alpha must be a float"),
    ("alpha", (-0.1, 1.5, float("nan"), float("inf")), ValueError, "alpha must be from 0 to 1, got"),
    ("recent", blocks.NOT_INTEGERS, TypeError, "recent must be an int"),
    ("recent", (-1,), ValueError, "recent must be at least 0"),
    ("recent", (5,), ValueError, "recent must be at most budget = 4, got 5"),
    ("sinks", blocks.NOT_INTEGERS, TypeError, "sinks must be an int"),
    ("sinks", (-1,), ValueError, "sinks must be at least 0"),
    ("sinks", (5,), ValueError, r"recent \+ sinks must be at most budget = 4, got 0 \+ 5"),
    *blocks.INTERVAL_NUMBERS,
]
#: From a weight that few tokens have to one that all have. With a high one, few timestamps are equal.
ALPHAS = (0.1, 0.2, 0.05, 0.02, 0.4, 0.0, 1.0)
HIGH = (0.4, 1.0)
SUBJECTS = ()


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package."""
    config = draw(h2o.protecting(blocks.block_configs(most)))
    recent, alpha = config["recent"] or 0, draw(st.sampled_from(draws.plain_among(ALPHAS, HIGH)))
    return {**config, "recent": recent, "alpha": alpha, "interval": draw(blocks.INTERVALS)}


def weight_error(chunk: Chunk) -> Tensor:
    """|computed - true| of mean_h a_hij, [B, Hkv, Q, capacity + Q].

    A weight has the relative error `log_weight_error`. It passes through at most G additions, the division by G and two
    products with powers of two. Weights, factors of splits, products and sums below FLUSH may flush to zero.
    """
    below, above = log_weight_error(chunk.attention, chunk.allowed)
    relative = torch.maximum(torch.expm1(above.clamp_max(300)), -torch.expm1(below))
    heads = chunk.attention.key_value_heads
    sums = gamma(chunk.group + 2 + 2 * DIVISION / UNIT)
    error = chunk.attention.weight * (relative + sums * (1 + relative)) + 4 * FLUSH
    return error.masked_fill(~chunk.attention.seen, 0).unflatten(1, (heads, -1)).mean(2) * SLACK


def renewals(chunk: Chunk, alpha: float) -> Interval:
    """The last query, by position, that renews each token: the earliest and the latest that computed weights allow.
    [B, Hkv, S] float64; -1 for none.

    alpha is rounded once to float32. A weight is never negative, so that an alpha of 0 leaves nothing open.
    """
    heads, count = chunk.attention.key_value_heads, chunk.before["query"].shape[2]
    weight = chunk.attention.weight.unflatten(1, (heads, -1)).mean(2)                         # [B, Hkv, Q, S]
    seen = chunk.attention.seen.unflatten(1, (heads, -1)).any(2)
    error = weight_error(chunk) + UNIT * alpha * SLACK
    first = chunk.reference.tokens_seen - count
    position = torch.arange(first, first + count, device=weight.device, dtype=torch.float64)[:, None]

    def last(renewed: Tensor) -> Tensor:
        found = position.where(seen & renewed, -1).amax(2)
        return torch.nn.functional.pad(found, (0, chunk.slots - found.shape[-1]), value=-1)

    return Interval(last((weight - error >= alpha) | (alpha == 0)), last(weight + error >= alpha))


class Model(block_model.Head):
    """A token's score is the number of the last query that gave it at least alpha, its own one at the least."""

    def observe(self, number: int, group: list[block_model.Vector]) -> None:
        weights = self.weights(group, number)
        for token in self.tokens:
            if token.position == number or weights.get(token.position, -1.0) >= self.config.alpha:
                token.score = float(number)

    def rank(self, token: block_model.Token) -> Any:
        return token.score, token.position

    def protected(self, positions: list[int]) -> set[int]:
        ordered, recent = sorted(positions), self.config.recent
        return {*ordered[:self.config.sinks], *ordered[len(ordered) - min(recent, len(ordered)):]}


class Adapter(blocks.Adapter):
    """Ranks are the timestamps, whole numbers. They are exact unless a weight is so near alpha that either side of it
    is right; then the timestamp lies in an interval until a query renews the token for certain. Positions decide
    between equal ones."""

    def score_error(self, chunk: Chunk) -> Tensor:
        time, own = chunk.before["score"].double(), chunk.before["positions"].double()
        occupied = chunk.before["occupied"]
        found = renewals(chunk, chunk.reference.config.alpha)
        first = chunk.reference.tokens_seen - chunk.before["query"].shape[2]
        # Not renewed for certain: as early as before, and if that is not known, as early as the token itself.
        before = torch.where(time >= first, own, time - chunk.previous_error)
        low = torch.maximum(torch.where(found.low >= 0, found.low, before), own)
        high = torch.where(found.high >= 0, torch.maximum(found.high, own), time + chunk.previous_error)
        error = torch.maximum(high - time, time - low).clamp_min(0)
        return error.masked_fill(~occupied, 0)

    def rank_interval(self, chunk: Chunk, error: Tensor) -> Interval:
        rank = chunk.before["rank"].double()
        return Interval(rank - error * 2**31, rank + error * 2**31)

    def ties(self, chunk: Chunk) -> Tensor:
        return blocks.no_ties(chunk)
