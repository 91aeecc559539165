"""Checker of TOVA: bounds of the newest query's weights and of their logarithms, and configs to draw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference.baselines import tova
from ...cases import block_cases, supported
from ...cases.case import Case
from ...cases.oracle import Attention
from .. import block_model
from ..bounds import DIVISION, EXP, FLUSH, LOG, SLACK, UNIT, Arithmetic, Interval, gamma
from ..compare import assert_same
from ..variants import BLOCKS, INTERVALS, ONE, variant
from . import blocks, h2o
from .blocks import SMALL as SMALL
from .blocks import Chunk, equal_keys, log_sum_interval, received_attention, received_error
from .blocks import max_kept as max_kept

CASES = blocks.ATTEND_CASES
DEFAULTS = {"per_head": True, "interval": 1, "block_size": 128, "softcap": None, "scale": None}
LAWS = h2o.LAWS[1:]
VARIANTS = (
    # Of equal scores most of TOVA's choices are open: its bounds are wider than one unit in the last place.
    *(one for one in BLOCKS if one.name != "equal-scores"), *INTERVALS,
    # Each of 64 heads evicts some of the tokens whose ranks are a unit apart, wherever a search for them ends.
    variant("ranks-a-unit-apart", {"block_size": 40}, **ONE | {"batch": 4, "key_value_heads": 16},
            content="units_apart", dtype=torch.float32, budget=40, prompt=80, steps=1),
    variant("heads-together", {"per_head": False}, turns=((3, 2),)),
    variant("heads-together-and-interval", {"per_head": False, "interval": 3}, padding="random", steps=11),
)
GROUPINGS = (*h2o.GROUPINGS, {"per_head": False})
arguments, variants = h2o.arguments, h2o.variants
#: See the package.
CACHES: dict[str, dict[str, Any]] = {
    "small": {"budget": 6, "block_size": 4},
    "blocks of one": {"budget": 5, "block_size": 1},
    "budget 1": {"budget": 1, "block_size": 4},
    "once in four tokens": {"budget": 4, "block_size": 3, "interval": 4},
    "all heads alike": {"budget": 5, "block_size": 3, "per_head": False},
}
COMPILED = ({"softcap": 2.0}, {"per_head": False})
AUTHORS = {"per_head": False}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"budget": 4, "recent": 1}, TypeError, "recent"),
    ({"budget": 4, "interval": 0}, ValueError, "interval must be at least 1"),
    ({"budget": 4, "per_head": 1}, TypeError, "per_head must be a bool"),
]
NUMBERS = blocks.INTERVAL_NUMBERS


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package."""
    per_head = draw(st.sampled_from(supported.per_head((True, False))))
    return {**draw(blocks.block_configs(most)), "interval": draw(blocks.INTERVALS), "per_head": per_head}


