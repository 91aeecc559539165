"""Checker of TOVA: bounds of the newest query's weights and of their logarithms, and configs to draw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference.baselines import tova
from ...cases import block_cases
from ...cases.case import Case
from .. import block_model
from ..bounds import DIVISION, EXP, FLUSH, SLACK, UNIT, Arithmetic, Interval
from ..oracle import Attention
from . import blocks, h2o
from .blocks import SMALL as SMALL
from .blocks import Chunk, equal_keys, log_sum_interval, received, received_error
from .blocks import max_kept as max_kept

CASES = (block_cases.AttendCase,)
LAWS = h2o.LAWS[1:]
GROUPINGS = h2o.GROUPINGS
arguments = h2o.arguments
#: See the package.
CACHES: dict[str, dict[str, Any]] = {
    "small": {"budget": 6, "block_size": 4},
    "blocks of one": {"budget": 5, "block_size": 1},
    "budget 1": {"budget": 1, "block_size": 4},
    "once in four tokens": {"budget": 4, "block_size": 3, "interval": 4},
}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"budget": 4, "recent": 1}, TypeError, "recent"),
    ({"budget": 4, "interval": 0}, ValueError, "interval must be at least 1"),
]
NUMBERS = blocks.INTERVAL_NUMBERS


@st.composite
def configs(draw: st.DrawFn, most: int, window: int) -> dict[str, Any]:
    """See the package."""
    return {**draw(blocks.block_configs(most)), "interval": draw(blocks.INTERVALS)}


def newest(attention: Attention, valid: Tensor) -> Attention:
    """The attention of each head's last valid query alone (Q = 1); valid [B, Hkv, Q] bool. A head without a valid query
    gets query 0, which sees nothing."""
    number = torch.arange(valid.shape[-1], device=valid.device)
    last = number.where(valid, -1).amax(-1).clamp_min(0)                                       # [B, Hkv]
    last = last.repeat_interleave(attention.query_heads // attention.key_value_heads, 1)      # [B, Hq]
    index = last[..., None, None].expand(-1, -1, 1, attention.logit.shape[-1])
    return replace(attention, logit=attention.logit.gather(2, index), dot=attention.dot.gather(2, index))


def weight_error(attention: Attention, allowed: Arithmetic) -> Tensor:
    """|computed - true| of mean_h a_hj of one query, [B, Hkv, S]. It is computed as a mean of weights
    (`received_error`), or as the exponential of the logarithm that ranks (`log_sum_interval`), which adds one
    exponential and a division by G. The bound is the larger of the two."""
    low, high = log_sum_interval(attention, allowed)
    group = attention.query_heads // attention.key_value_heads
    truth, last = received(attention), EXP + DIVISION + 2 * UNIT
    error = torch.maximum(high.exp() / group * (1 + last) - truth, truth - low.exp() / group * (1 - last))
    error = error * SLACK + 4 * FLUSH * attention.seen[:, :, 0].unflatten(1, (-1, group)).any(2)
    return torch.maximum(error, received_error(attention, allowed))


def attend_error(case: block_cases.AttendCase, allowed: Arithmetic) -> Tensor:
    """Bound of `attend(...).received`, [B, Hkv, S]."""
    return weight_error(newest(case.attention, case.valid), allowed)


SUBJECTS = (blocks.attend_subject("tova", tova.attend, attend_error),)


class Model(block_model.Head):
    """A token's score is the weight that the newest query gives it."""

    def observe(self, number: int, group: list[block_model.Vector]) -> None:
        weights = self.weights(group, number)
        for token in self.tokens:
            token.score = weights.get(token.position, 0.0)


class Adapter(blocks.Adapter):
    """Ranks are logarithms of the newest query's weights. Tokens with bitwise equal keys tie, whatever their values."""

    def score_error(self, chunk: Chunk) -> Tensor:
        error = chunk.wide(weight_error(self._newest(chunk), chunk.allowed))
        # A row whose chunk is all padding keeps its scores.
        has_tokens = chunk.before["real"].any(-1)[:, None, None]
        return torch.where(has_tokens, error, chunk.previous_error)

    def rank_interval(self, chunk: Chunk, error: Tensor) -> Interval:
        low, high = (chunk.wide(end) for end in log_sum_interval(self._newest(chunk), chunk.allowed))
        return Interval(low, high)

    def ties(self, chunk: Chunk) -> Tensor:
        return equal_keys(chunk)

    @staticmethod
    def _newest(chunk: Chunk) -> Attention:
        valid = chunk.before["real"][:, None].expand(-1, chunk.attention.key_value_heads, -1)
        return newest(chunk.attention, valid)


def replay(case: Case, module: Any) -> Iterator[str]:
    """See the package."""
    yield from blocks.replay_attend(case, module, "tova", tova.attend, attend_error)
