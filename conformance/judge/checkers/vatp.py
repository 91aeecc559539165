"""Checker of VATP: H2O's accumulated weights, bounds of their products with ||v||_1, and configs to draw."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ....reference.baselines import vatp
from ...cases.case import Case
from .. import block_model
from ..bounds import FLUSH, SLACK, UNIT, Interval, gamma
from ..variants import variant
from . import blocks, h2o
from .blocks import SMALL as SMALL
from .blocks import Chunk
from .blocks import max_kept as max_kept

CASES = blocks.ATTEND_CASES
DEFAULTS = {"recent": None, "sinks": 1, "interval": 1, "block_size": 128, "softcap": None, "scale": None}
VARIANTS = (
    *h2o.VARIANTS, variant("zero-values", {"recent": 0}, content="zero_values"),
)
LAWS, GROUPINGS = h2o.LAWS, h2o.GROUPINGS
arguments, variants = h2o.arguments, h2o.variants
AUTHORS = {"sinks": 20}
#: See the package.
CACHES: dict[str, dict[str, Any]] = {
    "half of it recent": {"budget": 6, "block_size": 4},
    "none recent": {"budget": 5, "block_size": 3, "recent": 0},
    "budget 1": {"budget": 1, "block_size": 4},
    "first tokens": {"budget": 6, "block_size": 4, "recent": 2, "sinks": 3},
    "once in four tokens": {"budget": 4, "block_size": 3, "recent": 1, "interval": 4},
}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"budget": 4, "recent": 4}, ValueError, "recent must be less than budget = 4"),
    ({"budget": 20, "sinks": 20}, ValueError, "must be at most budget = 20, got 10 [+] 20"),
]
NUMBERS: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("recent", blocks.NOT_INTEGERS[:3], TypeError, "recent must be an int"),
    ("recent", (-1,), ValueError, "recent must be at least 0"),
    ("recent", (4,), ValueError, "recent must be less than budget = 4, got 4"),
    ("sinks", blocks.NOT_INTEGERS, TypeError, "sinks must be an int"),
    ("sinks", (-1,), ValueError, "sinks must be at least 0"),
    ("sinks", (3, 5), ValueError, r"recent \+ sinks must be at most budget = 4, got 2 \+ "),
    *blocks.INTERVAL_NUMBERS,
]


configs = h2o.configs


def product_interval(chunk: Chunk, error: Tensor) -> Interval:
    """Interval of the computed score * ||v||_1, [B, Hkv, S], for a score within `error` of the truth.

    ||v||_1 sums D nonnegative numbers: gamma(D). Subnormal ones may flush to zero: FLUSH each. A zero value has a norm
    of exactly 0, and rank 0. The product rounds once and may flush to zero: FLUSH.
    """
    occupied = chunk.before["occupied"]
    score = chunk.before["score"].masked_fill(~occupied, 0)
    norm = chunk.before["value"].masked_fill(~occupied[..., None], 0).abs().sum(-1)
    head_dim = chunk.before["value"].shape[-1]
    loss = gamma(head_dim) * norm + head_dim * FLUSH * (norm > 0)
    low = (score - error).clamp_min(0) * (norm - loss).clamp_min(0)
    high = (score + error) * (norm + loss)
    flush = FLUSH * (norm > 0)
    return Interval(low * (1 - UNIT * SLACK) - flush, high * (1 + UNIT * SLACK) + flush)


def zero_values(chunk: Chunk) -> Tensor:
    """Classes of tokens that rank the same, [B, Hkv, S]: those with zero values, whose rank is exactly 0."""
    value, occupied = chunk.before["value"], chunk.before["occupied"]
    zero = occupied & (value == 0).all(-1)
    index = torch.arange(chunk.slots, device=value.device).expand(zero.shape)
    return torch.where(zero, index.where(zero, chunk.slots).amin(-1, keepdim=True), index)


SUBJECTS = blocks.attend_subjects("vatp", vatp.attend, h2o.attend_error)


class Model(h2o.Model):
    """H2O's sums times the norms of the values."""

    def rank(self, token: block_model.Token) -> float:
        return token.score * math.fsum(abs(number) for number in token.value)


class Adapter(h2o.Adapter):
    """Ranks are score * ||v||_1."""

    def rank_interval(self, chunk: Chunk, error: Tensor) -> Interval:
        return product_interval(chunk, error)

    def ties(self, chunk: Chunk) -> Tensor:
        return zero_values(chunk)


def replay(case: Case, module: Any) -> Iterator[str]:
    """See the package."""
    yield from blocks.replay_attend(case, module, "vatp", vatp.attend, h2o.attend_error)