def newest(attention: Attention, valid: Tensor) -> Attention:
    """The attention of each head's last valid query alone (Q = 1); valid [B, Hkv, Q] bool. A head without a valid query
    gets query 0, which sees nothing."""
    number = torch.arange(valid.shape[-1], device=valid.device)
    last = number.where(valid, -1).amax(-1).clamp_min(0)                                       # [B, Hkv]
    last = last.repeat_interleave(attention.query_heads // attention.key_value_heads, 1)      # [B, Hq]
    index = last[..., None, None].expand(-1, -1, 1, attention.logit.shape[-1])
    uncapped = None if attention.uncapped is None else attention.uncapped.gather(2, index)
    return replace(
        attention, logit=attention.logit.gather(2, index), dot=attention.dot.gather(2, index), uncapped=uncapped
    )


def weight_error(attention: Attention, allowed: Arithmetic) -> Tensor:
    """|computed - true| of mean_h a_hj of one query, [B, Hkv, S]. It is computed as a mean of weights
    (`received_error`), or as the exponential of the logarithm that ranks (`log_sum_interval`), which adds one
    exponential and a division by G. The bound is the larger of the two."""
    low, high = log_sum_interval(attention, allowed)
    group = attention.query_heads // attention.key_value_heads
    truth, last = received_attention(attention), EXP + DIVISION + 2 * UNIT
    error = torch.maximum(high.exp() / group * (1 + last) - truth, truth - low.exp() / group * (1 - last))
    error = error * SLACK + 4 * FLUSH * attention.seen[:, :, 0].unflatten(1, (-1, group)).any(2)
    return torch.maximum(error, received_error(attention, allowed))


def over_heads(found: Interval) -> Interval:
    """Interval of the computed logarithm of the sum over the KV heads of numbers whose logarithms are in `found`
    [B, Hkv, S]: the same for each head.

    As in `log_sum_interval`: at most Hkv + 1 exponentials and products, Hkv additions, a logarithm of a number up to
    Hkv, and roundings of arguments and of the result.
    """
    heads = torch.tensor(float(found.low.shape[1]))
    ends = []
    for end, sign in ((found.low, -1), (found.high, 1)):
        finite = end.masked_fill(end.isinf(), 0)
        total = (end + sign * 4 * UNIT * finite.abs()).logsumexp(1, keepdim=True)
        common = (heads + 1) * (EXP + UNIT) + gamma(heads) + LOG * (1 + heads.log())
        common = common + 4 * UNIT * total.abs().masked_fill(total.isinf(), 0)
        ends.append((total + sign * common * SLACK).expand_as(end))
    return Interval(*ends)


def mean_error(truth: Tensor, error: Tensor) -> Tensor:
    """|computed - true| of the mean over the heads of numbers with these errors, both [B, Hkv, S]: Hkv additions, a
    division, and a result that may flush to zero."""
    mean, own = (tensor.mean(1, keepdim=True) for tensor in (truth, error))
    rounding = (mean.abs() + own) * (gamma(truth.shape[1]) + DIVISION) + FLUSH
    return ((own + rounding) * SLACK).expand_as(error)


def attend_error(case: block_cases.AttendCase, allowed: Arithmetic) -> Tensor:
    """Bound of `attend(...).received`, [B, Hkv, S]."""
    return weight_error(newest(case.attention, case.valid), allowed)


SUBJECTS = blocks.attend_subjects("tova", tova.attend, attend_error)


class Model(block_model.Head):
    """A token's score is the weight that the newest query gives it."""

    def observe(self, number: int, group: list[block_model.Vector]) -> None:
        weights = self.weights(group, number)
        for token in self.tokens:
            token.score = weights.get(token.position, 0.0)


class Adapter(blocks.Adapter):
    """Ranks are logarithms of the newest query's weights. Tokens with bitwise equal keys tie, whatever their values."""

    def score_error(self, chunk: Chunk) -> Tensor:
        attention = self._newest(chunk)
        error = weight_error(attention, chunk.allowed)
        if not chunk.reference.config.per_head:
            error = mean_error(received_attention(attention), error)
        error = chunk.wide(error)
        # A row whose chunk is all padding keeps its scores.
        has_tokens = chunk.before["valid"].any(-1)[:, None, None]
        return torch.where(has_tokens, error, chunk.previous_error)

    def rank_interval(self, chunk: Chunk, error: Tensor) -> Interval:
        found = log_sum_interval(self._newest(chunk), chunk.allowed)
        if not chunk.reference.config.per_head:
            found = over_heads(found)
        return Interval(*map(chunk.wide, found))

    def ties(self, chunk: Chunk) -> Tensor:
        """Keys of equal tokens are equal; with one choice for all heads, in every head."""
        tie = equal_keys(chunk)
        if chunk.reference.config.per_head:
            return tie
        same = (tie[..., :, None] == tie[..., None, :]).all(1, keepdim=True)                  # [B, 1, S, S]
        return same.to(torch.int8).argmax(-1).expand_as(tie)

    @staticmethod
    def _keep_mask(tested: Any, chunk: Chunk, when: str) -> Tensor:
        kept = blocks.Adapter._keep_mask(tested, chunk, when)
        if not chunk.reference.config.per_head:
            assert_same(tested.positions, tested.positions[:, :1].expand_as(tested.positions), what=f"heads {when}")
        return kept

    @staticmethod
    def _newest(chunk: Chunk) -> Attention:
        valid = chunk.before["valid"][:, None].expand(-1, chunk.attention.key_value_heads, -1)
        return newest(chunk.attention, valid)


def replay(case: Case, module: Any) -> Iterator[str]:
    """See the package."""
    yield from blocks.replay_attend(case, module, "tova", tova.attend, attend_error)
